"""Precision, devices, copies and memory format of σNorm layers in networks."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tests.layers import CASES, folded_layer
from tests.networks import Pictures, dense, randomise
from tests.oracles.norms import (
    Copies,
    effective_scales,
    effective_shifts,
)
from torch import nn

import sigmanens as sn


@pytest.mark.case("T6")
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("batch_norm", [True, False], ids=["batch", "layer"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_scales_and_statistics_stay_in_float32_under_half(
    dtype: torch.dtype, batch_norm: bool, training: bool
) -> None:
    base = randomise(dense(batch_norm))
    ens = sn.convert(base, 3).train(training)
    x = torch.randn(16, 4)
    expected = copy.deepcopy(ens)(x)
    ens.to(dtype)
    got = ens(x.to(dtype))
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), expected, rtol=0.1, atol=0.1)
    for layer in ens.sigma_norms().values():
        floats = [t for t in (*layer.parameters(), *layer.buffers()) if t.is_floating_point()]
        assert {t.dtype for t in floats} == {torch.float32}
    assert ens.network[0].weight.dtype == dtype
    got.float().sum().backward()
    assert ens.network[1].scale_logit.grad.dtype == torch.float32


@pytest.mark.case("T6")
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("case", ["bn2d", "ln", "rms", "gn", "in2d", "channels_first_torchvision"])
def test_autocast_keeps_scales_and_statistics_in_float32(case: str, training: bool) -> None:
    make, shape = CASES[case]
    layer = folded_layer(make(), 2, shift="member").float().train(training)
    x = torch.randn(6, *shape)
    copies = Copies(make(), effective_scales(layer), effective_shifts(layer)).train(training)
    copies.set_statistics(layer)
    with torch.autocast("cpu", torch.bfloat16):
        half = (x @ torch.eye(shape[-1])) if len(shape) > 1 else x.bfloat16()
        assert half.dtype == torch.bfloat16
        got = layer(half)
        with torch.autocast("cpu", enabled=False):
            expected = copies(half.float())
    assert got.dtype in (torch.bfloat16, torch.float32)
    torch.testing.assert_close(got.float(), expected, rtol=2e-2, atol=2e-2)
    if layer.training and hasattr(layer, "running_var") and layer.running_var is not None:
        torch.testing.assert_close(
            layer.running_var, copies.statistics("running_var"), rtol=1e-3, atol=1e-4
        )
        assert layer.running_var.dtype == torch.float32
    got.float().sum().backward()
    assert layer.scale_logit.grad.dtype == torch.float32


@pytest.mark.case("T6")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_network_in_half_precision_gets_scales_in_float32(dtype: torch.dtype) -> None:
    base = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.LayerNorm(6), nn.Linear(6, 3)
    )
    base = randomise(base).to(dtype).eval()
    x = torch.randn(8, 4, dtype=dtype)
    for layers in (None, ["3"], ["1"]):  # the other norm is kept with its parameters in half
        ens = sn.convert(base, 2, layers=layers)
        assert {m.logit.dtype for m in ens.sigma_norms().values()} == {torch.float32}
        torch.testing.assert_close(ens(x)[1].float(), base(x).float(), rtol=0.05, atol=0.05)
        assert torch.isfinite(ens.train()(x)).all()
        assert ens.member(1)[3].weight.dtype == dtype


@pytest.mark.parametrize("affine", [True, False])
def test_double_precision_is_followed(affine: bool) -> None:
    def base() -> nn.Module:
        return nn.Sequential(
            nn.Conv1d(2, 4, 1),
            nn.BatchNorm1d(4, affine=affine),
            nn.InstanceNorm1d(4, affine=affine),
            nn.GroupNorm(2, 4, affine=affine),
            nn.LayerNorm(5, elementwise_affine=affine),
            nn.Flatten(),
            nn.Linear(20, 3),
        )

    x = torch.randn(4, 2, 5).double()
    for ens in (
        sn.convert(base().double(), 2, init="preserve"),
        sn.convert(base(), 2, init="preserve").double(),
        sn.convert(base().double(), 2, init="preserve", layers=r"[234]"),
    ):
        assert {m.logit.dtype for m in ens.sigma_norms().values()} == {torch.float64}
        assert ens(x).dtype == torch.float64
        torch.testing.assert_close(ens.eval().member(0)(x), ens(x)[0])


def test_device_moves_are_followed_and_float32_kept_on_the_way() -> None:
    ens = sn.convert(randomise(dense()), 2)
    ens.to("meta", torch.float16)
    for layer in ens.sigma_norms().values():
        for t in (*layer.parameters(), *layer.buffers()):
            assert t.device.type == "meta"
            assert not t.is_floating_point() or t.dtype == torch.float32
    assert ens.network[0].weight.dtype == torch.float16
    assert ens.temperature.device.type == "meta"
    assert ens.temperature.dtype == torch.float32


@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_have_one_member_axis_of_their_own(how: str) -> None:
    ens = sn.convert(randomise(Pictures()), 3)
    x = torch.randn(2, 1, 8, 8)
    twin = copy.deepcopy(ens) if how == "deepcopy" else pickle.loads(pickle.dumps(ens))
    axes = {id(m.axis) for m in twin.modules() if hasattr(m, "axis")}
    assert axes == {id(twin.axis)}
    assert twin.axis is not ens.axis
    assert torch.equal(twin.eval()(x), ens.eval()(x))
    with twin.axis.choosing(start=1, stop=2):
        assert twin(x).shape[0] == 1
        assert ens(x).shape[0] == 3
    assert torch.equal(twin.member(2)(x), ens.member(2)(x))


@pytest.mark.case("C8")
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_channels_last_is_kept_through_the_norms(training: bool) -> None:
    base = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3), nn.GroupNorm(2, 4),
        nn.Flatten(), nn.Linear(64, 3),
    ).to(memory_format=torch.channels_last)  # fmt: skip
    ens = sn.convert(base, 2).train(training)
    seen: dict[str, bool] = {}
    for name in ("0", "1", "2", "3"):
        ens.network[int(name)].register_forward_hook(
            lambda m, a, y, n=name: seen.update(
                {n: y.is_contiguous(memory_format=torch.channels_last)}
            )
        )
    ens(torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last))
    assert seen["0"]
    assert seen["1"]
    assert seen["2"]
    assert seen["3"]
    assert ens.network[2].weight.is_contiguous(memory_format=torch.channels_last)
