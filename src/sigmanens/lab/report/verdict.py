"""What a run shows, in words: a headline, the evidence for it, and the chosen τ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from sigmanens.evaluation.equivalent import deep_ensemble_equivalent
from sigmanens.lab.report import naming
from sigmanens.lab.report.compare import METRICS, Metric, compare, interval, judge
from sigmanens.lab.report.headline import headline
from sigmanens.lab.report.reading import read_study
from sigmanens.lab.report.study import Group, Stat, Study, dig, finite

__all__ = ["Verdict", "criterion_words", "study_verdict", "verdict"]

_CRITERIA = {
    "validation nll_calibrated": "the lowest temperature-scaled NLL on the validation data",
    "validation nll": "the lowest NLL on the validation data",
    "validation ece": "the lowest ECE on the validation data",
    "validation accuracy": "the highest accuracy on the validation data",
}
_FITTED = " with a temperature fitted to each"
_AUROC = Metric("auroc", "AUROC", "higher")
_ONE_MODEL = 0.005
"""Disagreement of two members below which the verdict doubts that they are an ensemble."""


@dataclass(frozen=True)
class Verdict:
    """The conclusion of a run: one headline, lines of evidence, and the chosen σN-Ens.

    ``chosen`` has ``method, members, tau, weight, label, criterion, reason``; None where the run
    has no σN-Ens or no ground to choose one.
    """

    headline: str
    lines: list[str]
    chosen: dict[str, Any] | None


def verdict(metrics: Mapping[str, Any]) -> Verdict:
    """The verdict on a parsed ``metrics.json``.

    Raises ``InputError`` where the metrics have no rows or are not understood.
    """
    return study_verdict(read_study(metrics))


def study_verdict(study: Study) -> Verdict:
    """The verdict on the grouped rows of a run."""
    ours = study.chosen
    if ours is None:
        return Verdict(headline(study), [_evidence(study)], None)
    lines = [
        _against(ours, study.single, ("nll", "ece", "accuracy"), " as trained"),
        _against(ours, study.scaled_single, ("nll_calibrated", "ece_calibrated"), _FITTED),
        _against(ours, study.deep, ("nll", "nll_calibrated", "ece", "accuracy")),
        _cost(study, ours),
        _choice(study, ours),
        _controls(study, ours),
        _members(ours),
        _noise(study, ours),
        *(_ood(study, ours, name) for name in study.ood),
        _ood_score(study, ours),
        _equivalent(study, ours),
        _evidence(study),
    ]
    chosen = {
        "method": ours.method,
        "members": ours.members,
        "tau": ours.tau,
        "weight": ours.weight,
        "label": ours.label,
        "criterion": study.criterion,
        "reason": study.reason,
    }
    return Verdict(headline(study), [line for line in lines if line], chosen)


def criterion_words(criterion: str) -> str:
    """A criterion such as "validation nll_calibrated" as a reader would say it."""
    return _CRITERIA.get(criterion, criterion)


def _against(ours: Group, theirs: Group | None, keys: tuple[str, ...], how: str = "") -> str:
    if theirs is None:
        return ""
    found = [c for c in (compare(ours, theirs, key) for key in keys) if c is not None]
    said = [c.sentence for c in found]
    if how == _FITTED:
        said = [text.removeprefix("temperature-scaled ") for text in said]
    return f"Against {theirs.label}{how}: {'; '.join(said)}." if said else ""


def _cost(study: Study, ours: Group) -> str:
    if not study.multiple(ours):
        return ""
    text = f"Parameters: {study.multiple(ours)} one network"
    if study.deep is not None and study.multiple(study.deep):
        text += f"; {study.deep.label} take {study.multiple(study.deep)}"
    one, mine, many = (
        group.stat("train_seconds").mean if group else None
        for group in (study.single, ours, study.deep)
    )
    if one and mine:
        text += f". Training took {mine / one:.1f} × the time of one network"
        text += f", {many / one:.1f} × for the separate ones" if many else ""
    return f"{text}."


def _choice(study: Study, ours: Group) -> str:
    if study.criterion is None:
        return ""
    text = f"Choice of τ: {ours.label}, by {criterion_words(study.criterion)}"
    text += f": {study.reason.rstrip('.')}." if study.reason else "."
    metric = METRICS.get(study.criterion.removeprefix("validation "))
    if metric is None:
        return text
    mine = ours.stat("validation", metric.key)
    rivals = [group for group in study.sigma if group is not ours]
    outcomes = [(g, judge(mine, g.stat("validation", metric.key), metric)) for g in rivals]
    ties = [g.label for g, outcome in outcomes if outcome is not None and outcome.direction == 0]
    if ties:
        text += f" On the validation data no difference is seen from {_join(ties)}."
    sign = 1.0 if metric.better == "higher" else -1.0
    tested = [
        (sign * mean, g) for g in study.sigma if (mean := g.stat(metric.key).mean) is not None
    ]
    best = max(tested, key=lambda pair: pair[0])[1] if tested else ours
    if best is not ours and (seen := compare(ours, best, metric.key)) is not None:
        text += (
            f" On the {study.split} data, which played no part in the choice, {best.label} comes "
            f"out first: {metric.name} {seen.theirs} against {seen.ours} "
            f"({'a difference is seen' if seen.direction else 'no difference seen'})."
        )
    return text


def _controls(study: Study, ours: Group) -> str:
    """Whether the parts of the method earn their keep: σN-Ens against every other group."""
    key = "nll_calibrated" if ours.stat("nll_calibrated").by_seed else "nll"
    outcomes: dict[int, list[str]] = {1: [], 0: [], -1: []}
    for group in study.groups:
        if group.method in ("single", "single_temperature", "sigmanens") or group is study.deep:
            continue
        if (result := compare(ours, group, key)) is not None:
            outcomes[result.direction].append(group.label.replace(", ", " "))
    heads = {1: "better than", 0: "not seen to differ from", -1: "worse than"}
    parts = [f"{heads[d]} {_join(names)}" for d, names in outcomes.items() if names]
    if not parts:
        return ""
    text = f"Controls and rivals: by {METRICS[key].name}, {ours.label} is {'; '.join(parts)}."
    plain = [g.label for g in study.groups if g.method == "sigmanens_lambda0"]
    if any(label in outcomes[-1] for label in plain):
        text += " So in this run the diversity penalty itself does harm by this measure."
    elif any(label in outcomes[0] for label in plain):
        text += " So this run does not show that the diversity penalty itself helps."
    return text


def _members(ours: Group) -> str:
    disagreement, gap = ours.stat("disagreement"), ours.stat("jensen_gap")
    if not ours.members or ours.members < 2 or disagreement.mean is None:
        return ""
    text = (
        f"Members: two of them give different labels for a fraction {disagreement} of the samples"
    )
    if gap.mean is not None:
        text += f"; averaging lowers the NLL by {gap} against the mean member"
    if disagreement.mean < _ONE_MODEL:
        text += "; they are close to one model in disguise"
    return f"{text}."


def _noise(study: Study, ours: Group) -> str:
    if not study.severities:
        return ""
    hardest = study.severities[-1]
    name = f"{len(study.kinds)} corruptions" if len(study.kinds) > 1 else naming.words(*study.kinds)
    parts = []
    for key in ("ece", "accuracy"):
        at = ("corruption_pooled", hardest, "intervals", key)
        text = _beside(study, ours, partial(_corrupted, hardest, key), METRICS[key], at)
        parts += [text] if text else []
    return f"Corruption: under {name} at severity {hardest}, {'; '.join(parts)}." if parts else ""


def _ood(study: Study, ours: Group, name: str) -> str:
    score = study.quoted_score(name)
    text = _beside(study, ours, partial(_auroc, name, score), _AUROC)
    return f"OOD set “{naming.words(name)}”: by {naming.words(score)}, {text}." if text else ""


def _ood_score(study: Study, ours: Group) -> str:
    """Which score tells the OOD sets apart best, beside the usual one."""
    shared = [
        s for s in next(iter(study.ood.values()), []) if all(s in v for v in study.ood.values())
    ]
    found: dict[str, float] = {}
    for score in shared:
        means = [ours.stat("ood", name, score).mean for name in study.ood]
        known = [m for m in means if m is not None]
        if known and len(known) == len(means):
            found[score] = sum(known) / len(known)
    if len(found) < 2:
        return ""
    best = max(found, key=lambda score: found[score])
    usual = study.quoted_score(next(iter(study.ood)))
    text = (
        f"OOD scores: for {ours.label} the highest mean AUROC over the sets is that of "
        f"{naming.words(best)}, {naming.number(found[best])}"
    )
    if best != usual and usual in found:
        text += f", against {naming.number(found[usual])} of {naming.words(usual)}"
    return f"{text}. It is the best of {len(found)} on these very sets; others may favour another."


def _equivalent(study: Study, ours: Group) -> str:
    """How many separate networks would have this temperature-scaled NLL."""
    mine = ours.stat("nll_calibrated")
    curves = [dig(row, "curve") for row in (study.deep.rows.values() if study.deep else ())]
    known = [c for c in curves if isinstance(c, Mapping) and len(c) > 1]
    if mine.mean is None or not known:
        return ""
    curve = {int(k): [float(c[k]) for c in known if finite(c.get(k)) is not None] for k in known[0]}
    found = deep_ensemble_equivalent(list(mine.by_seed.values()), curve)
    text = f"Deep-ensemble equivalent: by temperature-scaled NLL, {ours.label} "
    if found.relation == "<":
        one = "one network" if found.smallest == 1 else f"{found.smallest} separate networks"
        fitted = [g for g in study.groups if g.method == "single_finetuned" and not g.variant]
        return text + _told("worse than", one, ours, fitted[0] if fitted else study.single)
    if found.relation == ">":
        every = f"all {found.largest} separate networks that were measured"
        return text + _told("better than", every, ours, study.deep)
    spread = ""
    if found.low is not None and found.high is not None and found.low < found.high:
        spread = f" ({found.low:.1f} to {found.high:.1f} by the spread over seeds)"
    return f"{text}is worth {found.value:.1f} separate networks{spread}."


def _told(word: str, what: str, ours: Group, theirs: Group | None) -> str:
    """Better or worse, or that the temperature-scaled NLL does not tell two groups apart."""
    found = None if theirs is None else compare(ours, theirs, "nll_calibrated")
    if found is not None and found.direction == 0:
        return f"is worth about {what}: no difference is seen."
    return f"is {word} {what}."


def _corrupted(severity: str, key: str, group: Group) -> Stat:
    return group.corruption(severity, key)


def _auroc(name: str, score: str, group: Group) -> Stat:
    return group.stat("ood", name, score)


def _beside(
    study: Study,
    ours: Group,
    read: Callable[[Group], Stat],
    metric: Metric,
    at: tuple[str, ...] | None = None,
) -> str:
    """One number of ours beside the same number of one network and of separate ones.

    ``at``: where rows have its interval.
    """
    mine = read(ours)
    if mine.mean is None:
        return ""
    found = []
    for theirs in (study.single, study.deep):
        if theirs is None:
            continue
        ends = (None, None) if at is None else (interval(ours, *at), interval(theirs, *at))
        if (outcome := judge(mine, read(theirs), metric, ends)) is not None:
            found.append(f"{theirs.label} {outcome.theirs} ({outcome.phrase})")
    return f"{metric.name} {mine}" + (f" against {_join(found)}" if found else "")


def _evidence(study: Study) -> str:
    seeds = len(study.seeds)
    fewest = min(len(group.rows) for group in study.groups)
    span = f"{fewest} to {seeds}" if fewest < seeds else f"{seeds}"
    text = f"Evidence: {span} seed{'s' if seeds > 1 else ''}"
    if study.samples:
        text += f", {_join([f'{n:,}' for n in study.samples])} {study.split} samples"
    if seeds > 1:
        text += "; ± is the standard deviation over seeds"
    return f"{text}."


def _join(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
