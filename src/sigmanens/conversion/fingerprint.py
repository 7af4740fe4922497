"""Which tensors of a converted network are the base's, and whether it is what it was."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

from sigmanens.conversion.heads import MemberHeads
from sigmanens.conversion.rules import qualified_name
from sigmanens.norms import MemberBatchNorm, MemberNorm

_WRAPPED = "_checkpoint_wrapped_module"
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def fingerprint(tensor: Tensor) -> int:
    """64-bit fingerprint of a tensor's dtype, shape and bytes, computed where the tensor lies."""
    flat = tensor.detach().contiguous().flatten()
    text = f"{flat.dtype}{tuple(tensor.shape)}"
    h = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    if flat.numel() == 0:
        return h
    raw = flat.view(torch.uint8)
    if raw.numel() % 8 or raw.storage_offset() % 8:
        raw = torch.cat([raw, raw.new_zeros(-raw.numel() % 8)])
    start = 0
    for part in raw.view(torch.int64).split(1 << 22):
        index = torch.arange(start, start + part.numel(), device=part.device, dtype=torch.int64)
        mixed = (part ^ (part >> 29)) * (2 * index * 0x9E3779B97F4A7C1 + 0x2545F4914F6CDD1D)
        h = (h * 1099511628211 + int((mixed ^ (mixed >> 32)).sum())) & (2**64 - 1)
        start += part.numel()
    return h


def own_keys(network: nn.Module) -> set[str]:
    """State-dict keys of a converted network that belong to the members rather than to the base."""
    keys: set[str] = set()
    for name, module in network.named_modules(remove_duplicate=False):  # tied ones have all names
        if isinstance(module, (MemberNorm, MemberHeads)):
            shared = ("weight", "bias") if isinstance(module, MemberBatchNorm) else ()
            prefix = f"{name}." if name else ""
            keys.update(prefix + k for k in module.state_dict() if k not in shared)
    return keys


def shared_fingerprints(network: nn.Module) -> dict[str, int]:
    """Fingerprint of every tensor the members share, by state-dict key."""
    own = own_keys(network)
    state = network.state_dict()
    return {k: fingerprint(v) for k, v in state.items() if k not in own and isinstance(v, Tensor)}


def structure(network: nn.Module) -> dict[str, str]:
    """The class of every layer and the shape of every tensor of a network, in words.

    Wrappers of activation checkpointing do not count. A SyncBatchNorm counts as a BatchNorm, which
    it is on one device.
    """
    found: dict[str, str] = {}
    for name, module in network.named_modules(remove_duplicate=False):
        if not hasattr(module, _WRAPPED):
            inner = ".".join(part for part in name.split(".") if part != _WRAPPED)
            sync = isinstance(module, nn.SyncBatchNorm)
            kind = nn.BatchNorm2d if sync or type(module) in _BATCH_NORMS else type(module)
            found[f"layer '{inner}'"] = f"a {qualified_name(kind)}"
    for key, tensor in network.state_dict().items():
        if isinstance(tensor, Tensor):
            found[f"tensor '{key}'"] = f"of shape {tuple(tensor.shape)}"
    return found
