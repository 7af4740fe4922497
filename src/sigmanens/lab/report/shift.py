"""Corruptions kind by kind: tables over all methods, and the curves of one run."""

from __future__ import annotations

from statistics import fmean
from typing import Any

from sigmanens.lab.report import naming
from sigmanens.lab.report.compare import METRICS
from sigmanens.lab.report.plot import INK, Key, Panel, axis, hover, layout, series
from sigmanens.lab.report.study import Group, Stat, Study
from sigmanens.lab.report.tables import Cell, Table

__all__ = ["MEASURED", "curve_panels", "kind_stat", "kind_table"]

MEASURED = ("ece", "accuracy", "nll")
"""What is shown under corruption, first the paper's own question."""


def kind_stat(group: Group, kind: str, severities: list[str], metric: str) -> Stat:
    """The mean over ``severities`` of ``metric`` under one kind of corruption, per seed."""
    found: dict[Any, list[float]] = {}
    for severity in severities:
        for seed, value in group.stat("corruption", kind, severity, metric).by_seed.items():
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
        lines = []
        keys = []
        for i, kind in enumerate(kinds):
            stats = [(level, group.stat("corruption", kind, level, metric)) for level in levels]
            line = _line(naming.words(kind), metric, [("0", group.stat(metric)), *stats], series(i))
            if len(line["x"]) > 1:
                lines.append(line)
                keys.append(Key(naming.words(kind), *series(i)))
        if len(lines) > 1:
            means = [(level, group.corruption(level, metric)) for level in ["0", *levels]]
            over = "all together" if study.pooled else "mean"
            lines.append(_line(over, metric, means, (INK, "solid"), width=3.5))
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


def _line(
    name: str,
    metric: str,
    points: list[tuple[str, Stat]],
    look: tuple[str, str],
    width: float = 1.8,
) -> dict[str, Any]:
    known = [(level, stat) for level, stat in points if stat.mean is not None]
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [int(level) for level, _ in known],
        "y": [stat.mean for _, stat in known],
        "line": {"color": look[0], "dash": look[1], "width": width},
        "hoverinfo": "text",
        "hovertext": [
            hover(name, f"severity {level}", f"{METRICS[metric].name} {stat}")
            for level, stat in known
        ],
    }
