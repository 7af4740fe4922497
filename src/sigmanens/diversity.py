r"""The diversity penalty and what it does to the scales of the members.

With :math:`s_{m} = \sigma(\gamma_{m})` of one channel and a softmax over the members
(arXiv 2607.23860)

.. math:: L = \lambda \sum_{\ell \in R} \sum_i \sum_m \log \mathrm{softmax}(s_{\ell,i}/\tau)_m
            = -\lambda \sum_{\ell,i} \Big[ M \log M
              + \tfrac{M}{\tau} \big( \mathrm{LME}_\tau(s_{\ell,i}) - \bar s_{\ell,i} \big) \Big],

where :math:`\mathrm{LME}_\tau(s) = \tau \log \frac1M \sum_j e^{s_j/\tau}` is a soft maximum.
Minimising widens the gap between the soft maximum and the mean of the members' scales; the
gradient is :math:`\partial L/\partial\gamma_j = \frac{\lambda}{\tau} s_j (1 - s_j)(1 - M p_j)`.
The gap alone, averaged over all :math:`N` regularised channels, is the bounded form
:math:`L' = -\Lambda \cdot \mathrm{mean}[\mathrm{LME}_\tau(s) - \bar s]`, which transfers between
networks of different size; the two differ by a constant when :math:`\Lambda = \lambda M N / \tau`.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sigmanens.audit import LayerSelector
from sigmanens.ensemble import SigmaEnsemble
from sigmanens.errors import DiversityError, SigmaNensWarning
from sigmanens.measures import (
    cosine,
    disagreement,
    jensen_gap,
    owners,
    owners_per_channel,
    pairwise_kl,
    saturation,
    symmetric,
)
from sigmanens.norms import SigmaNorm
from sigmanens.selection import as_ensemble, select
from sigmanens.theory import (
    check_temperature,
    is_number,
    preferred_owners,
    reached_cosine,
    reached_owners,
    tau_for_owners,
)

__all__ = [
    "Diversity",
    "bridge_weight",
    "cosine",
    "disagreement",
    "gap",
    "jensen_gap",
    "log_softmax_sum",
    "owners",
    "owners_per_channel",
    "pairwise_kl",
    "preferred_owners",
    "reached_cosine",
    "reached_owners",
    "saturation",
    "symmetric",
    "tau_for_owners",
]


class Diversity:
    """The penalty on an ensemble's scales: ``weight`` is λ (or Λ), ``tau`` the dial.

    Args:
        tau: softmax temperature τ > 0. Low: the members partition the channels; high: the term
            acts weakly and the task decides. See :func:`reached_owners`.
        weight: λ ≥ 0 for ``form="sum"``, Λ for ``form="mean"``.
        layers: "auto" = the paper's rule for known blocks, "all" = every converted norm, a regex,
            a list of dotted names, or a callable ``(name, layer) -> bool``.
        form: "sum" is the paper's, "mean" the bounded transferable one.

    Raises:
        DiversityError: for τ ≤ 0, a negative or infinite weight, or an unknown form.
    """

    def __init__(
        self,
        tau: float = 0.1,
        weight: float = 1e-2,
        layers: LayerSelector = "auto",
        form: str = "sum",
    ) -> None:
        check_temperature(tau)
        if not is_number(weight) or not 0 <= weight < math.inf:
            raise DiversityError(f"weight (λ) is {weight!r}; expected a finite number ≥ 0")
        if form not in ("sum", "mean"):
            raise DiversityError(f"form is {form!r}; expected 'sum' or 'mean'")
        self.tau = float(tau)
        self.weight = float(weight)
        self.layers = layers
        self.form = form
        # Layers by ensemble, for as long as each ensemble lives.
        self._chosen: WeakKeyDictionary[SigmaEnsemble, list[SigmaNorm]] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_chosen": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _chosen=WeakKeyDictionary())

    def chosen(self, ensemble: SigmaEnsemble) -> tuple[str, list[str]]:
        """The rule used and the dotted names of the regularised norms R."""
        ensemble = as_ensemble(ensemble)
        return select(ensemble.network, ensemble.sigma_norms(), self.layers)

    def __call__(self, ensemble: SigmaEnsemble) -> Tensor:
        """The penalty: (), float32 or wider, also under autocast.

        Raises:
            DiversityError: for one member or linear scales, where it has no meaning, or if
                ``layers`` selects nothing.
        """
        s = gates(self._layers(ensemble))
        with torch.autocast(s.device.type, enabled=False):
            if self.form == "sum":
                return self.weight * log_softmax_sum(s, self.tau)
            return -self.weight * gap(s, self.tau).mean()

    def converted(self, ensemble: SigmaEnsemble, form: str) -> Diversity:
        """The same penalty, up to a constant, in the other form for this ensemble."""
        if form == self.form:
            return Diversity(self.tau, self.weight, self.layers, form)
        factor = bridge_weight(1.0, self.tau, ensemble.num_members, self.channels(ensemble))
        weight = self.weight * factor if form == "mean" else self.weight / factor
        return Diversity(self.tau, weight, self.layers, form)

    def channels(self, ensemble: SigmaEnsemble) -> int:
        """Number N of regularised channels."""
        return sum(layer.logit[0].numel() for layer in self._layers(ensemble))

    def _layers(self, ensemble: SigmaEnsemble) -> list[SigmaNorm]:
        """The regularised norms, chosen and checked at the first use of an ensemble."""
        ensemble = as_ensemble(ensemble)
        known = self._chosen.get(ensemble)
        if known is not None:
            return known
        if ensemble.num_members == 1:
            raise DiversityError(
                "the ensemble has one member, among which there is no diversity: the penalty is "
                "constant. Use members ≥ 2, or diversity=None"
            )
        norms = ensemble.sigma_norms()
        linear = [n for n, m in norms.items() if m.kind != "sigmoid"]
        if linear:
            raise DiversityError(
                f"the penalty is defined for sigmoid scales; '{linear[0]}' has scale='linear'. "
                "Use convert(scale='sigmoid'), or diversity=None for the FiLM-Ensemble control"
            )
        layers = [norms[n] for n in self.chosen(ensemble)[1]]
        if not torch.compiler.is_compiling() and self.weight > 0 and symmetric(ensemble):
            warnings.warn(
                "all members have equal scales, shifts and heads: task and penalty give each of "
                "them the same gradient, and they stay one model unless dropout or split batches "
                "part them. Convert with init='preserve' or head='fresh'",
                SigmaNensWarning,
                stacklevel=3,
            )
        self._chosen[ensemble] = layers
        return layers

    def __repr__(self) -> str:
        return (
            f"Diversity(tau={self.tau:g}, weight={self.weight:g}, layers={self.layers!r}, "
            f"form={self.form!r})"
        )


def gates(layers: Sequence[SigmaNorm]) -> Tensor:
    """σ(γ) of all channels of some layers: (M, N), one sigmoid for all."""
    members = layers[0].axis.num_members
    return torch.sigmoid(torch.cat([m.scale_logit.reshape(members, -1) for m in layers], 1))


def log_softmax_sum(s: Tensor, tau: float) -> Tensor:
    r""":math:`\sum_i \sum_m \log \mathrm{softmax}(s_i/\tau)_m` for s (M, N), softmax over M: ()."""
    return torch.log_softmax(s / tau, dim=0).sum()


def gap(s: Tensor, tau: float) -> Tensor:
    r""":math:`\mathrm{LME}_\tau(s) - \bar s` of each channel, in [0, 1): s (M, N) → (N,).

    Computed from s less its mean: by a log-sum-exp at low τ, else by expm1 and log1p, which stay
    exact to rounding where the gap is a small difference of large terms.
    """
    centred = (s - s.mean(0)) / tau
    if tau < 0.1:  # e^{1/τ} may overflow; here the gap is no small difference
        return tau * (torch.logsumexp(centred, 0) - math.log(s.shape[0]))
    return tau * torch.log1p(torch.expm1(centred).mean(0))


def bridge_weight(weight: float, tau: float, members: int, channels: int) -> float:
    r""":math:`\Lambda = \lambda M N / \tau`: the weight of the "mean" form equal to λ of "sum"."""
    return weight * members * channels / tau
