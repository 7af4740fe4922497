"""The shared prefix: what a network computes before the first layer that members have of their own.

All members would compute the same there, so it is computed once, on B rows. The modules that have
finished by then are found by a trace; in a pass their results are recorded, and in the members'
passes handed out again in the place of their computation, for as many members as fold into the
batch. Whatever lies between modules (sums, masks, reshapes) is computed in every pass, so that a
network of any shape keeps its meaning.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sigmanens.conversion.heads import MemberHeads
from sigmanens.ensemble.inputs import split_tree
from sigmanens.norms.batchnorm import RunningStatistics
from sigmanens.norms.member import HOOKS
from sigmanens.norms.scales import SigmaNorm
from sigmanens.passes.context import MemberAxis
from sigmanens.passes.trees import map_tensors

__all__ = ["Leaves", "Prefix", "find_prefix"]

_SMALL = 2**18  # bytes


class _Reached(BaseException):
    """Raised in front of the first layer with members of its own; not to be caught by networks."""


class Prefix:
    """The modules that run before the members part.

    Attributes:
        calls: the modules in the order in which they finish; one that is called twice is in twice.
        end: the first layer that the members have of their own.
        names: the modules' dotted names.
        depth: number of layers with a matrix of weights among them.
    """

    def __init__(
        self,
        calls: Sequence[nn.Module],
        end: nn.Module,
        batched: Sequence[frozenset[str]],
        axis: MemberAxis,
    ) -> None:
        self.calls = list(calls)
        self.end = end
        self.batched = list(batched)
        self.axis = axis
        self.names: list[str] = []
        self.depth = sum(_computes(m) for c in dict.fromkeys(calls) for m in c.modules())
        norms = {m: None for c in calls for m in c.modules() if isinstance(m, RunningStatistics)}
        self._norms = list(norms)
        self._random: bool | None = None

    # -- whether it may be used ------------------------------------------------------------------

    def is_worth_it(self, pass_bytes: int) -> bool:
        """Whether sharing saves more than it costs: not for one layer on a few small samples.

        Args:
            pass_bytes: bytes of the largest input of a norm, for one member; 0 if unknown.
        """
        return self.depth > 1 or pass_bytes == 0 or pass_bytes >= _SMALL

    def alike(self) -> bool:
        """Whether the active members have the same running statistics in the prefix.

        They start with the same and stay so as long as they see the same batches.
        """
        own = slice(self.axis.start, self.axis.stop)
        rows = [b[own] for n in self._norms for b in n.buffers(recurse=False) if b.dim()]
        differ = [(r != r[:1]).any() for r in rows if len(r) > 1]
        return not differ or not bool(torch.stack(differ).any())

    def is_random(self, network: nn.Module, tree: Mapping[str, Any]) -> bool:
        """Whether the prefix draws random numbers in training: dropout, which members do not share.

        Found by a trial on a small batch, whose draws and statistics are undone.
        """
        if self._random is None:
            buffers = [(b, b.clone()) for c in self.calls for b in c.buffers()]
            devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
            with torch.no_grad(), torch.random.fork_rng(devices=devices):
                before = _random_states(devices)
                try:
                    self.record(network, tree)
                except Exception:  # a batch too small for its statistics, say: it cannot tell
                    self._random = True
                else:
                    after = _random_states(devices)
                    self._random = not all(map(torch.equal, before, after))
                for buffer, value in buffers:
                    buffer.copy_(value)
        return self._random

    # -- passes ----------------------------------------------------------------------------------

    def record(self, network: nn.Module, tree: Mapping[str, Any]) -> list[Any] | None:
        """Run the prefix on the inputs of one member (B rows) and return the modules' results.

        None if the network took another path than in the trace.
        """
        results: list[Any] = []
        made: list[nn.Module] = []
        wanted = set(self.calls)

        depth = 0

        def enter(module: nn.Module, _: Any) -> None:
            nonlocal depth
            depth += 1

        def keep(module: nn.Module, _: Any, result: Any) -> None:
            nonlocal depth
            depth -= 1
            if not depth:  # else it was called by another of them
                made.append(module)
                results.append(result)

        def stop(module: nn.Module, _: Any) -> None:
            raise _Reached

        handles = [m.register_forward_hook(keep) for m in wanted]
        handles += [m.register_forward_pre_hook(enter) for m in wanted]
        handles.append(self.end.register_forward_pre_hook(stop, prepend=True))
        args, kwargs = split_tree(tree)
        try:
            with self.axis.sharing():
                network(*args, **kwargs)
        except _Reached:
            pass
        finally:
            for handle in handles:
                handle.remove()
        return results if made == self.calls else None

    @contextmanager
    def replaying(self, results: Sequence[Any], members: int) -> Iterator[None]:
        """Let the prefix's modules return what was recorded, repeated for the members of a pass."""
        queues: dict[nn.Module, list[Any]] = {m: [] for m in self.calls}
        for module, result, batched in zip(self.calls, results, self.batched, strict=True):
            queues[module].append(_repeated(result, batched, members))
        with ExitStack() as undo:
            for module, queue in queues.items():
                replaced: dict[str, Any] = {key: OrderedDict() for key in HOOKS}
                replaced["forward"] = _replay(module, iter(queue))
                undo.enter_context(_attributes(module, replaced))
            yield


class Leaves:
    """Recorded results cut from their graph, so that members can run backward one at a time.

    Each member's backward pass adds to the gradients at the cut; :meth:`backward` takes the sum on
    through the prefix, once.

    Attributes:
        results: the results in the form in which they were recorded.
    """

    def __init__(self, results: Sequence[Any]) -> None:
        self._cut: list[tuple[Tensor, Tensor]] = []
        self.results = map_tensors(self._leaf, list(results))

    def _leaf(self, t: Tensor, _: str) -> Tensor:
        if not t.requires_grad:
            return t
        leaf = t.detach().requires_grad_()
        self._cut.append((t, leaf))
        return leaf

    def backward(self) -> None:
        """Add the gradients of what lies before the cut."""
        reached = [(t, leaf.grad) for t, leaf in self._cut if leaf.grad is not None]
        if reached:
            torch.autograd.backward([t for t, _ in reached], [g for _, g in reached])


def find_prefix(
    network: nn.Module, axis: MemberAxis, trees: Sequence[Mapping[str, Any]]
) -> Prefix | None:
    """Trace a network in evaluation mode on two batches of different size.

    Args:
        network: the converted network.
        axis: its member axis.
        trees: the same inputs with 2 and with 3 rows; results whose dimension 0 follows are those
            with a batch.

    Returns:
        None where there is nothing to share: no module with a matrix of weights, other than an
        embedding, finishes before the members part; or where that differs between the batches.
    """
    traces = [_trace(network, axis, tree) for tree in trees]
    if any(t is None for t in traces):
        return None
    (calls, end, small), (again, other_end, large) = traces  # type: ignore[misc]
    if calls != again or end is not other_end:
        return None
    batched = [
        frozenset(p for p in a if len(a[p]) and a[p][:1] == (2,) and b.get(p, ())[:1] == (3,))
        for a, b in zip(small, large, strict=True)
    ]
    prefix = Prefix(calls, end, batched, axis)
    if not prefix.depth:
        return None
    names = {m: n for n, m in network.named_modules()}
    prefix.names = [names[m] for m in calls]
    return prefix


def _trace(
    network: nn.Module, axis: MemberAxis, tree: Mapping[str, Any]
) -> tuple[list[nn.Module], nn.Module, list[dict[str, tuple[int, ...]]]] | None:
    """Outermost modules that finish before the members part, what parts them, results' shapes."""
    finished: list[tuple[nn.Module, dict[str, tuple[int, ...]]]] = []
    started: list[int] = []
    end: list[nn.Module] = []

    def enter(module: nn.Module, _: Any) -> None:
        if isinstance(module, (SigmaNorm, MemberHeads)):
            end.append(module)
            raise _Reached
        started.append(len(finished))

    def leave(module: nn.Module, _: Any, result: Any) -> None:
        del finished[started.pop() :]  # what it called is a part of it
        shapes: dict[str, tuple[int, ...]] = {}
        map_tensors(lambda t, path: shapes.setdefault(path, tuple(t.shape)), result)
        finished.append((module, shapes))

    handles = []
    for module in network.modules():
        handles.append(module.register_forward_pre_hook(enter, prepend=True))
        handles.append(module.register_forward_hook(leave))
    args, kwargs = split_tree(tree)
    try:
        with axis.sharing():
            network(*args, **kwargs)
    except _Reached:
        return [m for m, _ in finished], end[0], [s for _, s in finished]
    except Exception:
        return None  # what the network cannot do on such a batch is for its own call to say
    finally:
        for handle in handles:
            handle.remove()
    return None


def _computes(module: nn.Module) -> bool:
    """Whether a module has a matrix of weights to multiply by."""
    return not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and any(
        p.dim() > 1 for p in module.parameters(recurse=False)
    )


def _repeated(result: Any, batched: frozenset[str], members: int) -> Any:
    if members == 1:
        return result

    def repeat(t: Tensor, path: str) -> Tensor:
        return torch.cat([t] * members) if path in batched else t

    return map_tensors(repeat, result)


def _replay(module: nn.Module, queue: Iterator[Any]) -> Any:
    """A ``forward`` that gives the queue's items, one a call, then computes again.

    Hooks have seen the recorded call; they do not see this one.
    """
    forward, used_up = module.forward, object()
    hooks = {key: vars(module)[key] for key in HOOKS}

    def replay(*args: Any, **kwargs: Any) -> Any:
        item = next(queue, used_up)
        if item is not used_up:
            return item
        with _attributes(module, hooks | {"forward": forward}):
            return module(*args, **kwargs)

    return replay


@contextmanager
def _attributes(module: nn.Module, values: Mapping[str, Any]) -> Iterator[None]:
    """Set entries of a module's ``__dict__`` for a while, past ``__setattr__``."""
    own = vars(module)
    before = {key: own[key] for key in values if key in own}
    own.update(values)
    try:
        yield
    finally:
        for key in values:
            del own[key]
        own.update(before)


def _random_states(devices: Sequence[int] | range | tuple[()]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.cuda.get_rng_state(d) for d in devices)]
