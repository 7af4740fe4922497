"""Refusals: the errors for a network, or for some of its norms, that cannot be converted."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn
from torch.nn.modules.conv import _ConvNd

from sigmanens.errors import NoNormError, UnsupportedNormError

_KNOWN = "BatchNorm, LayerNorm, RMSNorm, GroupNorm or InstanceNorm"
_SHOWN = 4


def no_norms(model: nn.Module) -> NoNormError:
    """The error for a network without a norm. It names weight-standardised convolutions."""
    kind = type(model).__name__
    # timm and BiT call convolutions that standardise their weights StdConv2d and the like.
    standardised = [
        m
        for m in model.modules()
        if isinstance(m, _ConvNd) and any("StdConv" in c.__name__ for c in type(m).__mro__)
    ]
    if standardised:
        classes = ", ".join(sorted({type(m).__name__ for m in standardised}))
        return NoNormError(
            f"this {kind} has no normalisation layers: it standardises the weights of its "
            f"convolutions instead ({len(standardised)} × {classes}). σNorm scales normalised "
            f"activations per member. Take a network with {_KNOWN} layers"
        )
    return NoNormError(
        f"no normalisation layer found in this {kind}: σNorm needs at least one module of the "
        f"kind {_KNOWN}. A norm that forward calls as a function (such as F.layer_norm) cannot be "
        "converted: make it a module of the network"
    )


def unsupported(
    model: nn.Module, refused: Sequence[tuple[str, str, str]], total: int, others: bool | None
) -> UnsupportedNormError:
    """The error for norms that cannot be converted: every reason once, with its norms.

    Args:
        model: the base.
        refused: (dotted name, class, reason) of each.
        total: number of norms in the network.
        others: whether another norm could be converted; None if that would not help.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name, kind, reason in refused:
        groups.setdefault((kind, reason), []).append(name)
    lines = []
    for (kind, reason), names in groups.items():
        count = kind if len(names) == 1 else f"{len(names)} × {kind}"
        lines.append(f"  {some_names(names, _SHOWN)} ({count}): {reason}")
    n, kind = len(refused), type(model).__name__
    if others:
        them = "it as it is" if n == 1 else "them as they are"
        lines.append(f"To keep {them}, the same for all members, choose other norms with layers=…")
    elif others is False:
        lines.append(f"This {kind} has no other norm to convert")
    return UnsupportedNormError(
        f"{n} of {total} norms of this {kind} cannot be converted:\n" + "\n".join(lines)
    )


def some_names(names: Sequence[str], limit: int = 12) -> str:
    """The first names of a list, and the number of the others."""
    shown = ", ".join(name or "(root)" for name in names[:limit])
    more = len(names) - limit
    return f"{shown} and {more} more" if more > 0 else shown
