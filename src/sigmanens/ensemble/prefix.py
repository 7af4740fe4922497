"""The shared prefix: what a network computes before the first layer that members have of their own.

It is one network: it runs once on B rows, its random layers draw once, and its norms are plain ones
with one set of statistics. Traces in evaluation and in training mode find, once for an ensemble,
the modules that have finished by then. A pass records their results, and the members' passes are
given them, repeated for as many members as fold into the batch. What lies between modules (sums,
masks, reshapes) is computed in every pass, with the random numbers of the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from sigmanens.conversion.build import plain_within
from sigmanens.ensemble.inputs import Inputs
from sigmanens.ensemble.passing import run_pass
from sigmanens.ensemble.trial import Draws, difference, other_generators, restorer, twin_of
from sigmanens.norms import MemberNorm, SigmaNorm
from sigmanens.passes.context import MemberAxis, MemberLayer, Reached, follow_backward
from sigmanens.passes.sharing import Dims, Recorded, Replaying, Shareable, in_function
from sigmanens.passes.trees import join, map_tensors, tensors
from sigmanens.seeding import device_of, own_random_state


@dataclass(frozen=True)
class Prefix:
    """The modules that run before the members part, by name, and what is known of their calls.

    ``end`` is the first layer that the members have of their own. ``changes`` are the modes (of
    training: True) in which each run differs, by random numbers or statistics, and ``between``
    those in which numbers are drawn outside of these modules.
    """

    modules: Mapping[str, tuple[Dims, Dims, bool]]
    end: str
    changes: frozenset[bool] = frozenset({True})
    between: frozenset[bool] = frozenset({True})

    def put_into(self, network: nn.Module, axis: MemberAxis) -> None:
        """Let passes of the axis answer the calls of these modules."""
        modules = dict(network.named_modules(remove_duplicate=False))
        for name, known in self.modules.items():
            modules[name].__dict__["_call_impl"] = Shareable(modules[name], axis, *known)

    def record(self, network: nn.Module, axis: MemberAxis, inputs: Inputs) -> Recorded:
        """What the prefix gives for B samples."""
        recorded, start = Recorded(inputs.size), axis.chosen.start
        once = axis.running(start, start + 1, once=True, prefix=recorded)
        keeping = recorded if network.training in self.between else nullcontext()
        with suppress(Reached), once as made, keeping:
            inputs.call(network)
        if torch.is_grad_enabled():
            follow_backward(recorded.results, replace(made, prefix=None))
        return recorded

    def __str__(self) -> str:
        names = list(self.modules)
        shown = names if len(names) < 6 else [*names[:4], "…", names[-1]]
        return f"computed once for all members, before '{self.end}': {', '.join(shown)}"


class Leaves:
    """What was ``recorded``, if anything, cut from its graph for backward passes of each member.

    Each member's backward pass adds to the gradients at the cut; :meth:`backward` takes the sum on
    through the prefix, once.
    """

    def __init__(self, recorded: Recorded | None) -> None:
        self._cut: list[tuple[Tensor, Tensor]] = []
        self.recorded = recorded and recorded.having(map_tensors(self._leaf, recorded.results))

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
    network: nn.Module, axis: MemberAxis, inputs: Inputs, folds: bool, sure: bool
) -> tuple[Prefix | None, str | None]:
    """Find the shared prefix on copies of the network, and compare results with and without.

    ``folds`` says whether members are ever folded, ``sure`` whether it is known that there is one.
    Returns the prefix, or None, and what the report says about it: "" if nothing, None if these
    inputs cannot tell.
    """
    small, traces = inputs.resized(2), dict[bool, tuple[list[_Call], list[_Call]]]()
    for mode in (False, True):
        with twin_of(network, mode) as twin, torch.no_grad():
            calls, others = (_trace(twin, axis, given) for given in (small, inputs.resized(3)))
        if calls and others:  # else it is for the network's own call to say what is wrong
            traces[mode] = calls, others
    if not traces:
        return None, None
    if any([c.name for c in a] != [c.name for c in b] for a, b in traces.values()):
        return None, "nothing is shared: which layers run depends on the number of samples"
    if any(c.inside for calls, _ in traces.values() for c in calls):
        return None, (
            "nothing is shared: layers run within an autograd Function, such as activation "
            "checkpointing with use_reentrant=True"
        )
    modules = dict(network.named_modules())
    shared, where = _before(modules, traces)
    within = {m for name in shared for m in modules[name].modules()}
    statistics = any(isinstance(m, (MemberNorm, _NormBase)) for m in within)
    untried = {True} - set(traces)
    changes, between = untried | ({True} if statistics else set()), untried
    problems: list[str | None] = []
    if not all(_alike(m) for m in within):
        problems.append("the members' statistics differ there already")
    for mode in traces if shared and not problems else ():
        with twin_of(network, mode) as twin, torch.no_grad():
            plain_within(twin, shared)
            prefix = Prefix(shared, where, between=frozenset({mode}))
            prefix.put_into(twin, axis)
            problem, drawn, gaps = _try(prefix, twin, axis, small, folds and not mode)
        problems.append(problem)
        changes |= {mode} if drawn else set()
        between |= {mode} if gaps else set()
    if not shared or not (changes or any(map(_computes, within))):
        return None, ""
    if any(problems):
        return None, f"nothing is shared before '{where}': {next(filter(None, problems))}"
    prefix = Prefix(shared, where, frozenset(changes), frozenset(between))
    return (prefix, str(prefix)) if sure or "" in problems else (None, None)


def _before(
    modules: Mapping[str, nn.Module], traces: Mapping[bool, tuple[list[_Call], list[_Call]]]
) -> tuple[dict[str, tuple[Dims, Dims, bool]], str]:
    """Outermost modules that finish before the members part, and the layer at which that begins."""
    own = {n for n, m in modules.items() if isinstance(m, MemberLayer) and not _may_be_plain(m)}
    while True:  # a kept norm that also runs in the members part is the members' own
        firsts = {
            m: [i for i, c in enumerate(a) if c.name in own][:1] for m, (a, _) in traces.items()
        }
        if not all(firsts.values()):
            return {}, ""
        ends = {mode: first[0] for mode, first in firsts.items()}
        later = {c.name for mode, (a, _) in traces.items() for c in a[ends[mode] :]}
        late = {n for n in later - own if isinstance(modules[n], MemberLayer)}
        if not late:
            break
        own |= late
    shared: dict[str, tuple[Dims, Dims, bool]] = {}
    for mode, (calls, others) in traces.items():
        for call, other in zip(calls[: ends[mode]], others, strict=False):
            outer = call.outer
            if call.left <= ends[mode] and outer is not None and outer.left > ends[mode]:
                given, made = _moving(call.given, other.given), _moving(call.made, other.made)
                if call.name in shared:
                    given, made = (
                        {**shared[call.name][0], **given},
                        {**shared[call.name][1], **made},
                    )
                shared[call.name] = given, made, call.name in later
    mode, (calls, _) = next(iter(traces.items()))
    return shared, calls[ends[mode]].name


def _may_be_plain(layer: nn.Module) -> bool:
    """Whether a layer is a kept norm that could have one set of statistics.

    The plain norm of synchronised statistics asks for a GPU.
    """
    kept = isinstance(layer, MemberNorm) and not isinstance(layer, SigmaNorm)
    apart = getattr(layer, "synchronised", False) and device_of(layer).type == "cpu"
    return kept and not apart


def _alike(module: nn.Module) -> bool:
    """Whether a norm has the same statistics for all members."""
    rows = module.buffers(recurse=False) if isinstance(module, MemberNorm) else ()
    return not any(bool((t != t[:1]).any()) for t in rows if t.dim())


def _try(
    prefix: Prefix, network: nn.Module, axis: MemberAxis, inputs: Inputs, folds: bool
) -> tuple[str | None, bool, bool]:
    """What goes wrong with the prefix: "" if nothing, None if these inputs cannot tell.

    And whether random numbers are drawn in it, and whether outside of its modules.
    """
    device, members = device_of(network), min(axis.chosen.held, 2)
    draws, again, restore = Draws(device), Draws(device), restorer(network)

    def run(start: int, stop: int, recorded: Recorded | None) -> Any:
        given, changes = inputs.copied(), dict[str, Any](perturbed=True, memory=None)
        if recorded is None:
            restore()
            with Draws(device).start(network):
                return run_pass(network, axis, given, start, stop, **changes)
        with own_random_state(device), other_generators(), Replaying(recorded, stop - start) as r:
            return run_pass(network, axis, given, start, stop, prefix=r, **changes)

    def joined(recorded: Recorded | None) -> Any:
        return join([run(m, m + 1, recorded) for m in range(members)], [1] * members)

    try:
        wanted = joined(None)
    except Exception:  # what the network cannot do on such a batch is for its own call to say
        return None, True, True
    known = [t for _, t in tensors(wanted) if t.is_floating_point() and t.numel()]
    if not any(0 < float(t.abs().amax()) < float("inf") for t in known):
        return None, True, True
    restore()
    try:
        with draws.start(network):
            recorded = prefix.record(network, axis, inputs.copied())
        # How often each tensor was written to; those made in inference mode do not know.
        known = [t for _, t in tensors(recorded.results) if not t.is_inference()]
        versions = [t._version for t in known]
        problem = difference(joined(recorded), wanted)
        if [t._version for t in known] != versions:
            problem = "the network writes into a result of these layers"
        if not problem and folds:
            problem = difference(run(0, members, recorded), wanted)
        replayed = Replaying(recorded, 1)
        part = axis.running(0, 1, once=True, prefix=replayed)
        with own_random_state(device), again.start(network), suppress(Reached), part, replayed:
            inputs.copied().call(network)
        if again.drawn:
            problem = "random numbers are drawn between these layers past torch's own generators"
    except Exception as e:
        return (str(e) or type(e).__name__).splitlines()[0], True, True
    return problem or "", draws.drawn, bool(recorded.drawn)


@dataclass
class _Call:
    """One call of a module in a trace.

    ``outer`` is the call that made it, ``inside`` whether an autograd Function did, ``left`` the
    number of calls that had begun at its end; ``given`` and ``made`` are the shapes of its
    arguments and results.
    """

    name: str
    outer: _Call | None
    given: dict[str, torch.Size]
    inside: bool = False
    left: int = 0
    made: dict[str, torch.Size] = field(default_factory=dict)


def _trace(network: nn.Module, axis: MemberAxis, inputs: Inputs) -> list[_Call] | None:
    """The calls of all modules in the order in which they begin; None if the network fails."""
    names = {m: n for n, m in network.named_modules()}
    calls: list[_Call] = []
    open_calls: list[_Call] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        shapes = {path: t.shape for path, t in tensors((args, kwargs))}
        outer = open_calls[-1] if open_calls else None
        call = _Call(names[module], outer, shapes, in_function())
        calls.append(call)
        open_calls.append(call)

    def leave(module: nn.Module, _: Any, result: Any) -> None:
        call = open_calls.pop()
        call.left, call.made = len(calls), {path: t.shape for path, t in tensors(result)}

    with ExitStack() as handles:
        for module in network.modules():
            before = module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True)
            handles.callback(before.remove)
            handles.callback(module.register_forward_hook(leave).remove)
        try:
            with Draws(device_of(network), low=False).start(network):  # on the same path each time
                run_pass(network, axis, inputs.copied(), 0, 1, memory=None)
        except Exception:
            return None
    return calls


def _moving(small: Mapping[str, torch.Size], large: Mapping[str, torch.Size]) -> dict[str, int]:
    """The one dimension of each tensor that grows with the batch from 2 to 3 samples."""
    found: dict[str, int] = {}
    for path, shape in small.items():
        sizes = enumerate(zip(shape, large.get(path, ()), strict=False))
        grown = [d for d, (a, b) in sizes if a != b and 3 * a == 2 * b]
        if len(grown) == 1:
            found[path] = grown[0]
    return found


def _computes(module: nn.Module) -> bool:
    """Whether a module has a matrix of weights to multiply by."""
    return not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and any(
        p.dim() > 1 for p in module.parameters(recurse=False)
    )
