"""Reliability diagrams: accuracy against confidence, bin by bin."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from sigmanens.lab.report.naming import number
from sigmanens.lab.report.plot import MUTED, Panel, Section, axis, hover, layout, whiskers
from sigmanens.lab.report.study import Group, Study, dig, finite, numbers
from sigmanens.lab.report.tables import Cell, Table


@dataclass(frozen=True)
class Bin:
    """A confidence bin with samples in it, pooled over seeds; ``count`` is the mean of a seed."""

    low: float
    high: float
    count: float
    confidence: float
    accuracy: float

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the accuracy, from the samples of one seed."""
        n, p, z = self.count, self.accuracy, 1.96
        middle = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
        return max(0.0, middle - half), min(1.0, middle + half)


def bins(group: Group) -> list[Bin]:
    """The reliability bins of a group that hold samples; empty where not measured."""
    pooled: dict[tuple[float, float], list[tuple[float, float, float]]] = {}
    tables = 0
    for row in group.rows.values():
        edges = numbers(dig(row, "reliability", "edges")) or []
        lists = [dig(row, "reliability", name) for name in ("count", "confidence", "accuracy")]
        if not all(isinstance(v, list | tuple) and len(v) == len(edges) - 1 for v in lists):
            continue
        tables += 1
        for ends, *entry in zip(pairwise(edges), *lists, strict=True):
            n, confidence, accuracy = (finite(value) for value in entry)
            if n is None or confidence is None or accuracy is None:
                continue
            if n > 0 and 0 <= confidence <= 1 and 0 <= accuracy <= 1:
                pooled.setdefault(ends, []).append((n, confidence, accuracy))
    found = []
    for (low, high), entries in sorted(pooled.items()):
        total = sum(n for n, *_ in entries)
        confidence, accuracy = (sum(e[0] * e[i] for e in entries) / total for i in (1, 2))
        found.append(Bin(low, high, total / tables, confidence, accuracy))
    return found


def reliability(study: Study) -> Section | None:
    """Accuracy against confidence for one network, separate networks and the chosen σN-Ens."""
    every = [(group, found) for group in study.groups if (found := bins(group))]
    wanted = (study.single, study.chosen, study.deep)
    shown = (
        sorted(
            (pair for pair in every if pair[0] in wanted), key=lambda pair: wanted.index(pair[0])
        )
        or every[:3]
    )
    if not shown:
        return None
    top = max(b.count for _, found in shown for b in found)
    return Section(
        "reliability",
        "Reliability, before temperature scaling",
        "Accuracy of the predictions in each confidence bin. On the diagonal, confidence can be "
        "taken at its word; below it, the model is over-confident. Whiskers: 95 % interval of the "
        "bin's accuracy from the samples of one seed. Lower strip: samples per bin, log scale. "
        "Bins are pooled over seeds.",
        [_panel(group, found, top) for group, found in shown],
        Table(
            "Reliability bins",
            ["method", "from", "to", "samples", "confidence", "accuracy"],
            [
                [
                    Cell.of(group.label, group=group),
                    *(Cell.of(value) for value in (b.low, b.high)),
                    Cell.of(b.count, 1),
                    *(Cell.of(value) for value in (b.confidence, b.accuracy)),
                ]
                for group, found in every
                for b in found
            ],
        ),
        width=270,
    )


def reliability_panel(group: Group) -> Panel | None:
    """The diagram of one group alone; None where it has no bins."""
    found = bins(group)
    if not found:
        return None
    panel = _panel(group, found, max(b.count for b in found))
    return replace(panel, title=f"Reliability, {panel.title}", group=None)


def _panel(group: Group, found: list[Bin], top: float) -> Panel:
    ink = group.look.colour
    texts = [
        hover(
            f"confidence {number(b.low, 2)} to {number(b.high, 2)}",
            f"mean confidence {number(b.confidence)}",
            f"accuracy {number(b.accuracy)} "
            f"({number(b.interval[0], 2)} to {number(b.interval[1], 2)})",
            f"{b.count:.1f} samples a seed" if b.count % 1 else f"{b.count:.0f} samples",
        )
        for b in found
    ]
    accuracy = [b.accuracy for b in found]
    shared: dict[str, Any] = {"hovertext": texts, "hoverinfo": "text"}
    bars = shared | {
        "type": "bar",
        "x": [(b.low + b.high) / 2 for b in found],
        "width": [b.high - b.low for b in found],
        "marker": {"color": ink, "line": {"width": 0}},
    }
    points = shared | {
        "type": "scatter",
        "mode": "markers",
        "x": [b.confidence for b in found],
        "y": accuracy,
        "marker": {"color": ink, "size": 7, "symbol": group.look.symbol},
        "error_y": whiskers(
            group.look,
            [b.interval[1] - b.accuracy for b in found],
            [b.accuracy - b.interval[0] for b in found],
        ),
    }
    ticks = [10**k for k in range(7) if 10**k <= max(top, 1)]
    diagonal = {"type": "line", "x0": 0, "y0": 0, "x1": 1, "y1": 1}
    diagonal["line"] = {"color": MUTED, "width": 1.5, "dash": "dash"}
    strip = axis(
        "samples", type="log", domain=[0, 0.2], range=[-0.7, len(ticks) - 0.3],
        tickvals=ticks[:: 2 if len(ticks) > 3 else 1],
    )  # fmt: skip
    return Panel(
        f"ECE {group.stat('ece')}",
        [
            {**bars, "y": accuracy, "opacity": 0.25},
            points,
            {**bars, "y": [b.count for b in found], "yaxis": "y2", "opacity": 0.7},
        ],
        layout(
            axis("confidence", range=[0, 1], anchor="y2", tickvals=[0, 0.2, 0.4, 0.6, 0.8, 1]),
            axis("accuracy", range=[0, 1.02], domain=[0.3, 1], tickvals=[0, 0.25, 0.5, 0.75, 1]),
            yaxis2=strip,
            shapes=[diagonal],
            bargap=0,
        ),
        380,
        group,
    )
