"""What happened while training: the members' loss, and how alike their scales were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from sigmanens.lab.report.curves import Curve, curve_panel, curve_table
from sigmanens.lab.report.plot import Panel, Section
from sigmanens.lab.report.study import Group, Stat, Study, dig, finite, setting_of

_CURVES = {
    "task": ("task loss", "nats"),
    "jensen_gap": ("Jensen gap", "nats"),
    "val_jensen_gap": ("Jensen gap on validation data", "nats"),
    "cosine": ("cosine of the members' scales", "cosine"),
    "saturation": ("share of saturated scales", "share"),
}
"""By key in the history: its name, and what the axis says."""


def training(study: Study) -> Section | None:
    """Curves over the epochs of one seed; None where no history was kept."""
    curves = [c for group in study.groups if (c := _curve(study, group)) is not None]
    drawn = {key: panel for key in _CURVES if (panel := _panel(curves, key, "")) is not None}
    if not drawn:
        return None
    ends = [replace(curve, points=[curve.points[0], curve.points[-1]]) for curve in curves]
    return Section(
        "training",
        "While training",
        "One seed. A cosine that falls in the first epochs says that the members divided the "
        "channels before the backbone had learned; a cosine near 1 that they are one model.",
        list(drawn.values()),
        curve_table("First and last epoch", ends, "epoch", {key: _CURVES[key][0] for key in drawn}),
        legend=[curve.group for curve in curves if curve.group],
        main=study.main,
    )


def curve_panels(study: Study, group: Group) -> list[Panel]:
    """The curves of one method and setting, each in a panel of its own."""
    curve = _curve(study, group)
    keys = [key for key in _CURVES if key != "saturation"]
    panels = [_panel([curve], key, "Training: ", 240) for key in keys if curve]
    return [panel for panel in panels if panel is not None]


def _panel(curves: Sequence[Curve], key: str, before: str, height: int = 300) -> Panel | None:
    name, unit = _CURVES[key]
    more: dict[str, Any] = {"yaxis": {"nticks": 5}, "height": height}
    return curve_panel(f"{before}{name}", curves, key, "epoch", unit, **more)


def _curve(study: Study, group: Group) -> Curve | None:
    """The epochs of a group, where a history of it was kept."""
    found = study.metrics.get("histories")
    entries = list(found) if isinstance(found, Sequence) else []
    alone = study.metrics.get("history")
    if isinstance(alone, Sequence):  # a run of one ensemble keeps the history of that
        entries.append({**study.metrics["rows"][-1], "epochs": alone})
    for entry in entries:
        epochs = dig(entry, "epochs")
        if setting_of(entry) != group.setting or not isinstance(epochs, Sequence):
            continue
        points = [
            (at, partial(_measured, epoch))
            for epoch in epochs
            if (at := finite(dig(epoch, "epoch"))) is not None
        ]
        if points:
            return Curve(group.label, group.look, points, group)
    return None


def _measured(epoch: Mapping[str, Any], key: str) -> Stat:
    value = finite(epoch.get(key))
    return Stat({} if value is None else {"": value})
