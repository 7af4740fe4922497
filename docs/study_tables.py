"""What docs/make_tables.py writes of a study besides its main table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import mean, median, stdev
from typing import Any

from sigmanens.evaluation.comparison import Difference, seed_difference
from sigmanens.lab.report.compare import difference, named, seeds_word, survivors, word
from sigmanens.lab.report.naming import ORDER, label
from sigmanens.lab.report.reading import read_study


def corruption(metrics: Mapping[str, Any]) -> list[str]:
    """All kinds of corruption at the mildest, middle and hardest severity.

    Of all their examples together where every row has it, else the mean over the kinds.
    """
    rows = [r for r in metrics["rows"] if r.get("corruption")]
    if not rows or "failures" not in metrics:  # the demo and single trainings have their report
        return []
    kinds = sorted({k for r in rows for k in r["corruption"]})
    keys = [("accuracy", "accuracy"), ("NLL", "nll"), ("ECE", "ece"), ("ECE (T)", "ece_calibrated")]
    keys = [k for k in keys if k[1] in next(iter(rows[0]["corruption"].values()))["1"]]
    listed = ", ".join(k.replace("_", " ") for k in kinds)
    pooled = all(r.get("corruption_pooled") for r in rows)
    if len(kinds) > 1 and pooled:
        first = rows[0]["corruption_pooled"]["1"]
        listed = (
            f"{first['n']:,} corrupted examples of {len(kinds)} kinds together, made from "
            f"{first['examples']:,}: {listed}"
        )
    elif len(kinds) > 1:
        listed = f"mean over {len(kinds)} kinds: {listed}"
    heads = [f"{name} at {s}" for s in ("1", "3", "5") for name, _ in keys]
    lines = [
        f"{listed[:1].upper()}{listed[1:]}; severity 1, 3 and 5. (T): with the temperature of the "
        "clean validation data.\n",
        "| method | M | τ | variant | " + " | ".join(heads) + " |",
        "| --- " * (4 + len(heads)) + "|",
    ]
    for group in groups_of(rows):
        cells = [
            _corrupted(group, kinds, s, key, pooled) for s in ("1", "3", "5") for _, key in keys
        ]
        lines.append(f"| {' | '.join([*_setting(group[0]), *cells])} |")
    return lines


def _corrupted(
    group: Sequence[Mapping[str, Any]], kinds: Sequence[str], severity: str, key: str, pooled: bool
) -> str:
    if not pooled:
        return spread([mean(r["corruption"][k][severity][key] for k in kinds) for r in group])
    found = [r["corruption_pooled"][severity] for r in group]
    ends = found[0]["intervals"].get(key)
    if len(found) > 1 or not ends:
        return spread([f[key] for f in found])
    return bounded(found[0][key], ends)


def ood(metrics: Mapping[str, Any]) -> list[str]:
    """AUROC by score, mean over the OOD sets."""
    rows = [r for r in metrics["rows"] if r.get("ood")]
    if not rows or "failures" not in metrics:
        return []
    scores = list(dict.fromkeys(s for r in rows for found in r["ood"].values() for s in found))
    sets = list(dict.fromkeys(name for r in rows for name in r["ood"]))
    lines = [
        f"AUROC, OOD is the positive class; mean over {', '.join(sets)}. –: not measured.\n",
        "| method | M | τ | variant | " + " | ".join(s.replace("_", " ") for s in scores) + " |",
        "| --- " * (4 + len(scores)) + "|",
    ]
    for group in groups_of(rows):
        cells = []
        for score in scores:
            found = [[r["ood"][n].get(score) for n in sets if n in r["ood"]] for r in group]
            cells.append(spread([mean(v) if None not in v else None for v in found]))
        lines.append(f"| {' | '.join([*_setting(group[0]), *cells])} |")
    return lines


def shift(metrics: Mapping[str, Any]) -> list[str]:
    """The same classes from elsewhere."""
    rows = [r for r in metrics["rows"] if r.get("shift")]
    lines: list[str] = []
    keys = [("accuracy", "accuracy"), ("NLL", "nll"), ("NLL (T)", "nll_calibrated"), ("ECE", "ece")]
    for name in dict.fromkeys(n for r in rows for n in r["shift"]):
        lines += [
            f"{name}:\n",
            "| method | M | τ | variant | " + " | ".join(title for title, _ in keys) + " |",
            "| --- " * (4 + len(keys)) + "|",
        ]
        for group in groups_of(rows):
            cells = [spread([r["shift"][name][key] for r in group]) for _, key in keys]
            lines.append(f"| {' | '.join([*_setting(group[0]), *cells])} |")
    return lines


def dial(metrics: Mapping[str, Any]) -> list[str]:
    """How well the cosine of the scales, which needs no data, predicts the Jensen gap."""
    if "failures" not in metrics:
        return []
    lines = []
    settings: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in metrics["rows"]:
        if row["method"] == "sigmanens" and not row.get("variant") and row["cosine"] is not None:
            settings.setdefault((row["members"], row["weight"]), []).append(row)
    for (members, weight), rows in settings.items():
        taus = sorted({r["tau"] for r in rows})
        if len(taus) < 4:
            continue
        means = [
            [mean(r[key] for r in rows if r["tau"] == t) for t in taus]
            for key in ("cosine", "jensen_gap")
        ]
        every = correlation([r["cosine"] for r in rows], [r["jensen_gap"] for r in rows])
        lines.append(
            f"M={members}, λ={weight:g}: over {len(taus)} τ from {taus[0]:g} to {taus[-1]:g} the "
            f"cosine of the members' scales and the Jensen gap have a correlation of "
            f"{correlation(*means):+.2f} by means over seeds, {every:+.2f} over all {len(rows)} "
            "trainings (Pearson)."
        )
    return lines


def path(metrics: Mapping[str, Any]) -> list[str]:
    """The warm paths beside full trainings at the same τ, seed by seed."""
    rows = [r for r in metrics["rows"] if r["method"] == "sigmanens"]
    full = {(r["tau"], r["seed"]): r for r in rows if not r.get("variant")}
    lines: list[str] = []
    for name in dict.fromkeys(
        r["variant"] for r in rows if str(r.get("trial", "")).startswith("warm_path")
    ):
        warm = {(r["tau"], r["seed"]): r for r in rows if r.get("variant") == name}
        if both := sorted(k for k in warm if k in full):
            lines += _path(name, both, warm, full, metrics.get("histories") or [])
    if not lines:
        return []
    return [
        "One full training a seed, then short ones from τ to the neighbouring τ, beside a full "
        "training at every τ. Warm less full: mean over seeds with Student's 95 % interval.\n",
        *lines,
    ]


Runs = Mapping[tuple[float, int], Mapping[str, Any]]


def _path(
    name: str,
    both: Sequence[tuple[float, int]],
    warm: Runs,
    full: Runs,
    histories: Sequence[Mapping[str, Any]],
) -> list[str]:
    keys = ("accuracy", "nll", "nll_calibrated", "ece", "jensen_gap", "cosine")
    lines = [
        f"**{name.replace('_', ' ')}**\n",
        "| τ | accuracy | NLL | NLL (T) | ECE | Jensen gap | cosine |",
        "| --- " * 7 + "|",
    ]
    for tau in sorted({t for t, _ in both}):
        seeds = [s for t, s in both if t == tau]
        cells = [f"{tau:g}"]
        for key in keys:
            both_of = [(warm[tau, s][key], full[tau, s][key]) for s in seeds]
            cells.append(seed_gap(both_of))
        lines.append(f"| {' | '.join(cells)} |")
    count = len({t for t, _ in both})
    lengths: dict[str, list[int]] = {h["variant"] or "": [] for h in histories}
    for history in histories:
        if history["method"] == "sigmanens":
            lengths[history["variant"] or ""].append(len(history["epochs"]))
    if lengths.get(name) and lengths.get(""):
        share = sum(lengths[name]) / max(lengths[""])
        lines.append(f"\n{share:.2f} × the epochs of one full training for {count} points.\n")
    return lines


def seed_gap(both: Sequence[tuple[float, float]]) -> str:
    """The mean difference of pairs, one a seed, with its interval."""
    if len(both) < 2:
        return f"{both[0][0] - both[0][1]:+.3f}, one seed".replace("-", "−")
    ours, theirs = zip(*both, strict=True)
    return named(seed_difference(ours, theirs))


def correlation(x: Sequence[float], y: Sequence[float]) -> float:
    """Pearson's correlation."""
    a, b = mean(x), mean(y)
    both = sum((u - a) * (v - b) for u, v in zip(x, y, strict=True))
    alone = sum((u - a) ** 2 for u in x) * sum((v - b) ** 2 for v in y)
    return float(both / alone**0.5) if alone > 0 else float("nan")


_COMPARED = {
    "accuracy": "accuracy",
    "nll": "NLL",
    "nll_calibrated": "NLL (T)",
    "ece": "ECE",
    "nll_corrupted": "NLL, corrupted",
    "nll_calibrated_corrupted": "NLL (T), corrupted",
}
"""Headings of the differences."""


def pairs(metrics: Mapping[str, Any]) -> list[str]:
    """The chosen σN-Ens less every other method, with what it is called by the rule."""
    study = read_study(metrics)
    ours = study.chosen
    if ours is None or not study.differences:
        return []
    others = [g for g in study.groups if g is not ours]
    gaps = {g.key: {k: difference(study, ours, g, k) for k in _COMPARED} for g in others}
    shown = [k for k in _COMPARED if any(gaps[g.key][k] for g in others)]
    kept = {k: survivors(study, ours, k) for k in shown}
    reason = f" ({study.reason})" if study.reason else ""
    chosen = f", chosen by {study.criterion}{reason}," if study.criterion else ""
    lines = [
        f"{ours.label}{chosen} less each other method. NLL and ECE below 0 are better.\n",
        "| against | " + " | ".join(_COMPARED[k] for k in shown) + " | seeds |",
        "| --- " * (2 + len(shown)) + "|",
    ]
    for group in others:
        found = gaps[group.key]
        if not any(found.values()):
            continue
        cells = [_gap(found[k], k, group.key in kept[k]) for k in shown]
        first = next(gap for gap in found.values() if gap)
        lines.append(f"| {group.label} | {' | '.join(cells)} | {seeds_word(first)} |")
    half = [median(g.half_width for by in gaps.values() if (g := by[k])) for k in shown]
    cells = [f"±{value:.3f}" for value in half]
    return [*lines, f"| half an interval, median | {' | '.join(cells)} | |"]


def _gap(gap: Difference | None, key: str, star: bool) -> str:
    if gap is None:
        return "–"
    said = word(gap, key)
    return f"{named(gap)}{f' **{said}**' if said else ''}{'†' if star and said else ''}"


def _setting(row: Mapping[str, Any]) -> list[str]:
    """Cells that say which method a row is of."""
    tau = "" if row["tau"] is None else f"{row['tau']:g}"
    return [label_of(row), str(row["members"]), tau, str(row.get("variant") or "")]


def label_of(row: Mapping[str, Any]) -> str:
    """Readable name without its τ, which has a column."""
    return label(row["method"], row["members"], None)


def groups_of(rows: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in rows:
        variant = row.get("variant") or ""
        key = (row["method"], row["members"], row["tau"], row["weight"], variant)
        groups.setdefault(key, []).append(row)
    known = {name: i for i, name in enumerate(ORDER)}
    order = sorted(groups, key=lambda k: (known.get(k[0], len(known)), k[4], k[2] or 0.0))
    return [groups[k] for k in order]


def bounded(value: float, ends: Sequence[float]) -> str:
    """A number of one run with the ends of its interval."""
    return f"{value:.3f} [{ends[0]:.3f}, {ends[1]:.3f}]"


def spread(values: Sequence[float | None], digits: int = 3) -> str:
    found = [v for v in values if v is not None]
    if not found:
        return "–"
    middle = f"{mean(found):.{digits}f}"
    return middle if len(found) < 2 else f"{middle} ± {stdev(found):.{digits}f}"
