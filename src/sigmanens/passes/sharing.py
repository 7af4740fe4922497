"""Modules whose results one pass records and others are given: the shared prefix of a network.

A module that was made shareable asks the pass of its call (:mod:`sigmanens.passes.context`)
whether it is to compute. Passes of other threads and tasks compute as ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from sigmanens.passes.context import peek


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
    """Collects the results of modules until ``end`` is called, which raises :class:`Reached`."""

    def __init__(self, modules: Iterable[nn.Module], end: nn.Module) -> None:
        self.modules = set(modules)
        self.end = end
        self.made: list[nn.Module] = []
        self.results: list[Any] = []
        self._depth = 0

    def call(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Compute, and keep the result unless another module of the prefix made the call."""
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
        return result


class Replaying:
    """Gives modules the recorded results of their calls, in order; then they compute again.

    Hooks of a module do not run. A call of ``end`` raises :class:`Reached`.
    """

    def __init__(
        self, results: Mapping[nn.Module, Iterable[Any]], end: nn.Module | None = None
    ) -> None:
        self._queues = {m: iter(q) for m, q in results.items()}
        self._end = end

    def call(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """The next recorded result of a module, or what it computes."""
        if module is self._end:
            raise Reached
        for result in self._queues.get(module, ()):
            return result
        return _compute(module, args, kwargs)
