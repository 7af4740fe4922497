"""The frontier of the dial: accuracy against calibration, one point per τ and per reference."""

from __future__ import annotations

from typing import Any

from sigmanens.lab.report.compare import METRICS
from sigmanens.lab.report.plot import (
    INK,
    MUTED,
    Panel,
    Section,
    axis,
    hover,
    layout,
    plain,
    whiskers,
)
from sigmanens.lab.report.study import Group, Study, unique


def frontier(study: Study) -> Section | None:
    """Accuracy against ECE and against temperature-scaled NLL; None below two methods."""
    panels = []
    shown: list[Group] = []
    for key in ("ece", "nll_calibrated"):
        groups = [g for g in study.groups if g.stat(key).by_seed and g.stat("accuracy").by_seed]
        if key == "nll_calibrated" and study.single in groups:
            # With a temperature for everyone, this row is the single network once more.
            groups = [g for g in groups if g.method != "single_temperature"]
        if len(groups) > 1:
            panels.append(_panel(study, groups, key))
            shown += groups
    if not panels:
        return None
    legend = [group for group in study.groups if group in shown]
    notes = ["Up and to the left is better. A click on a point shows that run in detail."]
    if len(study.seeds) > 1:
        notes.append("Means over seeds ± one standard deviation.")
    if len(study.sigma) > 1:
        notes.append("The dotted line joins the σN-Ens points in order of τ.")
        notes += ["The large one with a dark edge is the chosen one."] if study.chosen else []
    return Section(
        "frontier",
        "The dial: accuracy against calibration",
        " ".join(notes),
        panels,
        legend=legend,
        main=study.main,
        width=320,
    )


def _panel(study: Study, groups: list[Group], key: str) -> Panel:
    drawn = [g for g in study.main if g in groups] or groups
    name = METRICS[key].name
    traces = [
        *_dial([g for g in study.sigma if g in groups], key),
        *(_mean(group, key, study.was_chosen(group)) for group in groups),
    ]
    across = axis(f"{name} (lower is better)", range=_span(drawn, key), nticks=6)
    up = axis("accuracy (higher is better)", range=_span(drawn, "accuracy"), nticks=6)
    return Panel(f"Accuracy against {name}", traces, layout(across, up), 400)


def _span(groups: list[Group], key: str) -> list[float]:
    """The axis range that holds every seed, with room for labels."""
    values = [value for group in groups for value in group.stat(key).by_seed.values()]
    low, high = min(values), max(values)
    room = 0.14 * (high - low) or max(abs(high) * 0.05, 1e-3)
    return [low - room, high + room]


def _dial(groups: list[Group], key: str) -> list[dict[str, Any]]:
    """Lines through the σN-Ens points of equal M and λ, in order of τ."""
    lines = [
        [g for g in groups if (g.members, g.weight) == setting]
        for setting in unique((g.members, g.weight) for g in groups)
    ]
    return [
        {
            "type": "scatter", "mode": "lines", "hoverinfo": "skip",
            "x": [group.stat(key).mean for group in line],
            "y": [group.stat("accuracy").mean for group in line],
            "line": {"color": MUTED, "width": 1.5, "dash": "dot"},
        }
        for line in lines
        if len(line) > 1
    ]  # fmt: skip


def _mean(group: Group, key: str, chosen: bool) -> dict[str, Any]:
    x, y = group.stat(key), group.stat("accuracy")
    edge = {"size": 15, "line": {"color": INK, "width": 2.5}} if chosen else {"size": 11}
    seeds = f"{len(group.rows)} seed{'s' if len(group.rows) > 1 else ''}"
    trace = {
        "type": "scatter",
        "mode": "markers+text",
        "x": [x.mean],
        "y": [y.mean],
        "marker": {"color": group.look.colour, "symbol": group.look.symbol, **edge},
        "text": [f"<b>{plain(group.short)}</b>" if chosen else plain(group.short)],
        "textposition": "top right" if group.method == "sigmanens" else "bottom right",
        "textfont": {"color": INK, "size": 13},
        "cliponaxis": False,
        "meta": group.key,
        "hoverinfo": "text",
        "hovertext": [
            hover(
                group.label + (" (chosen)" if chosen else ""),
                f"accuracy {y}",
                f"{METRICS[key].name} {x}",
                seeds,
            )
        ],
    }
    bars = {"error_x": x.sd, "error_y": y.sd}
    return trace | {name: whiskers(group.look, [sd], [sd]) for name, sd in bars.items() if sd}
