"""Reliability diagrams: accuracy against confidence, bin by bin."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from sigmanens.lab.report import naming
from sigmanens.lab.report.plot import MUTED, Figure, Panel, axis, colour, hover, layout
from sigmanens.lab.report.study import Group, Study, dig, finite
from sigmanens.lab.report.tables import Cell, Table

__all__ = ["Bin", "bins", "reliability", "reliability_panel"]


@dataclass(frozen=True)
class Bin:
    """One confidence bin, pooled over seeds; ``count`` is the mean number of samples a seed."""

    low: float
    high: float
    count: float
    confidence: float | None
    accuracy: float | None

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the accuracy, from the samples of one seed."""
        n, p, z = self.count, self.accuracy or 0.0, 1.96
        middle = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
        return max(0.0, middle - half), min(1.0, middle + half)


def bins(group: Group) -> list[Bin]:
    """The reliability bins of a group, pooled over its seeds; empty where not measured."""
    tables = [_read(dig(row, "reliability")) for row in group.rows.values()]
    whole = [table for table in tables if table is not None]
    edges = whole[0]["edges"] if whole else []
    whole = [table for table in whole if table["edges"] == edges]
    found = []
    for k in range(len(edges) - 1):
        counts = [max(0.0, table["count"][k] or 0.0) for table in whole]
        pooled: dict[str, float | None] = {}
        for name in ("confidence", "accuracy"):
            values = [(table[name][k], n) for table, n in zip(whole, counts, strict=True)]
            known = [(v, n) for v, n in values if v is not None and 0 <= v <= 1 and n > 0]
            total = sum(n for _, n in known)
            pooled[name] = sum(v * n for v, n in known) / total if total else None
        found.append(Bin(edges[k], edges[k + 1], fmean(counts), **pooled))
    return found


def _read(table: Any) -> dict[str, Any] | None:
    """The lists of one row's reliability table, None where they do not fit together."""
    names = ("edges", "confidence", "accuracy", "count")
    lists = {name: dig(table, name) for name in names}
    if not all(isinstance(values, list | tuple) for values in lists.values()):
        return None
    read = {name: [finite(value) for value in values] for name, values in lists.items()}
    sizes = {len(read[name]) for name in names[1:]}
    fit = sizes == {len(read["edges"]) - 1} and None not in read["edges"]
    return read if fit else None


def reliability(study: Study) -> Figure | None:
    """Accuracy against confidence for one network, separate networks and the chosen σN-Ens."""
    wanted = [study.single, study.chosen, study.deep]
    measured = [group for group in wanted if group is not None and bins(group)]
    shown = measured or [group for group in study.groups if bins(group)][:3]
    if not shown:
        return None
    binned = [(group, bins(group)) for group in shown]
    top = max(b.count for _, all_bins in binned for b in all_bins)
    every = [(group, found) for group in study.groups if (found := bins(group))]
    return Figure(
        key="reliability",
        title="Reliability, before temperature scaling",
        caption=(
            "Accuracy of the predictions in each confidence bin. On the diagonal, confidence can "
            "be taken at its word; below it, the model is over-confident. Whiskers: 95 % interval "
            "of the bin's accuracy from the samples of one seed. Lower strip: samples per bin, log "
            "scale. Bins are pooled over seeds."
        ),
        panels=[_panel(group, all_bins, top) for group, all_bins in binned],
        panel_width=270,
        table=Table(
            "Reliability bins",
            ["method", "from", "to", "samples", "confidence", "accuracy"],
            [
                [
                    Cell.of(group.label, group=group),
                    Cell.of(b.low),
                    Cell.of(b.high),
                    Cell.of(b.count, 1),
                    Cell.of(b.confidence),
                    Cell.of(b.accuracy),
                ]
                for group, all_bins in every
                for b in all_bins
            ],
        ),
    )


def reliability_panel(group: Group) -> Panel | None:
    """The diagram of one group alone; None where it has no bins."""
    found = bins(group)
    if not any(b.count > 0 and b.accuracy is not None for b in found):
        return None
    panel = _panel(group, found, max(b.count for b in found))
    return replace(panel, title=f"Reliability, {panel.title}", group=None)


def _panel(group: Group, all_bins: list[Bin], top: float) -> Panel:
    full = [b for b in all_bins if b.count > 0 and None not in (b.accuracy, b.confidence)]
    ink = colour(group)
    texts = [
        hover(
            f"confidence {naming.number(b.low, 2)} to {naming.number(b.high, 2)}",
            f"mean confidence {naming.number(b.confidence)}",
            f"accuracy {naming.number(b.accuracy)} "
            f"({naming.number(b.interval[0], 2)} to {naming.number(b.interval[1], 2)})",
            f"{b.count:.1f} samples a seed" if b.count % 1 else f"{b.count:.0f} samples",
        )
        for b in full
    ]
    middles = [(b.low + b.high) / 2 for b in full]
    widths = [b.high - b.low for b in full]
    bars: dict[str, Any] = {"type": "bar", "x": middles, "width": widths, "hovertext": texts}
    bars |= {"hoverinfo": "text", "marker": {"color": ink, "line": {"width": 0}}}
    accuracy = [b.accuracy for b in full]
    points = {
        "type": "scatter",
        "mode": "markers",
        "x": [b.confidence for b in full],
        "y": accuracy,
        "hovertext": texts,
        "hoverinfo": "text",
        "marker": {"color": ink, "size": 7, "symbol": group.look.symbol},
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [b.interval[1] - (b.accuracy or 0) for b in full],
            "arrayminus": [(b.accuracy or 0) - b.interval[0] for b in full],
            "color": ink,
            "thickness": 1.3,
            "width": 3,
        },
    }
    ticks = [10**k for k in range(7) if 10**k <= max(top, 1)]
    diagonal = {"type": "line", "x0": 0, "y0": 0, "x1": 1, "y1": 1}
    diagonal["line"] = {"color": MUTED, "width": 1.5, "dash": "dash"}
    return Panel(
        title=f"ECE {group.stat('ece')}",
        group=group,
        traces=[
            {**bars, "y": accuracy, "opacity": 0.25},
            points,
            {**bars, "y": [b.count for b in full], "yaxis": "y2", "opacity": 0.7},
        ],
        layout=layout(
            axis("confidence", range=[0, 1], anchor="y2", tickvals=[0, 0.2, 0.4, 0.6, 0.8, 1]),
            axis("accuracy", range=[0, 1.02], domain=[0.3, 1], tickvals=[0, 0.25, 0.5, 0.75, 1]),
            yaxis2=axis(
                "samples",
                type="log",
                domain=[0, 0.2],
                range=[-0.7, len(ticks) - 0.3],
                tickvals=ticks[:: 2 if len(ticks) > 3 else 1],
            ),
            shapes=[diagonal],
            bargap=0,
        ),
        height=380,
    )
