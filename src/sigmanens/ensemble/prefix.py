"""The shared prefix: what a network computes before the first layer that members have of their own.

All members are one network there. So it is computed once, on B rows: its random layers draw once,
and its norms take their statistics once. A trace finds the modules that have finished by then. A
pass records their results, and the members' passes are given them, repeated for as many members as
fold into the batch. What lies between modules (sums, masks, reshapes) is computed in every pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from sigmanens.conversion.heads import MemberHeads
from sigmanens.ensemble.inputs import Inputs
from sigmanens.ensemble.passing import run_pass
from sigmanens.ensemble.trial import difference, twin_of
from sigmanens.norms import RunningStatistics, SigmaNorm
from sigmanens.passes.context import MemberAxis, follow_backward
from sigmanens.passes.modes import evaluating
from sigmanens.passes.sharing import Reached, Recording, Replaying, make_shareable
from sigmanens.passes.trees import join, map_tensors
from sigmanens.seeding import device_of

__all__ = ["Leaves", "Prefix", "find_prefix"]

_SMALL = 2**18  # bytes


class Prefix:
    """The modules that run before the members part.

    Attributes:
        calls: the modules in the order in which they finish; one that is called twice is in twice.
        end: the first layer that the members have of their own.
        depth: number of layers with a matrix of weights among them.
        names: the modules' dotted names.
        draws_between: whether random numbers are drawn between these modules in training, by
            functions (``F.dropout``). A member's pass would draw others than the recorded ones.
    """

    def __init__(
        self, calls: Sequence[nn.Module], end: nn.Module, batched: Sequence[frozenset[str]]
    ) -> None:
        self.calls = list(calls)
        self.end = end
        self.batched = list(batched)  # of each call, the paths of results with a batch
        self.depth = sum(_computes(m) for c in dict.fromkeys(calls) for m in c.modules())
        norms = {m: None for c in calls for m in c.modules() if isinstance(m, RunningStatistics)}
        self._norms = list(norms)
        self.names: list[str] = []
        self.draws_between = False
        make_shareable([*self.calls, end])

    def is_worth_it(self, pass_bytes: int) -> bool:
        """Whether sharing saves more than it costs: not for one layer on a few small samples.

        Args:
            pass_bytes: bytes of the largest input of a norm, for one member; 0 if unknown.
        """
        return self.depth > 1 or pass_bytes == 0 or pass_bytes >= _SMALL

    def alike(self, start: int, stop: int) -> bool:
        """Whether members ``start … stop-1`` have the same running statistics in the prefix."""
        own = slice(start, stop)
        rows = [b[own] for n in self._norms for b in n.buffers(recurse=False) if b.dim()]
        differ = [(r != r[:1]).any() for r in rows if len(r) > 1]
        return not differ or not bool(torch.stack(differ).any())

    def record(
        self, network: nn.Module, axis: MemberAxis, inputs: Inputs, **changes: Any
    ) -> list[Any] | None:
        """Run the prefix on B samples for all members and return the modules' results.

        None if the network took another path than in the trace.
        """
        recording = Recording(self.calls, self.end)
        chosen = axis.chosen
        once = {"once": True, "prefix": recording, **changes}
        with axis.running(chosen.start, chosen.stop, **once) as made, suppress(Reached):
            inputs.call(network)
        if torch.is_grad_enabled():
            follow_backward(recording.results, made)
        return recording.results if recording.made == self.calls else None

    def replaying(self, results: Sequence[Any], members: int) -> Replaying:
        """What gives the recorded results to a pass of k members."""
        queues: dict[nn.Module, list[Any]] = {m: [] for m in self.calls}
        for module, result, batched in zip(self.calls, results, self.batched, strict=True):
            queues[module].append(_repeated(result, batched, members))
        return Replaying(queues)


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
    network: nn.Module, axis: MemberAxis, inputs: Inputs, folds: bool
) -> tuple[Prefix | None, str | None]:
    """Find the shared prefix on a copy of the network, and compare a prediction with and without.

    Args:
        network: the converted network.
        axis: its member axis.
        inputs: of a call.
        folds: whether members are ever folded.

    Returns:
        the prefix, or None; and what the report says about it: "" if nothing, None if these inputs
        cannot tell.
    """
    small = inputs.resized(2)
    with twin_of(network) as twin, evaluating(twin):
        found = _traced(twin, axis, [small, inputs.resized(3)])
        if found is None or not found.alike(0, axis.chosen.held):
            return None, ""
        try:
            problem = _problem(found, twin, axis, small, folds)
        except Exception:  # what the network cannot do on such a batch is for its own call to say
            return None, ""
        if problem is None:
            return None, None
        names = {m: n for n, m in twin.named_modules()}
        random = _draws_between(found, twin.train(), axis, small)
    where = names[found.end]
    if problem:
        return None, f"nothing is shared before '{where}': {problem}" if problem != "path" else ""
    listed = [names[m] for m in found.calls]
    modules = dict(network.named_modules(remove_duplicate=False))
    prefix = Prefix([modules[n] for n in listed], modules[where], found.batched)
    prefix.names, prefix.draws_between = listed, random
    shown = listed if len(listed) < 6 else [*listed[:4], "…", listed[-1]]
    return prefix, f"computed once for all members, before '{where}': {', '.join(shown)}"


def _problem(
    prefix: Prefix, network: nn.Module, axis: MemberAxis, inputs: Inputs, folds: bool
) -> str | None:
    """What goes wrong with the prefix: "" if nothing, None if these inputs cannot tell."""
    members = axis.chosen.held
    recorded = prefix.record(network, axis, inputs.copied(), perturbed=True)
    if recorded is None:
        return "path"
    before = _versions(recorded)
    expected, replayed = [], []
    for m in range(members):
        given = inputs.copied(), inputs.copied()
        expected.append(run_pass(network, axis, given[0], m, m + 1, perturbed=True))
        replay = prefix.replaying(recorded, 1)
        replayed.append(run_pass(network, axis, given[1], m, m + 1, perturbed=True, prefix=replay))
    wanted = join(expected, [1] * members)
    problem = difference(join(replayed, [1] * members), wanted)
    if _versions(recorded) != before:
        return "the network writes into a result of these layers"
    if problem == "" and folds:
        try:
            replay = prefix.replaying(recorded, members)
            folded = run_pass(
                network, axis, inputs.copied(), 0, members, perturbed=True, prefix=replay
            )
        except Exception as e:
            return (str(e) or type(e).__name__).splitlines()[0]
        problem = difference(folded, wanted)
    return problem


def _draws_between(prefix: Prefix, network: nn.Module, axis: MemberAxis, inputs: Inputs) -> bool:
    """Whether a copy of the network, in training mode, draws numbers between the modules."""
    recording = Recording(prefix.calls, prefix.end, watch=device_of(network))
    try:
        with suppress(Reached), axis.running(0, axis.chosen.held, once=True, prefix=recording):
            inputs.copied().call(network)
    except Exception:  # a batch too small for its statistics, say: it cannot tell
        return True
    return recording.draws_between


def _versions(results: Any) -> list[int]:
    """How often each tensor was written to; those made in inference mode do not know."""
    found: list[int] = []
    map_tensors(lambda t, _: found.append(0 if t.is_inference() else t._version), results)
    return found


Shapes = dict[str, tuple[int, ...]]


def _traced(network: nn.Module, axis: MemberAxis, trials: Sequence[Inputs]) -> Prefix | None:
    """Trace a network on two batches of different size.

    Args:
        network: a copy of the converted network, in evaluation mode.
        axis: its member axis.
        trials: the same inputs with 2 and with 3 rows; results whose dimension 0 follows are those
            with a batch.

    Returns:
        None where there is nothing to share: no module with a matrix of weights, other than an
        embedding, finishes before the members part; or where that differs between the batches.
    """
    traces = [_trace(network, axis, inputs) for inputs in trials]
    if any(t is None for t in traces):
        return None
    (calls, end, small), (again, other_end, large) = traces  # type: ignore[misc]
    if calls != again or end is not other_end:
        return None
    batched = [
        frozenset(p for p in a if len(a[p]) and a[p][:1] == (2,) and b.get(p, ())[:1] == (3,))
        for a, b in zip(small, large, strict=True)
    ]
    prefix = Prefix(calls, end, batched)
    return prefix if prefix.depth else None


def _trace(
    network: nn.Module, axis: MemberAxis, inputs: Inputs
) -> tuple[list[nn.Module], nn.Module, list[Shapes]] | None:
    """Outermost modules that finish before the members part, what parts them, results' shapes."""
    finished: list[tuple[nn.Module, Shapes]] = []
    started: list[int] = []
    end: list[nn.Module] = []

    def enter(module: nn.Module, _: Any) -> None:
        if isinstance(module, (SigmaNorm, MemberHeads)):
            end.append(module)
            raise Reached
        started.append(len(finished))

    def leave(module: nn.Module, _: Any, result: Any) -> None:
        del finished[started.pop() :]  # what it called is a part of it
        shapes: Shapes = {}
        map_tensors(lambda t, path: shapes.setdefault(path, tuple(t.shape)), result)
        finished.append((module, shapes))

    handles = []
    for module in network.modules():
        handles.append(module.register_forward_pre_hook(enter, prepend=True))
        handles.append(module.register_forward_hook(leave))
    try:
        with axis.running(0, axis.chosen.held, once=True):
            inputs.copied().call(network)
    except Reached:
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
