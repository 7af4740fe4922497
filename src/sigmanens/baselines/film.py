"""FiLM-Ensemble (arXiv 2206.00050): an unbounded scale and a shift per member, no penalty."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from sigmanens.baselines.base import base_network
from sigmanens.ensemble.convert import convert
from sigmanens.ensemble.ensemble import SigmaEnsemble
from sigmanens.errors import InputError

__all__ = ["film_ensemble"]


def film_ensemble(
    model_or_factory: nn.Module | Callable[[], nn.Module],
    members: int,
    *,
    gain: float = 1.0,
    **options: Any,
) -> SigmaEnsemble:
    r"""Convert a copy of a network into a FiLM-Ensemble.

    .. math:: y_m = \gamma_m \odot \mathrm{norm}_m(x) + \beta_m

    From scratch γ and β are drawn uniformly within the Xavier bound
    :math:`\rho\sqrt{6/(M + C)}`. They are trained at the base learning rate, and batch statistics
    are kept for each member. Heads are one per member here, as for σN-Ens; the authors share one
    head (``head="shared"``).

    Args:
        model_or_factory: a network, which is copied, or a function that makes one.
        members: M ≥ 1.
        gain: ρ > 0, by which the authors set how far the members start apart; from scratch only.
        options: further options of :func:`sigmanens.convert` but ``scale`` and ``shift``.

    Raises:
        InputError: for a gain that is not positive, or one other than 1 with a pretrained base.
        Also what ``convert`` raises.
    """
    if not gain > 0:
        raise InputError(f"gain is {gain!r}; expected a number > 0")
    base = base_network(model_or_factory)
    ensemble = convert(base, members, scale="linear", shift=True, **options)
    if gain == 1:
        return ensemble
    if ensemble.plan.init != "normal":
        raise InputError(
            f"gain is {gain}, which would change the function of this pretrained base; expected 1, "
            "or init='normal'"
        )
    with torch.no_grad():
        for norm in ensemble.sigma_norms().values():
            for p in norm.parameters(recurse=False):
                p.mul_(gain)
    return ensemble
