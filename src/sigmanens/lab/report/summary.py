"""What a run shows in a few lines: one headline, quality, cost, and the choice of τ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sigmanens.evaluation.comparison import Difference
from sigmanens.lab.report.compare import (
    METRICS,
    difference,
    measured,
    named,
    seeds_word,
    survivors,
    word,
)
from sigmanens.lab.report.naming import times
from sigmanens.lab.report.reading import read_study
from sigmanens.lab.report.study import Group, Study

_QUALITY = ("accuracy", "nll", "nll_calibrated", "ece", "ece_calibrated")
_NUMBERS = ("accuracy", "nll", "ece")
_LEADING = ("nll_calibrated", "nll")
"""What the headline is about: the first that was measured on both sides."""
_VERBS = {"better": "is better than", "worse": "is worse than", "": "is not told apart from"}
CRITERIA = {
    "validation nll_calibrated": "the lowest temperature-scaled NLL on validation data",
    "validation nll": "the lowest NLL on validation data",
    "validation ece": "the lowest ECE on validation data",
    "validation accuracy": "the highest accuracy on validation data",
}


@dataclass(frozen=True)
class Summary:
    """A headline, and lines of (topic, text): at most quality, cost and choice."""

    headline: str
    lines: list[tuple[str, str]]


def summary(metrics: Mapping[str, Any]) -> Summary:
    """The summary of a parsed ``metrics.json``.

    Raises:
        InputError: where the metrics have no rows or are not understood.
    """
    return study_summary(read_study(metrics))


def study_summary(study: Study) -> Summary:
    """The summary of the grouped rows of a run."""
    ours = study.chosen
    if ours is None and len(study.sigma) > 1:
        return Summary(
            f"{len(study.sigma)} settings of σN-Ens were trained and none was chosen: the run "
            "holds no held-out score for each.",
            [],
        )
    if ours is None:
        return Summary(_numbers(study.groups[0]), [])
    others = [g for g in (study.reference, study.deep) if g is not None]
    lead = _lead(study, ours, others)
    texts = {
        "Quality": _quality(study, ours, others, lead),
        "Cost": _cost(study, ours),
        "Choice": _choice(study, ours),
    }
    against = " and ".join(
        f"{_VERBS[word(gap, key)]} {other.label} "
        f"({f'{METRICS[key].name} ' if i == 0 else ''}{named(gap)}, {seeds_word(gap)})"
        for i, (other, key, gap) in enumerate(lead)
    )
    headline = f"{ours.label} {against}." if lead else _numbers(ours)
    return Summary(headline, [(topic, text) for topic, text in texts.items() if text])


def _lead(study: Study, ours: Group, others: list[Group]) -> list[tuple[Group, str, Difference]]:
    """The leading difference from each of the others, where there is one."""
    found = []
    for other in others:
        gaps = ((key, _gap(study, ours, other, key)[1]) for key in _LEADING)
        found += [(other, key, gap) for key, gap in gaps if gap is not None][:1]
    return found


def _gap(study: Study, ours: Group, theirs: Group, key: str) -> tuple[Group, Difference | None]:
    """Ours less theirs, or less their row with a temperature where ``key`` asks for one."""
    scaled = study.scaled_single
    if "calibrated" in key and theirs.method == "single" and scaled is not None:
        theirs = scaled if scaled.variant == theirs.variant else theirs
    return theirs, difference(study, ours, theirs, key)


def _quality(
    study: Study, ours: Group, others: list[Group], lead: list[tuple[Group, str, Difference]]
) -> str:
    parts = []
    for key in _QUALITY if others else ():
        theirs, gap = _gap(study, ours, others[0], key)
        if gap is not None:
            star = "†" if ours.key in survivors(study, theirs, key) else ""
            said = f" {word(gap, key)}{star}" if word(gap, key) else ""
            parts.append(f"{METRICS[key].name} {named(gap)}{said}")
    if not parts:
        return ""
    text = f"Against {others[0].label}: {'; '.join(parts)}."
    if lead:
        _, key, gap = lead[0]
        half = f"±{gap.half_width:.3f} in {METRICS[key].name}"
        text += f" Half an interval, {half}, is what this run can resolve."
    return text


def _cost(study: Study, ours: Group) -> str:
    if study.multiple(ours) is None:
        return ""
    parts = []
    for group in (ours, study.deep) if study.deep else (ours,):
        one = study.reference and study.reference.stat("train_seconds").mean
        mine = group.stat("train_seconds").mean
        time = f" and {mine / one:.1f} × the training time" if one and mine else ""
        parts.append(f"{group.label}: {times(study.multiple(group))} the parameters{time}")
    return f"{'; '.join([f'{parts[0]} of one network', *parts[1:]])}."


def _choice(study: Study, ours: Group) -> str:
    if study.criterion is None:
        return ""
    reason = f" ({study.reason})" if study.reason else ""
    return f"{ours.label}, by {CRITERIA.get(study.criterion, study.criterion)}{reason}."


def _numbers(group: Group) -> str:
    return f"{group.label}: {measured(group, _NUMBERS) or 'nothing measured'}."
