"""When a difference between two methods counts as seen.

With several seeds in common the seeds are paired: the difference counts when the size of its mean
exceeds its standard deviation from seed to seed. With one seed the bootstrap interval of the
difference on the same samples decides: it must leave out 0; or, where there is none, those of the
two rows: they must not overlap. Without intervals the direction is given and named unconfirmed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

from sigmanens.lab.report.study import Group, Stat, dig, finite

__all__ = ["METRICS", "RULE", "WITHIN", "Comparison", "Metric", "compare", "interval", "judge"]

RULE = (
    "A difference counts as seen when its mean over the seeds (paired) is larger than its standard "
    "deviation from seed to seed; with one seed, when the bootstrap interval of the difference on "
    "the same samples leaves out 0, or, where there is none, the two intervals do not overlap. "
    "Anything smaller is called “no difference seen”."
)
WITHIN = ", by less than they differ"
"""Said where all seeds agree on a difference that is not seen by the rule."""
_RESOLUTION = 5e-4
"""Differences below half a unit of the third decimal are never called better or worse."""


@dataclass(frozen=True)
class Metric:
    """A measured quantity: its key in a row, its name in a sentence, which direction is better."""

    key: str
    name: str
    better: Literal["higher", "lower"]


METRICS = {
    metric.key: metric
    for metric in (
        Metric("accuracy", "accuracy", "higher"),
        Metric("nll", "NLL", "lower"),
        Metric("nll_calibrated", "temperature-scaled NLL", "lower"),
        Metric("ece", "ECE", "lower"),
        Metric("ece_calibrated", "temperature-scaled ECE", "lower"),
        Metric("brier", "Brier score", "lower"),
    )
}


@dataclass(frozen=True)
class Comparison:
    """What was seen between "ours" and "theirs" on one metric.

    ``direction``: +1 ours is better, −1 worse, 0 no difference seen. ``better`` and ``worse`` are
    the numbers of shared seeds in which ours is so. ``basis``: what decided, "seeds", "samples",
    "intervals" or "one seed".
    """

    metric: Metric
    ours: Stat
    theirs: Stat
    direction: int
    seeds: int
    better: int
    worse: int
    basis: Literal["seeds", "samples", "intervals", "one seed"]

    @property
    def word(self) -> str:
        """ "better", "worse" or "no difference seen"."""
        return {1: "better", -1: "worse", 0: "no difference seen"}[self.direction]

    @property
    def phrase(self) -> str:
        """The outcome with what limits it: "better, but worse in 1 of 3 seeds"."""
        if self.seeds < 2:
            alone = self.direction != 0 and self.basis == "one seed"
            return f"{self.word} in this one seed" if alone else self.word
        if self.direction == 0:
            count, way = max((self.better, "better"), (self.worse, "worse"))
            within = WITHIN if count == self.seeds else ""
            said = f": {way} in {count} of {self.seeds} seeds{within}" if count else ""
            return f"{self.word}{said}"
        other, count = ("worse", self.worse) if self.direction > 0 else ("better", self.better)
        return f"{self.word}{f', but {other} in {count} of {self.seeds} seeds' if count else ''}"

    @property
    def sentence(self) -> str:
        """The metric, both numbers and the outcome: "NLL 0.201 against 0.310 (better)"."""
        return f"{self.metric.name} {self.ours} against {self.theirs} ({self.phrase})"


def compare(ours: Group, theirs: Group, key: str) -> Comparison | None:
    """Compare two groups on the row value ``key``; None where it was not measured in both."""
    intervals = tuple(interval(group, "intervals", key) for group in (ours, theirs))
    difference = theirs.differences.get((ours.setting, key))
    return judge(ours.stat(key), theirs.stat(key), METRICS[key], intervals, difference)


def judge(
    ours: Stat,
    theirs: Stat,
    metric: Metric,
    intervals: Sequence[tuple[float, float] | None] = (None, None),
    difference: tuple[float, float] | None = None,
) -> Comparison | None:
    """Compare two values per seed by the rule of this module; None where either is empty.

    Args:
        ours, theirs: the values.
        metric: which they are.
        intervals: of each, for one seed.
        difference: interval of ours less theirs on the same samples, for one seed.
    """
    if ours.mean is None or theirs.mean is None:
        return None
    sign = 1.0 if metric.better == "higher" else -1.0
    shared = [seed for seed in ours.by_seed if seed in theirs.by_seed]
    gains = [sign * (ours.by_seed[seed] - theirs.by_seed[seed]) for seed in shared]
    basis: Literal["seeds", "samples", "intervals", "one seed"]
    if len(gains) > 1:
        gain, spread, basis = fmean(gains), stdev(gains), "seeds"
    elif ours.sd is not None and theirs.sd is not None:
        gain, basis = sign * (ours.mean - theirs.mean), "seeds"
        spread = (ours.sd**2 + theirs.sd**2) ** 0.5
    else:
        gain, spread, basis = sign * (ours.mean - theirs.mean), 0.0, "one seed"
        first, second = intervals
        if difference is not None and gains:
            gain, basis = gains[0], "samples"
            spread = abs(gain) if difference[0] <= 0 <= difference[1] else 0.0
        elif first is not None and second is not None:
            basis = "intervals"
            apart = first[0] > second[1] or second[0] > first[1]
            spread = 0.0 if apart else abs(gain)
    seen = abs(gain) > max(spread, _RESOLUTION)
    direction = (1 if gain > 0 else -1) if seen else 0
    better = sum(value > _RESOLUTION for value in gains)
    worse = sum(value < -_RESOLUTION for value in gains)
    return Comparison(metric, ours, theirs, direction, len(shared), better, worse, basis)


def interval(group: Group, *path: str) -> tuple[float, float] | None:
    """The bootstrap interval of a group, where it was measured for one seed."""
    found = (dig(row, *path) for row in group.rows.values())
    bounds = [b for b in found if b is not None]
    if len(bounds) != 1 or not isinstance(bounds[0], Sequence) or len(bounds[0]) != 2:
        return None
    low, high = (finite(bound) for bound in bounds[0])
    return None if low is None or high is None else (low, high)
