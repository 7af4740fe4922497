r"""Fixed masks: σN-Ens whose diversity is drawn, not trained.

.. math:: s_{m,i} = w_i \, [m \in O_i], \qquad O_i \subset \{1 … M\},\ |O_i| = k

on the norms R that the diversity penalty of arXiv 2607.23860 acts on: each channel i belongs to k
members drawn at random, and its scales are frozen. All else is σN-Ens without the penalty, so the
comparison with it says what training the scales adds to random sparsity.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sigmanens.baselines.base import base_network, check_count
from sigmanens.conversion.blocks import select
from sigmanens.conversion.config import LayerSelector
from sigmanens.ensemble.convert import convert
from sigmanens.ensemble.ensemble import SigmaEnsemble
from sigmanens.errors import InputError
from sigmanens.norms import SigmaNorm

__all__ = ["fixed_masks"]

_OPEN = 1e3  # σ(1000) is 1 and σ(-1000) is 0, exactly, in float32 and float64


def fixed_masks(
    model_or_factory: Any,
    members: int,
    *,
    keep: int | float = 0.5,
    layers: LayerSelector = "auto",
    generator: torch.Generator | None = None,
    **options: Any,
) -> SigmaEnsemble:
    """Convert a network, then freeze the scales of R to random masks of k owners per channel.

    The scale of an owner is 1 from scratch and the base's scale under ``init="preserve"``; that of
    any other member is 0. Shifts are those of σN-Ens: none from scratch, the base's otherwise. The
    other norms and the heads are converted and trained as in σN-Ens. A pretrained base does not
    keep its function.

    Args:
        model_or_factory: a network, which is copied, or a function that makes one.
        members: M ≥ 1.
        keep: k, an integer from 1 to M, or the share k/M as a float in (0, 1], rounded to at
            least one owner.
        layers: R: "auto" (the paper's rule, see :mod:`sigmanens.conversion.blocks`), "all", a
            regex, names or a callable.
        generator: source of scales, heads and masks.
        options: further options of :func:`sigmanens.convert` but ``layers`` and ``scale``.

    Raises:
        InputError: for ``keep`` out of its range. DiversityError: if ``layers`` selects no norm.
        Also what ``convert`` raises.
    """
    check_count("members", members)
    owners = _owners(keep, members)
    if "scale" in options:
        raise InputError("fixed_masks takes no option 'scale': the masks are the scales")
    base = base_network(model_or_factory)
    ensemble = convert(base, members, generator=generator, **options)
    norms = ensemble.sigma_norms()
    _, chosen = select(ensemble.network, norms, layers)
    for name in chosen:
        _mask(norms[name], owners, generator)
    return ensemble


def _owners(keep: int | float, members: int) -> int:
    if isinstance(keep, bool) or not isinstance(keep, (int, float)):
        raise InputError(f"keep is {keep!r}; expected an integer or a share")
    if isinstance(keep, int):
        if not 1 <= keep <= members:
            raise InputError(f"keep is {keep}; expected 1 to {members} owners, or a share (float)")
        return keep
    if not 0 < keep <= 1:
        raise InputError(f"keep is {keep}; expected a share in (0, 1], or a number of owners (int)")
    return max(1, round(keep * members))


@torch.no_grad()
def _mask(norm: SigmaNorm, owners: int, generator: torch.Generator | None) -> None:
    """Freeze a norm's scales to w ⊙ mask; its buffers keep their shapes, so checkpoints fit."""
    weight = norm.scales()
    mask = draw_masks(norm.logit.shape, owners, generator).to(norm.logit.device)
    norm.logit.copy_(torch.where(mask, _OPEN, -_OPEN))
    norm.logit.requires_grad_(False)
    if norm.carrier is not None:
        norm.carrier = weight.expand(norm.logit.shape).clone()
        if norm.offset is not None:
            norm.offset.zero_()


def draw_masks(shape: torch.Size, owners: int, generator: torch.Generator | None = None) -> Tensor:
    """Masks (M, *S), bool: every channel is True for exactly ``owners`` of the M members."""
    device = "cpu" if generator is None else generator.device
    drawn = torch.rand(shape, generator=generator, device=device)
    return drawn.argsort(0).argsort(0).cpu() < owners
