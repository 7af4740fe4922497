"""Trials on copies: whether members may be folded into the batch of this network.

A trial runs a copy of the network on copies of the inputs. So it changes nothing: no parameter,
buffer, attribute, input or random state of the user's. It compares folded members with members one
by one, in the mode of the call. Where it fails, sees a difference, or sees the network branch on
what members computed, members run one by one.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from sigmanens.conversion.copying import deep_copy
from sigmanens.ensemble.inputs import Inputs
from sigmanens.ensemble.passing import run_pass
from sigmanens.norms import MemberNorm
from sigmanens.norms.member import HOOKS
from sigmanens.norms.scales import is_sharded
from sigmanens.passes.context import MemberAxis, MemberLayer
from sigmanens.passes.sharing import DRAWS
from sigmanens.passes.trees import join, map_tensors, tensors
from sigmanens.seeding import device_of, generator_states, own_random_state, seed_device

_ROWS = 4


@dataclass(frozen=True)
class Verdict:
    """What a trial found.

    ``problem`` is why members may not be folded; "" if they may; None if these inputs cannot tell,
    because the members answer alike on them (all zeros, say) or not with finite numbers.
    """

    problem: str | None
    row_bytes: int = 0  # of the largest input of a norm, for one sample of one member
    divisible: bool = True  # whether the samples may be run in parts


def examine(
    network: nn.Module, axis: MemberAxis, inputs: Inputs, mode: bool | None = None
) -> Verdict:
    """Compare folded members with members one by one, with scales that differ visibly.

    Random numbers are replaced by fixed ones, so that dropout does not count as a difference. A few
    samples are tried, all of them where the network cannot do few. ``mode`` is that of training
    (True) or evaluation (False), or the one the network is in.
    """
    verdict = _examine(network, axis, inputs.narrow(0, min(_ROWS, inputs.size)), mode)
    if verdict is None and inputs.size > _ROWS:
        verdict = _examine(network, axis, inputs, mode)
        verdict = None if verdict is None else replace(verdict, divisible=False)
    return Verdict(None) if verdict is None else verdict


def _examine(
    network: nn.Module, axis: MemberAxis, inputs: Inputs, mode: bool | None
) -> Verdict | None:
    """What a trial on all these inputs finds; with two kinds of fixed draws if it draws any."""
    device = device_of(network)
    draws = Draws(device)
    with torch.no_grad():
        verdict = _compare(network, axis, inputs, mode, draws)
        if not draws.drawn:
            return verdict
        for low in (False, True):
            verdict = _compare(network, axis, inputs, mode, Draws(device, low))
            if verdict is None or verdict.problem != "":
                break
    return verdict


def _compare(
    network: nn.Module, axis: MemberAxis, inputs: Inputs, mode: bool | None, draws: Draws
) -> Verdict | None:
    """One comparison; no verdict if already the members one by one fail."""
    members = axis.chosen.held
    changes: dict[str, Any] = {"perturbed": True, "memory": None}
    try:
        with twin_of(network, mode) as twin, _row_bytes(twin) as row_bytes:
            restore, reads = restorer(twin), _Reads()
            one_by_one = []
            for m in range(members):
                restore()
                with draws.start(twin), reads.watch(twin) if m == 0 else nullcontext():
                    one_by_one.append(run_pass(twin, axis, inputs.copied(), m, m + 1, **changes))
            expected = join(one_by_one, [1] * members)
    except Exception:  # what the network cannot do on such a batch is for its own call to say
        return None
    if reads.found:
        return Verdict(_READ, max(row_bytes), divisible=False)
    divisible = {len(t[0]) for _, t in tensors(expected) if t.dim() > 1} <= {inputs.size}
    problem: str | None
    try:
        with twin_of(network, mode) as twin, draws.start(twin):
            got = run_pass(twin, axis, inputs.copied(), 0, members, **changes)
        problem = difference(got, expected)
    except Exception as e:
        problem = (str(e) or type(e).__name__).splitlines()[0]
    return Verdict(problem, max(row_bytes), divisible)


_READ = (
    "the network reads a number that a member has computed into Python, such as `if h.mean() > 1`, "
    "by which one member would decide for all"
)


class _Reads(TorchDispatchMode):
    """Sees whether a pass reads numbers or truth values into Python that follow from members.

    They follow from the results of the members' layers. Whole numbers do not count: by these,
    networks find rows, such as those of an expert.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = False
        self._of_members: Any = WeakTensorKeyDictionary()

    @contextmanager
    def watch(self, network: nn.Module) -> Iterator[None]:
        """One pass of a copy of the network."""
        with ExitStack() as handles:
            for layer in (m for m in network.modules() if isinstance(m, MemberLayer)):
                hook = layer.register_forward_hook(lambda _, __, result: self._mark(result))
                handles.callback(hook.remove)
            handles.enter_context(self)
            yield

    def _mark(self, tree: Any) -> None:
        for _, t in tensors(tree):
            self._of_members[t] = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        follows = any(t in self._of_members for _, t in tensors((args, kwargs or {})))
        if follows and func is torch.ops.aten._local_scalar_dense.default:
            self.found |= args[0].dtype == torch.bool or args[0].is_floating_point()
        result = func(*args, **(kwargs or {}))
        if follows:
            self._mark(result)
        return result


@contextmanager
def _row_bytes(network: nn.Module) -> Iterator[list[int]]:
    """Bytes of the inputs of a network's norms in the block, for one sample of one member."""
    found = [0]

    def look(_: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor) and args[0].dim() and len(args[0]):
            found.append(args[0].numel() * args[0].element_size() // len(args[0]))

    with ExitStack() as handles:
        for norm in (m for m in network.modules() if isinstance(m, MemberNorm)):
            handles.callback(norm.register_forward_pre_hook(look).remove)
        yield found


@contextmanager
def twin_of(network: nn.Module, mode: bool | None = None) -> Iterator[nn.Module]:
    """A copy of a network for a trial, in this mode, without the user's hooks; draws are undone.

    A network that is divided over ranks is not copied: its buffers and modes are put back.
    """
    with own_random_state(device_of(network)), other_generators():
        if is_sharded(network):
            restore = restorer(network)
            try:
                yield network if mode in (None, network.training) else network.train(mode)
            finally:
                restore()
            return
        twin = deep_copy(network)
        if mode not in (None, twin.training):
            twin.train(mode)
        for module in twin.modules():
            for key in HOOKS:
                hooks = vars(module).get(key, {})
                for number, hook in list(hooks.items()):
                    if not computes(hook):
                        del hooks[number]
        yield twin


def computes(hook: Any) -> bool:
    """Whether a hook computes for the network (weight norm, pruning, PEFT) rather than looks on."""
    return _package(hook) in ("torch", "peft", "accelerate", "timm")


def has_onlookers(network: nn.Module) -> bool:
    """Whether there are forward hooks of the user's, which are to see all members in one call."""
    return any(
        not computes(hook) and _package(hook) != "sigmanens"
        for module in network.modules()
        for key in ("_forward_hooks", "_forward_pre_hooks")
        for hook in vars(module).get(key, {}).values()
    )


def _package(hook: Any) -> str:
    return str(getattr(hook, "__module__", "")).partition(".")[0]


def restorer(network: nn.Module) -> Callable[[], None]:
    """A function that gives all buffers the values, and all modules the modes, they have now."""
    values = [(t, t.clone()) for t in network.buffers()]
    modes = [(m, m.training) for m in network.modules()]

    @torch.no_grad()
    def restore() -> None:
        for t, value in values:
            t.copy_(value)
        for module, mode in modes:
            module.training = mode

    return restore


@contextmanager
def other_generators() -> Iterator[None]:
    """Put the generators of Python and numpy back."""
    numpy = sys.modules.get("numpy.random")
    states = random.getstate(), None if numpy is None else numpy.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        if numpy is not None:
            numpy.set_state(states[1])


# Arguments of operations that draw and compute in one, and the values under which they do not draw.
_CALM = {"dropout_p": 0.0, "training": False}


class Draws:
    """Starts every pass with the same seeds, and sees whether it has ``drawn`` random numbers.

    ``low`` says which of two values takes the place of them all, however many are drawn; a network
    may draw whether it mixes samples. Permutations reverse. None leaves what is drawn.
    """

    def __init__(self, device: torch.device, low: bool | None = None) -> None:
        self.drawn = False
        self._device = device
        self._seed = 1630 if low else 2152  # every generator's first number: below 0.1, above 0.9
        self._mode: Any = nullcontext() if low is None else _Fixing(0.1 if low else 0.9)

    @contextmanager
    def start(self, network: nn.Module) -> Iterator[None]:
        """One pass of a copy of the network with the same draws as the others."""
        numpy, own = sys.modules.get("numpy.random"), _own_generators(network)
        seed_device(self._device, self._seed)
        for generator in (random, *([] if numpy is None else [numpy]), *own):
            bits: Any = getattr(generator, "bit_generator", None)
            if hasattr(bits, "state"):  # numpy's newer kind
                bits.state = type(bits)(self._seed).state
            elif not isinstance(generator, torch.Generator):  # the mode takes torch's place
                generator.seed(self._seed)
        before = self._state(numpy)
        with self._mode:
            yield
        self.drawn |= bool(own) or self._state(numpy) != before

    def _state(self, numpy: Any) -> list[Any]:
        """The state of the generators of torch, Python and numpy."""
        theirs = [] if numpy is None else [(s.tobytes(), n) for _, s, n, *_ in [numpy.get_state()]]
        ours = [bytes(s.tolist()) for s in generator_states(self._device)]
        return [random.getstate(), *ours, *theirs]


def _own_generators(network: nn.Module) -> list[Any]:
    """Generators that the modules of a copy hold, also behind bound methods."""
    numpy = sys.modules.get("numpy.random")
    kinds = (random.Random, torch.Generator)
    kinds += () if numpy is None else (numpy.RandomState, numpy.Generator)
    held = [getattr(v, "__self__", v) for m in network.modules() for v in vars(m).values()]
    return [] if is_sharded(network) else [g for g in held if isinstance(g, kinds)]


class _Fixing(TorchDispatchMode):
    """Replaces what torch draws."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self._value = value

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        if "dropout" in name and "attention" not in name:
            x = args[0]
            return (x.clone(), torch.ones_like(x, dtype=torch.bool)) if "native" in name else x
        names = [argument.name for argument in func._schema.arguments]
        calm = {n: value for n, value in _CALM.items() if n in names}
        given = [calm.pop(n, x) for n, x in zip(names, args, strict=False)]
        result = func(*given, **kwargs | calm)
        if not name.startswith(DRAWS):
            return result
        if name.startswith("randperm"):
            return result.copy_(torch.arange(len(result), device=result.device).flip(0))
        return map_tensors(lambda t, _: self._fixed(t, name), result)

    def _fixed(self, t: Tensor, name: str) -> Tensor:
        if name.startswith("bernoulli"):
            return t.fill_(1)
        return t.fill_(self._value) if t.is_floating_point() else t.zero_()


def difference(got: Any, expected: Any) -> str | None:
    """How results of members differ: "" if they do not; None if these cannot tell members apart."""
    theirs = dict(tensors(got))
    largest_spread = 0.0
    for path, t in tensors(expected):
        where = f"result '{path}' " if path else ""
        if path not in theirs or theirs[path].shape != t.shape:
            other = tuple(theirs[path].shape) if path in theirs else "nothing"
            return f"{where}shape {other} instead of {tuple(t.shape)}"
        if t.numel() == 0 or not t.is_floating_point():
            continue
        size = float(t.abs().amax())
        if not 0 < size < float("inf"):
            continue
        gap = float((theirs[path] - t).abs().amax()) / size
        if not gap <= tolerance(t):
            return f"{where}results differ by {gap:.1e} of their size"
        largest_spread = max(largest_spread, float((t - t[:1]).abs().amax()) / size / tolerance(t))
    return "" if largest_spread > 2 else None


def tolerance(t: Tensor) -> float:
    """Difference that rounding may make, as a share of the largest value."""
    return 1e-3 if t.dtype in (torch.float32, torch.float64) else 5e-2
