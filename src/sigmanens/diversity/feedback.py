r"""A closed loop that turns the dial during training until the members differ as asked.

Let :math:`y_t` be what is measured at step t, :math:`y^*` the target, and v the setting that is
moved, λ or 1/τ: the larger, the more the penalty parts the members. Wanted is an approach with time
constant T, so a change of :math:`w_t = (y^* - y_t)/T` per step, where :math:`h_t = y_t - y_{t-1}`
was had. Then

.. math:: \log v_{t+1} = \log v_t \pm k \frac{h_t - w_t}{|h_t| + |w_t| + \epsilon},

"+" if the measure falls as members part (cosine), "−" if it rises (disagreement), within bounds.
This is integral control of the speed on a logarithmic scale. It starts at the weakest setting: a
penalty that overshoots cannot bring members together again, only the task can. One step changes the
setting by at most a factor of :math:`e^k`, whatever the learning rates are.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from typing import Any

from sigmanens.diversity.theory import is_number
from sigmanens.errors import DiversityError, SigmaNensWarning

__all__ = ["GAIN", "TAU_RANGE", "TIME_CONSTANT", "WEIGHT_RANGE", "Feedback", "Point"]

GAIN = 0.1  # k: the setting changes by 10 % a step at most
TIME_CONSTANT = 50.0  # T, in steps
FLOOR = 2e-4  # ε: speeds far below it count as rest
SMOOTHING = 0.95  # of the disagreement, which a batch tells roughly
TAU_RANGE = (0.02, 20.0)  # bounds of τ
WEIGHT_RANGE = 1e-4  # λ moves between this share of the given weight and all of it
PATIENCE = 200  # steps at a bound without progress after which it is said
TOLERANCE = 0.1  # relative; a target that is missed by less counts as reached
_LONGEST = 2000  # entries of the path

Point = tuple[int, float, float, float]  # step, τ, λ, measured


class Feedback:
    """The state of the loop.

    Args:
        measure: "cosine" (of the scales) or "disagreement" (of the predictions).
        target: of the measure, strictly between 0 and 1.
        moves: "tau" or "weight".
        tau: τ, where it stays.
        weight: λ, where it stays; else the largest that it may become.

    Attributes:
        value: where the setting that moves stands.
        measured: last measurement, smoothed for "disagreement"; None before the first.
        path: (step, τ, λ, measured) of every step, or of every ``stride``-th in a long training.

    Raises:
        DiversityError: for a target or a ``moves`` out of range, or a weight of 0.
    """

    def __init__(self, measure: str, target: float, moves: str, tau: float, weight: float) -> None:
        if not is_number(target) or not 0 < target < 1:
            raise DiversityError(
                f"target_{measure} is {target!r}; expected a number strictly between 0 and 1"
            )
        if moves not in ("tau", "weight"):
            raise DiversityError(f"moves is {moves!r}; expected 'tau' or 'weight'")
        if weight == 0:
            raise DiversityError(
                f"target_{measure} needs a penalty to move, but weight is 0; give a weight > 0"
                + (", the largest that λ may become" if moves == "weight" else "")
            )
        self.measure, self.target, self.moves = measure, float(target), moves
        self.tau, self.weight = tau, weight
        low, high = TAU_RANGE if moves == "tau" else (weight * WEIGHT_RANGE, weight)
        self.bounds = (low, high)
        self.reset()

    def reset(self) -> None:
        """Back to the weakest setting, with an empty path."""
        self.value = self.bounds[1] if self.moves == "tau" else self.bounds[0]
        self.measured: float | None = None
        self.path: list[Point] = []
        self.stride = 1
        self._count = 0
        self._at_bound = 0
        self._before = math.nan
        self._said = False

    @property
    def setting(self) -> tuple[float, float]:
        """(τ, λ) now."""
        return (self.value, self.weight) if self.moves == "tau" else (self.tau, self.value)

    def update(self, step: int, measured: float) -> None:
        """Move the setting after one more measurement, before the penalty of ``step``."""
        last = self.measured
        if last is None or self.measure == "cosine":
            now = measured
        else:
            now = SMOOTHING * last + (1 - SMOOTHING) * measured
        had = 0.0 if last is None else now - last
        wanted = (self.target - now) / TIME_CONSTANT
        lacking = (had - wanted) / (abs(had) + abs(wanted) + FLOOR)
        if (self.measure == "cosine") == (self.moves == "tau"):
            lacking = -lacking
        low, high = self.bounds
        self.value = min(max(self.value * math.exp(GAIN * lacking), low), high)
        self.measured = now
        self._note(step)
        self._judge()

    def _note(self, step: int) -> None:
        if self._count % self.stride == 0:
            assert self.measured is not None
            self.path.append((step, *self.setting, self.measured))
            if len(self.path) > _LONGEST:
                self.path = self.path[::2]
                self.stride *= 2
        self._count += 1

    def _judge(self) -> None:
        """Say it once when the loop rests at a bound and the target is still missed."""
        assert self.measured is not None
        if self.value not in self.bounds:
            self._at_bound = 0
            return
        if self._at_bound % PATIENCE == 0:
            missing = abs(self.measured - self.target)
            stuck = self._at_bound and abs(self._before - self.target) - missing < 0.1 * missing
            if stuck and missing > TOLERANCE * self.target and not self._said:
                self._said = True
                warnings.warn(self._stuck(), SigmaNensWarning, stacklevel=5)
            self._before = self.measured
        self._at_bound += 1

    def _stuck(self) -> str:
        strongest = (self.value == self.bounds[0]) == (self.moves == "tau")
        advice = (
            "Take a target that is nearer, or raise the weight or the rate of the scales"
            if strongest
            else "Here the penalty hardly acts, and it cannot make members more alike; the task "
            "alone parts them so far. Take a target that is nearer"
        )
        tau, weight = self.setting
        return (
            f"target_{self.measure}={self.target:g} is not reached: {self.moves} has been at its "
            f"bound for {self._at_bound} steps (tau={tau:.3g}, weight={weight:.3g}) and the "
            f"{self.measure} stays at {self.measured:.3f}. {advice}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything that changes, as numbers and lists."""
        return {
            "measure": self.measure,
            "moves": self.moves,
            "value": self.value,
            "measured": self.measured,
            "path": [list(point) for point in self.path],
            "stride": self.stride,
            "count": self._count,
            "at_bound": self._at_bound,
            "before": self._before,
            "said": self._said,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Inverse of :meth:`state_dict`.

        Raises:
            DiversityError: if the state is that of another loop.
        """
        kind = (state["measure"], state["moves"])
        if kind != (self.measure, self.moves):
            raise DiversityError(
                f"the state is of a loop on the {kind[0]} that moves {kind[1]}; this one is on the "
                f"{self.measure} and moves {self.moves}"
            )
        self.value, self.measured = state["value"], state["measured"]
        self.path = [(int(p[0]), p[1], p[2], p[3]) for p in state["path"]]
        self.stride, self._count = state["stride"], state["count"]
        self._at_bound, self._before = state["at_bound"], state["before"]
        self._said = state["said"]
