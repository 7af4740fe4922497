"""Batch normalisation that writes members side by side equals one ``F.batch_norm`` per member."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sigmanens.norms import kernels as memberwise

SHAPES = {"2d": (4,), "3d": (4, 5), "4d": (4, 3, 2), "5d": (4, 2, 3, 2)}


def arguments(
    k: int, size: int, shape: tuple[int, ...], shift: str, dtype: torch.dtype
) -> dict[str, Any]:
    wide = torch.promote_types(dtype, torch.float32)
    c = shape[0]
    shifts = {"none": None, "shared": (1, c), "member": (k, c)}[shift]
    return {
        "x": torch.randn(k * size, *shape, dtype=dtype).mul_(3).add_(1),
        "mean": torch.randn(k, c, dtype=wide),
        "var": torch.rand(k, c, dtype=wide) + 0.5,
        "scale": torch.randn(k, c, dtype=wide),
        "shift": None if shifts is None else torch.randn(shifts, dtype=wide),
        "factors": [0.1 * (i + 1) for i in range(k)],
        "eps": 1e-5,
    }


def call(
    fn: Any, x: Tensor, mean: Any, var: Any, scale: Tensor, shift: Any = None, **rest: Any
) -> Tensor:
    """Result of ``batch_norm``, or of its reference, on arguments by name."""
    found: Tensor = fn(x, (mean, var, scale, shift), **rest)
    return found


def run(fn: Any, given: dict[str, Any], training: bool, weights: Tensor) -> dict[str, Tensor]:
    """Result, gradients and buffers of a function on copies of its arguments."""
    own = {k: v.clone() if isinstance(v, Tensor) else v for k, v in given.items()}
    leaves = {n: own[n].requires_grad_() for n in ("x", "scale", "shift") if own[n] is not None}
    y = call(fn, **own, training=training)
    (y * weights).sum().backward()
    found = {"y": y.detach(), "mean": own["mean"], "var": own["var"]}
    return found | {f"d{n}": t.grad for n, t in leaves.items()}


@settings(max_examples=60)
@given(
    k=st.integers(1, 4),
    size=st.integers(2, 5),
    shape=st.sampled_from(sorted(SHAPES)),
    shift=st.sampled_from(["none", "shared", "member"]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    training=st.booleans(),
    form=st.sampled_from(["contiguous", "channels last", "strided"]),
)
def test_the_fast_path_equals_the_reference(
    k: int, size: int, shape: str, shift: str, dtype: torch.dtype, training: bool, form: str
) -> None:
    given = arguments(k, size, SHAPES[shape], shift, dtype)
    x = given["x"]
    if form == "channels last" and x.dim() in (4, 5):
        last = torch.channels_last if x.dim() == 4 else torch.channels_last_3d
        given["x"] = x.contiguous(memory_format=last)
    elif form == "strided":
        given["x"] = torch.stack([x, x], -1)[..., 0]
    weights = torch.randn_like(x)
    fast = run(memberwise.batch_norm, given, training, weights)
    slow = run(memberwise.batch_norm_reference, given, training, weights)
    tolerance = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}[dtype]
    for name, expected in slow.items():
        bound = tolerance * max(1.0, float(expected.abs().max()))
        assert fast[name].dtype == expected.dtype
        torch.testing.assert_close(fast[name], expected, rtol=0, atol=bound)


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_the_memory_format_is_kept_and_nothing_is_copied_on_the_way(form: Any) -> None:
    given = arguments(3, 4, (4, 3, 2), "shared", torch.float32)
    given["x"] = given["x"].contiguous(memory_format=form)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        y = call(memberwise.batch_norm, **given, training=True)
    assert y.is_contiguous(memory_format=form)
    called = {e.key for e in seen.key_averages()}
    assert "aten::native_batch_norm" in called
    assert not called & {"aten::cat", "aten::copy_", "aten::clone"}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("shift", ["none", "member"])
def test_gradients_can_be_differentiated_again(training: bool, shift: str) -> None:
    given = arguments(2, 4, (3,), shift, torch.float64)
    leaves = [given.pop(n) for n in ("x", "scale", "shift")]
    leaves = [t.requires_grad_() if t is not None else None for t in leaves]

    def fn(x: Tensor, scale: Tensor, shift: Tensor | None = None) -> Tensor:
        own = {"x": x, "scale": scale, "shift": shift}
        return call(memberwise.batch_norm, **own, training=training, **given)

    inputs = [t for t in leaves if t is not None]
    assert torch.autograd.gradcheck(fn, inputs)
    assert torch.autograd.gradgradcheck(fn, inputs)


def test_members_do_not_see_each_other() -> None:
    given = arguments(3, 4, (4, 3, 2), "member", torch.float32)
    before = call(memberwise.batch_norm, **given, training=True)
    given["x"][4:8] *= 100
    after = call(memberwise.batch_norm, **given, training=True)
    assert torch.equal(before[:4], after[:4])
    assert torch.equal(before[8:], after[8:])


def test_function_transforms_and_compilers_get_what_they_understand() -> None:
    given = arguments(3, 4, (4,), "shared", torch.float32)
    x, scale = given.pop("x"), given.pop("scale")

    def loss(scale: Tensor) -> Tensor:
        y = call(memberwise.batch_norm, x=x, scale=scale, training=False, **given)
        return y.square().sum()

    leaf = scale.clone().requires_grad_()
    loss(leaf).backward()
    torch.testing.assert_close(torch.func.grad(loss)(scale), leaf.grad)
