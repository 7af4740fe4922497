"""The frontier of the dial: accuracy against calibration, one point per τ and per reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sigmanens.lab.report.compare import METRICS
from sigmanens.lab.report.plot import (
    INK,
    MUTED,
    Figure,
    Panel,
    axis,
    colour,
    hover,
    layout,
    others,
    plain,
)
from sigmanens.lab.report.study import Group, Study

__all__ = ["frontier", "place_labels"]

_CHARACTER, _LINE, _MARKER = 0.03, 0.06, 0.025
"""A label's character and line and half a marker, as shares of a narrow plot's size."""
_SPOTS = {
    "top right": (1.0, 1.0),
    "bottom right": (1.0, -1.0),
    "top left": (-1.0, 1.0),
    "bottom left": (-1.0, -1.0),
    "middle right": (1.0, 0.0),
    "middle left": (-1.0, 0.0),
    "top center": (0.0, 1.0),
    "bottom center": (0.0, -1.0),
}
"""Where a label may stand, best first: the diagonals keep clear of the error bars."""
_CROWD = 12
"""Number of methods above which a plot shows means alone; the spread is in the hover text."""
Box = tuple[float, float, float, float]


def frontier(study: Study) -> Figure | None:
    """Accuracy against ECE and against temperature-scaled NLL; None below two methods."""
    panels = []
    shown: dict[str, Group] = {}
    outside = _outside(study)
    for key in ("ece", "nll_calibrated"):
        groups = [
            g
            for g in study.groups
            if g.stat(key).by_seed and g.stat("accuracy").by_seed and g.key not in outside
        ]
        if key == "nll_calibrated" and study.single in groups:
            # With a temperature for everyone, this row is the single network once more.
            groups = [g for g in groups if g.method != "single_temperature"]
        if len(groups) > 1:
            panels.append(_panel(study, groups, key))
            shown |= {group.key: group for group in groups}
    if not panels:
        return None
    notes = ["Up and to the left is better."]
    if len(study.seeds) > 1 and len(shown) <= _CROWD:
        notes.append("Large symbols: mean over seeds, one standard deviation each way.")
        notes.append("Small ones: single seeds.")
    if len(study.sigma) > 1:
        notes.append("The dotted line joins the σN-Ens points in order of τ.")
        notes += ["The large one with a dark edge is the chosen one."] if study.chosen else []
        if any(study.dominated(group) for group in study.sigma):
            notes.append(
                "Open symbols are dominated: another σN-Ens is at least as good in both accuracy "
                "and temperature-scaled NLL, and better in one."
            )
    if outside:
        notes.append(f"Too far off to be drawn: {'; '.join(map(_told, outside.values()))}.")
    best = max(shown.values(), key=lambda g: g.stat("accuracy").mean or 0.0)
    return Figure(
        key="frontier",
        title="The dial: accuracy against calibration",
        caption=" ".join(notes),
        summary=(
            f"Highest accuracy: {best.label}, {best.stat('accuracy')}. "
            + " ".join(_extreme(shown.values(), key) for key in ("ece", "nll_calibrated"))
        ).strip(),
        panels=panels,
        legend=[group for group in study.groups if group.key in shown],
        rest=others(list(shown.values()), study.main),
        rest_off=False,
        panel_width=320,
    )


def _outside(study: Study) -> dict[str, Group]:
    """References so much worse than the main methods that the others would crowd in a corner.

    The main ones are σN-Ens, one network and separate ones; too far off is what is worse than all
    of them by more than they differ among themselves, in any of the numbers drawn.
    """
    always = [*study.sigma, study.single, study.scaled_single, study.deep]
    main = {group.key: group for group in always if group is not None}
    found: dict[str, Group] = {}
    for key, sign in (("accuracy", -1.0), ("ece", 1.0), ("nll_calibrated", 1.0)):
        values = [sign * mean for g in main.values() if (mean := g.stat(key).mean) is not None]
        spread = max(values) - min(values) if values else 0.0
        for group in study.groups if spread > 0 else ():
            mean = group.stat(key).mean
            if group.key not in main and mean is not None and sign * mean > max(values) + spread:
                found[group.key] = group
    return found


def _told(group: Group) -> str:
    numbers = [
        f"{METRICS[key].name} {mean:.3f}"
        for key in ("accuracy", "ece", "nll_calibrated")
        if (mean := group.stat(key).mean) is not None
    ]
    return f"{group.label} ({', '.join(numbers)})"


def _extreme(groups: Any, key: str) -> str:
    known = [(mean, g) for g in groups if (mean := g.stat(key).mean) is not None]
    if not known:
        return ""
    best = min(known, key=lambda pair: pair[0])[1]
    return f"Lowest {METRICS[key].name}: {best.label}, {best.stat(key)}."


def _panel(study: Study, groups: list[Group], key: str) -> Panel:
    spread = len(groups) <= _CROWD
    spans = [_span(groups, key, spread), _span(groups, "accuracy", spread)]
    # The chosen point is labelled first, then the rest of the dial, then the references.
    ranked = sorted(groups, key=lambda g: (g is not study.chosen, g.method != "sigmanens"))
    spots = place_labels(
        [
            (_place(g.stat(key).mean, spans[0]), _place(g.stat("accuracy").mean, spans[1]))
            for g in ranked
        ],
        [g.short for g in ranked],
    )
    spot = {g.key: where for g, where in zip(ranked, spots, strict=True)}
    traces = [
        *_dial(study, key),
        *(_seeds(group, key) for group in groups if spread and len(group.rows) > 1),
        *(_mean(study, group, key, spot[group.key], spread) for group in groups),
    ]
    name = METRICS[key].name
    return Panel(
        title=f"Accuracy against {name}",
        traces=traces,
        layout=layout(
            axis(f"{name} (lower is better)", range=list(spans[0]), nticks=6),
            axis("accuracy (higher is better)", range=list(spans[1]), nticks=6),
        ),
        height=400,
    )


def _span(groups: list[Group], key: str, spread: bool) -> tuple[float, float]:
    """The axis range that holds every seed, or the means alone, with room for labels."""
    stats = [group.stat(key) for group in groups]
    values = [v for s in stats for v in (s.by_seed.values() if spread else [s.mean or 0.0])]
    low, high = min(values), max(values)
    room = 0.14 * (high - low) or max(abs(high) * 0.05, 1e-3)
    return low - room, high + room


def _place(value: float | None, span: tuple[float, float]) -> float:
    return ((value or 0.0) - span[0]) / (span[1] - span[0])


def _dial(study: Study, key: str) -> list[dict[str, Any]]:
    """Lines through the σN-Ens points of equal M and λ, in order of τ."""
    lines: dict[tuple[Any, ...], list[Group]] = {}
    for group in study.sigma:
        if group.stat(key).by_seed and group.stat("accuracy").by_seed:
            lines.setdefault((group.members, group.weight), []).append(group)
    return [
        {
            "type": "scatter",
            "mode": "lines",
            "x": [group.stat(key).mean for group in line],
            "y": [group.stat("accuracy").mean for group in line],
            "line": {"color": MUTED, "width": 1.5, "dash": "dot"},
            "hoverinfo": "skip",
        }
        for line in lines.values()
        if len(line) > 1
    ]


def _seeds(group: Group, key: str) -> dict[str, Any]:
    xs, ys = group.stat(key).by_seed, group.stat("accuracy").by_seed
    shared = [seed for seed in xs if seed in ys]
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [xs[seed] for seed in shared],
        "y": [ys[seed] for seed in shared],
        "marker": {"color": colour(group), "symbol": group.look.symbol, "size": 6},
        "opacity": 0.4,
        "meta": group.key,
        "hoverinfo": "text",
        "hovertext": [
            hover(
                f"{group.label}, seed {seed}",
                f"accuracy {ys[seed]:.3f}",
                f"{METRICS[key].name} {xs[seed]:.3f}",
            )
            for seed in shared
        ],
    }


def _mean(study: Study, group: Group, key: str, spot: str | None, spread: bool) -> dict[str, Any]:
    x, y = group.stat(key), group.stat("accuracy")
    chosen = study.was_chosen(group)
    dominated = study.dominated(group)
    text = plain(group.short)
    symbol = f"{group.look.symbol}-open" if dominated and not chosen else group.look.symbol
    marker: dict[str, Any] = {"color": colour(group), "symbol": symbol, "size": 11}
    if dominated:
        marker["line"] = {"color": colour(group), "width": 2}
    if chosen:
        marker |= {"size": 15, "line": {"color": INK, "width": 2.5}}
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "markers+text" if spot else "markers",
        "x": [x.mean],
        "y": [y.mean],
        "marker": marker,
        "meta": group.key,
        "customdata": ["run"],  # the script rings the selected one, and selects it on a click
        "hoverinfo": "text",
        "hovertext": [
            hover(
                group.label + (" (chosen)" if chosen else " (dominated)" if dominated else ""),
                f"accuracy {y}",
                f"{METRICS[key].name} {x}",
                f"{len(group.rows)} seed{'s' if len(group.rows) > 1 else ''}",
            )
        ],
    }
    if spot:
        trace |= {
            "text": [f"<b>{text}</b>" if chosen else text],
            "textposition": spot,
            "textfont": {"color": INK, "size": 13},
            "cliponaxis": False,
        }
    for name, stat in (("error_x", x), ("error_y", y)):
        if spread and stat.sd:
            trace[name] = {
                "type": "data",
                "array": [stat.sd],
                "color": colour(group),
                "thickness": 1.2,
                "width": 0,
            }
    return trace


def place_labels(points: Sequence[tuple[float, float]], texts: Sequence[str]) -> list[str | None]:
    """A plotly ``textposition`` per point so that no label covers a label, a point or the edge.

    ``points`` lie in the unit square. Earlier points choose first; None where no spot is free, so
    that a crowded plot loses labels rather than its legibility. The first label is always placed.
    """
    taken: list[Box] = []
    found: list[str | None] = []
    for i, ((x, y), text) in enumerate(zip(points, texts, strict=True)):
        others = [point for j, point in enumerate(points) if j != i]
        best: tuple[float, str, Box] | None = None
        for spot, (right, up) in _SPOTS.items():
            box = _box(x, y, right, up, text)
            if any(_overlap(box, other) for other in taken):
                continue
            wide = (box[0] - _MARKER, box[1] - _MARKER, box[2] + _MARKER, box[3] + _MARKER)
            cost = 3.0 * sum(wide[0] < x < wide[2] and wide[1] < y < wide[3] for x, y in others)
            cost += 5.0 * (box[0] < 0 or box[2] > 1 or box[1] < 0 or box[3] > 1)
            if best is None or cost < best[0]:
                best = (cost, spot, box)
        if best is not None and (best[0] == 0 or i == 0):
            taken.append(best[2])
            found.append(best[1])
        else:
            found.append(None)
    return found


def _box(x: float, y: float, right: float, up: float, text: str) -> Box:
    """The rectangle of a label beside the point (x, y): left, bottom, right, top."""
    width, height, gap = _CHARACTER * len(text), _LINE, 0.025
    left = {0.0: x - width / 2, 1.0: x + gap, -1.0: x - gap - width}[right]
    bottom = {0.0: y - height / 2, 1.0: y + gap, -1.0: y - gap - height}[up]
    return left, bottom, left + width, bottom + height


def _overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
