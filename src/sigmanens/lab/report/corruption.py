"""Under corruption: every method against severity, kind by kind, and the curves of one run."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from sigmanens.lab.report import naming
from sigmanens.lab.report.compare import METRICS
from sigmanens.lab.report.plot import INK, Figure, Key, Panel, axis, colour, hover, layout, line
from sigmanens.lab.report.plot import series as look_of
from sigmanens.lab.report.study import Group, Stat, Study, dig
from sigmanens.lab.report.tables import Cell, Table, bounded

__all__ = ["MEASURED", "curve_panels", "kind_stat", "kind_table", "severity"]

MEASURED = ("ece", "accuracy", "nll")
"""What is shown under corruption, first the paper's own question."""


def severity(study: Study) -> Figure | None:
    """ECE, accuracy and NLL of every method against the severity of the corruption."""
    levels = ["0", *study.severities]
    shown = [g for g in study.groups if any(g.corruption(s, "ece").by_seed for s in levels[1:])]
    if not shown:
        return None
    keys = [k for k in MEASURED if shown[0].corruption(levels[-1], k).by_seed]
    kinds = [naming.words(kind) for kind in study.kinds]
    over = "the examples of all kinds together, which are" if study.pooled else "the mean over"
    what = kinds[0] if len(kinds) == 1 else f"{over} {', '.join(kinds)}"
    return Figure(
        key="severity",
        title="Under corruption",
        caption=f"Corruption: {what}. Severity 0 is the clean {study.split} data. Means over "
        "seeds; hover for the spread.",
        panels=[_severity(study, shown, levels, key) for key in keys],
        legend=shown,
        main=study.main,
        table=Table(
            "Numbers under corruption",
            ["method", "severity", *(METRICS[key].name for key in keys)],
            [
                [
                    Cell.of(group.label, group=group),
                    Cell.of(int(level), 0),
                    *(_corrupted(group, level, key) for key in keys),
                ]
                for group in shown
                for level in levels
            ],
        ),
    )


def _severity(study: Study, shown: list[Group], levels: list[str], key: str) -> Panel:
    name = METRICS[key].name
    traces = []
    for group in shown:
        points = [(level, group.corruption(level, key)) for level in levels]
        width = 3.5 if group is study.chosen else 1.8
        trace = _curve(group.label, key, points, (colour(group), group.look.dash), width)
        marker = {"symbol": group.look.symbol, "size": 7}
        traces.append(trace | {"mode": "lines+markers", "marker": marker, "meta": group.key})
    return Panel(
        title=f"{name[:1].upper()}{name[1:]} ({METRICS[key].better} is better)",
        traces=traces,
        layout=layout(
            axis("severity", tickvals=[int(s) for s in levels]),
            axis(name, rangemode="normal" if key == "accuracy" else "tozero"),
        ),
    )


def _corrupted(group: Group, level: str, key: str) -> Cell:
    """The spread over seeds, or the interval of a single one where it was measured."""
    stat = group.corruption(level, key)
    if len(group.rows) > 1:
        return Cell.of(stat)
    within = ("intervals", key) if level == "0" else ("corruption_pooled", level, "intervals", key)
    return bounded(stat.mean, dig(next(iter(group.rows.values())), *within))


def kind_stat(group: Group, kind: str, severities: list[str], metric: str) -> Stat:
    """The mean over ``severities`` of ``metric`` under one kind of corruption, per seed."""
    found: dict[Any, list[float]] = {}
    for level in severities:
        for seed, value in group.stat("corruption", kind, level, metric).by_seed.items():
            found.setdefault(seed, []).append(value)
    return Stat({s: fmean(v) for s, v in found.items() if len(v) == len(severities)})


def kind_table(study: Study, metric: str) -> Table | None:
    """One line per method, one column per kind: the mean over severities, tinted column by column.

    The darkest cell of a column is its best. None with fewer than two kinds, or nothing measured.
    """
    if len(study.kinds) < 2 or not study.severities:
        return None
    stats = {
        group.key: [kind_stat(group, kind, study.severities, metric) for kind in study.kinds]
        for group in study.groups
    }
    shown = [g for g in study.groups if any(stat.by_seed for stat in stats[g.key])]
    if not shown:
        return None
    columns = [[stats[g.key][i].mean for g in shown] for i in range(len(study.kinds))]
    heats = [_heat(column, METRICS[metric].better == "higher") for column in columns]
    name = METRICS[metric].name
    return Table(
        f"{name[:1].upper()}{name[1:]} by kind, mean over severities "
        f"{study.severities[0]} to {study.severities[-1]} ({METRICS[metric].better} is better)",
        ["method", "mean", *(naming.words(kind) for kind in study.kinds)],
        [
            [
                Cell.of(group.label, group=group, mark="chosen" if study.was_chosen(group) else ""),
                Cell.of(_mean(stats[group.key])),
                *(_short(stat, heats[i][j]) for i, stat in enumerate(stats[group.key])),
            ]
            for j, group in enumerate(shown)
        ],
    )


def _short(stat: Stat, heat: float | None) -> Cell:
    """A cell of the mean alone: with fifteen columns the spread goes to the hover text."""
    full = Cell.of(stat)
    return Cell(naming.number(stat.mean), full.value, full.sd, full.hint, heat=heat)


def _mean(stats: list[Stat]) -> Stat:
    """The mean over kinds, in the seeds in which every kind was measured."""
    shared = [s for s in stats[0].by_seed if all(s in stat.by_seed for stat in stats)]
    return Stat({seed: fmean(stat.by_seed[seed] for stat in stats) for seed in shared})


def _heat(column: list[float | None], higher: bool) -> list[float | None]:
    known = [value for value in column if value is not None]
    low, high = min(known, default=0.0), max(known, default=0.0)
    if not low < high:
        return [None] * len(column)
    shares = [None if v is None else (v - low) / (high - low) for v in column]
    return [None if s is None else (s if higher else 1 - s) for s in shares]


def curve_panels(study: Study, group: Group) -> list[Panel]:
    """ECE and accuracy of one run against severity, a line per kind and one for all of them."""
    levels = study.severities
    kinds = [kind for kind in study.kinds if group.nested_keys("corruption", kind)]
    if not levels or not kinds:
        return []
    panels = []
    for metric in MEASURED[:2]:
        lines, keys = [], []
        for i, kind in enumerate(kinds):
            stats = [(level, group.stat("corruption", kind, level, metric)) for level in levels]
            points = [("0", group.stat(metric)), *stats]
            curve = _curve(naming.words(kind), metric, points, look_of(i))
            if len(curve["x"]) > 1:
                lines.append(curve)
                keys.append(Key(naming.words(kind), *look_of(i)))
        if len(lines) > 1:
            means = [(level, group.corruption(level, metric)) for level in ["0", *levels]]
            over = "all together" if study.pooled else "mean"
            lines.append(_curve(over, metric, means, (INK, "solid"), width=3.5))
            keys.insert(0, Key(over, INK, "solid"))
        if lines:
            name = METRICS[metric].name
            what = keys[0].name if len(lines) == 1 else "corruption"
            panels.append(
                Panel(
                    title=f"{name[:1].upper()}{name[1:]} under {what}",
                    traces=lines,
                    layout=layout(
                        axis("severity", tickvals=[0, *(int(level) for level in levels)]),
                        axis(name, rangemode="normal" if metric == "accuracy" else "tozero"),
                    ),
                    height=320,
                    keys=keys if len(lines) > 1 else (),
                )
            )
    return panels


def _curve(
    name: str,
    metric: str,
    points: list[tuple[str, Stat]],
    look: tuple[str, str],
    width: float = 1.8,
) -> dict[str, Any]:
    known = [(int(level), stat) for level, stat in points if stat.mean is not None]
    texts = [hover(name, f"severity {x}", f"{METRICS[metric].name} {stat}") for x, stat in known]
    return line([x for x, _ in known], [s.mean for _, s in known], look, texts, width=width)
