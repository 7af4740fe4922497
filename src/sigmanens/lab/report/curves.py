"""Lines over something: severity, τ, λ, M, epochs, scores. One form for all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sigmanens.lab.report import naming
from sigmanens.lab.report.naming import Look
from sigmanens.lab.report.plot import Panel, Section, axis, hover, layout, whiskers
from sigmanens.lab.report.study import Group, Stat
from sigmanens.lab.report.tables import Cell, Table


class Quantity(NamedTuple):
    """What is drawn upwards: its key, the title of its panel, its name, options of its axis."""

    key: str
    title: str
    name: str
    yaxis: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Curve:
    """One line: at each x, what was measured there by key.

    ``group`` is the method that a legend can switch off; ``marked`` puts a symbol on each point and
    ``spread`` whiskers: one standard deviation over seeds, or the interval of a single one. A
    ``level`` stands for what does not depend on x.
    """

    name: str
    look: Look
    points: Sequence[tuple[float, Callable[[str], Stat]]]
    group: Group | None = None
    width: float = 1.8
    marked: bool = False
    spread: bool = False
    level: bool = False

    def trace(self, quantity: Quantity, x: str) -> dict[str, Any] | None:
        """The line for plotly; None below two points, or one that is marked."""
        found = [(at, of(quantity.key)) for at, of in self.points]
        known = [(at, stat) for at, stat in found if stat.mean is not None]
        if len(known) < (1 if self.marked else 2):
            return None

        def says(stat: Stat) -> str:
            return f"{quantity.name} {stat.text()}"

        trace: dict[str, Any] = {
            "type": "scatter",
            "mode": "lines+markers" if self.marked else "lines",
            "x": [at for at, _ in known],
            "y": [stat.mean for _, stat in known],
            "line": {"color": self.look.colour, "dash": self.look.dash, "width": self.width},
            "marker": {"symbol": self.look.symbol, "size": 8},
            "hoverinfo": "text",
            "hovertext": [hover(self.name, f"{x} {at:.4g}", says(stat)) for at, stat in known],
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


def curve_panels(
    quantities: Sequence[Quantity],
    curves: Sequence[Curve],
    x: str,
    *,
    xaxis: Mapping[str, Any] | None = None,
    height: int = 340,
    keyed: bool = False,
    shapes: Sequence[Mapping[str, Any]] = (),
) -> list[Panel]:
    """A panel of each quantity that can be drawn. ``keyed``: each with a legend of its own."""
    panels = []
    for quantity in quantities:
        drawn = [(c, trace) for c in curves if (trace := c.trace(quantity, x.partition(",")[0]))]
        axes = axis(x, **(xaxis or {})), axis(quantity.name, **quantity.yaxis)
        keys = [(c.name, c.look) for c, _ in drawn] if keyed and len(drawn) > 1 else []
        if drawn:
            title, traces = naming.capital(quantity.title), [trace for _, trace in drawn]
            panels.append(Panel(title, traces, layout(*axes, shapes=shapes), height, keys))
    return panels


def curve_section(
    key: str,
    title: str,
    note: str,
    quantities: Sequence[Quantity],
    curves: Sequence[Curve],
    x: str,
    *,
    main: Sequence[Group] = (),
    first: str = "method",
    ends: bool = False,
    **more: Any,
) -> Section | None:
    """The panels with their legend and a table of the numbers; None where nothing can be drawn.

    ``first`` is the head of the table's first column; with ``ends`` it has the first and the last
    point of each curve. ``more`` is as for :func:`curve_panels`.
    """
    every = [of for curve in curves for _, of in curve.points]
    quantities = [q for q in quantities if any(of(q.key).by_seed for of in every)]
    panels = curve_panels(quantities, curves, x, **more)
    shown = [(c, c.points[:: max(len(c.points) - 1, 1)] if ends else c.points) for c in curves]
    rows = [
        [
            Cell.of(curve.name, group=curve.group),
            Cell(f"{at:.4g}", at),
            *(Cell.of(of(quantity.key)) for quantity in quantities),
        ]
        for curve, points in shown
        for at, of in points
        if not curve.level
    ]
    legend = [curve.group for curve in curves if curve.group]
    if not panels:
        return None
    return Section(
        key,
        title,
        note,
        panels,
        Table(f"{title}: the numbers", [first, x, *(q.name for q in quantities)], rows),
        legend=legend,
        main=main,
        keys=[] if legend else [(curve.name, curve.look) for curve in curves],
    )
