"""What turning one knob does, all else equal: metrics against τ, against λ and against M."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sigmanens.lab.report import naming
from sigmanens.lab.report.compare import METRICS
from sigmanens.lab.report.plot import INK, Figure, Key, Panel, axis, colour, hover, layout
from sigmanens.lab.report.study import Group, Study
from sigmanens.lab.report.tables import Cell, Table

__all__ = ["by_members", "by_tau", "by_weight"]

_METRICS = ("nll_calibrated", "accuracy", "ece")
_REFERENCES = ("single", "deep_ensemble", "sigmanens_lambda0", "fixed_masks")
_SHIFT = 0.012
"""Sideways shift between lines, as a share of the axis, so that their error bars stay apart."""


@dataclass(frozen=True)
class _Line:
    """Groups that differ in nothing but the knob, in its order; ``group`` gives the look."""

    name: str
    group: Group
    points: list[tuple[float, Group]]


def by_tau(study: Study) -> Figure | None:
    """Metrics against τ at equal M and λ, variants apart; None below three values of τ."""
    groups = [g for g in study.groups if g.method == "sigmanens"]
    lines = _lines(groups, lambda g: g.tau, lambda g: (g.members, g.weight, g.variant))
    lines = [line for line in lines if len(line.points) > 2]
    if not lines:
        return None
    references = [g for g in _references(study) if g.members in (1, None, *_members(lines))]
    return _figure(
        study,
        "tau",
        "The dial turned: metrics against τ",
        "τ",
        [_named(line, lines, ("members", "weight")) for line in lines],
        references,
    )


def by_weight(study: Study) -> Figure | None:
    """Metrics against the weight λ of the penalty at equal τ and M; None for one λ."""
    lines = _lines(study.sigma, lambda g: g.weight, lambda g: (g.tau, g.members))
    lines = [line for line in lines if len(line.points) > 1]
    if not lines:
        return None
    references = [g for g in _references(study) if g.members in (1, None, *_members(lines))]
    named = [_named(line, lines, ("tau", "members")) for line in lines]
    title = "The weight of the penalty: metrics against λ"
    return _figure(study, "weight", title, "λ", named, references)


def by_members(study: Study) -> Figure | None:
    """Metrics against M for every method that was trained at several M."""
    groups = [g for g in study.groups if (g.members or 0) > 1]
    lines = _lines(
        groups,
        lambda g: None if g.members is None else float(g.members),
        lambda g: (g.method, g.tau, g.weight, g.variant),
    )
    lines = [line for line in lines if len(line.points) > 1]
    if not lines:
        return None
    named = [_Line(_without_members(line.group), line.group, line.points) for line in lines]
    references = [g for g in study.groups if g.method == "single"]
    title = "More members: metrics against M"
    return _figure(study, "members", title, "M, the number of members", named, references)


def _members(lines: list[_Line]) -> set[int | None]:
    return {group.members for line in lines for _, group in line.points}


def _lines(
    groups: list[Group],
    knob: Callable[[Group], float | None],
    rest: Callable[[Group], tuple[Any, ...]],
) -> list[_Line]:
    found: dict[tuple[Any, ...], list[tuple[float, Group]]] = {}
    for group in groups:
        value = knob(group)
        if value is not None:
            found.setdefault(rest(group), []).append((value, group))
    ordered = [sorted(points, key=lambda point: point[0]) for points in found.values()]
    return [_Line(points[-1][1].label, points[-1][1], points) for points in ordered]


def _named(line: _Line, lines: list[_Line], names: tuple[str, ...]) -> _Line:
    """The line called by those of its settings in which the lines differ."""
    symbols = {"tau": "τ", "members": "M", "weight": "λ"}
    parts = ["σN-Ens"]
    for name in names:
        if len({getattr(other.group, name) for other in lines}) > 1:
            parts.append(f"{symbols[name]}={naming.amount(getattr(line.group, name)) or '?'}")
    variant = f", {naming.words(line.group.variant)}" if line.group.variant else ""
    return _Line(" ".join(parts) + variant, line.group, line.points)


def _without_members(group: Group) -> str:
    if group.method == "deep_ensemble":
        return "separate networks"
    return group.label.removesuffix(f" M={naming.amount(group.members)}").replace(
        f" M={naming.amount(group.members)} ", " "
    )


def _references(study: Study) -> list[Group]:
    return [g for g in study.groups if g.method in _REFERENCES and not g.variant]


def _figure(
    study: Study, key: str, title: str, name: str, lines: list[_Line], references: list[Group]
) -> Figure | None:
    values = sorted({value for line in lines for value, _ in line.points})
    panels = []
    for metric in _METRICS:
        panel = _panel(metric, name, values, lines, references)
        if panel is not None:
            panels.append(panel)
    if not panels:
        return None
    keys = [
        *(Key(g.label, colour(g), _level(g)) for g in references),
        *(Key(line.name, colour(line.group), _dash(line.group)) for line in lines),
    ]
    several = len(study.seeds) > 1
    means = "Means over seeds" if several else "One seed"
    spread = " Whiskers: one standard deviation over seeds." if several else ""
    beside = " Level lines: methods that have no such setting." if references else ""
    return Figure(
        key=key,
        title=title,
        caption=f"{means}, {study.split} data.{spread}{beside}",
        panels=panels,
        keys=keys,
        table=Table(
            f"Numbers against {name}",
            ["line", name, *(METRICS[m].name for m in _METRICS), "seeds"],
            [
                [
                    Cell.of(line.name, group=line.group),
                    Cell(naming.amount(value), value),
                    *(Cell.of(group.stat(m)) for m in _METRICS),
                    Cell(str(len(group.rows)), float(len(group.rows))),
                ]
                for line in lines
                for value, group in line.points
            ],
        ),
    )


def _panel(
    metric: str, name: str, values: list[float], lines: list[_Line], references: list[Group]
) -> Panel | None:
    log = values[0] > 0 and values[-1] / values[0] >= 4
    span = (values[0], values[-1])
    traces = []
    for group in references:
        stat = group.stat(metric)
        if stat.mean is not None:
            text = hover(group.label, f"{METRICS[metric].name} {stat}")
            traces.append(
                {
                    "type": "scatter",
                    "mode": "lines",
                    "x": _beyond(span, log),
                    "y": [stat.mean] * 2,
                    "line": {"color": colour(group), "width": 1.8, "dash": _level(group)},
                    "hoverinfo": "text",
                    "hovertext": [text] * 2,
                }
            )
    drawn = 0
    for i, line in enumerate(lines):
        place = (i - (len(lines) - 1) / 2) * _SHIFT * min(1.0, 6 / len(lines))
        trace = _trace(metric, name, line, span, log, place)
        if trace["x"]:
            drawn += 1
            traces.append(trace)
    if not drawn:
        return None
    low, high = _beyond(span, log)
    if log:
        from_, to = math.log10(low), math.log10(high)
        scale: dict[str, Any] = {"type": "log", "range": [from_, to]}
    else:
        scale = {"range": [low, high]}
    ticks = values if len(values) <= 8 else values[:: -(-len(values) // 8)]
    return Panel(
        title=f"{METRICS[metric].name[:1].upper()}{METRICS[metric].name[1:]} "
        f"({METRICS[metric].better} is better)",
        traces=traces,
        layout=layout(
            axis(name, tickvals=ticks, ticktext=[naming.amount(v) for v in ticks], **scale),
            axis(METRICS[metric].name, nticks=6),
        ),
    )


def _dash(group: Group) -> str:
    """The dash of a line; a variant of σN-Ens has the colour of σN-Ens and a dash of its own."""
    return "dash" if group.variant else group.look.dash


def _level(group: Group) -> str:
    """The dash of a level line, never solid."""
    return group.look.dash if group.look.dash != "solid" else "longdash"


def _beyond(span: tuple[float, float], log: bool) -> list[float]:
    """Both ends of the axis: the span and some room."""
    low, high = span
    if log:
        room = (high / low) ** 0.06
        return [low / room, high * room]
    room = 0.06 * (high - low) or 1.0
    return [low - room, high + room]


def _moved(value: float, span: tuple[float, float], log: bool, place: float) -> float:
    low, high = span
    return value * (high / low) ** place if log else value + (high - low) * place


def _trace(
    metric: str, name: str, line: _Line, span: tuple[float, float], log: bool, place: float
) -> dict[str, Any]:
    known = [(v, g, g.stat(metric)) for v, g in line.points if g.stat(metric).by_seed]
    spreads = [stat.sd or 0.0 for *_, stat in known]
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [_moved(v, span, log, place) for v, *_ in known],
        "y": [stat.mean for *_, stat in known],
        "line": {"color": colour(line.group), "width": 2.2, "dash": _dash(line.group)},
        "marker": {
            "symbol": line.group.look.symbol,
            "size": 9,
            "color": [colour(g) for _, g, _ in known],
            "line": {"color": INK, "width": 0},
        },
        "cliponaxis": False,
        "hoverinfo": "text",
        "hovertext": [
            hover(
                group.label,
                f"{name.partition(',')[0]} {naming.amount(value)}",
                f"{METRICS[metric].name} {stat}",
                f"{len(stat.by_seed)} seed{'s' if len(stat.by_seed) > 1 else ''}",
            )
            for value, group, stat in known
        ],
    }
    if any(spreads):
        trace["error_y"] = {
            "type": "data",
            "array": spreads,
            "color": colour(line.group),
            "thickness": 1.2,
            "width": 3,
        }
    return trace
