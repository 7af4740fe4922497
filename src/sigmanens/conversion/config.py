"""The plan of a conversion: what a checkpoint needs to build the same ensemble again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from sigmanens.errors import InputError

__all__ = ["TASKS", "Plan", "check_schedule", "check_task"]

TASKS = ("multiclass", "multilabel", "regression")
"""What the outputs of a network can be: logits of which one class is right, logits of labels that
are present or not, or no logits at all."""


@dataclass(frozen=True)
class Plan:
    """Everything that decides how an ensemble is built from its base; survives a JSON round trip.

    Attributes:
        members: M.
        norms: dotted names of the converted norms.
        heads: dotted names of the heads that become one per member.
        head: "fresh", "copy" or "shared".
        init: "normal", "preserve" or "paper".
        scale: "sigmoid" or "linear".
        shift: one trained shift per member (True), none (False), or the default of ``init``.
        train: "all" or "members".
        schedule: "auto", "folded", "sequential" or a number of members per pass.
        batch_dims: batch dimension by input name or position.
        task: "multiclass", "multilabel" or "regression"; None where nobody has said, which is read
            as multiclass.
    """

    members: int
    norms: tuple[str, ...]
    heads: tuple[str, ...]
    head: str
    init: str
    scale: str = "sigmoid"
    shift: bool | None = None
    train: str = "all"
    schedule: str | int = "auto"
    batch_dims: Mapping[str, int | None] | None = None
    task: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Plan:
        """Inverse of :meth:`to_dict`; unknown or missing keys raise InputError."""
        known = {f.name for f in fields(cls)}
        if set(data) != known:
            odd = sorted(set(data) ^ known)
            raise InputError(f"plan has unknown or missing keys: {', '.join(odd)}")
        values: dict[str, Any] = {
            k: tuple(v) if k in ("norms", "heads") else v for k, v in data.items()
        }
        return cls(**values)


def check_schedule(schedule: str | int, members: int) -> None:
    """Raise InputError unless the schedule is "auto", "folded", "sequential" or 1 … M."""
    if isinstance(schedule, bool) or not (
        schedule in ("auto", "folded", "sequential")
        or (isinstance(schedule, int) and 1 <= schedule <= members)
    ):
        raise InputError(
            f"schedule is {schedule!r}; expected 'auto', 'folded', 'sequential' or a number of "
            f"members per pass from 1 to {members}"
        )


def check_task(task: str | None) -> None:
    """Raise InputError unless the task is None or one of :data:`TASKS`."""
    if task is not None and task not in TASKS:
        raise InputError(f"task is {task!r}; expected {', '.join(map(repr, TASKS))} or None")
