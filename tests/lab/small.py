"""Little data and little networks, for tests that train."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sigmanens import Diversity, EnsembleLoss, SigmaEnsemble, convert
from sigmanens.baselines import SeparateNetworks
from sigmanens.lab.backbones import build_backbone
from sigmanens.lab.digits import Labelled, digits_sets


def digits(count: int = 48, seed: int = 0) -> Labelled:
    """Training pictures (N, 1, 8, 8)."""
    return digits_sets(train=count, validation=40, ood=1, seed=seed).train


def network(seed: int = 0, width: int = 4) -> nn.Module:
    """The residual network for digits, with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_backbone("digits", width=width)


def single(seed: int = 0) -> SeparateNetworks:
    return SeparateNetworks([network(seed)])


def ensemble(members: int = 2, seed: int = 0, **options: Any) -> SigmaEnsemble:
    """A σN-Ens from scratch on :func:`network`."""
    generator = torch.Generator().manual_seed(seed)
    return convert(network(seed), members, generator=generator, **options)


def penalised() -> EnsembleLoss:
    return EnsembleLoss(diversity=Diversity(tau=0.5, weight=1e-2))


def snapshot(module: nn.Module) -> dict[str, Tensor]:
    """A copy of everything a network holds."""
    return {k: v.clone() for k, v in module.state_dict().items() if isinstance(v, Tensor)}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Whether two snapshots are the same to the bit."""
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Greatest difference between two snapshots, in the floating tensors."""
    assert a.keys() == b.keys()
    return max(float((a[k] - b[k]).abs().max()) for k in a if a[k].is_floating_point())
