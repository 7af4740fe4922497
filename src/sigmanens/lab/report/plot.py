"""What every figure of the report is made of: panels of plotly traces, a legend, a data table.

Traces and layouts are plain dictionaries in plotly's schema. Colours are CSS variables such as
``var(--g3)``; the page resolves them, so that the plots follow light, dark and print colours.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from sigmanens.lab.report.study import Group
from sigmanens.lab.report.tables import Table

__all__ = [
    "INK",
    "MUTED",
    "Figure",
    "Key",
    "Panel",
    "axis",
    "colour",
    "hover",
    "layout",
    "others",
    "plain",
    "series",
]

INK = "var(--ink)"
MUTED = "var(--muted)"
GRID = "var(--grid)"
_SERIES = 6
"""Number of the colours --s1 … that lines without a method of their own take in turn."""
_DASHES = ("solid", "dash", "dot", "dashdot")


@dataclass(frozen=True)
class Key:
    """An entry of a panel's own legend: a name and the look of its line."""

    name: str
    colour: str
    dash: str = "solid"


@dataclass(frozen=True)
class Panel:
    """One plot: a title above it, its plotly traces and layout, its height in pixels.

    ``group`` is the method it is about; ``keys`` its own legend, where its lines are no methods.
    """

    title: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]
    height: int = 340
    group: Group | None = None
    keys: Sequence[Key] = ()


@dataclass(frozen=True)
class Figure:
    """A titled row of panels; ``summary`` says in words what they show.

    ``legend`` lists the groups that can be switched off; those with a key in ``rest`` are folded
    away at first, and off with ``rest_off``. ``panel_width`` is the least width of a panel in
    pixels before the row wraps; ``table`` holds the plotted numbers; ``keys`` is a legend that all
    panels share. Panels from ``first`` on are folded away at first.
    """

    key: str
    title: str
    caption: str
    summary: str
    panels: list[Panel]
    legend: list[Group] = field(default_factory=list)
    panel_width: int = 300
    table: Table | None = None
    rest: frozenset[str] = frozenset()
    rest_off: bool = True
    first: int | None = None
    keys: Sequence[Key] = ()


def colour(group: Group) -> str:
    """The CSS colour of a group."""
    return f"var(--{group.key})"


def series(i: int) -> tuple[str, str]:
    """Colour and dash of the ``i``-th of several lines that are no methods, all different."""
    return f"var(--s{i % _SERIES + 1})", _DASHES[i // _SERIES % len(_DASHES)]


def others(shown: Sequence[Group], main: Sequence[Group]) -> frozenset[str]:
    """Keys of the shown groups that are not among the main ones; none where no main one is."""
    wanted = {group.key for group in main}
    keys = frozenset(group.key for group in shown)
    return keys - wanted if keys & wanted else frozenset()


def plain(text: str) -> str:
    """``text`` without a meaning in plotly's pseudo-HTML."""
    return html.escape(text, quote=False)


def hover(title: str, *facts: str) -> str:
    """The text of a hover box: a bold title and one fact a line."""
    return "<br>".join([f"<b>{plain(title)}</b>", *(plain(fact) for fact in facts)])


def axis(title: str, **more: Any) -> dict[str, Any]:
    """An axis with a title and quiet lines."""
    return {
        "title": {"text": plain(title), "standoff": 8, "font": {"size": 13}},
        "gridcolor": GRID,
        "linecolor": MUTED,
        "tickcolor": MUTED,
        "zeroline": False,
        "automargin": True,
        "fixedrange": True,
        **more,
    }


def layout(xaxis: dict[str, Any], yaxis: dict[str, Any], **more: Any) -> dict[str, Any]:
    """The layout every panel shares."""
    return {
        "xaxis": xaxis,
        "yaxis": yaxis,
        "showlegend": False,
        "hovermode": "closest",
        "dragmode": False,
        "margin": {"l": 52, "r": 12, "t": 10, "b": 46},
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"family": "system-ui, sans-serif", "size": 13, "color": INK},
        "hoverlabel": {
            "bgcolor": "var(--paper)",
            "bordercolor": MUTED,
            "font": {"color": INK, "size": 13},
            "align": "left",
        },
        **more,
    }
