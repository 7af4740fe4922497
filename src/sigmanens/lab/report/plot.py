"""What every page is made of: sections of panels that plotly draws, with legends and tables.

Traces and layouts are plain dictionaries in plotly's schema; the HTML of a panel is plotly's own.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sigmanens.errors import MissingPackageError
from sigmanens.lab.report.naming import Look
from sigmanens.lab.report.study import Group
from sigmanens.lab.report.tables import Table

try:
    from plotly.io import to_html
except ImportError as e:
    raise MissingPackageError(
        "reports and the page of sigmanens explain need plotly: pip install 'sigmanens[lab]'"
    ) from e

ACCENT, INK, MUTED, GRID = "#00695a", "#1c2126", "#5b646e", "#e3e5e6"
_SERIES = ("#0069a8", "#c2450a", "#00806c", "#a3457f", "#8a6d00", "#5d50c6")
_DASHES = ("solid", "dash", "dot", "dashdot")
_CONFIG = {"displayModeBar": False, "scrollZoom": False, "doubleClick": False, "responsive": True}


@dataclass(frozen=True)
class Panel:
    """One plot: a title above it, its plotly traces and layout, its height in pixels.

    ``keys`` is its own legend, where its lines are no methods.
    """

    title: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]
    height: int = 340
    keys: Sequence[tuple[str, Look]] = ()

    def html(self, key: str, hidden: frozenset[str] = frozenset()) -> str:
        """Plotly's HTML of this panel in an element called ``key``.

        Traces of the groups in ``hidden`` are not shown at first.
        """
        shown = [t | {"visible": False} if t.get("meta") in hidden else t for t in self.traces]
        found: str = to_html(
            {"data": shown, "layout": self.layout}, config=_CONFIG, include_plotlyjs=False,
            full_html=False, default_height=f"{self.height}px", div_id=key, validate=False,
        )  # fmt: skip
        return found


@dataclass(frozen=True)
class Section:
    """A titled part of a page: a row of panels, or else a table; a note; more tables, folded away.

    ``legend`` lists the groups that can be switched off; those that are not in ``main`` are folded
    away at first. ``width`` is the least width of a panel in pixels before the row wraps; ``keys``
    is a legend that all panels share. Beside panels, ``table`` holds the plotted numbers.
    """

    key: str
    title: str
    note: str = ""
    panels: Sequence[Panel] = ()
    table: Table | None = None
    folded: Sequence[tuple[str, Table]] = ()
    legend: Sequence[Group] = ()
    main: Sequence[Group] = ()
    keys: Sequence[tuple[str, Look]] = ()
    width: int = 300

    @property
    def rest(self) -> frozenset[str]:
        """Keys of the groups that are folded away; none where no main one is shown."""
        keys, main = ({g.key for g in groups} for groups in (self.legend, self.main))
        return frozenset(keys - main if keys & main else ())


def series(i: int) -> Look:
    """The look of the ``i``-th of several lines that are no methods, all different."""
    return Look(_SERIES[i % len(_SERIES)], _DASHES[i // len(_SERIES) % len(_DASHES)])


def plain(text: str) -> str:
    """``text`` without a meaning in plotly's pseudo-HTML."""
    return html.escape(text, quote=False)


def hover(title: str, *facts: str) -> str:
    """The text of a hover box: a bold title and one fact a line."""
    return "<br>".join([f"<b>{plain(title)}</b>", *(plain(fact) for fact in facts)])


def whiskers(look: Look, up: Sequence[float], down: Sequence[float]) -> dict[str, Any]:
    """Error bars of these lengths, in plotly's schema."""
    bars = {"type": "data", "array": up, "symmetric": False, "arrayminus": down}
    return bars | {"color": look.colour, "thickness": 1.2, "width": 3}


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
            "bgcolor": "#ffffff",
            "bordercolor": MUTED,
            "font": {"color": INK, "size": 13},
            "align": "left",
        },
        **more,
    }
