"""Norms fused with dropout and activation, synchronised norms, and networks that fold norms."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.networks import apart, randomise, snapshot, unchanged
from tests.oracles.norms import member_networks
from torch import Tensor, nn

import sigmanens as sn
from sigmanens.conversion.rules import KeepRule, is_norm, rule_for
from sigmanens.errors import ConversionError, InputError, NoNormError, UnsupportedNormError
from sigmanens.norms import MemberBatchNorm, MemberNorm, SigmaBatchNorm

timm_layers = pytest.importorskip("timm.layers")
norm_act = pytest.importorskip("timm.layers.norm_act")

WIDTH = 6
FIRST = ("BatchNormAct2d", "GroupNorm1Act", "LayerNormAct2d", "LayerNormAct2dFp32")
FIRST += ("RmsNormAct2d", "RmsNormAct2dFp32", "FrozenBatchNormAct2d", "SyncBatchNormAct")
LAST = ("LayerNormAct", "LayerNormActFp32", "RmsNormAct", "RmsNormActFp32")
BATCH = ("BatchNormAct2d", "SyncBatchNormAct")


class Picture(nn.Module):
    """(B, 2, 4, 4) → (B, 3): a convolution, one norm in either layout, a head."""

    def __init__(self, bn: nn.Module, last: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, WIDTH, 3)
        self.bn = bn
        self.fc = nn.Linear(WIDTH, 3)
        self.last = last

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x)
        h = self.bn(h.permute(0, 2, 3, 1)).permute(0, 3, 1, 2) if self.last else self.bn(h)
        return self.fc(h.mean((2, 3)))


def fused(kind: str, p: float = 0.5, **kwargs: Any) -> nn.Module:
    if kind == "SyncBatchNormAct":
        return norm_act.convert_sync_batchnorm(fused("BatchNormAct2d", p, **kwargs))
    kwargs = {"act_layer": nn.SiLU, "drop_layer": lambda: nn.Dropout(p)} | kwargs
    if kind == "GroupNormAct":
        kwargs["num_groups"] = 2
    return getattr(norm_act, kind)(WIDTH, **kwargs)


def network(kind: str, **kwargs: Any) -> nn.Module:
    return randomise(Picture(fused(kind, **kwargs), kind in LAST)).eval()


def pictures(rows: int = 5) -> Tensor:
    return torch.randn(rows, 2, 4, 4)


# -- fused norms -------------------------------------------------------------------------------


@pytest.mark.case("C2")
@pytest.mark.parametrize("kind", [*FIRST, "GroupNormAct", *LAST])
def test_fused_norms_keep_dropout_and_activation(kind: str) -> None:
    base, x = network(kind), pictures()
    before = snapshot(base)
    ens = sn.convert(base, 3, init="preserve", example=x)
    assert unchanged(base, before)
    assert ens.report.converted == ["bn"]
    torch.testing.assert_close(ens(x), base(x).expand(3, -1, -1), rtol=1e-5, atol=1e-5)
    assert bool((ens(x) - torch.stack([p(x) for p in plain_nets(base)])).abs().max() > 1e-2)
    apart(ens)
    for m, alone in enumerate(member_networks(base, ens)):
        single = ens.member(m)
        assert str(single) == str(base)
        assert single.state_dict().keys() == base.state_dict().keys()
        torch.testing.assert_close(ens(x)[m], alone(x), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(single(x), alone(x), rtol=1e-5, atol=1e-5)


def plain_nets(base: nn.Module) -> list[nn.Module]:
    """What a converter that loses the activation would make."""
    network = sn.convert(base, 1, init="preserve").member(0)
    network.bn.act = nn.Identity()
    return [network] * 3


@pytest.mark.parametrize("kind", BATCH)
def test_fused_batch_norms_train_as_separate_networks(kind: str) -> None:
    base = network(kind, p=0.0)
    ens = apart(sn.convert(base, 3, init="preserve")).train()
    alone = [n.train() for n in member_networks(base, ens)]
    for _ in range(2):
        x = pictures()
        torch.testing.assert_close(ens(x), torch.stack([n(x) for n in alone]), rtol=1e-5, atol=1e-5)
    for key in ("running_mean", "running_var", "num_batches_tracked"):
        expected = torch.stack([getattr(n.bn, key) for n in alone])
        torch.testing.assert_close(getattr(ens.network.bn, key), expected)


def test_dropout_and_activation_are_the_networks_own_modules() -> None:
    base = network("BatchNormAct2d")
    seen: list[str] = []
    base.bn.act.register_forward_hook(lambda *_: seen.append("act"))
    act, drop = base.bn.act, base.bn.drop
    ens = sn.convert_(base, 2, init="preserve")
    layer = ens.network.get_submodule("bn")
    assert isinstance(layer, SigmaBatchNorm)
    assert layer.act is act
    assert layer.drop is drop
    ens(pictures())
    assert seen
    seen.clear()
    single = ens.member(0)
    assert single.bn.act is not act
    single(pictures())
    assert seen == ["act"]


def test_dropout_masks_differ_between_members_and_follow_the_mode() -> None:
    base = network("BatchNormAct2d")
    base.bn.drop.p = 0.9
    ens = sn.convert(base, 2, init="preserve").train()
    x = pictures()
    assert not torch.allclose(ens(x)[0], ens(x)[1])
    ens.network.bn.drop.eval()
    torch.testing.assert_close(ens(x)[0], ens(x)[1], rtol=1e-5, atol=1e-5)
    single = ens.member(0)
    assert single.bn.training
    assert not single.bn.drop.training
    assert single.bn.drop.p == 0.9


def test_a_module_frozen_inside_a_fused_norm_stays_so() -> None:
    base = network("BatchNormAct2d").train()
    base.bn.drop.eval()
    layer = sn.convert(base, 2).network.bn
    assert layer.training
    assert not layer.drop.training


def test_parameters_of_an_activation_are_shared_trained_and_exported(tmp_path: Path) -> None:
    base = network("BatchNormAct2d", act_layer="prelu")
    ens = sn.convert(base, 2, init="preserve")
    assert [n for n, _ in ens.network.bn.named_parameters()] == ["scale_logit", "act.weight"]
    ens.network.bn.act.weight.data.fill_(-0.7)
    x = pictures()
    torch.testing.assert_close(ens.member(1)(x), ens(x)[1])
    ens.save_pretrained(tmp_path)
    assert torch.equal(sn.load(tmp_path, base=base)(x), ens(x))
    half = ens.half().network.bn
    assert half.scale_logit.dtype == torch.float32
    assert half.act.weight.dtype == torch.float16


@pytest.mark.parametrize("kind", BATCH)
def test_a_kept_fused_batch_norm_activates_and_has_statistics_per_member(kind: str) -> None:
    base = nn.Sequential(
        nn.Conv2d(2, WIDTH, 1), fused(kind, p=0.0), *network(kind, p=0.0).children()
    )
    base[2] = nn.Conv2d(WIDTH, WIDTH, 3)
    base.insert(4, nn.Flatten())
    base[5] = nn.Linear(WIDTH * 4, 3)
    randomise(base).eval()
    x = pictures()
    ens = sn.convert(base, 2, layers=["1"], init="preserve", example=x)
    assert isinstance(ens.network[3], MemberBatchNorm)
    assert ens.report.norms[1].reason == "not selected; statistics per member"
    late = sn.convert(base, 2, layers=["3"], init="preserve", example=x)
    if "Sync" not in kind:  # of which the plain one asks for a GPU
        assert str(late.network[1]) == str(base[1])
        assert late.report.norms[0].reason.endswith("the members part, one set of statistics")
    torch.testing.assert_close(late(x)[1], base(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ens(x)[1], base(x), rtol=1e-5, atol=1e-5)
    base.train()
    torch.testing.assert_close(ens.train()(x)[1], base(x), rtol=1e-5, atol=1e-5)
    assert str(ens.member(0)) == str(base)


def test_an_affine_free_fused_norm_gets_scales() -> None:
    for kind in ("BatchNormAct2d", "RmsNormAct2d", "LayerNormAct2dFp32"):
        base, x = network(kind, affine=False), pictures()
        ens = sn.convert(base, 2, init="preserve", example=x)
        torch.testing.assert_close(ens(x)[1], base(x), rtol=1e-5, atol=1e-5)
        apart(ens)
        torch.testing.assert_close(ens.member(1)(x), ens(x)[1], rtol=1e-5, atol=1e-5)


# -- refused and kept --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("EvoNorm2dB0", "normalisation and activation in one formula"),
        ("EvoNorm2dS0a", "normalisation and activation in one formula"),
        ("EvoNorm2dS2", "normalisation and activation in one formula"),
        ("FilterResponseNormTlu2d", "scale, shift and activation threshold as one"),
    ],
)
def test_norms_that_are_more_than_scaled_are_refused_with_the_reason(
    kind: str, message: str
) -> None:
    base = Picture(getattr(timm_layers, kind)(32), False)
    with pytest.raises(UnsupportedNormError, match=f"bn .*{message}"):
        sn.convert(base, 2)


def test_a_filter_response_norm_with_a_plain_activation_is_recognised() -> None:
    base = randomise(Picture(timm_layers.FilterResponseNormAct2d(WIDTH), False)).eval()
    x = pictures()
    ens = sn.convert(base, 3, init="preserve", example=x)
    assert ens.report.converted == ["bn"]
    apart(ens)
    for m, alone in enumerate(member_networks(base, ens)):
        torch.testing.assert_close(ens(x)[m], alone(x), rtol=1e-5, atol=1e-5)


def test_leaving_out_a_refused_norm_with_statistics_warns_that_members_mix() -> None:
    base = Picture(nn.Sequential(timm_layers.EvoNorm2dB0(WIDTH), nn.BatchNorm2d(WIDTH)), False)
    with pytest.warns(
        sn.SigmaNensWarning, match=r"1 kept norms \(first: 'bn.0'\) take their running"
    ):
        ens = sn.convert(base, 2, layers=["bn.1"])
    assert ens.report.norms[0].reason == "not selected; running statistics mix all members"


def test_in_place_batch_norm_is_refused_by_its_name() -> None:
    class InPlaceABN(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

    InPlaceABN.__module__, InPlaceABN.__qualname__ = "inplace_abn.abn", "InPlaceABN"
    assert is_norm(InPlaceABN())
    assert "recomputes its input from its output" in str(rule_for(InPlaceABN()))


def test_a_response_normalisation_is_kept_and_reported() -> None:
    grn = pytest.importorskip("timm.layers.grn").GlobalResponseNorm(WIDTH, channels_last=False)
    base = Picture(nn.Sequential(nn.BatchNorm2d(WIDTH), grn), False)
    randomise(base).eval()
    x = pictures()
    ens = sn.convert(base, 2, init="preserve", example=x)
    assert ens.report.kept == ["bn.1"]
    assert "a gate, no scale" in str(ens.report)
    assert isinstance(rule_for(grn), KeepRule)
    torch.testing.assert_close(ens(x)[1], base(x), rtol=1e-5, atol=1e-5)
    with pytest.raises(NoNormError, match="can be converted:\n  bn: a response normalisation"):
        sn.convert(Picture(grn, False), 2)


# -- synchronised ------------------------------------------------------------------------------


def synchronised(kept: bool) -> sn.SigmaEnsemble:
    base = nn.Sequential(
        nn.Linear(2, 4), nn.SyncBatchNorm(4), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
    )
    return sn.convert(randomise(base), 2, init="preserve", layers=["3"] if kept else None)


def test_sync_batch_norm_in_one_process_is_a_batch_norm_per_member() -> None:
    base = nn.Sequential(nn.Conv2d(2, 4, 1), nn.SyncBatchNorm(4), nn.Flatten(), nn.Linear(64, 2))
    base = randomise(base).eval()
    x = pictures()
    ens = sn.convert(base, 2, init="preserve", example=x)
    assert isinstance(ens.network[1], SigmaBatchNorm)
    assert ens.network[1].synchronised
    torch.testing.assert_close(ens(x)[1], base(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ens.train()(x)[1], base.train()(x), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ens.network[1].running_var[1], base[1].running_var)
    assert type(ens.member(1)[1]) is nn.SyncBatchNorm


@pytest.mark.parametrize("kept", [False, True], ids=["converted", "kept"])
def test_sync_batch_norm_of_two_processes_with_equal_batches(
    kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice the same rows: the same result, and a variance unbiased for twice the count."""
    x = torch.randn(4, 2)
    one = synchronised(kept).train()
    two, start = copy.deepcopy(one), one.network[1].running_var.clone()
    expected = one(x)
    monkeypatch.setattr("sigmanens.norms.synchronised.dist.is_initialized", lambda: True)
    monkeypatch.setattr("sigmanens.norms.synchronised.dist.get_world_size", lambda group: 2)
    monkeypatch.setattr("sigmanens.norms.synchronised.dist.all_reduce", lambda t, group: t.mul_(2))
    two.schedule = one.schedule = "folded"
    torch.testing.assert_close(two(x), expected, rtol=1e-5, atol=1e-5)
    ours, theirs = two.network[1], one.network[1]
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    seen = (theirs.running_var - 0.9 * start) / 0.1 * 3 / 4  # biased, of 4 rows
    torch.testing.assert_close(ours.running_var, 0.9 * start + 0.1 * seen * 8 / 7)
    assert two.eval()(x).shape == (2, 4, 2)
    assert two.freeze_statistics().train()(x).shape == (2, 4, 2)
    two.freeze_statistics(False)
    with two.axis.running(0, 2):
        assert ours(torch.randn(2, 4)).shape == (2, 4)  # a row of each member here and there
    monkeypatch.setattr("sigmanens.norms.synchronised.dist.all_reduce", lambda t, group: t)
    with (
        pytest.raises(InputError, match="1 value per channel and member on all ranks"),
        two.axis.running(0, 2),
    ):
        ours(torch.randn(2, 4))


# -- networks that fold norms into weights -----------------------------------------------------

BLOCKS: Mapping[str, Callable[[], tuple[nn.Module, str]]] = {
    "repvit": lambda: (timm_models("repvit").ConvNorm(2, WIDTH, 1), "fuse"),
    "levit": lambda: (timm_models("levit").ConvNorm(2, WIDTH), "fuse"),
    "repvgg": lambda: (timm_models("byobnet").RepVggBlock(2, WIDTH), "reparameterize"),
    "mobileone": lambda: (timm_models("byobnet").MobileOneBlock(2, WIDTH), "reparameterize"),
    "fastvit": lambda: (timm_models("fastvit").MobileOneBlock(2, WIDTH, 3), "reparameterize"),
    "repghost": lambda: (
        timm_models("repghost").RepGhostModule(2, WIDTH, 1, reparam=True),
        "switch_to_deploy",
    ),
}


def timm_models(name: str) -> Any:
    return pytest.importorskip(f"timm.models.{name}")


class Folding(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.fc = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.block(x).mean((2, 3)))


@pytest.mark.case("C11")
@pytest.mark.parametrize("members", [1, 2, WIDTH])
@pytest.mark.parametrize("name", BLOCKS)
def test_folding_norms_is_refused_until_a_member_has_left(name: str, members: int) -> None:
    block, method = BLOCKS[name]()
    base = randomise(Folding(block)).eval()
    x = pictures()
    ens = apart(sn.convert(base, members, init="preserve", example=x))
    expected = ens(x)
    with pytest.raises(ConversionError, match=rf"{method}\(\) of 'block' \(\w+\) would fold norms"):
        getattr(ens.network.block, method)()
    with pytest.raises(ConversionError, match="each member has scales of its own"):
        pytest.importorskip("timm.utils").reparameterize_model(ens)
    torch.testing.assert_close(ens(x), expected)
    with torch.no_grad():
        single = ens.member(members - 1)
        fused = getattr(single.block, method)()
        if isinstance(fused, nn.Module):
            single.block = fused
        assert not any(isinstance(m, MemberNorm) for m in single.modules())
        torch.testing.assert_close(single(x), expected[-1], rtol=1e-4, atol=1e-4)


def test_a_conversion_that_fails_leaves_folding_as_it_was() -> None:
    block, method = BLOCKS["mobileone"]()
    base = randomise(Folding(block)).eval()
    base.register_forward_hook(
        lambda m, _, y: y + float(isinstance(m.block.conv_scale.bn, MemberNorm))
    )
    with pytest.raises(ConversionError, match="does not reproduce the base"):
        sn.convert_(base, 2, init="preserve", example=pictures())
    assert method not in vars(base.block)
    getattr(base.block, method)()


@pytest.mark.case("C11")
def test_networks_that_ask_norms_for_their_device_keep_working() -> None:
    block = timm_models("swin_transformer").SwinTransformerBlock
    base = nn.Sequential(
        block(8, (8, 8), num_heads=2, window_size=4, shift_size=2),
        nn.Flatten(1, 2),
        nn.AdaptiveAvgPool2d((1, None)),
        nn.Flatten(),
        nn.Linear(8, 3),
    )
    randomise(base).eval()
    ens = sn.convert(base, 2, init="preserve", example=torch.randn(2, 8, 8, 8))
    for network in (base, ens.network):
        network[0].set_input_size((16, 16), (4, 4))  # reads norm1.weight.device and .dtype
    x = torch.randn(2, 16, 16, 8)
    torch.testing.assert_close(ens(x)[1], base(x), rtol=1e-5, atol=1e-5)
