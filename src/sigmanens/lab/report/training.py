"""What happened while training: the members' loss, and how alike their scales were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sigmanens.lab.report import naming
from sigmanens.lab.report.plot import Figure, Panel, axis, colour, hover, layout, line
from sigmanens.lab.report.study import Group, Study, dig, finite
from sigmanens.lab.report.tables import Cell, Table

__all__ = ["curve_panels", "training"]

_CURVES = (
    ("task", "task loss", "nats"),
    ("jensen_gap", "Jensen gap", "nats"),
    ("val_jensen_gap", "Jensen gap on validation data", "nats"),
    ("cosine", "cosine of the members' scales", "cosine"),
    ("saturation", "share of saturated scales", "share"),
)
"""Key in the history, name, and what the axis says."""
_OF_A_RUN = ("task", "jensen_gap", "val_jensen_gap", "cosine")
_ENDS = ("first", "last")
Epochs = Sequence[Mapping[str, Any]]


def training(study: Study) -> Figure | None:
    """Curves over the epochs of one seed; None where no history was kept."""
    curves = _histories(study)
    panels = [panel for curve in _CURVES if (panel := _panel(curves, curve, curve[1])) is not None]
    if not panels:
        return None
    measured = [c for c in _CURVES if any(_known(epochs, c[0]) for _, epochs in curves)]
    return Figure(
        key="training",
        title="While training",
        caption=(
            "One seed. A cosine that falls in the first epochs says that the members divided the "
            "channels before the backbone had learned; a cosine near 1 that they are one model."
        ),
        panels=panels,
        legend=[group for group, _ in curves],
        main=study.main,
        table=Table(
            "First and last epoch",
            ["method", "epochs", *(f"{name}, {end}" for _, name, _ in measured for end in _ENDS)],
            [
                [
                    Cell.of(group.label, group=group),
                    Cell.of(len(epochs), 0),
                    *(Cell.of(_number(epochs[i], key)) for key, *_ in measured for i in (0, -1)),
                ]
                for group, epochs in curves
            ],
        ),
    )


def curve_panels(study: Study, group: Group) -> list[Panel]:
    """The curves of one method and setting, each in a panel of its own."""
    mine = [(other, epochs) for other, epochs in _histories(study) if other is group]
    drawn = (
        _panel(mine, curve, f"Training: {curve[1]}", 240)
        for curve in _CURVES
        if curve[0] in _OF_A_RUN
    )
    return [panel for panel in drawn if panel is not None]


def _panel(
    curves: list[tuple[Group, Epochs]], curve: tuple[str, str, str], title: str, height: int = 300
) -> Panel | None:
    key, name, unit = curve
    lines = [_line(group, epochs, key, name) for group, epochs in curves]
    shown = [line for line in lines if len(line["x"]) > 1]
    if not shown:
        return None
    title = f"{title[:1].upper()}{title[1:]}"
    return Panel(title, shown, layout(axis("epoch"), axis(unit, nticks=5)), height)


def _histories(study: Study) -> list[tuple[Group, Epochs]]:
    """The epochs of every group that has them, in the order of the groups."""
    found = study.metrics.get("histories")
    entries = list(found) if isinstance(found, Sequence) else []
    single = study.metrics.get("history")
    if isinstance(single, Sequence) and single and study.groups:
        last = study.metrics["rows"][-1]  # a run of one ensemble keeps the history of that
        entries.append({**last, "epochs": single})
    curves = []
    for group in study.groups:
        for entry in entries:
            members = finite(dig(entry, "members"))
            setting = (
                dig(entry, "method"),
                None if members is None else int(members),
                finite(dig(entry, "tau")),
                finite(dig(entry, "weight")),
                dig(entry, "variant") or "",
            )
            mine = (group.method, group.members, group.tau, group.weight, group.variant)
            epochs = dig(entry, "epochs")
            if setting == mine and isinstance(epochs, Sequence) and epochs:
                curves.append((group, epochs))
                break
    return curves


def _number(epoch: Any, key: str) -> float | None:
    return finite(dig(epoch, key))


def _known(epochs: Epochs, key: str) -> bool:
    return any(_number(epoch, key) is not None for epoch in epochs)


def _line(group: Group, epochs: Epochs, key: str, name: str) -> dict[str, Any]:
    points = [(_number(epoch, "epoch"), _number(epoch, key)) for epoch in epochs]
    known = [(x, y) for x, y in points if x is not None and y is not None]
    texts = [hover(group.label, f"epoch {x:g}", f"{name} {naming.number(y)}") for x, y in known]
    look = (colour(group), group.look.dash)
    return line([x for x, _ in known], [y for _, y in known], look, texts, meta=group.key)
