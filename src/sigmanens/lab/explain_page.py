"""The page of ``sigmanens explain``: the map of the dial and the split by step, in one HTML file.

It has the style, tables, plots and script of the reports.
"""

from __future__ import annotations

from pathlib import Path

from sigmanens.errors import RunError
from sigmanens.lab.explain import Explanation
from sigmanens.lab.explain_words import COLUMNS, sentences, tau_text
from sigmanens.lab.report.curves import Curve, Quantity, curve_panels, fixed
from sigmanens.lab.report.naming import Look
from sigmanens.lab.report.plot import ACCENT, MUTED, Panel, Section
from sigmanens.lab.report.tables import Cell, Table
from sigmanens.lab.report.template import document, write_page

_PANELS = (
    ("Owners per channel", "owners", ("reached", "preferred")),
    ("Cosine of the scales", "cosine", ("cosine",)),
    ("Push on γ at the start", "−∂L/∂γ", ("leader", "others")),
)
"""Title, axis, and the fields that are drawn, the first of them solid."""


def write_explanation(found: Explanation, out: Path) -> Path:
    """Write the page to a new file and return its path.

    Raises:
        RunError: if the file exists, or cannot be written.
    """
    if out.exists():
        raise RunError(f"{out} exists already; give another --out")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise RunError(f"{out} cannot be written: {e.strerror or e}") from e
    return write_page(render(found), out)


def render(found: Explanation) -> str:
    """The HTML of the page; it asks the network for nothing."""
    config = found.config
    steps = Curve("cosine", Look(ACCENT, "solid"), fixed(enumerate(found.path)))
    cosine = Quantity(
        "cosine", "cosine of the scales by optimizer step", "cosine", {"range": [0, 1]}
    )
    rows = [
        [
            Cell(tau_text(found, s), s.tau),
            *(Cell(text(s), getattr(s, field)) for field, text, _ in COLUMNS.values()),
        ]
        for s in found.settings
    ]
    caption = f"{config.members} members, λ={config.weight:g}: the penalty alone"
    meaning = {head: words for head, (_, _, words) in COLUMNS.items()}
    return document(
        "explain.html.j2",
        title=f"sigmanens explain: {config.members} members, τ={found.chosen.tau:.3g}",
        words=sentences(found),
        sections=[
            Section(
                "dial",
                "What τ does",
                "Solid: where penalty-only descent from γ ~ N(0, 1) ends, and the push on the "
                "largest scale of a channel; dotted: what the penalty prefers, and the push on the "
                "others. The vertical line is the asked τ.",
                [panel for spec in _PANELS for panel in _panels(found, *spec)],
            ),
            Section(
                "split",
                "How fast the penalty alone parts the members",
                f"{config.channels:,} channels, {config.optimizer} at rate {found.rate:g} of γ.",
                curve_panels([cosine], [steps], "step"),
            ),
            Section(
                "settings",
                "Every τ",
                table=Table(caption, ["τ", *COLUMNS], rows, meaning=meaning),
            ),
        ],
    )


def _panels(found: Explanation, title: str, y: str, fields: tuple[str, ...]) -> list[Panel]:
    looks = (Look(ACCENT, "solid"), Look(MUTED, "dot"))
    curves = [
        Curve(field, look, fixed((s.tau, getattr(s, field)) for s in found.settings), marked=True)
        for field, look in zip(fields, looks, strict=False)
    ]
    taus = [s.tau for s in found.settings]
    across = {"type": "log", "tickvals": taus, "ticktext": [f"{tau:.2g}" for tau in taus]}
    here = {"type": "line", "x0": found.chosen.tau, "x1": found.chosen.tau, "yref": "paper"}
    here |= {"y0": 0, "y1": 1, "line": {"color": MUTED, "width": 1}}
    return curve_panels(
        [Quantity(y, title, y)], curves, "τ", xaxis=across, keyed=True, shapes=[here]
    )
