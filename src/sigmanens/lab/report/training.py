"""What happened while training: the members' loss, and how alike their scales were."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from sigmanens.lab.plain import finite
from sigmanens.lab.report.curves import Curve, Quantity, curve_panels, curve_section
from sigmanens.lab.report.plot import Panel, Section
from sigmanens.lab.report.study import Group, Row, Stat, Study, dig, setting_of

_TICKS = {"nticks": 5}
_QUANTITIES = [
    Quantity("task", "task loss, nats", "task loss", _TICKS),
    Quantity("jensen_gap", "Jensen gap, nats", "Jensen gap", _TICKS),
    Quantity("val_jensen_gap", "Jensen gap on validation data, nats", "held-out gap", _TICKS),
    Quantity("cosine", "cosine of the members' scales", "cosine", _TICKS),
    Quantity("saturation", "share of saturated scales", "saturated", _TICKS),
]


def training(study: Study) -> Section | None:
    """Curves over the epochs of one seed; None where no history was kept."""
    curves = [c for group in study.groups if (c := _curve(study, group)) is not None]
    return curve_section(
        "training",
        "While training",
        "One seed. A cosine that falls in the first epochs says that the members divided the "
        "channels before the backbone had learned; a cosine near 1 that they are one model. The "
        "table has the first and the last epoch.",
        _QUANTITIES,
        curves,
        "epoch",
        main=study.main,
        ends=True,
        height=300,
    )


def curves_of_a_run(study: Study, group: Group) -> list[Panel]:
    """The curves of one method and setting, each in a panel of its own."""
    curve = _curve(study, group)
    wanted = [q._replace(title=f"Training: {q.title}") for q in _QUANTITIES[:-1]]
    return curve_panels(wanted, [curve], "epoch", height=240) if curve else []


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


def _measured(epoch: Row, key: str) -> Stat:
    value = finite(epoch.get(key))
    return Stat({} if value is None else {"": value})
