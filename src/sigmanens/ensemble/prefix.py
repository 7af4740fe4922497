"""The shared prefix: what a network computes before the first layer that members have of their own.

All members are one network there. So it is computed once, on B rows: its random layers draw once,
and its norms take their statistics once. A trace finds the modules that have finished by then. A
pass records their results, and the members' passes are given them, repeated for as many members as
fold into the batch. What lies between modules (sums, masks, reshapes) is computed in every pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

import torch
from torch import Tensor, nn

from sigmanens.conversion.heads import MemberHeads
from sigmanens.ensemble.inputs import Inputs
from sigmanens.ensemble.passing import run_pass
from sigmanens.ensemble.trial import Draws, difference, twin_of
from sigmanens.norms import RunningStatistics, SigmaNorm
from sigmanens.passes.context import MemberAxis, follow_backward
from sigmanens.passes.modes import evaluating
from sigmanens.passes.sharing import Reached, Recording, Replaying, make_shareable
from sigmanens.passes.trees import join, map_tensors, tensors
from sigmanens.seeding import device_of

_SMALL = 2**18  # bytes


class Prefix:
    """The modules that run before the members part.

    ``calls`` are in the order in which they finish; a module that is called twice is in twice.
    ``end`` is the first layer that the members have of their own, ``batched`` are the paths of each
    call's results with a batch, and ``depth`` counts the layers with a matrix of weights.
    """

    def __init__(
        self, calls: Sequence[nn.Module], end: nn.Module, batched: Sequence[frozenset[str]]
    ) -> None:
        self.calls = list(calls)
        self.end = end
        self.batched = list(batched)
        self.depth = sum(_computes(m) for c in dict.fromkeys(calls) for m in c.modules())
        self._norms = {m for c in calls for m in c.modules() if isinstance(m, RunningStatistics)}
        # Whether functions (F.dropout) draw random numbers between these modules in training. A
        # member's pass would draw others than the recorded ones.
        self.draws_between = False
        make_shareable([*self.calls, end])

    def is_worth_it(self, pass_bytes: int) -> bool:
        """Whether sharing saves more than it costs: not for one layer on a few small samples.

        ``pass_bytes`` is that of the largest input of a norm, for one member; 0 if unknown.
        """
        return self.depth > 1 or pass_bytes == 0 or pass_bytes >= _SMALL

    def alike(self, members: slice) -> bool:
        """Whether these members have the same running statistics in the prefix."""
        rows = [b[members] for n in self._norms for b in n.buffers(recurse=False) if b.dim()]
        differ = [(r != r[:1]).any() for r in rows if len(r) > 1]
        return not differ or not bool(torch.stack(differ).any())

    def record(
        self, network: nn.Module, axis: MemberAxis, inputs: Inputs, **changes: Any
    ) -> list[Any] | None:
        """Results of the prefix on B samples for all members; None if it took another path."""
        recording = Recording(self.calls, self.end)
        chosen = axis.chosen
        once = {"once": True, "prefix": recording, **changes}
        with axis.running(chosen.start, chosen.stop, **once) as made, suppress(Reached):
            inputs.call(network)
        if torch.is_grad_enabled():
            follow_backward(recording.results, made)
        return recording.results if recording.made == self.calls else None

    def replaying(
        self, results: Sequence[Any], members: int, end: nn.Module | None = None
    ) -> Replaying:
        """What gives the recorded results to a pass of k members, which ends before ``end``."""
        queues: dict[nn.Module, list[Any]] = {m: [] for m in self.calls}
        for module, result, batched in zip(self.calls, results, self.batched, strict=True):

            def repeat(t: Tensor, path: str, batched: frozenset[str] = batched) -> Tensor:
                return torch.cat([t] * members) if path in batched else t

            queues[module].append(map_tensors(repeat, result) if members > 1 else result)
        return Replaying(queues, end)


class Leaves:
    """Recorded ``results``, if any, cut from their graph for backward passes member by member.

    Each member's backward pass adds to the gradients at the cut; :meth:`backward` takes the sum on
    through the prefix, once.
    """

    def __init__(self, results: list[Any] | None) -> None:
        self._cut: list[tuple[Tensor, Tensor]] = []
        self.results = map_tensors(self._leaf, results)

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

    ``folds`` says whether members are ever folded. Returns the prefix, or None, and what the report
    says about it: "" if nothing, None if these inputs cannot tell.
    """
    small = inputs.resized(2)
    with twin_of(network) as twin, evaluating(twin):
        found = _traced(twin, axis, [small, inputs.resized(3)])
        if found is None or not found.alike(slice(axis.chosen.held)):
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
    prefix.draws_between = random
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
    # How often each tensor was written to; those made in inference mode do not know.
    marked = [(t, t._version) for _, t in tensors(recorded) if not t.is_inference()]

    def run(start: int, stop: int, replay: bool = True) -> Any:
        replayed = prefix.replaying(recorded, stop - start) if replay else None
        given = inputs.copied()
        return run_pass(network, axis, given, start, stop, perturbed=True, prefix=replayed)

    wanted = join([run(m, m + 1, False) for m in range(members)], [1] * members)
    problem = difference(join([run(m, m + 1) for m in range(members)], [1] * members), wanted)
    if any(t._version != version for t, version in marked):
        return "the network writes into a result of these layers"
    if problem == "" and folds:
        try:
            return difference(run(0, members), wanted)
        except Exception as e:
            return (str(e) or type(e).__name__).splitlines()[0]
    return problem


def _draws_between(prefix: Prefix, network: nn.Module, axis: MemberAxis, inputs: Inputs) -> bool:
    """Whether a copy of the network, in training mode, draws numbers between the modules."""
    draws = Draws(device_of(network))
    try:
        recorded = prefix.record(network, axis, inputs.copied())
        if recorded is None:
            return True
        replayed = prefix.replaying(recorded, 1, prefix.end)
        once = axis.running(0, axis.chosen.held, once=True, prefix=replayed)
        with draws.start(network), suppress(Reached), once:
            inputs.copied().call(network)
    except Exception:  # a batch too small for its statistics, say: it cannot tell
        return True
    return draws.drawn


def _traced(network: nn.Module, axis: MemberAxis, trials: Sequence[Inputs]) -> Prefix | None:
    """Trace a network in evaluation mode on the same inputs with 2 and with 3 rows.

    Results whose dimension 0 follows are those with a batch. None where there is nothing to share:
    no module with a matrix of weights, other than an embedding, finishes before the members part;
    or where that differs between the batches.
    """
    traces = [_trace(network, axis, inputs) for inputs in trials]
    if traces[0] is None or traces[1] is None or traces[0][:2] != traces[1][:2]:
        return None
    (calls, end, small), (_, _, large) = traces[0], traces[1]
    batched = [
        frozenset(p for p in a if len(a[p]) and a[p][:1] == (2,) and b.get(p, ())[:1] == (3,))
        for a, b in zip(small, large, strict=True)
    ]
    prefix = Prefix(calls, end, batched)
    return prefix if prefix.depth else None


def _trace(
    network: nn.Module, axis: MemberAxis, inputs: Inputs
) -> tuple[list[nn.Module], nn.Module, list[dict[str, torch.Size]]] | None:
    """Outermost modules that finish before the members part, what parts them, results' shapes."""
    finished: list[tuple[nn.Module, dict[str, torch.Size]]] = []
    started: list[int] = []
    end: list[nn.Module] = []

    def enter(module: nn.Module, _: Any) -> None:
        if isinstance(module, (SigmaNorm, MemberHeads)):
            end.append(module)
            raise Reached
        started.append(len(finished))

    def leave(module: nn.Module, _: Any, result: Any) -> None:
        del finished[started.pop() :]  # what it called is a part of it
        finished.append((module, {path: t.shape for path, t in tensors(result)}))

    with ExitStack() as handles:
        for module in network.modules():
            handles.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
            handles.callback(module.register_forward_hook(leave).remove)
        try:
            with axis.running(0, axis.chosen.held, once=True):
                inputs.copied().call(network)
        except Reached:
            return [m for m, _ in finished], end[0], [s for _, s in finished]
        except Exception:
            pass  # what the network cannot do on such a batch is for its own call to say
    return None


def _computes(module: nn.Module) -> bool:
    """Whether a module has a matrix of weights to multiply by."""
    return not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and any(
        p.dim() > 1 for p in module.parameters(recurse=False)
    )
