"""When a method is called better or worse: where the interval of its difference leaves out 0."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from sigmanens.evaluation.comparison import Difference, holm
from sigmanens.lab.report import naming
from sigmanens.lab.report.study import Group, Study

RULE = (
    "Differences are paired, with 95 % intervals: Student’s t over the seeds, or, with one seed in "
    "common, the bootstrap over the same samples. They are called better or worse only where the "
    "interval leaves out 0. † marks what also survives Holm’s correction for all methods that "
    "are compared with the same reference."
)


@dataclass(frozen=True)
class Metric:
    """A measured quantity: its key in a row, its name in a sentence, which direction is better."""

    key: str
    name: str
    better: Literal["higher", "lower"]

    @property
    def title(self) -> str:
        """ "NLL (lower is better)"."""
        return f"{naming.capital(self.name)} ({self.better} is better)"


METRICS = {
    metric.key: metric
    for metric in (
        Metric("accuracy", "accuracy", "higher"),
        Metric("nll", "NLL", "lower"),
        Metric("nll_calibrated", "temperature-scaled NLL", "lower"),
        Metric("ece", "ECE", "lower"),
        Metric("ece_calibrated", "temperature-scaled ECE", "lower"),
        Metric("brier", "Brier score", "lower"),
        Metric("nll_corrupted", "NLL under corruption", "lower"),
        Metric("nll_calibrated_corrupted", "temperature-scaled NLL under corruption", "lower"),
    )
}


def measured(group: Group, keys: Sequence[str]) -> str:
    """The group's numbers in words: "accuracy 0.921, NLL 0.352"."""
    known = [key for key in keys if group.stat(key).by_seed]
    return ", ".join(f"{METRICS[key].name} {group.stat(key)}" for key in known)


def difference(study: Study, ours: Group, theirs: Group, key: str) -> Difference | None:
    """Ours less theirs; None where they share no seed or one of them was not measured."""
    return study.differences.get((ours.name, theirs.name), {}).get(key)


def word(gap: Difference, key: str) -> str:
    """ "better" or "worse" where the interval leaves out 0, else ""."""
    good = gap.sign if METRICS[key].better == "higher" else -gap.sign
    return {1: "better", -1: "worse", 0: ""}[good]


def named(gap: Difference, digits: int = 3) -> str:
    """The estimate with its interval: "−0.012 [−0.020, −0.004]"."""
    value, low, high = (naming.number(x, digits) for x in (gap.value, gap.low, gap.high))
    sign = "+" if gap.value > 0 and float(f"{gap.value:.{digits}f}") else ""
    return f"{sign}{value} [{low}, {high}]"


def seeds_word(gap: Difference) -> str:
    """What a difference stands on: "3 seeds" or "one seed"."""
    return f"{gap.n} seeds" if gap.basis == "seeds" else "one seed"


def survivors(study: Study, reference: Group, key: str) -> set[str]:
    """Keys of the groups whose difference from ``reference`` survives Holm's correction."""
    gaps = {
        g.key: gap
        for g in study.groups
        if g is not reference and (gap := difference(study, g, reference, key)) is not None
    }
    kept = holm([gap.p for gap in gaps.values()])
    return {k for (k, gap), keep in zip(gaps.items(), kept, strict=True) if keep and gap.sign}
