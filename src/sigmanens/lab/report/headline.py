"""The first sentences of a report: σN-Ens against one network and against separate ones, by NLL."""

from __future__ import annotations

from sigmanens.lab.report.compare import METRICS, Comparison, compare
from sigmanens.lab.report.study import Group, Study

__all__ = ["headline"]


def headline(study: Study) -> str:
    """One to three sentences that hold whatever the run shows, good or bad."""
    ours = study.chosen
    if ours is None:
        return _without_choice(study)
    one, deep = _one(study, ours), _deep(study, ours)
    if one is None and deep is None:
        return f"{_numbers(ours)}. Nothing in this run to compare it with."
    parts = [one or f"{_numbers(ours)}.", deep or ""]
    if len(study.seeds) == 1:
        parts.append("One seed only: not confirmed.")
    return " ".join(part for part in parts if part)


def _one(study: Study, ours: Group) -> str | None:
    """Against one network: temperature-scaled first, because raw NLL flatters any averaging."""
    scaled = compare(ours, study.scaled_single, "nll_calibrated") if study.scaled_single else None
    raw = compare(ours, study.single, "nll") if study.single else None
    cost = study.multiple(ours)
    price = f", at {cost} the parameters" if cost else ""
    if scaled is None:
        if raw is None:
            return None
        words = {1: "beats", 0: "shows no difference from", -1: "is worse than"}
        return (
            f"{ours.label} {words[raw.direction]} one network on NLL{_in_seeds(raw)}{price}; "
            "temperature scaling was not measured."
        )
    plain = raw.direction if raw else 0
    if scaled.direction > 0:
        how = "temperature-scaled or not" if plain > 0 else "once both are temperature-scaled"
        accuracy = compare(ours, study.single, "accuracy") if study.single else None
        lost = " Its accuracy is lower." if accuracy and accuracy.direction < 0 else ""
        return f"{ours.label} beats one network on NLL{_in_seeds(scaled)}, {how}{price}.{lost}"
    if scaled.direction < 0:
        though = ", though better than the plain one" if plain > 0 else ""
        return (
            f"{ours.label} is worse than one network with temperature scaling on NLL"
            f"{_in_seeds(scaled)}{though}{price}."
        )
    if plain > 0:
        return (
            f"{ours.label} beats one plain network on NLL, but no difference is seen from one "
            f"network with temperature scaling{_split(scaled)}{price}."
        )
    worse = " after temperature scaling, and is worse before it" if plain < 0 else ""
    return (
        f"{ours.label} shows no difference from one network on NLL{worse}{_split(scaled)}{price}."
    )


def _deep(study: Study, ours: Group) -> str | None:
    if study.deep is None:
        return None
    result = compare(ours, study.deep, "nll_calibrated") or compare(ours, study.deep, "nll")
    if result is None:
        return None
    cost = study.multiple(study.deep)
    price = f"{cost} the parameters" if cost else ""
    name = f"{study.deep.label}{f' ({price})' if price else ''}"
    if result.direction > 0:
        return f"It is better than {name}{_in_seeds(result)}."
    if result.direction < 0:
        return f"{name[0].upper()}{name[1:]} are better{_in_seeds(result)}."
    notes = [note for note in (price, _split(result).strip(" ()")) if note]
    return (
        f"No difference is seen from {study.deep.label} ({'; '.join(notes)})."
        if notes
        else (f"No difference is seen from {study.deep.label}.")
    )


def _in_seeds(result: Comparison) -> str:
    """The share of the seeds that agree, such as " in 2 of 3 seeds"; "" where all do."""
    against = result.worse if result.direction > 0 else result.better
    return f" in {result.seeds - against} of {result.seeds} seeds" if against else ""


def _split(result: Comparison) -> str:
    """How the seeds fall where no difference is seen, such as " (better in 2 of 3 seeds)"."""
    note = result.phrase.removeprefix(result.word).removeprefix(": ")
    return f" ({note})" if note else ""


def _without_choice(study: Study) -> str:
    if study.sigma:
        return (
            f"{len(study.sigma)} settings of σN-Ens were trained and none was chosen: the run "
            "holds no held-out score for each, and choosing on the test data would flatter it."
        )
    if len(study.groups) == 1:
        return f"{_numbers(study.groups[0])}. Nothing in this run to compare it with."
    return f"{len(study.groups)} methods were compared; σN-Ens is not among them."


def _numbers(group: Group) -> str:
    parts = [
        f"{METRICS[key].name} {group.stat(key)}"
        for key in ("accuracy", "nll", "ece")
        if group.stat(key).by_seed
    ]
    name = group.label if group.label.startswith("σ") else group.label[0].upper() + group.label[1:]
    return f"{name}: {', '.join(parts) or 'nothing measured'}"
