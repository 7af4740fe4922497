"""From a network to an ensemble: what is kept, what is replaced, what is refused and how."""

from __future__ import annotations

import copy
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.networks import (
    Encoder,
    Nested,
    Pictures,
    Tied,
    Words,
    dense,
    randomise,
    snapshot,
    unchanged,
)
from tests.oracles.norms import member_networks
from torch import nn

import sigmanens as sn
from sigmanens.errors import (
    ConversionError,
)
from sigmanens.norms import MemberBatchNorm, SigmaNorm

NORMS = (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


# -- what is replaced --------------------------------------------------------------------------


@pytest.mark.case("C1")
@pytest.mark.parametrize("in_place", [False, True])
def test_every_norm_of_a_nested_network_is_replaced(in_place: bool) -> None:
    base = randomise(Nested())
    count = sum(isinstance(m, NORMS) for m in base.modules())
    x = torch.randn(6, 4)
    expected = base.eval()(x)
    ens = (sn.convert_ if in_place else sn.convert)(base, 3)
    assert count == 11
    assert len(ens.report.converted) == count
    assert sum(isinstance(m, SigmaNorm) for m in ens.network.modules()) == count
    assert not any(type(m) in NORMS for m in ens.network.modules())
    assert (ens.network is base) is in_place
    torch.testing.assert_close(ens(x)[1], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.case("C7")
def test_the_base_is_bit_identical_afterwards() -> None:
    base = randomise(Nested()).train()
    base.stem[0].weight.requires_grad_(False)
    base.blocks[0].eval()
    x = torch.randn(6, 4)
    before, output = snapshot(base), copy.deepcopy(base)(x)
    ens = sn.convert(base, 3)
    ens(x).sum().backward()
    with torch.no_grad():
        for p in ens.parameters():
            p.add_(1.0)
    assert unchanged(base, before)
    assert all(p.grad is None for p in base.parameters())
    assert torch.equal(base(x), output)


@pytest.mark.case("C8")
def test_modes_and_requires_grad_are_kept_module_by_module() -> None:
    base = randomise(Pictures()).train()
    base.bn1.eval()
    base.fc.eval()
    base.conv1.weight.requires_grad_(False)
    base.fc.bias.requires_grad_(False)
    ens = sn.convert(base, 2, head="copy")
    net = ens.network
    assert [net.training, net.bn1.training, net.bn2.training, net.fc.training] == [
        True, False, True, False,
    ]  # fmt: skip
    assert not net.fc.heads[1].training
    assert ens.training
    assert not sn.convert(base.eval(), 2).training
    assert not net.conv1.weight.requires_grad
    assert net.conv2.weight.requires_grad
    assert not net.fc.heads[0].bias.requires_grad
    assert net.fc.heads[0].weight.requires_grad
    assert net.bn1.scale_logit.requires_grad
    assert not net.bn1.carrier.requires_grad


@pytest.mark.case("C12")
def test_pretrained_tensors_are_identical_except_in_norms_and_heads() -> None:
    base = randomise(Pictures().to(memory_format=torch.channels_last))
    ens = sn.convert(base, 2)
    own = dict(ens.network.named_parameters())
    for name in ("conv1.weight", "conv2.weight"):
        assert torch.equal(own[name], base.get_parameter(name))
        assert own[name].stride() == base.get_parameter(name).stride()
        assert own[name].dtype == base.get_parameter(name).dtype
    for m in range(2):
        assert torch.equal(own[f"fc.heads.{m}.weight"], base.fc.weight)
        assert torch.equal(ens.network.bn1.running_var[m], base.bn1.running_var)
    assert ens.network.bn2.num_batches_tracked.tolist() == [7, 7]


def test_hooks_of_norms_keep_working() -> None:
    base = randomise(dense()).eval()
    calls: list[str] = []
    handles = [
        base[1].register_forward_hook(lambda m, a, y: calls.append("after")),
        base[1].register_forward_hook(
            lambda m, a, k, y: calls.append(f"kw {sorted(k)}"), with_kwargs=True
        ),
        base[1].register_forward_pre_hook(lambda m, a: calls.append("before")),
        base[4].register_full_backward_hook(lambda m, i, o: calls.append("backward")),
    ]
    ens = sn.convert_(base, 2)
    ens(torch.randn(4, 4)).sum().backward()
    assert calls[-4:] == ["before", "after", "kw []", "backward"]
    calls.clear()
    ens.member(0)(torch.randn(4, 4))
    assert calls == ["before", "after", "kw []"]
    for handle in handles:
        handle.remove()
    calls.clear()
    ens(torch.randn(4, 4)).sum().backward()
    assert calls == []


@pytest.mark.parametrize("batch_norm", [True, False], ids=["batch", "layer"])
@pytest.mark.parametrize("layers", [None, "^first$", ["layers.0"]], ids=["all", "regex", "list"])
def test_tied_norms_stay_tied(batch_norm: bool, layers: Any) -> None:
    base = randomise(Tied(batch_norm)).eval()
    ens = sn.convert(base, 3, layers=layers)
    net = ens.network
    assert isinstance(net.first, SigmaNorm)
    assert net.first is net.again
    assert net.first is net.layers[0]
    assert set(ens.report.converted) >= {"first", "again", "layers.0"}
    assert len(ens.sigma_norms()) == (2 if layers is None else 1)
    assert "tied to 'first'" in str(ens.report)
    x = torch.randn(5, 4)
    torch.testing.assert_close(ens(x)[0], base(x), rtol=1e-5, atol=1e-5)
    single = ens.member(1)
    assert single.first is single.again
    torch.testing.assert_close(single(x), ens(x)[1])


@pytest.mark.case("C4")
def test_a_root_norm_is_converted_but_not_in_place() -> None:
    base = randomise(nn.LayerNorm(8)).eval()
    ens = sn.convert(base, members=3, head="shared")
    x = torch.randn(2, 8)
    assert ens(x).shape == (3, 2, 8)
    torch.testing.assert_close(ens(x)[1], base(x), rtol=1e-5, atol=1e-6)
    assert type(ens.member(1)) is nn.LayerNorm
    for head in ("shared", "auto"):
        with pytest.raises(ConversionError, match="a root LayerNorm cannot be replaced in place"):
            sn.convert_(base, 3, head=head)


@pytest.mark.parametrize("members", [1, 2, 5])
def test_number_of_members(members: int) -> None:
    ens = sn.convert(dense(), members)
    assert ens.num_members == members
    assert ens(torch.randn(3, 4)).shape == (members, 3, 3)
    assert {len(h.heads) for h in ens.member_heads().values()} == {members}


# -- which norms -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layers", "converted"),
    [
        (None, ["bn1", "bn2"]),
        ("bn1", ["bn1"]),
        ("2$", ["bn2"]),
        (["bn2"], ["bn2"]),
        (("bn1", "bn2"), ["bn1", "bn2"]),
        (lambda name, module: module.num_features == 8 and name.endswith("1"), ["bn1"]),
    ],
    ids=["all", "regex", "regex_end", "list", "tuple", "callable"],
)
def test_layers_selects_norms(layers: Any, converted: list[str]) -> None:
    ens = sn.convert(randomise(Pictures()), 2, layers=layers)
    assert ens.report.converted == converted
    assert list(ens.sigma_norms()) == converted
    for name in {"bn1", "bn2"} - set(converted):
        assert isinstance(ens.network.get_submodule(name), MemberBatchNorm)
        assert "not selected; statistics per member" in str(ens.report)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_kept_batch_norm_shares_its_affine_and_has_statistics_per_member(training: bool) -> None:
    base = randomise(Pictures())
    ens = sn.convert(base, 3, layers=["bn1"], head="copy").train(training)
    kept = ens.network.bn2
    assert {n for n, _ in kept.named_parameters()} == {"weight", "bias"}
    assert kept.weight.shape == (8,)
    with torch.no_grad():  # members whose features differ a lot before the kept norm
        ens.network.bn1.scale_logit.copy_(torch.tensor([-3.0, 0.0, 4.0])[:, None].expand(3, 8))
        kept.running_mean.normal_()
        kept.running_var.uniform_(0.5, 2)
    separate = member_networks(base, ens)
    x = torch.randn(5, 1, 8, 8)
    y = ens(x)
    expected = [net.train(training)(x) for net in separate]
    torch.testing.assert_close(y, torch.stack(expected), rtol=1e-5, atol=1e-5)
    for m, net in enumerate(separate):
        torch.testing.assert_close(kept.running_mean[m], net.bn2.running_mean)
        torch.testing.assert_close(kept.running_var[m], net.bn2.running_var)
        assert kept.num_batches_tracked[m] == net.bn2.num_batches_tracked
    y.square().sum().backward()
    for m in range(3):
        expected[m].square().sum().backward()
    for name in ("weight", "bias"):
        total = sum(getattr(net.bn2, name).grad for net in separate)
        torch.testing.assert_close(getattr(kept, name).grad, total, rtol=1e-4, atol=1e-4)
    single = ens.member(2)
    assert type(single.bn2) is nn.BatchNorm2d
    torch.testing.assert_close(single.eval()(x), ens.eval()(x)[2], rtol=1e-5, atol=1e-5)


def test_other_kept_norms_stay_what_they_were() -> None:
    base = randomise(dense(batch_norm=False))
    ens = sn.convert(base, 2, layers="1")
    assert type(ens.network[4]) is nn.LayerNorm
    assert ens.report.kept == ["4"]


# -- init and what trains ----------------------------------------------------------------------


def test_auto_takes_a_trained_network_for_trained_and_a_new_one_for_new() -> None:
    def counted(net: nn.Module) -> nn.Module:
        net.bn1.num_batches_tracked.fill_(1)
        return net

    def moved(net: nn.Module) -> nn.Module:
        net.bn2.running_mean.add_(0.1)
        return net

    def scaled(net: nn.Module) -> nn.Module:
        net.bn2.weight.data[0] = 0.5
        return net

    def zeroed(net: nn.Module) -> nn.Module:
        net.bn2.weight.data.zero_()  # as timm starts the last norm of each block
        return net

    for make, init, head, why in (
        (lambda n: n, "normal", "fresh", "untrained"),
        (zeroed, "normal", "fresh", "untrained"),
        (counted, "preserve", "copy", "counted batches"),
        (moved, "preserve", "copy", "moved statistics"),
        (scaled, "preserve", "copy", "trained affine"),
    ):
        ens = sn.convert(make(Pictures()), 2)
        assert (ens.plan.init, ens.plan.head) == (init, head)
        assert why in ens.report.init_reason


def test_train_members_trains_scales_shifts_and_heads_only() -> None:
    base = randomise(Words()).requires_grad_(False)
    ens = sn.convert(base, 2, train="members", shift=True)
    trained = {n for n, p in ens.network.named_parameters() if p.requires_grad}
    assert trained == {
        "norm1.scale_logit", "norm1.shift", "norm2.scale_logit", "norm2.shift",
        "classifier.heads.0.weight", "classifier.heads.0.bias",
        "classifier.heads.1.weight", "classifier.heads.1.bias",
    }  # fmt: skip
    assert not any(p.requires_grad for p in base.parameters())
    kept = sn.convert(randomise(Pictures()), 2, train="members", layers="bn1")
    assert not kept.network.bn2.weight.requires_grad
    everything = sn.convert(randomise(Words()), 2, train="all")
    assert all(p.requires_grad for p in everything.network.parameters())


@pytest.mark.case("T3")
@pytest.mark.parametrize("layers", [None, "bn1"])
def test_frozen_statistics_survive_train_and_thaw_when_told(layers: str | None) -> None:
    ens = sn.convert(randomise(Pictures()), 2, layers=layers)
    optimizer = torch.optim.SGD(sn.param_groups(ens, lr=0.01))
    assert ens.freeze_statistics() is ens
    before = {k: v.clone() for k, v in ens.named_buffers()}
    weight = ens.network.conv1.weight.clone()
    for _ in range(3):
        ens.eval().train()
        sn.EnsembleLoss()(ens(torch.randn(4, 1, 8, 8)), torch.tensor([0, 1, 2, 3])).backward()
        optimizer.step()
    assert not torch.equal(ens.network.conv1.weight, weight)
    assert all(torch.equal(v, before[k]) for k, v in ens.named_buffers())
    ens.freeze_statistics(False)
    ens(torch.randn(4, 1, 8, 8))
    changed = {k for k, v in ens.named_buffers() if not torch.equal(v, before[k])}
    assert len(changed) == 6
    assert all("running" in k or "tracked" in k for k in changed)


# -- the fast path of nn.TransformerEncoderLayer -----------------------------------------------


@pytest.mark.case("C10")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")  # the base's own fast path
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_layers_take_no_fused_path_past_the_scales(
    norm_first: bool, padded: bool
) -> None:
    base = randomise(Encoder(norm_first)).eval()
    x = torch.randn(4, 6, 8)
    padding = torch.arange(6)[None] >= torch.tensor([6, 5, 3, 6])[:, None] if padded else None
    with torch.no_grad():
        theirs = base(x, padding)
    ens = sn.convert(base, 3)
    torch.testing.assert_close(ens(x, padding)[2], theirs, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        for layer in ens.sigma_norms().values():
            layer.scale_logit.normal_()
    with_grad = ens(x, padding)
    separate = member_networks(base, ens)
    with torch.no_grad():
        torch.testing.assert_close(ens(x, padding), with_grad, rtol=1e-5, atol=1e-5)
    for m, net in enumerate(separate):  # with gradients there is no fused path
        torch.testing.assert_close(net(x, padding), with_grad[m], rtol=1e-4, atol=1e-4)
    single = ens.member(1)
    for own, original in zip(single.encoder.layers, base.encoder.layers, strict=True):
        assert own.activation_relu_or_gelu == original.activation_relu_or_gelu == 1
    assert single.encoder.use_nested_tensor == base.encoder.use_nested_tensor
    with torch.no_grad():
        torch.testing.assert_close(single(x, padding), with_grad[1], rtol=1e-4, atol=1e-4)


# -- the report --------------------------------------------------------------------------------


def test_the_report_says_what_became_of_each_norm() -> None:
    base = randomise(Pictures())
    parameters = sum(p.numel() for p in base.parameters())
    ens = sn.convert(base, 3, layers="bn2")
    text = str(ens.report)
    for line in (
        r"Pictures as an ensemble of 3 members: 1 norms converted, 1 kept, 0 refused",
        r"init +preserve \(auto: the base's norms have counted batches\)",
        r"scale +sigmoid; shift the base's, shared",
        r"heads +copy: fc",
        r"schedule +auto",
        r"bn1 +BatchNorm2d +8 +kept +not selected; statistics per member",
        r"bn2 +BatchNorm2d +8 +converted",
    ):
        assert re.search(line, text), line
    total = sum(p.numel() for p in ens.network.parameters())
    assert f"parameters  {total:,} ({parameters:,} in the base, × {total / parameters:.3f})" in text
    shared = sn.convert(dense(), 2, head="shared", init="normal", shift=True)
    assert "heads       shared: one for all" in str(shared.report)
    assert "init        normal (as asked)" in str(shared.report)
    assert "shift one per member" in str(shared.report)


@pytest.mark.parametrize("head", ["shared", "copy", "fresh"])
def test_training_members_only_trains_heads_that_are_the_members(head: str) -> None:
    base = randomise(dense())
    ens = sn.convert(base, 3, head=head, train="members", shift=True)
    before = {k: v.clone() for k, v in base.state_dict().items()}
    trained = {n for n, p in ens.network.named_parameters() if p.requires_grad}
    heads = {n for n in trained if n.startswith("6.")}
    assert trained - heads == {
        f"{norm}.{part}" for norm in ("1", "4") for part in ("scale_logit", "shift")
    }
    assert bool(heads) == (head != "shared")
    assert any("head is no member's own" in note for note in ens.report.notes) == (head == "shared")
    optimizer = torch.optim.SGD(sn.param_groups(ens, lr=0.1))
    sn.EnsembleLoss()(ens(torch.randn(6, 4)), torch.arange(6) % 3).backward()
    optimizer.step()
    shared = ens.network.state_dict()
    for key in before.keys() & shared.keys():
        assert torch.equal(shared[key], before[key]) or "running" in key or "tracked" in key
    assert ("6.weight" in shared) == (head == "shared")


def test_a_configuration_may_hold_anything_as_its_problem_type() -> None:
    base = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2))
    base.config = SimpleNamespace(problem_type=["a"])  # type: ignore[assignment]
    assert sn.convert(base, 2).task is None
