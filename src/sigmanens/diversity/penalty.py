r"""The diversity penalty on the members' scales.

With :math:`s_{m} = \sigma(\gamma_{m})` of one channel and a softmax over the members
(arXiv 2607.23860)

.. math:: L = \lambda \sum_{\ell \in R} \sum_i \sum_m \log \mathrm{softmax}(s_{\ell,i}/\tau)_m
            = -\lambda \sum_{\ell,i} \Big[ M \log M
              + \tfrac{M}{\tau} \big( \mathrm{LME}_\tau(s_{\ell,i}) - \bar s_{\ell,i} \big) \Big],

where :math:`\mathrm{LME}_\tau(s) = \tau \log \frac1M \sum_j e^{s_j/\tau}` is a soft maximum.
Training widens the gap between the soft maximum and the mean of the scales.

``form="mean"`` is the gap alone, averaged over all N regularised channels:
:math:`L' = -\Lambda \cdot \mathrm{mean}[\mathrm{LME}_\tau(s) - \bar s]`. Its weight means the same
for networks of any size. L and L' differ by a constant if :math:`\Lambda = \lambda M N / \tau`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from sigmanens.conversion.blocks import select
from sigmanens.conversion.config import LayerSelector
from sigmanens.diversity.defaults import DEFAULT_TAU, DEFAULT_WEIGHT
from sigmanens.diversity.measures import SYMMETRIC, symmetric
from sigmanens.diversity.theory import check_temperature, is_number
from sigmanens.ensemble.ensemble import SigmaEnsemble, as_ensemble
from sigmanens.errors import DiversityError, warn
from sigmanens.norms import SigmaNorm
from sigmanens.norms.scales import whole

Dial = float | Callable[[float], float]


class Diversity:
    """The penalty on an ensemble's scales.

    A setting may be a function of the training's progress, 0 to 1. Your training loop says it; the
    integrations and the command line do that by themselves::

        diversity = sn.Diversity(tau=0.5, weight=sn.diversity.Ramp(0.01, start=0.2, length=0.3))
        for step in range(total):
            diversity.progress = step / total
            loss = loss_fn(ens(x), y, ens)

    Args:
        tau: temperature τ > 0 of the softmax over members, or a function of progress. A low τ gives
            each channel to one member; at a high τ the penalty acts weakly and the task decides.
        weight: λ ≥ 0 for ``form="sum"``, Λ ≥ 0 for ``form="mean"``, or a function of progress.
        layers: "auto" = the paper's rule for known blocks, "all" = every converted norm, a regex,
            a list of dotted names, or a callable ``(name, layer) -> bool``.
        form: "sum" as in the paper, or "mean", which is bounded.

    Attributes:
        tau, weight, layers: as they were given. They may be set anew.
        progress: share of the training that is done, 0 to 1; None until a training loop sets it.
            Set it outside a compiled function, which then follows it without recompiling.

    Raises:
        DiversityError: for τ ≤ 0, a negative or infinite weight, an unknown form, or a progress
            outside 0 to 1.
    """

    def __init__(
        self,
        tau: Dial = DEFAULT_TAU,
        weight: Dial = DEFAULT_WEIGHT,
        layers: LayerSelector = "auto",
        form: str = "sum",
    ) -> None:
        if form not in ("sum", "mean"):
            raise DiversityError(f"form is {form!r}; expected 'sum' or 'mean'")
        # Names of the regularised norms, for as long as each ensemble lives.
        self._chosen: WeakKeyDictionary[SigmaEnsemble, list[str]] = WeakKeyDictionary()
        self.layers, self.form = layers, form
        self.tau, self.weight = tau, weight
        self.progress: float | None = None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_chosen": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _chosen=WeakKeyDictionary())

    def __setattr__(self, name: str, value: Any) -> None:
        """Check a setting; choose layers anew, or compute what τ and λ are now."""
        if name in ("tau", "weight"):
            value = _checked(name, value)
        elif name == "progress" and not (value is None or (is_number(value) and 0 <= value <= 1)):
            raise DiversityError(
                f"progress is {value!r}; expected a number from 0 to 1: step / total steps"
            )
        super().__setattr__(name, value)
        if name == "layers":
            self._chosen.clear()
        elif name in ("tau", "weight", "progress") and "progress" in vars(self):
            at = self.progress
            # Tensors where they change, so that compiled graphs do not.
            self._now: tuple[float | Tensor, float | Tensor] | None = None
            if at is not None or not self.moves:
                self._now = _value("tau", self.tau, at), _value("weight", self.weight, at)

    @property
    def moves(self) -> bool:
        """Whether τ or λ is a function of progress."""
        return callable(self.tau) or callable(self.weight)

    @property
    def active(self) -> bool:
        """Whether the penalty can act at all: False for a weight of 0."""
        return callable(self.weight) or self.weight > 0

    def current(self) -> tuple[float, float]:
        """τ and λ (or Λ) at the present progress.

        Raises:
            DiversityError: if one of them is a function, and nothing has set ``progress``.
        """
        tau, weight = self._settings()
        return float(tau), float(weight)

    def _settings(self) -> tuple[float | Tensor, float | Tensor]:
        if self._now is None:
            name = "tau" if callable(self.tau) else "weight"
            raise DiversityError(
                f"{name} of the penalty is a function of the training's progress, which nothing "
                "has set. In your training loop set diversity.progress = step / total_steps before "
                "each step, or give a number"
            )
        return self._now

    def chosen(self, ensemble: SigmaEnsemble) -> tuple[str, list[str]]:
        """Name of the rule, and dotted names of the norms that it regularises."""
        ensemble = as_ensemble(ensemble)
        return select(ensemble.network, ensemble.sigma_norms(), self.layers)

    def _layers(self, ensemble: SigmaEnsemble) -> list[SigmaNorm]:
        """The regularised norms. They are chosen and checked at the first use of an ensemble."""
        if ensemble not in self._chosen:
            chosen = self.chosen(ensemble)[1]
            self._check(ensemble)
            self._chosen[ensemble] = chosen
        found = [ensemble.network.get_submodule(n) for n in self._chosen[ensemble]]
        return [m for m in found if isinstance(m, SigmaNorm)]

    def _check(self, ensemble: SigmaEnsemble) -> None:
        if ensemble.num_members == 1:
            raise DiversityError(
                "the ensemble has one member, and the penalty compares members. Use members ≥ 2, "
                "or diversity=None"
            )
        linear = [n for n, m in ensemble.sigma_norms().items() if m.kind != "sigmoid"]
        if linear:
            raise DiversityError(
                f"the penalty is defined for sigmoid scales; '{linear[0]}' has scale='linear'. "
                "Use convert(scale='sigmoid'), or diversity=None for the FiLM-Ensemble control"
            )
        if not torch.compiler.is_compiling() and self.active and symmetric(ensemble):
            warn(SYMMETRIC)

    def __call__(self, ensemble: SigmaEnsemble) -> Tensor:
        """The penalty: (), float32 or wider, also under autocast.

        Raises:
            DiversityError: for an ensemble of one member or of linear scales, if ``layers`` selects
                nothing, or if a setting is a function and nothing has set ``progress``.
        """
        s = gates(self._layers(as_ensemble(ensemble)))
        tau, weight = self._settings()
        with torch.autocast(s.device.type, enabled=False):
            value = log_softmax_sum(s, tau) if self.form == "sum" else -gap(s, tau).mean()
            return (weight * value).to(value.dtype)

    def __repr__(self) -> str:
        tau, weight = (repr(v) if callable(v) else f"{v:g}" for v in (self.tau, self.weight))
        return f"Diversity(tau={tau}, weight={weight}, layers={self.layers!r}, form={self.form!r})"


@dataclass(frozen=True)
class Ramp:
    r"""A function of the training's progress: 0 until ``start``, then a line up to ``value``.

    .. math:: f(p) = \mathrm{value} \cdot \min\big(1, \max(0, (p - \mathrm{start}) /
              \mathrm{length})\big)

    With ``length`` 0 it jumps to ``value`` at ``start``, 0 to 1.

        >>> weight = Ramp(0.01, start=0.25, length=0.5)
        >>> [weight(p) for p in (0.0, 0.25, 0.5, 0.75, 1.0)]
        [0.0, 0.0, 0.005, 0.01, 0.01]

    Raises:
        DiversityError: if ``value`` is no number, or a share lies outside 0 to 1.
    """

    value: float
    start: float = 0.0
    length: float = 0.0

    def __post_init__(self) -> None:
        if not is_number(self.value):
            raise DiversityError(f"value of the ramp is {self.value!r}; expected a number")
        for name in ("start", "length"):
            share = getattr(self, name)
            if not is_number(share) or not 0 <= share <= 1:
                raise DiversityError(
                    f"{name} of the ramp is {share!r}; expected a share of the training from 0 "
                    "to 1: steps / total steps"
                )

    def __call__(self, progress: float) -> float:
        """The number at a progress of 0 to 1."""
        if progress < self.start:
            return 0.0
        if self.length == 0:
            return float(self.value)
        return self.value * min(1.0, (progress - self.start) / self.length)


def _checked(name: str, value: Any, where: str = "") -> Any:
    """The number as a float, or the function as it is; DiversityError for anything else."""
    if callable(value) and not where:
        return value
    if name == "tau":
        check_temperature(value, where)
    elif not is_number(value) or not 0 <= value < math.inf:
        raise DiversityError(f"weight (λ){where} is {value!r}; expected a finite number ≥ 0")
    return float(value)


def _value(name: str, dial: Dial, progress: float | None) -> float | Tensor:
    if not callable(dial) or progress is None:
        return float(dial)  # type: ignore[arg-type]
    value = _checked(name, dial(progress), f" at progress {progress:.3g}")
    return torch.tensor(value, dtype=torch.float64, device="cpu")


def gates(layers: Sequence[SigmaNorm]) -> Tensor:
    """σ(γ) of all channels of some layers: (M, N), from one sigmoid."""
    members = layers[0].axis.num_members
    logits = [whole(m.scale_logit).reshape(members, -1) for m in layers]
    return torch.sigmoid(torch.cat(logits, 1))


def log_softmax_sum(s: Tensor, tau: float | Tensor) -> Tensor:
    r""":math:`\sum_i \sum_m \log \mathrm{softmax}(s_i/\tau)_m` for s (M, N), softmax over M: ()."""
    return torch.log_softmax(s / tau, dim=0).sum()


def gap(s: Tensor, tau: float | Tensor) -> Tensor:
    r""":math:`\mathrm{LME}_\tau(s) - \bar s` of each channel, in [0, 1): s (M, N) → (N,).

    At τ ≥ 0.1 expm1 and log1p keep the digits of a small gap. Below, e^{1/τ} may overflow.
    """
    centred = (s - s.mean(0)) / tau
    precise = torch.log1p(torch.expm1(centred.clamp(max=10)).mean(0))
    stable = torch.logsumexp(centred, 0) - math.log(len(s))
    if isinstance(tau, Tensor):
        return tau * torch.where((tau < 0.1).to(s.device), stable, precise)
    return tau * (stable if tau < 0.1 else precise)
