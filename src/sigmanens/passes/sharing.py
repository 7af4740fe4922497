"""Modules whose results one pass records and others are given: the shared prefix of a network.

A module that was made shareable asks the pass of its call (:mod:`sigmanens.passes.context`)
whether it is to compute. Passes of other threads and tasks compute as ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from sigmanens.passes.context import peek
from sigmanens.seeding import generator_states

__all__ = ["Reached", "Recording", "Replaying", "make_shareable", "unshare"]


class Reached(BaseException):
    """Raised in front of the members part; not to be caught by networks."""


class _Shareable:
    """The call of a module, which the pass may answer."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module
        made = peek()
        if made is None or made.prefix is None:
            return _compute(module, args, kwargs)
        return made.prefix.call(module, args, kwargs)


def make_shareable(modules: Iterable[nn.Module]) -> None:
    """Let passes record and replay the results of these modules."""
    for module in modules:
        vars(module).setdefault("_call_impl", _Shareable(module))


def unshare(network: nn.Module) -> None:
    """Undo :func:`make_shareable` for all modules of a network."""
    for module in network.modules():
        if isinstance(vars(module).get("_call_impl"), _Shareable):
            del vars(module)["_call_impl"]


def _compute(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
    return type(module)._call_impl(module, *args, **kwargs)


class Recording:
    """Collects the results of modules until the members part is reached.

    Args:
        modules: the modules of the prefix.
        end: the first module of the members part; its call raises :class:`Reached`.
        watch: the device to look at, for random numbers drawn between the modules; None: do not.

    Attributes:
        draws_between: whether they were.
    """

    def __init__(
        self, modules: Iterable[nn.Module], end: nn.Module, watch: torch.device | None = None
    ) -> None:
        self.modules = set(modules)
        self.end = end
        self.made: list[nn.Module] = []
        self.results: list[Any] = []
        self._depth = 0
        self.draws_between = False
        self._watch = watch
        self._state = None if watch is None else generator_states(watch)

    def call(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Compute, and keep the result unless another module of the prefix made the call."""
        if not self._depth and self._watch is not None:
            now = generator_states(self._watch)
            self.draws_between |= not all(map(torch.equal, self._state or [], now))
        if module is self.end:
            raise Reached
        if module not in self.modules:
            return _compute(module, args, kwargs)
        self._depth += 1
        result = _compute(module, args, kwargs)
        self._depth -= 1
        if not self._depth:
            self.made.append(module)
            self.results.append(result)
            if self._watch is not None:
                self._state = generator_states(self._watch)
        return result


class Replaying:
    """Gives modules their recorded results, in the order of the calls; then they compute again.

    Args:
        results: for each module, what its calls return. Hooks of the module do not run.
    """

    def __init__(self, results: Mapping[nn.Module, Iterable[Any]]) -> None:
        self._queues = {m: iter(q) for m, q in results.items()}

    def call(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """The next recorded result of a module, or what it computes."""
        for result in self._queues.get(module, ()):
            return result
        return _compute(module, args, kwargs)
