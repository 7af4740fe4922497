"""σNorm layers against M separate copies of the plain norm: values, gradients, buffers."""

from __future__ import annotations

import copy
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.layers import CASES, folded_layer
from tests.oracles.norms import (
    STATISTICS,
    Copies,
    effective_scales,
    effective_shifts,
    gradient_of_logit,
)
from torch import Tensor, nn

from sigmanens.errors import InputError
from sigmanens.norms import MemberBatchNorm, SigmaNorm
from sigmanens.passes.context import MemberAxis


def rows_of(members: int, size: int, shape: tuple[int, ...]) -> Tensor:
    """Features (M·B, *shape) whose scale and mean differ a lot from member to member."""
    x = torch.randn(members, size, *shape, dtype=torch.float64)
    scale = torch.logspace(-1, 2, members, dtype=torch.float64)
    x = x * scale.view(-1, *(1,) * (len(shape) + 1)) + scale.view(-1, *(1,) * (len(shape) + 1)) / 3
    return x.flatten(0, 1).requires_grad_()


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


def compare(plain: nn.Module, layer: SigmaNorm, x: Tensor) -> None:
    """Value, gradients of input, scale and shift, and buffers of one pass."""
    copies = Copies(plain.double(), effective_scales(layer), effective_shifts(layer))
    copies.train(layer.training)
    copies.set_statistics(layer)
    twin = x.detach().clone().requires_grad_()
    got, expected = layer(x), copies(twin)
    upstream = torch.randn_like(expected)
    close(got, expected)
    got.backward(upstream)
    expected.backward(upstream)
    close(x.grad, twin.grad)
    close(layer.logit.grad, gradient_of_logit(layer, copies.scale_gradients()))
    if isinstance(layer.shift, nn.Parameter):
        close(layer.shift.grad, copies.shift_gradients())
    else:
        assert layer.shift is None or layer.shift.grad is None
    for key in STATISTICS:
        if getattr(copies.norms[0], key, None) is not None:
            close(getattr(layer, key).to(torch.float64), copies.statistics(key).to(torch.float64))


@pytest.mark.case("C13")
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", CASES)
def test_folded_layer_equals_separate_copies(case: str, training: bool) -> None:
    make, shape = CASES[case]
    for scale, shift in product(("sigmoid", "linear"), ("none", "shared", "member")):
        layer = folded_layer(make(), 3, scale, shift).train(training)
        compare(make(), layer, rows_of(3, 4, shape))


@pytest.mark.case("T7")
@pytest.mark.parametrize("case", ["bn2d", "bn_cumulative", "ln", "in2d_tracked", "gn"])
def test_several_steps_keep_the_buffers_of_separate_copies(case: str) -> None:
    make, shape = CASES[case]
    layer = folded_layer(make(), 2, shift="member", carried=False).train()
    copies = Copies(make().double(), effective_scales(layer), effective_shifts(layer)).train()
    copies.set_statistics(layer)
    for _ in range(3):
        x = rows_of(2, 5, shape)
        close(layer(x), copies(x))
    layer.eval()
    copies.eval()
    x = rows_of(2, 5, shape)
    close(layer(x), copies(x))
    if getattr(layer, "running_var", None) is not None:
        close(layer.running_var, copies.statistics("running_var"))


@settings(max_examples=40)
@given(
    case=st.sampled_from(["bn1d", "bn2d", "ln_tokens", "rms", "gn", "in1d", "wrapped_first"]),
    members=st.integers(1, 5),
    size=st.integers(1, 5),
    training=st.booleans(),
    shift=st.sampled_from(["none", "shared", "member"]),
)
def test_any_number_of_members_and_samples(
    case: str, members: int, size: int, training: bool, shift: str
) -> None:
    make, shape = CASES[case]
    layer = folded_layer(make(), members, shift=shift).train(training)
    if case == "bn1d" and training and size == 1:
        with pytest.raises(InputError, match="1 value per channel and member"):
            layer(rows_of(members, size, shape))
        return
    compare(make(), layer, rows_of(members, size, shape))


@settings(max_examples=15)
@given(channels=st.integers(1, 7), members=st.integers(1, 4))
def test_any_number_of_channels(channels: int, members: int) -> None:
    for make, shape in (
        (lambda: nn.BatchNorm2d(channels), (channels, 2, 2)),
        (lambda: nn.LayerNorm(channels), (3, channels)),
    ):
        compare(make(), folded_layer(make(), members), rows_of(members, 3, shape))


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", ["bn2d", "bn_cumulative", "ln", "rms", "gn", "in2d_tracked"])
def test_sequential_and_groups_equal_folded(case: str, training: bool) -> None:
    make, shape = CASES[case]
    folded = folded_layer(make(), 5, shift="member").train(training)
    x = rows_of(5, 3, shape)
    expected = None
    for group in (5, 1, 2, 4):
        layer = copy.deepcopy(folded)
        rows = x.detach().unflatten(0, (5, 3)).requires_grad_()
        outputs = []
        for start in range(0, 5, group):
            stop = min(start + group, 5)
            with layer.axis.choosing(start=start, stop=stop):
                outputs.append(layer(rows[start:stop].flatten(0, 1)))
        y = torch.cat(outputs)
        (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
        results = [y, rows.grad, layer.logit.grad, layer.shift.grad, *layer.buffers()]
        if expected is None:
            expected = results
        for a, b in zip(results, expected, strict=True):
            close(a.double(), b.double())


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", ["bn1d", "ln", "rms", "gn_flat", "in1d", "wrapped_first"])
def test_gradients_by_finite_differences(case: str, training: bool) -> None:
    make, shape = CASES[case]
    layer = folded_layer(make(), 2, shift="member").train(training)
    names = ["scale_logit", "shift"]
    start = [getattr(layer, n).detach().clone().requires_grad_() for n in names]
    statistics = {k: v.clone() for k, v in layer.named_buffers()}

    def function(x: Tensor, *values: Tensor) -> Tensor:
        state = dict(zip(names, values, strict=True)) | {
            k: v.clone() for k, v in statistics.items()
        }
        return torch.func.functional_call(layer, state, (x,))

    x = torch.randn(6, *shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(function, (x, *start))


@pytest.mark.case("T10")
def test_members_of_very_different_features_share_no_statistics() -> None:
    layer = folded_layer(nn.BatchNorm1d(4), 2, carried=False).train()
    quiet, loud = torch.randn(8, 4).double(), 1e4 * torch.randn(8, 4).double()
    alone = folded_layer(nn.BatchNorm1d(4), 2, carried=False).train()
    alone.load_state_dict(layer.state_dict())
    together = layer(torch.cat([quiet, loud]))
    other = alone(torch.cat([quiet, torch.zeros(8, 4).double()]))
    close(together[:8], other[:8])
    close(layer.running_var[0], alone.running_var[0])
    assert layer.running_var[1].min() > 1e5 * layer.running_var[0].max()


@pytest.mark.parametrize("frozen", [False, True])
def test_frozen_statistics_outlive_train_calls(frozen: bool) -> None:
    layer = folded_layer(nn.BatchNorm2d(4), 2)
    layer.freeze_statistics(frozen)
    before = {k: v.clone() for k, v in layer.named_buffers()}
    for _ in range(3):
        layer.train()
        layer(rows_of(2, 3, (4, 2, 2)))
    changed = {k for k, v in layer.named_buffers() if not torch.equal(v, before[k])}
    assert changed == (set() if frozen else set(STATISTICS))
    x = rows_of(2, 3, (4, 2, 2))
    output = layer.train()(x)
    assert torch.allclose(output, layer.eval()(x)) is frozen


def test_frozen_statistics_need_statistics() -> None:
    layer = folded_layer(nn.BatchNorm1d(4, track_running_stats=False), 2)
    layer.where = "body.norm"
    with pytest.raises(InputError, match=r"'body\.norm' has no running statistics"):
        layer.freeze_statistics()


# -- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("case", "shape", "message"),
    [
        ("bn2d", (4, 4), "expected 4-D with 4 channels in dimension 1"),
        ("bn1d", (4, 5, 4, 4), "expected 2-D or 3-D"),
        ("bn1d", (4, 3), r"got shape \(4, 3\); expected .* with 4 channels"),
        ("bn1d", (2, 4), "1 value per channel and member .* 2 members.*Use a larger batch"),
        ("in1d", (4, 4, 1), "one value per channel and sample"),
        ("ln", (5, 4), "got 5 rows in dimension 0, which 2 folded members do not divide"),
        ("bn1d", (5, 4), "got 5 rows in dimension 0, which 2 folded members do not divide"),
        ("channels_first_torchvision", (4, 3, 2, 2), "expected 4 channels in dimension 1"),
    ],
)
def test_errors_name_the_layer(case: str, shape: tuple[int, ...], message: str) -> None:
    layer = folded_layer(CASES[case][0](), 2)
    layer.where = "stage.2.norm"
    with pytest.raises(InputError, match=message) as error:
        layer(torch.randn(shape).double())
    assert "'stage.2.norm'" in str(error.value)


def test_code_that_reads_weight_and_bias_finds_them() -> None:
    layer = folded_layer(nn.LayerNorm(4), 3, shift="shared")
    close(layer.weight, effective_scales(layer))
    close(layer.bias.expand(3, 4), effective_shifts(layer))
    assert folded_layer(nn.LayerNorm(4), 3).bias is None


def test_kept_batch_norm_without_any_tensor() -> None:
    layer = MemberBatchNorm(
        nn.BatchNorm1d(4, affine=False, track_running_stats=False), MemberAxis(2)
    )
    x = rows_of(2, 5, (4,))
    expected = Copies(nn.BatchNorm1d(4), torch.ones(2, 4), None).double()(x)
    close(layer(x), expected)
    assert layer.state_dict() == {}


def test_a_layer_made_by_hand_has_no_plain_form() -> None:
    with pytest.raises(InputError, match="was not made by conversion"):
        folded_layer(nn.LayerNorm(4), 2).plain(slice(0, 1))


def test_printing_says_what_a_layer_holds() -> None:
    text = str(folded_layer(nn.LayerNorm(4), 3, "linear", "member"))
    assert "(4,), members=3, scale=linear, shift=member" in text
