r"""The diversity penalty and what it does to the scales of the members.

With :math:`s_{m} = \sigma(\gamma_{m})` of one channel and a softmax over the members
(arXiv 2607.23860)

.. math:: L = \lambda \sum_{\ell \in R} \sum_i \sum_m \log \mathrm{softmax}(s_{\ell,i}/\tau)_m
            = -\lambda \sum_{\ell,i} \Big[ M \log M
              + \tfrac{M}{\tau} \big( \mathrm{LME}_\tau(s_{\ell,i}) - \bar s_{\ell,i} \big) \Big],

where :math:`\mathrm{LME}_\tau(s) = \tau \log \frac1M \sum_j e^{s_j/\tau}` is a soft maximum. Minimising
widens the gap between the soft maximum and the mean of the members' scales; the gradient is
:math:`\partial L/\partial\gamma_j = \frac{\lambda}{\tau} s_j (1 - s_j)(1 - M p_j)`. The gap alone,
averaged over all :math:`N` regularised channels, is the bounded form
:math:`L' = -\Lambda \cdot \mathrm{mean}[\mathrm{LME}_\tau(s) - \bar s]`, which transfers between
networks of different size; the two differ by a constant when :math:`\Lambda = \lambda M N / \tau`.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

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
from sigmanens.selection import select
from sigmanens.theory import (
    check_temperature,
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
        if not (weight >= 0 and weight != float("inf")):
            raise DiversityError(f"weight (λ) is {weight}; expected a finite number ≥ 0")
        if form not in ("sum", "mean"):
            raise DiversityError(f"form is {form!r}; expected 'sum' or 'mean'")
        self.tau = float(tau)
        self.weight = float(weight)
        self.layers = layers
        self.form = form
        self._chosen: tuple[int, list[SigmaNorm]] | None = None

    def chosen(self, ensemble: SigmaEnsemble) -> tuple[str, list[str]]:
        """The rule used and the dotted names of the regularised norms R."""
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
        if self._chosen is not None and self._chosen[0] == id(ensemble):
            return self._chosen[1]
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
        _, names = self.chosen(ensemble)
        layers = [norms[n] for n in names]
        if self.weight > 0 and symmetric(layers):
            warnings.warn(
                "all members have equal scales: the penalty's gradient is zero there, and with "
                "equal heads they stay one model. Use init='preserve' or head='fresh'",
                SigmaNensWarning,
                stacklevel=4,
            )
        self._chosen = (id(ensemble), layers)
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
    r""":math:`\mathrm{LME}_\tau(s) - \bar s` of each channel, in [0, 1): s (M, N) → (N,)."""
    soft_maximum = torch.log_softmax(s / tau, dim=0)  # s_m/τ - logsumexp
    # LME - mean = -(τ/M) Σ_m log p_m - τ log M
    return -tau * (soft_maximum.mean(0) + torch.log(torch.tensor(float(s.shape[0]), device=s.device)))


def bridge_weight(weight: float, tau: float, members: int, channels: int) -> float:
    r""":math:`\Lambda = \lambda M N / \tau`: the weight of the "mean" form equal to λ of "sum"."""
    return weight * members * channels / tau
