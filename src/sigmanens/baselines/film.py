"""FiLM-Ensemble (arXiv 2206.00050): an unbounded scale and a shift per member, no penalty."""

from __future__ import annotations

from typing import Any

from torch import nn

from sigmanens.convert import convert
from sigmanens.ensemble import SigmaEnsemble

__all__ = ["film_ensemble"]


def film_ensemble(model: nn.Module, members: int, **options: Any) -> SigmaEnsemble:
    r"""Convert a copy of a network into a FiLM-Ensemble.

    .. math:: y_m = \gamma_m \odot \mathrm{norm}_m(x) + \beta_m

    γ and β are drawn uniformly within the Xavier bound :math:`\sqrt{6/(M + C)}`, the gain 1 of the
    authors' code, and are trained at the base learning rate: pass ``scale_lr_mult=1`` to
    :func:`sigmanens.param_groups`. Heads are one per member here, as for σN-Ens; the authors share
    one head.

    Args:
        model: as for :func:`sigmanens.convert`.
        members: M ≥ 1.
        options: further options of ``convert`` but ``scale`` and ``shift``.

    Raises:
        what ``convert`` raises.
    """
    return convert(model, members, scale="linear", shift=True, **options)
