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


class Reached(BaseException):
    """Raised in front of the members part; not to be caught by networks."""


class _Shareable:
    """The call of a module, which the pass may answer."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        made = peek()
        if made is None or made.prefix is None:
            return _compute(self.module, args, kwargs)
        return made.prefix.call(self.module, args, kwargs)


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
    """Collects the results of modules until ``end`` is called, which raises :class:`Reached`.

    ``draws_between`` says whether random numbers were drawn between the modules on the device
    ``watch``; nobody looks if that is None.
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
    """Gives modules the recorded results of their calls, in order; then they compute again.

    Hooks of a module do not run.
    """

    def __init__(self, results: Mapping[nn.Module, Iterable[Any]]) -> None:
        self._queues = {m: iter(q) for m, q in results.items()}

    def call(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """The next recorded result of a module, or what it computes."""
        for result in self._queues.get(module, ()):
            return result
        return _compute(module, args, kwargs)
