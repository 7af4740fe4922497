"""The frontier of the dial: accuracy against calibration, one point per τ and per reference."""

from __future__ import annotations

from typing import Any

from sigmanens.lab.report.compare import METRICS
from sigmanens.lab.report.plot import INK, MUTED, Figure, Panel, axis, colour, hover, layout, plain
from sigmanens.lab.report.study import Group, Study

__all__ = ["frontier"]

_CROWD = 12
"""Number of methods above which a plot shows means alone; the spread is in the hover text."""


def frontier(study: Study) -> Figure | None:
    """Accuracy against ECE and against temperature-scaled NLL; None below two methods."""
    panels = []
    shown: dict[str, Group] = {}
    for key in ("ece", "nll_calibrated"):
        groups = [
            g for g in study.groups if g.stat(key).by_seed and g.stat("accuracy").by_seed
        ]  # fmt: skip
        if key == "nll_calibrated" and study.single in groups:
            # With a temperature for everyone, this row is the single network once more.
            groups = [g for g in groups if g.method != "single_temperature"]
        if len(groups) > 1:
            panels.append(_panel(study, groups, key))
            shown |= {group.key: group for group in groups}
    if not panels:
        return None
    notes = ["Up and to the left is better. A click on a point shows that run in detail."]
    if len(study.seeds) > 1 and len(shown) <= _CROWD:
        notes.append("Large symbols: mean over seeds ± one standard deviation; small: seeds.")
    if len(study.sigma) > 1:
        notes.append("The dotted line joins the σN-Ens points in order of τ.")
        notes += ["The large one with a dark edge is the chosen one."] if study.chosen else []
    return Figure(
        key="frontier",
        title="The dial: accuracy against calibration",
        caption=" ".join(notes),
        panels=panels,
        legend=[group for group in study.groups if group.key in shown],
        main=study.main,
        panel_width=320,
    )


def _panel(study: Study, groups: list[Group], key: str) -> Panel:
    spread = len(groups) <= _CROWD
    drawn = study.main if len(groups) > _CROWD else groups
    name = METRICS[key].name
    ranges = [_span([g for g in drawn if g in groups], k) for k in (key, "accuracy")]
    traces = [
        *_dial(study, key),
        *(_seeds(group, key) for group in groups if spread and len(group.rows) > 1),
        *(_mean(study, group, key, spread) for group in groups),
    ]
    return Panel(
        title=f"Accuracy against {name}",
        traces=traces,
        layout=layout(
            axis(f"{name} (lower is better)", range=ranges[0], nticks=6),
            axis("accuracy (higher is better)", range=ranges[1], nticks=6),
        ),
        height=400,
    )


def _span(groups: list[Group], key: str) -> list[float]:
    """The axis range that holds every seed, with room for labels."""
    values = [value for group in groups for value in group.stat(key).by_seed.values()]
    low, high = min(values), max(values)
    room = 0.14 * (high - low) or max(abs(high) * 0.05, 1e-3)
    return [low - room, high + room]


def _dial(study: Study, key: str) -> list[dict[str, Any]]:
    """Lines through the σN-Ens points of equal M and λ, in order of τ."""
    lines: dict[tuple[Any, ...], list[Group]] = {}
    for group in study.sigma:
        if group.stat(key).by_seed and group.stat("accuracy").by_seed:
            lines.setdefault((group.members, group.weight), []).append(group)
    return [
        {
            "type": "scatter", "mode": "lines", "hoverinfo": "skip",
            "x": [group.stat(key).mean for group in line],
            "y": [group.stat("accuracy").mean for group in line],
            "line": {"color": MUTED, "width": 1.5, "dash": "dot"},
        }
        for line in lines.values()
        if len(line) > 1
    ]  # fmt: skip


def _seeds(group: Group, key: str) -> dict[str, Any]:
    xs, ys = group.stat(key).by_seed, group.stat("accuracy").by_seed
    shared = [seed for seed in xs if seed in ys]
    name = METRICS[key].name
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
            hover(f"{group.label}, seed {s}", f"accuracy {ys[s]:.3f}", f"{name} {xs[s]:.3f}")
            for s in shared
        ],
    }


def _mean(study: Study, group: Group, key: str, spread: bool) -> dict[str, Any]:
    x, y = group.stat(key), group.stat("accuracy")
    chosen = study.was_chosen(group)
    marker: dict[str, Any] = {"color": colour(group), "symbol": group.look.symbol, "size": 11}
    if chosen:
        marker |= {"size": 15, "line": {"color": INK, "width": 2.5}}
    trace: dict[str, Any] = {
        "type": "scatter",
        "mode": "markers+text",
        "x": [x.mean],
        "y": [y.mean],
        "marker": marker,
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
                f"{len(group.rows)} seed{'s' if len(group.rows) > 1 else ''}",
            )
        ],
    }
    for name, stat in (("error_x", x), ("error_y", y)):
        if spread and stat.sd:
            trace[name] = {
                "type": "data", "array": [stat.sd], "color": colour(group),
                "thickness": 1.2, "width": 0,
            }  # fmt: skip
    return trace
