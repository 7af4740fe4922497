"""From the rows of ``metrics.json`` to groups of seeds, with the chosen σN-Ens among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from sigmanens.errors import InputError
from sigmanens.evaluation.comparison import Difference
from sigmanens.lab.differences import differences
from sigmanens.lab.plain import finite
from sigmanens.lab.report import naming
from sigmanens.lab.report.naming import Setting
from sigmanens.lab.report.study import Group, Row, Seed, Study, setting_of

_FIELDS = {field.name for field in fields(Difference)}


def read_study(metrics: Mapping[str, Any]) -> Study:
    """Group the rows of ``metrics`` and find the chosen σN-Ens.

    Raises ``InputError`` where ``metrics`` is no version-1 metrics object with at least one row,
    where a row has no method, or where two rows claim the same method, setting and seed.
    """
    rows, split, left_out = _rows(metrics)
    choice = metrics.get("choice")
    choice = choice if isinstance(choice, Mapping) else {}
    groups = _groups(rows)
    plain = [g for g in groups if g.method == "sigmanens" and not g.variant]
    # A run without a penalty is about its ensemble all the same.
    plain = plain or [g for g in groups if g.method == "sigmanens_lambda0" and not g.variant]
    chosen, criterion = _chosen(plain, choice)
    reason = str(choice.get("reason") or "").strip() if chosen else ""
    gaps = _differences(metrics, rows)
    return Study(metrics, groups, chosen, criterion, reason or None, split, left_out, gaps)


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


def _differences(
    metrics: Mapping[str, Any], rows: list[Row]
) -> dict[tuple[str, str], dict[str, Difference]]:
    """Those of the run, both ways round; of rows without any, what their seeds tell."""
    pairs = metrics.get("differences")
    if not isinstance(pairs, Sequence):
        pairs = differences(rows, lambda row: None)
    found: dict[tuple[str, str], dict[str, Difference]] = {}
    for pair in pairs:
        for key, gap in pair["metrics"].items():
            if gap is None or gap.get("value") is None:
                continue
            known = {k: v for k, v in gap.items() if k in _FIELDS}
            known["p"] = 1.0 if known.get("p") is None else known["p"]
            back = {"value": -gap["value"], "low": -gap["high"], "high": -gap["low"]}
            a, b = str(pair["a"]), str(pair["b"])
            found.setdefault((a, b), {})[key] = Difference(**known)
            found.setdefault((b, a), {})[key] = Difference(**known | back)
    return found


def _groups(rows: Sequence[Row]) -> tuple[Group, ...]:
    settings: dict[Setting, dict[Seed, Row]] = {}
    for row in rows:
        setting = setting_of(row)
        seed = row.get("seed")
        seed = seed if isinstance(seed, int | str) else 0
        same = settings.setdefault(setting, {})
        if seed in same:
            raise InputError(
                f"two rows for method {setting.method!r}, members {setting.members}, "
                f"tau {setting.tau}, weight {setting.weight}, variant {setting.variant!r}, "
                f"seed {seed}; expected one row per setting and seed"
            )
        same[seed] = row
    ordered = sorted(settings, key=naming.display_order)
    labels, shorts = naming.labels(ordered), naming.labels(ordered, short=True)
    drawn = zip(ordered, labels, shorts, naming.looks(ordered), strict=True)
    return tuple(
        Group(*setting, settings[setting], label, short, f"g{i}", look)
        for i, (setting, label, short, look) in enumerate(drawn)
    )


def _chosen(sigma: list[Group], choice: Row) -> tuple[Group | None, str | None]:
    """The σN-Ens the summary is about, and the criterion it was chosen by.

    What the run says counts; without a word of it, the lowest temperature-scaled validation NLL;
    a single σN-Ens needs no choice. The test numbers are never used.
    """
    stated = {name: finite(choice.get(name)) for name in ("tau", "members", "weight")}
    asked = {name: value for name, value in stated.items() if value is not None}
    candidates = [g for g in sigma if all(getattr(g, k) == v for k, v in asked.items())]
    if not candidates and sigma:
        raise InputError(
            f"the choice of metrics is tau {stated['tau']}, but the rows hold tau "
            f"{', '.join(naming.amount(g.tau) or 'none' for g in sigma)}"
        )
    criterion = choice.get("criterion")
    if len(candidates) == 1:
        return candidates[0], str(criterion) if criterion and "tau" in asked else None
    scored = [(g.stat("validation", "nll_calibrated").mean, g) for g in candidates]
    measured = [(score, g) for score, g in scored if score is not None]
    if candidates and len(measured) == len(candidates):
        best = min(measured, key=lambda pair: pair[0])[1]
        return best, str(criterion or "validation nll_calibrated")
    return None, None
