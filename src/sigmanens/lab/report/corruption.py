"""Under corruption: every method against severity, kind by kind, and the curves of one run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from sigmanens.lab.report import naming
from sigmanens.lab.report.compare import METRICS
from sigmanens.lab.report.curves import Curve, Quantity, curve_panels, curve_section
from sigmanens.lab.report.naming import Look
from sigmanens.lab.report.plot import INK, Panel, Section, series
from sigmanens.lab.report.study import Group, Stat, Study, mean_of
from sigmanens.lab.report.tables import Cell, Column, Table, by_group

_MEASURED = ("ece", "accuracy", "nll")
"""What is shown under corruption, first the paper's own question."""
_QUANTITIES = [
    Quantity(
        key, METRICS[key].title, METRICS[key].name,
        {"rangemode": "normal" if key == "accuracy" else "tozero"},
    )
    for key in _MEASURED
]  # fmt: skip


def severity(study: Study) -> Section | None:
    """ECE, accuracy and NLL of every method against the severity of the corruption."""
    levels = ["0", *study.severities]
    shown = [g for g in study.groups if any(g.corruption(s, "ece").by_seed for s in levels[1:])]
    if not shown:
        return None
    kinds = [naming.words(kind) for kind in study.kinds]
    over = "the examples of all kinds together, which are" if study.pooled else "the mean over"
    what = kinds[0] if len(kinds) == 1 else f"{over} {', '.join(kinds)}"
    curves = [
        Curve(
            group.label,
            group.look,
            [(int(level), partial(group.corruption, level)) for level in levels],
            group,
            width=3.5 if group is study.chosen else 1.8,
            marked=True,
        )
        for group in shown
    ]
    return curve_section(
        "severity",
        "Under corruption",
        f"Corruption: {what}. Severity 0 is the clean {study.split} data. Means over seeds; hover "
        "for the spread.",
        _QUANTITIES,
        curves,
        "severity",
        main=study.main,
        xaxis={"tickvals": [int(level) for level in levels]},
    )


def curves_of_a_run(study: Study, group: Group) -> list[Panel]:
    """ECE and accuracy of one run against severity, a line per kind and one for all of them."""
    levels = ["0", *study.severities]
    curves = []
    for i, kind in enumerate(group.keys("corruption")):
        points = [(int(level), partial(_of_kind, group, kind, level)) for level in levels]
        curves.append(Curve(naming.words(kind), series(i), points))
    what = curves[0].name if len(curves) == 1 else "corruption"
    if len(curves) > 1:
        points = [(int(level), partial(group.corruption, level)) for level in levels]
        over = "all together" if study.pooled else "mean"
        curves.append(Curve(over, Look(INK, "solid"), points, width=3.5))
    return curve_panels(
        [quantity._replace(title=f"{quantity.name} under {what}") for quantity in _QUANTITIES[:2]],
        curves,
        "severity",
        xaxis={"tickvals": [int(level) for level in levels]},
        height=320,
        keyed=True,
    )


def _of_kind(group: Group, kind: str, level: str, key: str) -> Stat:
    return group.stat(key) if level == "0" else group.stat("corruption", kind, level, key)


def kinds(study: Study) -> Section | None:
    """Every kind by itself, where there are several: a table for each of what was measured."""
    tables = [(key, table) for key in _MEASURED if (table := kind_table(study, key)) is not None]
    if not tables:
        return None
    note = "The darker a cell, the better the method beside the others in its column."
    found = [
        group.stat("corruption_pooled", level, "n").by_seed.values()
        for group in study.groups
        for level in study.severities
    ]
    counts = [n for by_seed in found for n in by_seed]
    if counts:
        note += (
            f" Each kind was measured on {int(max(counts)) // len(study.kinds):,} examples: an ECE "
            "of few is too large by what their noise adds, which that of all kinds together is not."
        )
    return Section(
        "kinds",
        "Corruptions kind by kind",
        note,
        table=tables[0][1],
        folded=[(f"The same for {METRICS[key].name}", table) for key, table in tables[1:]],
    )


def kind_table(study: Study, metric: str) -> Table | None:
    """One line per method, one column per kind: the mean over severities, tinted column by column.

    The darkest cell of a column is its best. None with fewer than two kinds, or nothing measured.
    """
    levels = study.severities
    if len(study.kinds) < 2 or not levels:
        return None

    def stat(kind: str, group: Group) -> Stat:
        return mean_of([group.stat("corruption", kind, level, metric) for level in levels])

    def bare(kind: str, group: Group) -> Cell:
        """The mean alone: with fifteen columns the spread goes to the hover text."""
        found = stat(kind, group)
        return replace(Cell.of(found), text=naming.number(found.mean))

    def tint(means: list[Any]) -> list[float | None]:
        known = [mean for mean in means if mean is not None]
        low, width = min(known), (max(known) - min(known))
        shares = [None if m is None or not width else (m - low) / width for m in means]
        if METRICS[metric].better == "higher":
            return shares
        return [None if share is None else 1 - share for share in shares]

    columns = [
        Column("mean", lambda g: Cell.of(mean_of([stat(kind, g) for kind in study.kinds]))),
        *(Column(naming.words(k), partial(bare, k), tint=tint) for k in study.kinds),
    ]
    name = naming.capital(METRICS[metric].name)
    span = f"{levels[0]} to {levels[-1]}"
    return by_group(
        study,
        f"{name} by kind, mean over severities {span} ({METRICS[metric].better} is better)",
        columns,
        [g for g in study.groups if any(stat(kind, g).by_seed for kind in study.kinds)],
    )
