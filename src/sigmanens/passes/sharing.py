"""Modules that a call runs once for all members: the shared prefix of a network.

A shareable module asks the pass of its call (:mod:`sigmanens.passes.context`) what to do. A pass
may record its results (:class:`Recorded`), give it recorded ones (:class:`Replaying`), or have it
compute for one folded member and repeat the result (:class:`Once`).
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.modules.batchnorm import _NormBase
from torch.utils._python_dispatch import TorchDispatchMode

from sigmanens.errors import InputError
from sigmanens.passes.context import MemberAxis
from sigmanens.passes.trees import map_tensors
from sigmanens.seeding import own_random_state

# What draws numbers and computes nothing else.
DRAWS = (
    "bernoulli", "binomial", "cauchy", "exponential", "geometric", "log_normal", "multinomial",
    "normal", "poisson", "rand", "_sample_dirichlet", "_standard_gamma", "uniform",
)  # fmt: skip

Dims = Mapping[str, int]
"""The batch dimension of each tensor of a tree that has one, by path."""


@dataclass(frozen=True)
class Shareable:
    """The call of a module of the shared prefix, which the pass may answer.

    ``given`` are the batch dimensions of its arguments ``(args, kwargs)``, ``made`` those of its
    result; ``later`` says whether it is called in the members part too.
    """

    module: nn.Module
    axis: MemberAxis
    given: Dims
    made: Dims
    later: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self.axis.found
        if found is None or found.prefix is None:
            return self.compute(args, kwargs)
        return found.prefix.call(self, args, kwargs)

    def compute(self, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """What the module itself makes of these arguments."""
        return type(self.module)._call_impl(self.module, *args, **kwargs)


def unshare(network: nn.Module) -> None:
    """Let no pass answer the calls of modules of a network."""
    for module in network.modules():
        if isinstance(vars(module).get("_call_impl"), Shareable):
            del vars(module)["_call_impl"]


def in_function() -> bool:
    """Whether the caller runs within the forward of an autograd Function.

    Gradients of what is computed there take a way of the Function's own, as under activation
    checkpointing with ``use_reentrant=True``.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        first = frame.f_code.co_varnames[:1]
        if first and isinstance(frame.f_locals.get(first[0]), FunctionCtx):
            return True
        frame = frame.f_back
    return False


def _repeated(tree: Any, dims: Dims, times: int) -> Any:
    def repeat(t: Tensor, path: str) -> Tensor:
        return torch.cat([t] * times, dims[path]) if path in dims else t

    return map_tensors(repeat, tree) if times > 1 else tree


def _narrowed(tree: Any, dims: Dims, start: int, part: int, parts: int) -> Any:
    """``part`` of the ``parts`` into which the batch divides, from ``start`` on."""

    def narrow(t: Tensor, path: str) -> Tensor:
        if path not in dims:
            return t
        size = t.shape[dims[path]] // parts
        return t.narrow(dims[path], start * size, part * size)

    return map_tensors(narrow, tree)


class Once:
    """Lets modules compute for the first of k folded members, where a compiler runs the pass."""

    def call(self, called: Shareable, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """The result for the first member's rows of the arguments, repeated."""
        found = called.axis.current
        if called.later:  # and this may be that call
            return called.compute(args, kwargs)
        args, kwargs = _narrowed((args, kwargs), called.given, 0, 1, found.count)
        with called.axis.running(found.start, found.start + 1, prefix=None):
            result = called.compute(args, kwargs)
        return _repeated(result, called.made, found.count)


ONCE = Once()


class Recorded(TorchDispatchMode):
    """What a pass of ``rows`` samples through the shared prefix gives.

    ``results`` are those of the ``calls`` of shareable modules. As a mode it collects in ``drawn``
    the random numbers that are drawn between them.
    """

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows
        self.calls: list[Shareable] = []
        self.results: list[Any] = []
        self.drawn: list[Tensor] = []
        self._within = 0
        self._grad = torch.is_grad_enabled()

    def call(self, called: Shareable, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """Compute, and keep the result unless another module of the prefix made the call.

        Raises:
            InputError: if it is computed within an autograd Function.
        """
        if self._grad and not torch.is_grad_enabled() and in_function():
            raise InputError(
                f"a {type(called.module).__name__} that runs before the members part is called "
                "within an autograd Function, past which its gradients would be lost. Use "
                "activation checkpointing with use_reentrant=False, or switch it on before the "
                "first batch"
            )
        self._within += 1
        result = called.compute(args, kwargs)
        self._within -= 1
        if not self._within:
            self.calls.append(called)
            self.results.append(result)
        return result

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and not self._within:
            name = func._schema.name.partition("::")[2]
            if name != "native_dropout" and not name.startswith(DRAWS):
                raise InputError(f"{name}, between layers, draws numbers and computes with them")
            self.drawn.append((result[1] if name == "native_dropout" else result).clone())
        return result

    def having(self, results: list[Any]) -> Recorded:
        """The same with other results."""
        made = Recorded(self.rows)
        made.calls, made.results, made.drawn = self.calls, results, self.drawn
        return made

    def narrow(self, start: int, rows: int) -> Recorded:
        """What samples ``start … start+rows-1`` have of it."""
        where = start, rows, self.rows
        pairs = zip(self.calls, self.results, strict=True)
        made = self.having([_narrowed(result, called.made, *where) for called, result in pairs])
        batched = [{"": 0} if t.shape[:1] == (self.rows,) else {} for t in self.drawn]
        drawn = zip(self.drawn, batched, strict=True)
        made.rows, made.drawn = rows, [_narrowed(t, dims, *where) for t, dims in drawn]
        return made


class Replaying(TorchDispatchMode):
    """Gives a pass of k members what was recorded; as a mode, also what was drawn.

    A module is given its results in order; then it computes again. Hooks of a module that is given
    a result do not run.
    """

    def __init__(self, recorded: Recorded, members: int) -> None:
        super().__init__()
        self._members = members
        self._results: dict[nn.Module, list[Any]] = {}
        for called, result in zip(recorded.calls, recorded.results, strict=True):
            self._results.setdefault(called.module, []).append(result)
        self._called: Counter[nn.Module] = Counter()
        self._drawn = recorded.drawn[::-1]

    def call(self, called: Shareable, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """The next recorded result of a module, or what it computes."""
        module, number = called.module, self._called[called.module]
        results = self._results.get(module, [])
        if torch._C._current_graph_task_id() == -1:
            self._called[module] += 1
        elif number == 1:  # activation checkpointing runs the one call again
            number = 0
        elif results:
            raise InputError(
                f"a {type(module).__name__} that first runs before the members part is called "
                "again, and activation checkpointing cannot tell the calls apart: leave out the "
                "checkpointing of the block in which the members part"
            )
        if number < len(results):
            return _repeated(results[number], called.made, self._members)
        if any(isinstance(m, _NormBase) and m.training for m in module.modules()):
            raise InputError(
                f"a {type(module).__name__} with batch statistics ran before the members part on "
                "the first batch, and is called after it now, where each member needs its own"
            )
        return called.compute(args, kwargs)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if not self._drawn or torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **(kwargs or {}))
        drawn = self._drawn.pop()
        with own_random_state(drawn.device):
            result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            drawn = drawn if drawn.shape == result.shape else torch.cat([drawn] * self._members)
            return result.copy_(drawn)
        kept = result[1].copy_(_repeated(drawn, {"": 0}, self._members))  # dropout and its mask
        return result[0].copy_(args[0] * kept / (1 - args[1] or 1)), kept
