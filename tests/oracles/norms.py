"""Members as what they stand for: separate copies of plain norms, and of whole networks."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from sigmanens import SigmaEnsemble
from sigmanens.conversion.heads import MemberHeads
from sigmanens.norms import MemberBatchNorm, SigmaNorm

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def effective_scales(layer: SigmaNorm) -> Tensor:
    """k ⊙ σ(γ) + o, or k ⊙ scale + o: (M, *S), from the stored tensors."""
    stored = dict(layer.named_parameters()) | dict(layer.named_buffers())
    if "scale_logit" in stored:
        factor = 1 / (1 + torch.exp(-stored["scale_logit"].detach()))
    else:
        factor = stored["scale"].detach()
    if stored.get("carrier") is not None:
        factor = factor * stored["carrier"]
    if stored.get("offset") is not None:
        factor = factor + stored["offset"]
    return factor


def effective_shifts(layer: SigmaNorm) -> Tensor | None:
    """Shifts (M, *S) from the stored tensors, or None."""
    if layer.shift is None:
        return None
    return layer.shift.detach().expand(layer.axis.num_members, *layer.logit.shape[1:])


def gradient_of_logit(layer: SigmaNorm, scale_gradient: Tensor) -> Tensor:
    """∂L/∂γ (or ∂L/∂scale) from ∂L/∂(effective scale), by the chain rule."""
    factor = scale_gradient if layer.carrier is None else scale_gradient * layer.carrier
    if layer.kind == "linear":
        return factor
    s = torch.sigmoid(layer.scale_logit.detach())
    return factor * s * (1 - s)


def plain_norm(plain: nn.Module, scale: Tensor, shift: Tensor | None) -> nn.Module:
    """A deep copy of a plain norm with weight ``scale`` and bias ``shift`` (zero for None)."""
    norm = copy.deepcopy(plain)
    norm.weight = nn.Parameter(scale.clone())
    if shift is not None and not hasattr(plain, "bias"):
        raise AssertionError("a norm without a bias cannot have a shift: use Copies")
    if shift is not None:
        norm.bias = nn.Parameter(shift.clone())
    elif getattr(norm, "bias", None) is not None:
        norm.bias = nn.Parameter(torch.zeros_like(norm.bias))
    return norm


class Copies(nn.Module):
    """M deep copies of a plain norm; chunk m of the rows goes through copy m."""

    def __init__(self, plain: nn.Module, scales: Tensor, shifts: Tensor | None) -> None:
        super().__init__()
        takes_shift = hasattr(plain, "bias")
        self.norms = nn.ModuleList(
            plain_norm(plain, s, shifts[m] if shifts is not None and takes_shift else None)
            for m, s in enumerate(scales)
        )
        self.added = None
        if shifts is not None and not takes_shift:
            self.added = nn.ParameterList(nn.Parameter(b.clone()) for b in shifts)

    def forward(self, x: Tensor) -> Tensor:
        outputs = [
            norm(rows) for norm, rows in zip(self.norms, x.chunk(len(self.norms)), strict=True)
        ]
        if self.added is not None:
            outputs = [y + b for y, b in zip(outputs, self.added, strict=True)]
        return torch.cat(outputs)

    def scale_gradients(self) -> Tensor:
        return torch.stack([n.weight.grad for n in self.norms])

    def shift_gradients(self) -> Tensor:
        biases = self.added if self.added is not None else [n.bias for n in self.norms]
        return torch.stack([b.grad for b in biases])

    def set_statistics(self, layer: nn.Module) -> None:
        for m, norm in enumerate(self.norms):
            set_statistics(norm, layer, m)

    def statistics(self, key: str) -> Tensor:
        return torch.stack([getattr(n, key) for n in self.norms])


def set_statistics(norm: nn.Module, layer: nn.Module, member: int) -> None:
    """Copy member's running statistics of a folded layer into a plain norm."""
    for key in STATISTICS:
        stored = getattr(layer, key, None)
        if stored is not None:
            getattr(norm, key).copy_(stored[member])


def member_networks(base: nn.Module, ensemble: SigmaEnsemble) -> list[nn.Module]:
    """M separate copies of the base, each with one member's scales, shifts, statistics and head.

    Written from the stored tensors, without the package's own export.
    """
    shared = ensemble.network.state_dict()
    networks = []
    for m in range(ensemble.num_members):
        network = copy.deepcopy(base)
        own = network.state_dict()
        for key, value in shared.items():
            if key in own and value.shape == own[key].shape:
                own[key].copy_(value)
        for name, layer in ensemble.network.named_modules(remove_duplicate=False):
            if not isinstance(layer, (SigmaNorm, MemberBatchNorm, MemberHeads)):
                continue
            parent, _, leaf = name.rpartition(".")
            if isinstance(layer, MemberHeads):
                new: nn.Module = copy.deepcopy(layer.heads[m])
            else:
                new = base.get_submodule(name)
                if isinstance(layer, SigmaNorm):
                    shifts = effective_shifts(layer)
                    new = plain_norm(
                        new, effective_scales(layer)[m], None if shifts is None else shifts[m]
                    )
                else:
                    new = copy.deepcopy(network.get_submodule(name))
                set_statistics(new, layer, m)
                new.train(layer.training)
            setattr(network.get_submodule(parent), leaf, new)
        networks.append(network)
    return networks
