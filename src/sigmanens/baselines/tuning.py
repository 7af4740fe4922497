"""Norm tuning (arXiv 2003.00152): one network of which only the norms' scales and shifts train."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from sigmanens.baselines.base import base_network
from sigmanens.baselines.separate import SeparateNetworks
from sigmanens.conversion.heads import find_heads, fresh_head
from sigmanens.conversion.rules import is_norm
from sigmanens.errors import InputError, NoNormError
from sigmanens.seeding import own_seed, seeded

__all__ = ["norm_tuning"]


def norm_tuning(
    model_or_factory: nn.Module | Callable[[], nn.Module],
    *,
    head: str = "copy",
    train_head: bool | None = None,
    head_name: str | Sequence[str] | None = None,
    generator: torch.Generator | None = None,
) -> SeparateNetworks:
    """Freeze a network but for the affine parameters of its norms (arXiv 2003.00152).

    The control that says what a short training of norms does without members. Batch statistics
    are updated in training mode, as the authors do.

    Args:
        model_or_factory: a network, which is copied, or a function that makes one.
        head: "copy" keeps the base's head, "fresh" replaces it by a norm and a Linear, randomly
            initialised.
        train_head: whether the head trains too; by default where it is fresh.
        head_name: where the head is, if it is not found by itself.
        generator: source of a fresh head.

    Returns:
        a network from (B, …) to (1, B, C).

    Raises:
        NoNormError: if no norm has affine parameters. HeadNotFoundError: if a head is needed and
            not found. InputError: for another ``head``.
    """
    if head not in ("copy", "fresh"):
        raise InputError(f"head is {head!r}; expected 'copy' or 'fresh'")
    train_head = head == "fresh" if train_head is None else train_head
    network = base_network(model_or_factory).requires_grad_(False)
    tuned = [
        p for m in network.modules() if is_norm(m) for p in m.parameters() if p.is_floating_point()
    ]
    if not tuned:
        raise NoNormError(
            f"this {type(network).__name__} has no norm with affine parameters: there is nothing "
            "to tune"
        )
    for p in tuned:
        p.requires_grad_(True)
    if head == "fresh" or train_head:
        _head(network, head, train_head, head_name, generator)
    return SeparateNetworks([network])


def _head(
    network: nn.Module,
    kind: str,
    trained: bool,
    head_name: str | Sequence[str] | None,
    generator: torch.Generator | None,
) -> None:
    """Replace or keep the head, and say whether it trains."""
    modules = dict(network.named_modules(remove_duplicate=False))
    made: dict[int, nn.Module] = {}
    for name in find_heads(network, head_name, kind):
        source = modules[name]
        if id(source) not in made:
            made[id(source)] = source
            if kind == "fresh":
                with own_seed(seeded(generator)):
                    made[id(source)] = fresh_head(source, name)
            made[id(source)].requires_grad_(trained)
        parent, _, leaf = name.rpartition(".")
        setattr(network.get_submodule(parent), leaf, made[id(source)])
