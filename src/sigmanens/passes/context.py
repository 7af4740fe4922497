"""Which members take part in a pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sigmanens.errors import InputError

__all__ = ["MemberAxis"]


class MemberAxis:
    """Which members take part in the current pass: ``start ≤ m < stop`` of ``num_members``.

    One object is shared by an ensemble and all its σNorm layers and heads. By default all members
    take part (folded); :meth:`only` narrows the pass.

    Args:
        num_members: number of members M, at least 1.
    """

    def __init__(self, num_members: int) -> None:
        self.num_members = num_members
        self.start = 0
        self.stop = num_members
        self.probing = False
        self.memory: dict[Any, Any] | None = None  # what layers remember; see `remembering`
        self.shared = False  # one pass over B rows stands for all members (see `prefix`)
        self.grouped = False  # whether the last differentiable call took several passes

    @property
    def active(self) -> int:
        """Number of members k in this pass."""
        return self.stop - self.start

    @contextmanager
    def only(self, start: int, stop: int) -> Iterator[None]:
        """Restrict the pass to members ``start … stop-1``; the former range is restored."""
        before = (self.start, self.stop)
        self.start, self.stop = start, stop
        try:
            yield
        finally:
            self.start, self.stop = before

    @contextmanager
    def alone(self, members: int) -> Iterator[None]:
        """Count this many members, all in the pass, while layers hold these only (see `alone`)."""
        before = (self.num_members, self.start, self.stop, self.memory)
        self.num_members, self.start, self.stop, self.memory = members, 0, members, None
        try:
            yield
        finally:
            self.num_members, self.start, self.stop, self.memory = before

    @contextmanager
    def remembering(self) -> Iterator[None]:
        """Let layers remember what depends on parameters and buffers alone, until the block ends.

        They do so without gradients and in evaluation mode only. Blocks may be nested.
        """
        before = self.memory
        self.memory = {} if before is None else before
        try:
            yield
        finally:
            self.memory = before

    def recall(self, layer: Any, make: Callable[[], Any], kind: Any = None) -> Any:
        """What a layer remembers for the members of this pass, or what ``make()`` gives."""
        if self.memory is None or torch.compiler.is_compiling():
            return make()
        if torch.is_grad_enabled() or layer.training or self.probing:
            return make()
        key = (id(layer), kind, self.start, self.stop)
        if key not in self.memory:
            self.memory[key] = make()
        return self.memory[key]

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Let a pass over B rows stand for all members in it, which are alike so far."""
        self.shared = True
        try:
            yield
        finally:
            self.shared = False

    @contextmanager
    def probe(self) -> Iterator[None]:
        """Give every member visibly different scales for the time of a check (see `ensemble`)."""
        self.probing = True
        try:
            yield
        finally:
            self.probing = False

    def check(self) -> None:
        """Refuse to run again in a backward pass when it is not known for which members.

        Activation checkpointing does that after a call that took several passes.

        Raises:
            InputError: then.
        """
        if not self.grouped or self.active < self.num_members or torch.compiler.is_compiling():
            return
        if torch._C._current_graph_task_id() != -1:
            raise InputError(
                "activation checkpointing ran a layer again in the backward pass of a call that "
                "took several passes, where it is not known which member the rows belong to. Use "
                "ens.backward(x, y, loss_fn), or schedule='folded'"
            )

    def __repr__(self) -> str:
        return f"MemberAxis({self.num_members}, active={self.start}:{self.stop})"
