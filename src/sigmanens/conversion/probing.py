r"""Probing: recognise the formula of a norm of an unknown class by running it.

A module follows the protocol if, for every weight :math:`w` and bias :math:`b` of shape S,

.. math:: y = \mathrm{tail}\bigl((w + o) \odot \mathrm{norm}(x) + b\bigr), \qquad o \in \{0, 1\},

sample by sample, and alike in training and evaluation. ``tail`` is its submodules in their order.
:func:`probe` runs a copy on random inputs with random weights.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Hashable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from sigmanens.norms.member import without_hooks
from sigmanens.norms.wrapped import SigmaWrappedNorm
from sigmanens.seeding import own_random_state, seed_device

_TOLERANCE = 1e-4
_ROWS = 3
_ROWS_DEPTH = 4
_FREE = (5, 4, 3, 2)  # sizes for the dimensions that are not scaled
_PLAIN = (bool, int, float, str, type(None), torch.dtype)
_OWN = ("inner", "scale_logit", "scale", "carrier", "offset", "shift", "axis", "where", "kind")

_Affine = tuple[Tensor | float, Tensor | float]  # weight and bias


@dataclass(frozen=True)
class Protocol:
    """How a norm computes, as a probe found it.

    Attributes:
        channels_last: True: the last dimensions are scaled; False: dimension 1 is.
        neutral: the weight that leaves the normalised input unchanged: 1 - o.
        tail: names of the submodules that are applied last.
    """

    channels_last: bool
    neutral: float
    tail: tuple[str, ...]


class _Deviation(Exception):
    """The reason why a module does not fit, and how many checks it passed before."""

    def __init__(self, depth: int, reason: str) -> None:
        super().__init__(reason)
        self.depth = depth


def probe(module: nn.Module) -> Protocol | str:
    """The protocol that a module follows, or the reason why it follows none, as a clause.

    The module has ``weight`` (*S) and maybe ``bias`` (*S), of any dtype. A weight of None counts as
    1 if there is a ``normalized_shape``. Module and random state stay as they are.
    """
    reason = _unfit(module)
    if reason:
        return reason
    tensors = [*module.parameters(), *module.buffers(), torch.empty(0)]
    device = tensors[0].device
    with (
        torch.no_grad(),
        own_random_state(device),
        torch.autocast(device.type, enabled=False),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        try:
            subject = _Subject(module, device)
        except Exception as e:
            return f"it cannot be copied ({_first_line(e)})"
        fits: dict[tuple[int, bool], Protocol] = {}
        best = _Deviation(-1, "")
        for shape, last in _shapes(subject.shape):
            try:
                fits[len(shape), last] = subject.examine(shape, last)
            except _Deviation as deviation:
                best = max(best, deviation, key=lambda d: d.depth)
    if best.depth >= _ROWS_DEPTH:  # right for some inputs, wrong for others
        return str(best)
    if any((rank, not last) in fits for rank, last in fits if rank > 2):
        return "it may scale the last dimension as well as dimension 1"
    findings = set(fits.values())
    if len({f.channels_last for f in findings}) > 1:  # 2-D inputs do not tell the two apart
        findings = {f for (rank, _), f in fits.items() if rank > 2} or {
            f for f in findings if f.channels_last
        }
    if len(findings) > 1:
        return "it scales another dimension for another number of dimensions"
    return findings.pop() if findings else str(best)


def settings(module: nn.Module) -> Hashable | None:
    """A key that is equal for norms that compute alike, so that one probe serves them all.

    None for a module with buffers, submodules or further parameters: their values may matter.
    """
    if module._buffers or module._modules or set(module._parameters) - {"weight", "bias"}:
        return None
    internal = vars(nn.Module()).keys() - {"training"}
    own = {k: v for k, v in vars(module).items() if k not in internal}
    if not all(map(_is_plain, own.values())):
        return None
    parameters = module._parameters.items()
    kinds = [(k, p if p is None else (p.shape, p.dtype, p.device)) for k, p in parameters]
    return type(module), repr((sorted(own.items()), kinds))


def _is_plain(value: object) -> bool:
    """Whether the ``repr`` of a value says all about it."""
    return isinstance(value, _PLAIN) or (isinstance(value, tuple) and all(map(_is_plain, value)))


def _unfit(module: nn.Module) -> str | None:
    """The reason why a module cannot follow the protocol, seen without running it."""
    bias = getattr(module, "bias", None)
    if isinstance(module, _NormBase):
        return "it keeps statistics of the batch"
    shape = _shape(module)
    if shape is None:
        return "it has no 'weight' of one value per channel"
    if torch.Size(shape).numel() < 2:
        return "its 'weight' has one value only, which does not tell the channels"
    if isinstance(bias, Tensor) and tuple(bias.shape) != shape:
        return f"its bias has shape {tuple(bias.shape)} and its weight {shape}"
    inputs = list(inspect.signature(module.forward).parameters.values())
    extra = [p.name for p in inputs[1:] if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if extra:
        return f"its forward takes further inputs ({', '.join(extra)})"
    taken = [n for n, _ in module.named_children() if hasattr(SigmaWrappedNorm, n) or n in _OWN]
    if taken:
        return f"its submodule '{taken[0]}' has a name that σNorm layers use"
    return None


def _shape(module: nn.Module) -> tuple[int, ...] | None:
    weight = getattr(module, "weight", None)
    if isinstance(weight, Tensor):
        return tuple(weight.shape) if weight.is_floating_point() and weight.dim() else None
    declared = getattr(module, "normalized_shape", None)
    return tuple(declared) if "weight" in module._parameters and declared else None


def _shapes(scaled: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], bool]]:
    """Input shapes to try, each with True if the scaled dimensions come last."""
    free = tuple(n for n in _FREE if n not in scaled)
    for count in range(3):  # (B, C) to (B, H, W, C)
        yield (_ROWS, *free[:count], *scaled), True
    for count in range(4 if len(scaled) == 1 else 0):  # (B, C) to (B, C, D, H, W)
        yield (_ROWS, *scaled, *free[:count]), False


class _Subject:
    """Two copies of a module in float32: the whole, and one without its submodules."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.whole = without_hooks(module).float().requires_grad_(False)
        shape = _shape(module)
        assert shape is not None
        self.tail = tuple(n for n, _ in self.whole.named_children())
        self.affine_free = self.whole.weight is None
        self.device = device
        if self.affine_free:
            ones = torch.ones(shape, device=device)
            self.whole.weight = nn.Parameter(ones, requires_grad=False)
        self.bare = copy.deepcopy(self.whole)
        for name in self.tail:
            setattr(self.bare, name, nn.Identity())
        self.shape = shape
        self.has_bias = isinstance(getattr(self.whole, "bias", None), Tensor)
        self.generator = torch.Generator().manual_seed(0)

    def examine(self, shape: tuple[int, ...], last: bool) -> Protocol:
        """The protocol for inputs of one shape; raises _Deviation."""
        x = self._draw(shape) * 1.5 + 0.3
        nothing = self.answer((0.0, 0.0), x)
        normalised = self.answer((1.0, 0.0), x) - nothing
        size = float(normalised.abs().amax())
        if not 0 < size < float("inf"):
            raise _Deviation(1, "its weight does not act on its output")
        offset = 0.0
        if not _close(nothing, torch.zeros(()), size):
            if not _close(nothing, normalised, size):
                raise _Deviation(2, "with a weight of 0 it answers more than its bias")
            offset = 1.0
        weight = self._draw(self.shape) * 3
        bias = self._draw(self.shape) if self.has_bias else torch.zeros_like(weight)
        y = self.answer((weight, bias), x)
        expected = _along(weight + offset, y, last) * normalised + _along(bias, y, last)
        if not _close(y, expected, 3 * size):
            where = "last dimension" if last else "dimension 1"
            raise _Deviation(3, f"its output is not weight ⊙ norm(x) + bias along the {where}")
        self._check(x, y, (weight, bias))
        if self.affine_free and offset:
            raise _Deviation(7, "without a weight it answers otherwise than with a weight of 1")
        return Protocol(last, 1.0 - offset, self.tail)

    def answer(self, affine: _Affine, x: Tensor, training: bool = False) -> Tensor:
        """Output of the module without its tail, of x's shape; raises _Deviation."""
        y = self._run(self.bare, affine, x, training)
        if y.shape != x.shape:
            raise _Deviation(0, f"it answers {tuple(x.shape)} with shape {tuple(y.shape)}")
        return y

    def _run(self, module: nn.Module, affine: _Affine, x: Tensor, training: bool) -> Tensor:
        module.train(training)
        try:
            module.weight.copy_(torch.as_tensor(affine[0]))  # type: ignore[operator]
            if self.has_bias:
                module.bias.copy_(torch.as_tensor(affine[1]))  # type: ignore[operator]
            y = module(x.clone())
        except Exception as e:
            raise _Deviation(0, f"it fails on {x.dim()}-D inputs ({_first_line(e)})") from e
        if not isinstance(y, Tensor):
            raise _Deviation(0, f"it answers with a {type(y).__name__}, not a tensor")
        return y.float()

    def _check(self, x: Tensor, y: Tensor, affine: _Affine) -> None:
        """Samples must not meet, training must change nothing, and the tail must come last."""
        size = float(y.abs().amax())
        others = x.clone()
        others[1:] = self._draw(tuple(others[1:].shape)) * 4 - 2
        if not all(_close(self.answer(affine, r)[:1], y[:1], size) for r in (others, x[:1])):
            raise _Deviation(_ROWS_DEPTH, "the output for a sample depends on the other samples")
        before = {n: b.clone() for n, b in self.bare.named_buffers()}
        if not _close(self.answer(affine, x, training=True), y, size):
            raise _Deviation(5, "it answers otherwise in training than in evaluation")
        for name, buffer in self.bare.named_buffers():
            if name not in ("weight", "bias") and not torch.equal(buffer, before[name]):
                raise _Deviation(5, f"a training pass changes its buffer '{name}'")
        for training in (False, True):
            seed_device(self.device, 0)  # the same dropout; `probe` puts the random state back
            whole = self._run(self.whole, affine, x, training)
            seed_device(self.device, 0)
            y = self.answer(affine, x, training)
            for name in self.tail:
                y = getattr(self.whole, name)(y)
            if whole.shape != y.shape or not _close(whole, y, float(y.abs().amax())):
                names = ", ".join(self.tail) or "nothing"
                raise _Deviation(6, f"after normalising it does more than {names}, in this order")

    def _draw(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self.generator).to(self.device)


def _along(t: Tensor, y: Tensor, last: bool) -> Tensor:
    """Reshape t (*S) to broadcast along the scaled dimensions of y."""
    return t if last else t.view(1, -1, *(1,) * (y.dim() - 2))


def _close(a: Tensor, b: Tensor, size: float) -> bool:
    return bool(((a - b.to(a.device)).abs() <= _TOLERANCE * size).all())


def _first_line(e: Exception) -> str:
    return f"{type(e).__name__}: {e}".splitlines()[0]
