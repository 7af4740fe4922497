"""The page of ``sigmanens explain``: the map of the dial and the split by step, in one HTML file.

It has the style, tables, plots and script of the reports.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sigmanens.errors import RunError
from sigmanens.lab.explain import Explanation
from sigmanens.lab.explain_words import HEAD, MEANING, sentences, table_rows
from sigmanens.lab.report.page import Section, document
from sigmanens.lab.report.plot import ACCENT, MUTED, Figure, Panel, axis, layout
from sigmanens.lab.report.tables import Cell, Table

__all__ = ["render", "write_page"]


def write_page(found: Explanation, out: Path) -> Path:
    """Write the page to a new file and return its path.

    Raises:
        RunError: if the file exists, or cannot be written.
    """
    if out.exists():
        raise RunError(f"{out} exists already; give another --out")
    text = render(found)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as e:
        raise RunError(f"{out} cannot be written: {e.strerror or e}") from e
    return out


def render(found: Explanation) -> str:
    """The HTML of the page; it asks the network for nothing."""
    config = found.config
    title = f"sigmanens explain: {config.members} members, τ={found.chosen.tau:.3g}"
    figures = [_map(found), _split(found)]
    return document(
        "explain.html.j2",
        title=title,
        words=sentences(found),
        sections=[
            *(Section(f.key, f.title, f.caption, f) for f in figures),
            Section("settings", "Every τ", table=_table(found)),
        ],
    )


def _map(found: Explanation) -> Figure:
    """Owners and cosine over τ, the asked τ marked."""
    taus = [s.tau for s in found.settings]
    panels = [
        _panel(
            "Owners per channel", "τ", "owners",
            [
                _line(taus, [s.reached for s in found.settings], "reached", ACCENT),
                _line(taus, [s.preferred for s in found.settings], "preferred", MUTED, "dot"),
            ],
            found,
        ),
        _panel(
            "Cosine of the scales", "τ", "cosine",
            [_line(taus, [s.cosine for s in found.settings], "reached", ACCENT)],
            found,
        ),
        _panel(
            "Push on γ at the start", "τ", "−∂L/∂γ",
            [
                _line(taus, [s.leader for s in found.settings], "leader", ACCENT),
                _line(taus, [s.others for s in found.settings], "others", MUTED, "dot"),
            ],
            found,
        ),
    ]  # fmt: skip
    return Figure(
        "dial",
        "What τ does",
        "Solid: where penalty-only descent from γ ~ N(0, 1) ends, and the push on the largest "
        "scale of a channel; dotted: what the penalty prefers, and the push on the others. The "
        "vertical line is the asked τ.",
        panels,
    )


def _split(found: Explanation) -> Figure:
    """The cosine by step."""
    steps = list(range(len(found.path)))
    line = _line(steps, found.path, "cosine", ACCENT)
    line["mode"] = "lines"
    panel = Panel(
        "Cosine of the scales by optimizer step",
        [line],
        layout(axis("step"), axis("cosine", range=[0, 1])),
    )
    config = found.config
    return Figure(
        "split",
        "How fast the penalty alone parts the members",
        f"{config.channels:,} channels, {config.optimizer} at rate {found.rate:g} of γ.",
        [panel],
    )


def _line(
    x: list[Any], y: list[Any], name: str, colour: str, dash: str = "solid"
) -> dict[str, Any]:
    return {
        "type": "scatter", "mode": "lines+markers", "x": x, "y": y, "name": name,
        "line": {"color": colour, "dash": dash}, "marker": {"color": colour},
        "hovertemplate": f"%{{x:.3g}}: %{{y:.3g}} {name}<extra></extra>",
    }  # fmt: skip


def _panel(title: str, x: str, y: str, traces: list[dict[str, Any]], found: Explanation) -> Panel:
    across = axis(x, type="log", tickvals=[s.tau for s in found.settings])
    across["ticktext"] = [f"{s.tau:.2g}" for s in found.settings]
    here = {
        "type": "line", "x0": found.chosen.tau, "x1": found.chosen.tau, "yref": "paper",
        "y0": 0, "y1": 1, "line": {"color": MUTED, "width": 1},
    }  # fmt: skip
    return Panel(title, traces, layout(across, axis(y), shapes=[here]))


def _table(found: Explanation) -> Table:
    caption = f"{found.config.members} members, λ={found.config.weight:g}: the penalty alone"
    values = [
        [s.tau, s.preferred, s.reached, s.cosine, s.slope, s.leader, s.others]
        for s in found.settings
    ]
    rows = [
        [Cell(text, value) for text, value in zip(texts, numbers, strict=True)]
        for texts, numbers in zip(table_rows(found), values, strict=True)
    ]
    return Table(caption, HEAD, rows, meaning=MEANING)
