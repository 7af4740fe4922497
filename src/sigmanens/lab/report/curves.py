"""Lines over something: severity, τ, λ, M, epochs, scores. One form for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sigmanens.lab.report import naming
from sigmanens.lab.report.naming import Look
from sigmanens.lab.report.plot import Panel, axis, hover, layout, whiskers
from sigmanens.lab.report.study import Group, Stat
from sigmanens.lab.report.tables import Cell, Table


@dataclass(frozen=True)
class Curve:
    """One line: at each x, what was measured there by key.

    ``group`` is the method that a legend can switch off; ``marked`` puts a symbol on each point and
    ``spread`` whiskers: one standard deviation over seeds, or the interval of a single one.
    """

    name: str
    look: Look
    points: Sequence[tuple[float, Callable[[str], Stat]]]
    group: Group | None = None
    width: float = 1.8
    marked: bool = False
    spread: bool = False

    def trace(self, key: str, x: str, y: str) -> dict[str, Any] | None:
        """The line of ``key`` for plotly; None below two points, or one that is marked."""
        known = [(at, stat) for at, of in self.points if (stat := of(key)).mean is not None]
        if len(known) < (1 if self.marked else 2):
            return None
        trace: dict[str, Any] = {
            "type": "scatter",
            "mode": "lines+markers" if self.marked else "lines",
            "x": [at for at, _ in known],
            "y": [stat.mean for _, stat in known],
            "line": {"color": self.look.colour, "dash": self.look.dash, "width": self.width},
            "marker": {"symbol": self.look.symbol, "size": 8},
            "hoverinfo": "text",
            "hovertext": [
                hover(self.name, f"{x} {at:.4g}", f"{y} {stat.text()}") for at, stat in known
            ],
        }
        ends = [_ends(stat) for _, stat in known]
        if self.spread and any(low or high for low, high in ends):
            trace["error_y"] = whiskers(self.look, [e[1] for e in ends], [e[0] for e in ends])
        return trace | ({"meta": self.group.key} if self.group else {})


def _ends(stat: Stat) -> tuple[float, float]:
    """How far the spread of a value reaches down and up."""
    if stat.bounds is not None and stat.mean is not None:
        return max(0.0, stat.mean - stat.bounds[0]), max(0.0, stat.bounds[1] - stat.mean)
    return stat.sd or 0.0, stat.sd or 0.0


def fixed(points: Iterable[tuple[float, float]]) -> list[tuple[float, Callable[[str], Stat]]]:
    """Points of a curve that shows one number for each x, whatever the key."""

    def always(value: float) -> Callable[[str], Stat]:
        return lambda key: Stat({"": value})

    return [(at, always(value)) for at, value in points]


def curve_panel(
    title: str,
    curves: Sequence[Curve],
    key: str,
    x: str,
    y: str,
    *,
    xaxis: Mapping[str, Any] | None = None,
    yaxis: Mapping[str, Any] | None = None,
    height: int = 340,
    keyed: bool = False,
    shapes: Sequence[Mapping[str, Any]] = (),
) -> Panel | None:
    """The lines of ``key`` over x; None where nothing can be drawn. ``keyed``: with a legend."""
    traces = [(c, trace) for c in curves if (trace := c.trace(key, x.partition(",")[0], y))]
    if not traces:
        return None
    return Panel(
        naming.capital(title),
        [trace for _, trace in traces],
        layout(axis(x, **(xaxis or {})), axis(y, **(yaxis or {})), shapes=shapes),
        height,
        keys=[(c.name, c.look) for c, _ in traces] if keyed and len(traces) > 1 else (),
    )


def curve_table(
    caption: str, curves: Sequence[Curve], x: str, columns: Mapping[str, str], first: str = "method"
) -> Table:
    """The numbers of the lines: one row for each of their points, one column for each key."""
    return Table(
        caption,
        [first, x, *columns.values()],
        [
            [
                Cell.of(curve.name, group=curve.group),
                Cell(f"{at:.4g}", at),
                *(Cell.of(of(key)) for key in columns),
            ]
            for curve in curves
            for at, of in curve.points
        ],
    )
