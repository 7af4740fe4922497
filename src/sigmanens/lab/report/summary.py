"""What a run shows in a few lines: one headline, quality, cost, and the choice of τ.

Numbers are found here; the words are in ``templates/summary.j2``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sigmanens.lab.report.compare import METRICS, difference, named, seeds_word, survivors, word
from sigmanens.lab.report.reading import read_study
from sigmanens.lab.report.study import Group, Study
from sigmanens.lab.report.template import environment

__all__ = ["CRITERIA", "Summary", "facts", "study_summary", "summary"]

_QUALITY = ("accuracy", "nll", "nll_calibrated", "ece", "ece_calibrated")
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
    words: Any = environment(html=False).get_template("summary.j2").module
    found = facts(study)
    texts = [(t, str(getattr(words, t)(found))) for t in ("quality", "cost", "choice")]
    headline = str(words.headline(found))
    return Summary(headline, [(topic.capitalize(), text) for topic, text in texts if text])


def facts(study: Study) -> dict[str, Any]:
    """The numbers that the template puts into words."""
    ours, reference = study.chosen, study.reference
    found: dict[str, Any] = {
        "ours": ours.label if ours else None,
        "sigma": len(study.sigma),
        "methods": len(study.groups),
        "numbers": _numbers(ours or study.groups[0]),
        "first": (ours or study.groups[0]).label,
        "choice": None,
        "cost": None,
        "one_seed": len(study.seeds) == 1,
    }
    if ours is None:
        return found
    others = [g for g in (reference, study.deep) if g is not None and g is not ours]
    gaps = {g.key: [_gap(study, ours, g, key) for key in _QUALITY] for g in others}
    found["against"] = [
        {"label": g.label, "gaps": [gap for gap in gaps[g.key] if gap is not None]} for g in others
    ]
    found["lead"] = [
        {"label": g.label} | gap
        for g in others
        if (gap := gaps[g.key][2] or gaps[g.key][1]) is not None
    ]
    if study.multiple(ours):
        found["cost"] = [
            {"label": g.label, "parameters": study.multiple(g), "time": _time(study, g)}
            for g in (ours, study.deep)
            if g is not None
        ]
    if study.criterion is not None:
        by = CRITERIA.get(study.criterion, study.criterion)
        found["choice"] = {"by": by, "reason": study.reason}
    return found


def _gap(study: Study, ours: Group, theirs: Group, key: str) -> dict[str, Any] | None:
    scaled = study.scaled_single
    if "calibrated" in key and theirs.method == "single" and scaled is not None:
        theirs = scaled if scaled.variant == theirs.variant else theirs
    gap = difference(study, ours, theirs, key)
    if gap is None:
        return None
    return {
        "metric": METRICS[key].name,
        "text": named(gap),
        "word": word(gap, key),
        "star": ours.key in survivors(study, theirs, key),
        "seeds": seeds_word(gap),
        "half": f"{gap.half_width:.3f}",
    }


def _time(study: Study, group: Group) -> str:
    """Training time as a multiple of one network's; "" where unknown."""
    one = study.reference and study.reference.stat("train_seconds").mean
    mine = group.stat("train_seconds").mean
    return f"{mine / one:.1f} ×" if one and mine else ""


def _numbers(group: Group) -> str:
    keys = [k for k in ("accuracy", "nll", "ece") if group.stat(k).by_seed]
    return ", ".join(f"{METRICS[k].name} {group.stat(k)}" for k in keys) or "nothing measured"
