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

import copy
import math
import warnings
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sigmanens.conversion.audit import LayerSelector
from sigmanens.conversion.blocks import select
from sigmanens.diversity.dial import Dial
from sigmanens.diversity.measures import symmetric
from sigmanens.ensemble.ensemble import SigmaEnsemble, as_ensemble
from sigmanens.errors import DiversityError, SigmaNensWarning
from sigmanens.norms import SigmaNorm
from sigmanens.norms.scales import whole

__all__ = ["Diversity", "bridge_weight", "gap", "log_softmax_sum"]


class Diversity(Dial):
    """The penalty on an ensemble's scales: ``weight`` is λ (or Λ), ``tau`` the dial.

    Args:
        tau: softmax temperature τ > 0, 0.1 by default. Low: the members partition the channels;
            high: the term acts weakly and the task decides. See :func:`reached_owners`.
        weight: λ ≥ 0 for ``form="sum"``, Λ for ``form="mean"``.
        layers: "auto" = the paper's rule for known blocks, "all" = every converted norm, a regex,
            a list of dotted names, or a callable ``(name, layer) -> bool``.
        form: "sum" is the paper's, "mean" the bounded transferable one.
        owners: in the place of τ: so many owners per channel as penalty-only descent is to reach;
            τ is set by :func:`tau_for_owners` for the ensemble's M at the first use.
        start: no penalty before so many optimizer steps (an int) or this share of the training (a
            float from 0 to 1).
        ramp: the penalty rises linearly from 0 to its weight for so long, likewise.
        total_steps: optimizer steps of the training, for shares; may be set later.
        target_cosine: cosine of the regularised scales (:func:`cosine`) that a closed loop steers
            to; see :mod:`sigmanens.diversity.feedback`.
        target_disagreement: likewise for the disagreement of the predictions (:func:`disagreement`)
            on the training batches, which :meth:`observe` has to be shown.
        moves: what the loop moves: "tau" between 0.02 and 20 (then neither ``tau`` nor ``owners``
            is given), or "weight" between ``weight`` / 10⁴ and ``weight``.

    With ``start``, ``ramp`` or a target the penalty changes from step to step. A call counts as one
    optimizer step if gradients are recorded and the ensemble is in training mode; such a penalty
    belongs to one training. Where steps and calls differ (accumulated gradients) set ``step``.

    Attributes:
        step: optimizer steps seen so far.

    Raises:
        DiversityError: for τ ≤ 0, a negative or infinite weight, an unknown form, or settings that
            exclude each other.
    """

    def __init__(
        self,
        tau: float | None = None,
        weight: float = 1e-2,
        layers: LayerSelector = "auto",
        form: str = "sum",
        *,
        owners: float | None = None,
        start: int | float = 0,
        ramp: int | float = 0,
        total_steps: int | None = None,
        target_cosine: float | None = None,
        target_disagreement: float | None = None,
        moves: str = "tau",
    ) -> None:
        super().__init__(
            tau,
            weight,
            owners=owners,
            start=start,
            ramp=ramp,
            total_steps=total_steps,
            target_cosine=target_cosine,
            target_disagreement=target_disagreement,
            moves=moves,
        )
        _check_form(form)
        self.form = form
        # Layers by ensemble, for as long as each ensemble lives.
        self._chosen: WeakKeyDictionary[SigmaEnsemble, list[SigmaNorm]] = WeakKeyDictionary()
        self.layers = layers

    def __getstate__(self) -> dict[str, Any]:
        return super().__getstate__() | {"_chosen": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._chosen = WeakKeyDictionary()

    @property
    def layers(self) -> LayerSelector:
        """Which converted norms are regularised."""
        return self._selector

    @layers.setter
    def layers(self, layers: LayerSelector) -> None:
        self._selector = layers
        self._chosen.clear()

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
        layers = self._layers(ensemble)
        ensemble = as_ensemble(ensemble)
        self.set_tau(ensemble)
        if not self.moving:
            return self._penalty(layers)
        if torch.compiler.is_compiling():
            raise DiversityError(
                "a penalty with start, ramp or a target changes from step to step, which a "
                "compiled function cannot follow. Compile the ensemble, and call the loss outside"
            )
        trains = ensemble.training and torch.is_grad_enabled()
        if trains:
            self.begin_step(ensemble, layers)
        strength = self.strength
        if trains:
            self.end_step(strength)
        return strength * self._penalty(layers)

    def full(self, ensemble: SigmaEnsemble) -> Tensor:
        """The penalty without the factor of ``start`` and ``ramp``, not counted as a step: ()."""
        layers = self._layers(ensemble)
        self.set_tau(as_ensemble(ensemble))
        return self._penalty(layers)

    def _penalty(self, layers: Sequence[SigmaNorm]) -> Tensor:
        s = gates(layers)
        with torch.autocast(s.device.type, enabled=False):
            if self.form == "sum":
                return self.weight * log_softmax_sum(s, self.tau)
            return -self.weight * gap(s, self.tau).mean()

    def converted(self, ensemble: SigmaEnsemble, form: str) -> Diversity:
        """The same penalty, up to a constant, in the other form for this ensemble."""
        _check_form(form)
        ensemble = as_ensemble(ensemble)
        self.set_tau(ensemble)
        other = copy.deepcopy(self)
        other.reset()
        if form == self.form:
            return other
        if self.feedback is not None:
            raise DiversityError(
                "a penalty with a target moves τ or λ, and what ties the two forms together moves "
                f"with them. Make Diversity(form={form!r}, …) with the target instead"
            )
        channels = self.channels(ensemble)
        factor = bridge_weight(1.0, other.tau, ensemble.num_members, channels)
        other.weight = self.weight * factor if form == "mean" else self.weight / factor
        other.form = form
        return other

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
        dial = [] if self.owners is None else [f"owners={self.owners:g}"]
        if self.owners is None or self._members:
            dial.append(f"tau={self.tau:g}")
        return (
            f"Diversity({', '.join(dial)}, weight={self.weight:g}, layers={self.layers!r}, "
            f"form={self.form!r}{self.settings()})"
        )


def _check_form(form: str) -> None:
    if form not in ("sum", "mean"):
        raise DiversityError(f"form is {form!r}; expected 'sum' or 'mean'")


def gates(layers: Sequence[SigmaNorm]) -> Tensor:
    """σ(γ) of all channels of some layers: (M, N), one sigmoid for all."""
    members = layers[0].axis.num_members
    logits = [whole(m.scale_logit).reshape(members, -1) for m in layers]
    return torch.sigmoid(torch.cat(logits, 1))


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
