"""How a run's OOD scores are distributed, on the test data and on each OOD set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sigmanens.lab.report import naming
from sigmanens.lab.report.plot import INK, Key, Panel, axis, hover, layout, series
from sigmanens.lab.report.study import Group, Row, Seed, Study, dig, finite
from sigmanens.lab.report.tables import Cell, Table

__all__ = ["Histogram", "histograms", "score_panels", "score_table"]


@dataclass(frozen=True)
class Histogram:
    """Counts of one score between ``edges``, in distribution and by OOD set, of one seed."""

    score: str
    seed: Seed
    edges: list[float]
    inside: list[float]
    sets: dict[str, list[float]]


def histograms(group: Group) -> list[Histogram]:
    """The histograms of the first seed that has any; empty where none was kept."""
    for seed, row in group.rows.items():
        found = _of_row(seed, row)
        if found:
            return found
    return []


def _of_row(seed: Seed, row: Row) -> list[Histogram]:
    tables = dig(row, "ood_histograms")
    found = []
    for score, table in tables.items() if isinstance(tables, Mapping) else ():
        edges = _numbers(dig(table, "edges"))
        inside = _numbers(dig(table, "inside"))
        sets = dig(table, "sets")
        if edges is None or inside is None or not isinstance(sets, Mapping):
            continue
        read = {str(name): _numbers(counts) for name, counts in sets.items()}
        fit = {name: c for name, c in read.items() if c is not None and len(c) == len(inside)}
        if fit and len(edges) == len(inside) + 1 and min(inside, default=0.0) >= 0:
            found.append(Histogram(str(score), seed, edges, inside, fit))
    return found


def _numbers(values: Any) -> list[float] | None:
    if not isinstance(values, Sequence) or isinstance(values, str):
        return None
    read = [finite(value) for value in values]
    return None if None in read else [value for value in read if value is not None]


def score_panels(study: Study, group: Group) -> list[Panel]:
    """One plot per score: the share of the samples in each bin, a line for each set."""
    panels = []
    for table in histograms(group):
        names = [f"{study.split} data", *(naming.words(name) for name in table.sets)]
        counts = [table.inside, *table.sets.values()]
        looks = [(INK, "solid"), *(series(i) for i in range(len(table.sets)))]
        traces = [
            _steps(table, name, values, look)
            for name, values, look in zip(names, counts, looks, strict=True)
        ]
        traces[0] |= {"fill": "tozeroy", "fillcolor": "rgba(28, 33, 38, .12)"}
        panels.append(
            Panel(
                title=f"OOD score: {naming.words(table.score)}",
                traces=traces,
                layout=layout(
                    axis("score (further right = more OOD)", nticks=6),
                    axis("share of the samples", rangemode="tozero"),
                ),
                height=300,
                keys=[Key(n, *look) for n, look in zip(names, looks, strict=True)],
            )
        )
    return panels


def _steps(
    table: Histogram, name: str, counts: list[float], look: tuple[str, str]
) -> dict[str, Any]:
    total = sum(counts) or 1.0
    shares = [count / total for count in counts]
    spans = [
        f"{low:.3g} to {high:.3g}" for low, high in zip(table.edges, table.edges[1:], strict=False)
    ]
    texts = [
        hover(name, f"score {span}", f"{naming.number(share)} of {total:,.0f} samples")
        for span, share in zip(spans, shares, strict=True)
    ]
    return {
        "type": "scatter",
        "mode": "lines",
        "x": table.edges,
        "y": [*shares, shares[-1]],
        "line": {"color": look[0], "dash": look[1], "width": 2, "shape": "hv"},
        "hoverinfo": "text",
        "hovertext": [*texts, texts[-1]],
    }


def score_table(study: Study) -> Table | None:
    """Quartiles of the scores per method, score and set, read from the histograms."""
    rows = []
    for group in study.groups:
        for table in histograms(group):
            for name, counts in [(f"{study.split} data", table.inside), *table.sets.items()]:
                rows.append(
                    [
                        Cell.of(group.label, group=group),
                        Cell.of(naming.words(table.score)),
                        Cell.of(naming.words(name)),
                        Cell.of(sum(counts), 0),
                        *(Cell.of(_quantile(table.edges, counts, q)) for q in (0.25, 0.5, 0.75)),
                    ]
                )
    if not rows:
        return None
    return Table(
        "Quartiles of the OOD scores, read from their histograms",
        ["method", "score", "set", "samples", "lower quartile", "median", "upper quartile"],
        rows,
    )


def _quantile(edges: list[float], counts: list[float], share: float) -> float | None:
    """Where the cumulative count reaches ``share``, linear within a bin."""
    total = sum(counts)
    below = 0.0
    for low, high, count in zip(edges, edges[1:], counts, strict=False):
        if count > 0 and below + count >= share * total:
            return low + (high - low) * (share * total - below) / count
        below += count
    return None
