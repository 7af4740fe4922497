"""The pass: which members a call runs, and what its layers may reuse.

A pass belongs to the call, in its thread and task (:mod:`contextvars`), and never to the network.
A layer outside a pass refuses. Activation checkpointing runs a part of the network again in the
backward pass, on a GPU in another thread: :func:`follow_backward` tells it the pass.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from sigmanens.errors import OutsidePassError
from sigmanens.passes.trees import map_tensors


@dataclass(frozen=True)
class Pass:
    """Members ``start ≤ m < stop`` of the ensemble that ``axis`` is of, in one call."""

    axis: MemberAxis
    start: int
    stop: int
    running: bool = False  # whether the network runs; False where members are only chosen
    held: int = 0  # members that the layers hold: M, or fewer in a compiled network
    memory: dict[Any, Any] | None = None  # what layers remember until the call ends
    perturbed: bool = False  # whether scales are changed so that members differ visibly (trials)
    split: bool = False  # whether members see rows of their own
    once: bool = False  # whether the pass ends before the members part (the shared prefix alone)
    prefix: Any = None  # what records or replays the shared prefix
    recorded: Any = None  # what the shared prefix gave for these inputs already

    @property
    def count(self) -> int:
        """Number of members k."""
        return self.stop - self.start

    @property
    def members(self) -> slice:
        """Their rows in a tensor (M, …)."""
        return slice(self.start, self.stop)


_current: ContextVar[Pass | None] = ContextVar("sigmanens_pass", default=None)


class Reached(BaseException):
    """Raised where the members part begins; not to be caught by networks."""


class MemberAxis:
    """The M members of one ensemble. Its layers ask it which of them are in the pass.

    It is a token without state, which copies of a layer share.
    """

    def __init__(self, num_members: int) -> None:
        self._members = num_members
        # The pass of a compiled network. A compiler reads attributes, not context variables; the
        # caller holds a lock meanwhile.
        self.pinned: Pass | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> MemberAxis:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return MemberAxis, (self._members,)

    @property
    def chosen(self) -> Pass:
        """The pass of this call, or one of all members if none was chosen."""
        found = self.pinned if torch.compiler.is_compiling() else _current.get()
        if found is None or found.axis is not self:
            return Pass(self, 0, self._members, held=self._members)
        return found

    @property
    def current(self) -> Pass:
        """The pass that runs.

        Raises:
            OutsidePassError: if none runs, or only one of another ensemble.
        """
        found = self.found
        if found is None:
            raise OutsidePassError(
                "a converted layer was called outside a pass of its ensemble, where it is not "
                "known which member the rows belong to. Call ens(x), ens.predict(x) or "
                "ens.features(x), or take the network of one member: ens.member(m)"
            )
        return found

    @property
    def found(self) -> Pass | None:
        """The pass that runs, or None."""
        found = self.pinned if torch.compiler.is_compiling() else _current.get()
        if not torch.compiler.is_compiling() and (found is None or not found.running):
            found = _in_backward()
        return found if found is not None and found.running and found.axis is self else None

    @property
    def num_members(self) -> int:
        """M; in a pass of a compiled network, the members that its layers hold."""
        return self.chosen.held

    @contextmanager
    def choosing(self, *, pin: bool = False, **changes: Any) -> Iterator[Pass]:
        """Change attributes of the :class:`Pass` for the calls in the block.

        ``pin`` does so for compiled code too, which all threads share: the caller holds a lock.
        """
        if torch.compiler.is_compiling():
            before, old = self.pinned, self.chosen
            names = ("start", "stop", "running", "held", "split", "prefix")
            self.pinned = made = Pass(self, **{**{n: getattr(old, n) for n in names}, **changes})
            try:
                yield made
            finally:
                self.pinned = before
            return
        made, pinned = replace(self.chosen, **changes), self.pinned
        token = _current.set(made)
        if pin:
            self.pinned = replace(made, memory=None, recorded=None)
        try:
            yield made
        finally:
            _current.reset(token)
            if pin:
                self.pinned = pinned

    def running(self, start: int, stop: int, **changes: Any) -> Any:
        """A context in which the network runs for members ``start … stop-1``."""
        return self.choosing(start=start, stop=stop, running=True, **changes)

    @contextmanager
    def remembering(self) -> Iterator[None]:
        """Let layers that evaluate without gradients remember what depends on parameters alone.

        They forget when the outermost block ends.
        """
        memory = self.chosen.memory
        with self.choosing(memory={} if memory is None else memory):
            yield

    def recall(self, layer: Any, make: Callable[[], Any], kind: Any = None) -> Any:
        """What a layer remembers for the members of this pass, or what ``make()`` gives."""
        if torch.compiler.is_compiling():
            return make()
        found = self.current
        memory = found.memory
        if memory is None or found.perturbed or torch.is_grad_enabled() or layer.training:
            return make()
        key = (id(layer), kind, found.start, found.stop)
        if key not in memory:
            memory[key] = make()
        return memory[key]


class MemberLayer(nn.Module):
    """A layer that holds something of each member. The members part begins where one is called."""

    axis: MemberAxis

    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        if self.axis.current.once:  # before any hook runs
            raise Reached
        return super()._call_impl(*args, **kwargs)


_KEPT = 32  # backward passes that one thread is taken to run side by side


class _Backward(threading.local):
    """The passes from which the gradients come that this thread computes."""

    def __init__(self) -> None:
        self.last: Pass | None = None
        self.by_task: OrderedDict[int, Pass] = OrderedDict()  # by the number of the backward pass

    def enter(self, made: Pass) -> None:
        task = torch._C._current_graph_task_id()
        self.last = self.by_task[task] = made
        self.by_task.move_to_end(task)
        if len(self.by_task) > _KEPT:
            self.by_task.popitem(last=False)


_backward = _Backward()


def follow_backward(result: Any, made: Pass) -> None:
    """Let layers that run again in the backward pass of a result know the pass it came from.

    Autograd works from the newest operation to the oldest. So the hook of a pass runs before all
    of its operations and after those of later passes. ``result`` holds tensors in any container.
    """
    replayed = made.prefix  # held by the hooks alone, for passes are remembered for longer
    known = None if replayed is None else weakref.proxy(replayed)
    made = replace(made, memory=None, prefix=known, recorded=None, once=False)

    def entered(_: torch.Tensor, held: Any = replayed) -> None:
        _backward.enter(made)

    def watch(y: torch.Tensor, _: str) -> torch.Tensor:
        if y.requires_grad:
            y.register_hook(entered)
        return y

    map_tensors(watch, result)


def _in_backward() -> Pass | None:
    """The pass of the gradients that autograd computes now in this thread."""
    task = torch._C._current_graph_task_id()
    return None if task == -1 else _backward.by_task.get(task, _backward.last)
