"""From the rows of ``metrics.json`` to groups of seeds, with the chosen σN-Ens among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sigmanens.errors import InputError
from sigmanens.lab.differences import differences
from sigmanens.lab.report import naming
from sigmanens.lab.report.study import Group, Row, Seed, Setting, Study, finite

__all__ = ["read_study"]


def read_study(metrics: Mapping[str, Any]) -> Study:
    """Group the rows of ``metrics`` and find the chosen σN-Ens and its references.

    Raises ``InputError`` where ``metrics`` is no version-1 metrics object with at least one row,
    where a row has no method, or where two rows claim the same method, setting and seed.
    """
    rows, split, left_out = _rows(metrics)
    choice = metrics.get("choice")
    choice = choice if isinstance(choice, Mapping) else {}
    groups = _groups(rows)
    chosen, criterion = _chosen(
        [g for g in groups if g.method == "sigmanens" and not g.variant], choice
    )
    members = chosen.members if chosen else None
    deep = [g for g in groups if g.method == "deep_ensemble"]
    deep.sort(key=lambda g: abs((g.members or 0) - (members or 0)))
    reason = choice.get("reason")
    return Study(
        metrics=metrics,
        groups=tuple(groups),
        chosen=chosen,
        criterion=criterion,
        reason=str(reason).strip() if chosen and reason else None,
        single=next((g for g in groups if g.method == "single"), None),
        deep=deep[0] if deep else None,
        split=split,
        left_out=left_out,
        differences=_differences(metrics, rows),
    )


def _rows(metrics: Mapping[str, Any]) -> tuple[list[Row], str, int]:
    if not isinstance(metrics, Mapping):
        raise InputError(
            f"metrics is a {type(metrics).__name__}; expected the object parsed from metrics.json"
        )
    if metrics.get("version", 1) != 1:
        raise InputError(
            f"metrics has version {metrics['version']!r}; this report reads version 1: "
            "use the sigmanens release that wrote the run"
        )
    rows = metrics.get("rows")
    if not isinstance(rows, Sequence) or isinstance(rows, str) or not rows:
        raise InputError(
            "metrics has no rows, so there is nothing to report; "
            "expected a list with one entry per trained method and seed"
        )
    for i, row in enumerate(rows):
        if not isinstance(row, Mapping) or not row.get("method"):
            raise InputError(
                f'metrics row {i} has no method; expected an object with "method" and its numbers'
            )
    splits = [str(row.get("split") or "test") for row in rows]
    split = "test" if "test" in splits else splits[0]
    kept = [row for row, name in zip(rows, splits, strict=True) if name == split]
    return _under_corruption_alike(kept), split, len(rows) - len(kept)


def _under_corruption_alike(rows: list[Row]) -> list[Row]:
    """Rows without numbers of all kinds of corruption together, unless all have them.

    Those of earlier versions have none, and a mean over kinds is no number to stand beside.
    """
    if all(row.get("corruption_pooled") for row in rows if row.get("corruption")):
        return rows
    return [{k: v for k, v in row.items() if k != "corruption_pooled"} for row in rows]


def _differences(metrics: Mapping[str, Any], rows: list[Row]) -> dict[tuple[str, str], Any]:
    """Those of the run by both names; of rows without any, what their seeds tell."""
    pairs = metrics.get("differences")
    if not isinstance(pairs, Sequence):
        pairs = differences(rows, lambda row: None)
    return {(str(pair["a"]), str(pair["b"])): pair["metrics"] for pair in pairs}


def _setting(row: Row) -> Setting:
    members = finite(row.get("members"))
    return (
        str(row["method"]),
        None if members is None else int(members),
        finite(row.get("tau")),
        finite(row.get("weight")),
        str(row.get("variant") or ""),
    )


def _groups(rows: Sequence[Row]) -> list[Group]:
    settings: dict[Setting, dict[Seed, Row]] = {}
    for row in rows:
        setting = _setting(row)
        seed = row.get("seed")
        seed = seed if isinstance(seed, int | str) else 0
        same = settings.setdefault(setting, {})
        if seed in same:
            raise InputError(
                f"two rows for method {setting[0]!r}, members {setting[1]}, tau {setting[2]}, "
                f"weight {setting[3]}, variant {setting[4]!r}, seed {seed}; expected one row per "
                "setting and seed"
            )
        same[seed] = row
    ordered = sorted(settings, key=_display_order)
    looks = naming.looks([{"method": s[0], "tau": s[2]} for s in ordered])
    labels = _distinct([_named(naming.label(*s[:3]), s) for s in ordered], ordered)
    shorts = _distinct([_named(naming.short_label(*s[:3]), s) for s in ordered], ordered)
    return [
        Group(s[0], s[1], s[2], s[3], settings[s], name, short, f"g{i}", look, s[4])
        for i, (s, name, short, look) in enumerate(zip(ordered, labels, shorts, looks, strict=True))
    ]


def _named(name: str, setting: tuple[Any, ...]) -> str:
    return f"{name}, {naming.words(setting[4])}" if setting[4] else name


def _display_order(setting: tuple[Any, ...]) -> tuple[Any, ...]:
    method, members, tau, weight, variant = setting
    unknown = naming.ORDER.index("sigmanens_lambda0") - 0.5
    place = naming.ORDER.index(method) if method in naming.ORDER else unknown
    return (place, method, variant, members or 0, tau or 0.0, weight or 0.0)


def _distinct(names: list[str], settings: Sequence[tuple[Any, ...]]) -> list[str]:
    """Add M and λ to names that would otherwise stand for several settings."""
    found = []
    for i, name in enumerate(names):
        twins = [s for other, s in zip(names, settings, strict=True) if other == name]
        parts = [name]
        if len({s[1] for s in twins}) > 1:
            parts.append(f"M={naming.amount(settings[i][1]) or '?'}")
        if len({s[2] for s in twins}) > 1 and "τ" not in name:
            parts.append(f"τ={naming.amount(settings[i][2]) or '?'}")
        if len({s[3] for s in twins}) > 1:
            parts.append(f"λ={naming.amount(settings[i][3]) or '?'}")
        found.append(" ".join(parts))
    return found


def _chosen(sigma: list[Group], choice: Row) -> tuple[Group | None, str | None]:
    """The σN-Ens the summary is about, and the criterion it was chosen by.

    What the run says counts; without a word of it, the lowest temperature-scaled validation NLL;
    a single σN-Ens needs no choice. The test numbers are never used.
    """
    candidates = sigma
    stated = {name: finite(choice.get(name)) for name in ("tau", "members", "weight")}
    for name, value in stated.items():
        if value is not None:
            candidates = [g for g in candidates if finite(getattr(g, name)) == value]
    if not candidates and sigma and any(value is not None for value in stated.values()):
        raise InputError(
            f"the choice of metrics is tau {stated['tau']}, but the rows hold tau "
            f"{', '.join(naming.amount(g.tau) or 'none' for g in sigma)}"
        )
    scored = [(g.stat("validation", "nll_calibrated").mean, g) for g in candidates]
    measured = [(score, g) for score, g in scored if score is not None]
    criterion = choice.get("criterion")
    if len(candidates) == 1:
        known = str(criterion) if criterion and stated["tau"] is not None else None
        return candidates[0], known
    if candidates and len(measured) == len(candidates):
        best = min(measured, key=lambda pair: pair[0])[1]
        return best, str(criterion or "validation nll_calibrated")
    return None, None
