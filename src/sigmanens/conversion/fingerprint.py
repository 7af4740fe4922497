"""Which tensors of a converted network are the base's, and whether it is what it was."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sigmanens.conversion.heads import MemberHeads
from sigmanens.norms import MemberBatchNorm, MemberNorm

__all__ = ["Structure", "fingerprint", "own_keys", "shared_fingerprints"]

_WRAPPED = "_checkpoint_wrapped_module"
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def fingerprint(tensor: Tensor) -> int:
    """64-bit fingerprint of a tensor's dtype, shape and bytes, computed where the tensor lies."""
    flat = tensor.detach().contiguous().flatten()
    h = _hash_text(f"{flat.dtype}{tuple(tensor.shape)}")
    if flat.numel() == 0:
        return h
    raw = flat.view(torch.uint8)
    pad = -raw.numel() % 8
    if pad:
        raw = torch.cat([raw, raw.new_zeros(pad)])
    if raw.storage_offset() % 8:  # a slice of a larger buffer
        raw = raw.clone()
    words = raw.view(torch.int64)
    step = 1 << 22
    for start in range(0, words.numel(), step):
        part = words[start : start + step]
        index = torch.arange(start, start + part.numel(), device=part.device, dtype=torch.int64)
        mixed = (part ^ (part >> 29)) * (2 * index * 0x9E3779B97F4A7C1 + 0x2545F4914F6CDD1D)
        h = (h * 1099511628211 + int((mixed ^ (mixed >> 32)).sum())) & (2**64 - 1)
    return h


def _hash_text(text: str) -> int:
    """First 64 bits of the SHA-256 of a text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def own_keys(network: nn.Module) -> set[str]:
    """State-dict keys of a converted network that belong to the members rather than to the base."""
    keys: set[str] = set()
    for name, module in network.named_modules(remove_duplicate=False):  # tied ones have all names
        prefix = f"{name}." if name else ""
        if isinstance(module, MemberBatchNorm):
            keys.update(prefix + k for k in module.state_dict() if k not in ("weight", "bias"))
        elif isinstance(module, (MemberNorm, MemberHeads)):
            keys.update(prefix + k for k in module.state_dict())
    return keys


def shared_fingerprints(network: nn.Module) -> dict[str, int]:
    """Fingerprint of every tensor the members share, by state-dict key."""
    own = own_keys(network)
    state = network.state_dict()
    return {k: fingerprint(v) for k, v in state.items() if k not in own and isinstance(v, Tensor)}


@dataclass(frozen=True)
class Structure:
    """What a converted network is made of.

    Attributes:
        shapes: of every tensor of its state dict, by key.
        classes: of every module, by dotted name.
    """

    shapes: Mapping[str, tuple[int, ...]]
    classes: Mapping[str, str]

    @classmethod
    def of(cls, network: nn.Module) -> Structure:
        """The structure that a network has now. Wrappers of activation checkpointing do not count.

        SyncBatchNorm counts as the BatchNorm that it is on one device.
        """
        state = network.state_dict()
        classes: dict[str, str] = {}
        for name, module in network.named_modules(remove_duplicate=False):
            if not hasattr(module, _WRAPPED):
                inner = ".".join(part for part in name.split(".") if part != _WRAPPED)
                sync = isinstance(module, nn.SyncBatchNorm)
                kind = nn.BatchNorm2d if sync or type(module) in _BATCH_NORMS else type(module)
                classes[inner] = f"{kind.__module__}.{kind.__qualname__}"
        return cls({k: tuple(v.shape) for k, v in state.items() if isinstance(v, Tensor)}, classes)
