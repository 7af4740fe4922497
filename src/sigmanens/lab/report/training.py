"""What happened while training: the members' loss, and how alike their scales were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sigmanens.lab.report import naming
from sigmanens.lab.report.plot import Figure, Panel, axis, colour, hover, layout
from sigmanens.lab.report.study import Group, Study, dig, finite
from sigmanens.lab.report.tables import Cell, Table

__all__ = ["training"]

_CURVES = (
    ("task", "task loss", "nats"),
    ("cosine", "cosine of the members' scales", ""),
    ("saturation", "share of saturated scales", ""),
)


def training(study: Study) -> Figure | None:
    """Curves over the epochs of one seed; None where no history was kept."""
    curves = _histories(study)
    if not curves:
        return None
    panels = []
    for key, name, unit in _CURVES:
        lines = [_line(group, epochs, key, name) for group, epochs in curves]
        shown = [line for line in lines if len(line["x"]) > 1]
        if shown:
            title = f"{name} ({unit})" if unit else name
            panels.append(
                Panel(
                    title=title[:1].upper() + title[1:],
                    traces=shown,
                    layout=layout(axis("epoch"), axis(name)),
                    height=300,
                )
            )
    if not panels:
        return None
    return Figure(
        key="training",
        title="While training",
        caption=(
            "One seed. A cosine that falls in the first epochs says that the members divided the "
            "channels before the backbone had learned; a cosine near 1 that they are one model."
        ),
        summary=_said(curves),
        panels=panels,
        legend=[group for group, _ in curves],
        table=Table(
            "First and last epoch",
            ["method", "epochs", *(f"{name}, {end}" for _, name, _ in _CURVES for end in _ENDS)],
            [
                [
                    Cell.of(group.label, group=group),
                    Cell.of(len(epochs), 0),
                    *(
                        Cell.of(finite(epochs[i].get(key)))
                        for key, _, _ in _CURVES
                        for i in (0, -1)
                    ),
                ]
                for group, epochs in curves
            ],
        ),
    )


_ENDS = ("first", "last")
Epochs = Sequence[Mapping[str, Any]]


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
            if setting == mine and dig(entry, "epochs"):
                curves.append((group, entry["epochs"]))
                break
    return curves


def _line(group: Group, epochs: Epochs, key: str, name: str) -> dict[str, Any]:
    points = [(e.get("epoch"), finite(e.get(key))) for e in epochs]
    known = [(x, y) for x, y in points if y is not None]
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [x for x, _ in known],
        "y": [y for _, y in known],
        "line": {"color": colour(group), "width": 1.8, "dash": group.look.dash},
        "meta": group.key,
        "hoverinfo": "text",
        "hovertext": [
            hover(group.label, f"epoch {x:g}", f"{name} {naming.number(y)}") for x, y in known
        ],
    }


def _said(curves: list[tuple[Group, Epochs]]) -> str:
    parts = []
    for group, epochs in curves:
        first, last = (finite(epochs[i].get("cosine")) for i in (0, -1))
        if first is not None and last is not None:
            parts.append(f"{naming.number(first, 2)} to {naming.number(last, 2)} at {group.label}")
    if not parts:
        return "The members' loss over the epochs."
    return f"Cosine of the members' scales after the first and the last epoch: {', '.join(parts)}."
