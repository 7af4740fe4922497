r"""Normalisation of folded members by PyTorch's own kernels, which scale and shift as they go.

.. math:: y_m = s_m \odot \mathrm{norm}_m(x_m) + b_m

:func:`each` calls a kernel per member and joins the results. :func:`batch_norm` writes them side by
side into one tensor instead, without a copy of the batch; the numbers, gradients and buffers are
those of :func:`batch_norm_reference`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_MANY = 2**15  # values per member from which a kernel each beats broadcasting

State = tuple[Tensor | None, Tensor | None, Tensor, Tensor | None]
"""Running mean and variance (k, C) or None, scale (k, C), and shift (k or 1, C) or None."""


def batch_norm(
    x: Tensor, state: State, training: bool, factors: Sequence[float], eps: float
) -> Tensor:
    """Normalise x (k·B, C, …), member-major, by the statistics of each member: the shape of x.

    ``training`` normalises by the statistics of the batch rather than by the running ones, which it
    updates in place: the batch has the weights ``factors`` (k) in the members' averages.
    """
    mean, var, scale, shift = state
    k = scale.shape[0]
    if k == 1 or not writes_in_place(x):
        return batch_norm_reference(x, state, training, factors, eps)
    if shift is not None and shift.shape[0] != k:
        shift = shift.expand(k, -1)
    x = x.contiguous(memory_format=_format(x))
    return _BatchNorm.apply(x, scale, shift, mean, var, training, tuple(factors), eps)


def batch_norm_reference(
    x: Tensor, state: State, training: bool, factors: Sequence[float], eps: float
) -> Tensor:
    """As :func:`batch_norm`, from one ``F.batch_norm`` per member."""
    mean, var, scale, shift = state
    means, variances = (_shares(t, scale.shape[0]) for t in (mean, var))

    def norm(i: int, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.batch_norm(rows, means[i], variances[i], weight, bias, training, factors[i], eps)

    return each(norm, x, scale, shift)


def each(
    norm: Callable[[int, Tensor, Tensor, Tensor | None], Tensor],
    x: Tensor,
    scale: Tensor,
    shift: Tensor | None,
) -> Tensor:
    """Apply ``norm(i, rows, weight, bias)`` to the i-th member's rows of x (k·B, …), and join.

    Scales are (k, *S), shifts (k, *S), or (1, *S) for all members, or None.
    """
    k = scale.shape[0]
    shared = zip(blocks(x, k), _shares(scale, k), _shares(shift, k), strict=True)
    parts = [norm(i, rows, weight, bias) for i, (rows, weight, bias) in enumerate(shared)]
    return torch.cat(parts) if k > 1 else parts[0]


def blocks(x: Tensor, k: int) -> tuple[Tensor, ...]:
    """Each member's rows (B, …) of x (k·B, …), as views."""
    return x.unflatten(0, (k, x.shape[0] // k)).unbind(0) if k > 1 else (x,)


def _shares(t: Tensor | None, k: int) -> Sequence[Any]:
    """What each of k members has of t (k, …), or of t (1, …) that all share, or of None."""
    if t is None:
        return [None] * k
    return t.unbind(0) if t.shape[0] == k else [t[0]] * k


def writes_in_place(x: Tensor) -> bool:
    """Whether kernels that write into a given tensor are used: eagerly, on a plain CPU tensor.

    Compilers and function transforms do not understand them; other devices have their own.
    """
    return x.device.type == "cpu" and type(x) is Tensor and is_eager()


def scales_in_kernel(x: Tensor, scale: Tensor) -> bool:
    """Whether one kernel per member normalises and scales; else all are scaled by broadcasting.

    Compilers fuse broadcasting, and for few values it is no slower. Kernels take scales of x's
    dtype; those of the CPU take float32 beside half precision too.
    """
    if not is_eager():  # asked first, for sizes may be symbols there
        return False
    mixed = x.device.type == "cpu" and x.element_size() == 2 and scale.dtype == torch.float32
    return is_large(x, scale.shape[0]) and (x.dtype == scale.dtype or mixed)


def is_large(x: Tensor, k: int) -> bool:
    """Whether a kernel for each of k members is worth its call; for one it always is."""
    return k == 1 or x.numel() >= k * _MANY


def is_eager() -> bool:
    """Whether operations run as they are called: no compiler, tracer or function transform."""
    return not (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()  # type: ignore[attr-defined]
        or torch._C._are_functorch_transforms_active()
    )


class _BatchNorm(torch.autograd.Function):
    """See :func:`batch_norm`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, shift: Tensor | None, *rest: Any) -> Tensor:
        mean, var, training, factors, eps = rest
        k = scale.shape[0]
        y = torch.empty_like(x)
        saved = scale.new_empty((2, k, scale.shape[1] if training else 0))
        for i, (rows, out) in enumerate(zip(blocks(x, k), blocks(y, k), strict=True)):
            own = [None if t is None else t[i] for t in (scale, shift, mean, var)]
            to = {"out": out, "save_mean": saved[0, i], "save_invstd": saved[1, i]}
            torch.ops.aten.native_batch_norm.out(rows, *own, training, factors[i], eps, **to)
        # Under training the kernels need the batch's statistics, else the running ones.
        kept = (None, None) if training else (mean, var)
        ctx.save_for_backward(x, scale, shift, saved, *kept)
        ctx.training, ctx.eps = training, eps
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, scale, _, saved, *running = ctx.saved_tensors
        k = scale.shape[0]
        wanted = list(ctx.needs_input_grad[:3])
        if torch.is_grad_enabled():  # under create_graph
            return *_gradients(ctx, grad, wanted), *[None] * 5
        grad = grad.contiguous(memory_format=_format(x))
        likes = zip((x, scale, scale), wanted, strict=True)
        found = [torch.empty_like(like) if w else None for like, w in likes]
        for i, (rows, above) in enumerate(zip(blocks(x, k), blocks(grad, k), strict=True)):
            own = [None if t is None else t[i] for t in (scale, *running, *saved)]
            parts = torch.ops.aten.native_batch_norm_backward(
                above, rows, *own, ctx.training, ctx.eps, wanted
            )
            for whole, part in zip(found, parts, strict=True):
                if whole is not None:
                    size = len(whole) // k
                    whole[i * size : (i + 1) * size] = part
        return *found, *[None] * 5


def _gradients(ctx: Any, grad: Tensor, wanted: Sequence[bool]) -> list[Tensor | None]:
    """Gradients of x, scale and shift that can be differentiated again."""
    x, scale, shift, _, mean, var = ctx.saved_tensors
    factors = [0.0] * scale.shape[0]
    y = batch_norm_reference(x, (mean, var, scale, shift), ctx.training, factors, ctx.eps)
    inputs = [t for t, w in zip((x, scale, shift), wanted, strict=True) if w]
    found = iter(torch.autograd.grad(y, inputs, grad, create_graph=True))
    return [next(found) if w else None for w in wanted]


def _format(x: Tensor) -> torch.memory_format:
    """The memory format that x has, for kernels that know two."""
    for dims, form in ((4, torch.channels_last), (5, torch.channels_last_3d)):
        if x.dim() == dims and x.is_contiguous(memory_format=form) and not x.is_contiguous():
            return form
    return torch.contiguous_format
