"""Parameter groups and the check of an optimizer: scales fast, never decayed, none forgotten."""

from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import sigmanens as sn
from sigmanens import baselines
from sigmanens.errors import InputError, SigmaNensWarning
from sigmanens.norms import SigmaBatchNorm, SigmaNorm
from sigmanens.training.loss import EnsembleLoss


class Net(nn.Module):
    """A norm of each kind, an embedding, a tied weight and a multi-head attention."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layer_norm = nn.LayerNorm((3, 8))
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.batch_norm = nn.BatchNorm1d(8)
        self.group_norm = nn.GroupNorm(2, 8)
        self.instance_norm = nn.InstanceNorm1d(8, affine=True)
        self.rms_norm = nn.RMSNorm(8)
        self.tied = nn.Linear(8, 9, bias=False)
        self.tied.weight = self.words.weight
        self.back = nn.Linear(9, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, words: Tensor) -> Tensor:
        x = self.words(words)
        x = self.layer_norm(self.attention(x, x, x, need_weights=False)[0])
        x = self.instance_norm(self.group_norm(self.batch_norm(self.conv(x.transpose(1, 2)))))
        return self.head(self.back(self.tied(self.rms_norm(x.transpose(1, 2).mean(1)))))


def make(members: int = 3, **options: Any) -> sn.SigmaEnsemble:
    return sn.convert(Net(), members, **options)


def by_name(model: nn.Module, groups: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Group of each parameter by the parameter's name."""
    where = {id(p): g for g in groups for p in g["params"]}
    return {n: where[id(p)] for n, p in model.named_parameters() if id(p) in where}


OPTIONS = [
    {"init": "normal", "head": "fresh"},
    {"init": "normal", "head": "fresh", "shift": True},
    {"init": "preserve", "head": "copy"},
    {"init": "preserve", "head": "shared", "shift": True},
    {"init": "normal", "head": "copy", "train": "members"},
    {"init": "normal", "scale": "linear"},
    {"init": "normal", "layers": "layer_norm"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_trainable_parameter_is_in_one_group(options: dict[str, Any]) -> None:
    ensemble = make(**options)
    ensemble.network.get_parameter("conv.weight").requires_grad_(False)
    groups = sn.param_groups(ensemble, 0.1, 1e-2)
    ids = [id(p) for g in groups for p in g["params"]]
    assert len(ids) == len(set(ids))
    assert set(ids) == {id(p) for p in ensemble.parameters() if p.requires_grad}
    assert all(g["params"] for g in groups)


@pytest.mark.case("T4")
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_only_weights_are_decayed(options: dict[str, Any]) -> None:
    ensemble = make(**options)
    groups = by_name(ensemble, sn.param_groups(ensemble, 0.1, 1e-2))
    norms = {n for n, m in ensemble.named_modules() if isinstance(m, SigmaNorm) or "norm" in n}
    for name, group in groups.items():
        module, _, leaf = name.rpartition(".")
        parent = ensemble.get_submodule(module)
        weight = isinstance(parent, (nn.Linear, nn.Conv1d, nn.Embedding)) and leaf == "weight"
        weight = weight or leaf == "in_proj_weight"
        assert group["weight_decay"] == (1e-2 if weight else 0.0), name
        assert not (weight and module in norms)
    if options.get("train") != "members":
        assert groups["network.words.weight"]["name"] == "decay"  # also the tied weight


def test_norms_are_undecayed_by_class_even_with_several_dimensions() -> None:
    plain = Net()
    groups = by_name(plain, sn.param_groups(plain, 0.1, 1e-2))
    for name in ("layer_norm", "batch_norm", "group_norm", "instance_norm", "rms_norm"):
        assert groups[f"{name}.weight"]["name"] == "no_decay", name
    assert plain.layer_norm.weight.dim() == 2


def test_a_plain_network_has_no_scale_groups() -> None:
    plain = Net()
    groups = sn.param_groups(plain, 0.1, 5e-4)
    assert [(g["name"], g["lr"], g["weight_decay"]) for g in groups] == [
        ("decay", 0.1, 5e-4),
        ("no_decay", 0.1, 0.0),
    ]
    decayed = {n for n, g in by_name(plain, groups).items() if g["name"] == "decay"}
    assert decayed == {
        "words.weight",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "conv.weight",
        "back.weight",
        "head.weight",
    }


def test_scales_are_fast_by_the_kind_of_norm() -> None:
    ensemble = make(init="normal")
    groups = by_name(ensemble, sn.param_groups(ensemble, 0.02, 1e-2))
    rates = {n: groups[f"network.{n}.scale_logit"]["lr"] for n in ensemble.sigma_norms()}
    assert rates.pop("batch_norm") == pytest.approx(2.0)
    assert set(rates) == {"layer_norm", "group_norm", "instance_norm", "rms_norm"}
    assert list(rates.values()) == pytest.approx([0.2] * 4)
    fast = {n for n, g in groups.items() if g["lr"] > 0.02}
    assert fast == {n for n in groups if n.endswith("scale_logit")}


def test_members_shifts_learn_at_the_rate_of_biases() -> None:
    ensemble = make(init="normal", shift=True)
    groups = by_name(ensemble, sn.param_groups(ensemble, 0.02, 1e-2))
    shifts = [g for n, g in groups.items() if n.endswith(".shift")]
    assert len(shifts) == 5
    assert {(g["name"], g["lr"], g["weight_decay"]) for g in shifts} == {("no_decay", 0.02, 0.0)}


@pytest.mark.parametrize("factor", [0, 1, 3.5, np.float32(2)])
def test_one_factor_for_all_scales(factor: float) -> None:
    for options in ({"init": "normal"}, {"scale": "linear"}):
        ensemble = make(**options)
        groups = sn.param_groups(ensemble, 0.02, scale_lr_mult=factor)
        scales = [g for g in groups if g["name"].startswith("scales")]
        assert scales
        for group in scales:
            assert group["lr"] == pytest.approx(0.02 * float(factor))
            assert group["lr_mult"] == float(factor)
        others = [g for g in groups if not g["name"].startswith("scales")]
        assert {g["lr"] for g in others} == {0.02}


@pytest.mark.parametrize("options", [*OPTIONS, "heads_only", "lora"], ids=str)
def test_members_own_heads_have_a_rate_of_their_own_when_asked(options: Any) -> None:
    model: nn.Module
    if options == "heads_only":
        model = baselines.heads_only(Net(), 3)
    elif options == "lora":
        model = baselines.lora_ensemble(Net(), 3, targets=("back",))
    else:
        model = make(**options)
    shared = options not in ("heads_only", "lora") and options.get("head") == "shared"
    plain = by_name(model, sn.param_groups(model, 0.02, 1e-2))
    told = pytest.warns(SigmaNensWarning, match="share one head") if shared else nullcontext()
    with told:
        groups = by_name(model, sn.param_groups(model, 0.02, 1e-2, head_lr_mult=3.0))
    assert set(plain) == set(groups)
    heads = {n for n in groups if ".heads." in n}
    assert bool(heads) == (not shared)
    for name, group in groups.items():
        if name in heads:
            assert (group["lr"], group["lr_mult"]) == (pytest.approx(0.06), 3.0)
            assert group["name"] == "heads_" + plain[name]["name"]
        else:
            assert (group["name"], group["lr"]) == (plain[name]["name"], plain[name]["lr"])
        assert group["weight_decay"] == plain[name]["weight_decay"]


def test_the_number_of_members_gives_heads_the_step_they_would_have_alone() -> None:
    ensemble = make(init="normal", head="fresh").double()
    words, labels = torch.randint(9, (6, 3)), torch.randint(4, (6,))
    ensemble.eval()
    before = {n: p.detach().clone() for n, p in ensemble.named_parameters() if ".heads." in n}
    alone = {}
    for m in range(3):
        own = {n: p for n, p in ensemble.named_parameters() if f".heads.{m}." in n}
        loss = nn.functional.cross_entropy(ensemble(words)[m], labels)
        alone |= dict(zip(own, torch.autograd.grad(loss, list(own.values())), strict=True))
    optimizer = torch.optim.SGD(sn.param_groups(ensemble, 0.1, head_lr_mult=3))
    EnsembleLoss()(ensemble(words), labels).backward()
    optimizer.step()
    for name, p in ensemble.named_parameters():
        if name in before:
            torch.testing.assert_close(p.detach(), before[name] - 0.1 * alone[name])


def test_linear_scales_learn_at_the_base_rate_undecayed() -> None:
    groups = sn.param_groups(make(scale="linear"), 0.02, 1e-2)
    (group,) = (g for g in groups if g["name"].startswith("scales"))
    assert (group["lr"], group["weight_decay"], len(group["params"])) == (0.02, 0.0, 5)


def test_only_members_are_trained_when_asked() -> None:
    ensemble = make(init="normal", head="copy", train="members")
    groups = by_name(ensemble, sn.param_groups(ensemble, 0.1, 1e-2))
    expected = {f"network.{n}.scale_logit" for n in ensemble.sigma_norms()}
    expected |= {f"network.head.heads.{m}.{p}" for m in range(3) for p in ("weight", "bias")}
    assert set(groups) == expected


def test_a_kept_batch_norm_is_undecayed_at_the_base_rate() -> None:
    ensemble = make(init="normal", layers="layer_norm")
    groups = by_name(ensemble, sn.param_groups(ensemble, 0.1, 1e-2))
    for leaf in ("weight", "bias"):
        assert groups[f"network.batch_norm.{leaf}"]["name"] == "no_decay"


def test_nothing_to_train_is_an_error() -> None:
    with pytest.raises(InputError, match="no parameter requires a gradient"):
        sn.param_groups(nn.Linear(2, 2).requires_grad_(False), 0.1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": 0}, "lr is 0; expected a finite number > 0"),
        ({"lr": -0.1}, "lr is -0.1; expected a finite number > 0"),
        ({"lr": math.nan}, "lr is nan; expected"),
        ({"lr": "0.1"}, "lr is '0.1'; expected"),
        ({"lr": 0.1, "weight_decay": -1e-4}, "weight_decay is -0.0001; expected .* ≥ 0"),
        ({"lr": 0.1, "weight_decay": math.inf}, "weight_decay is inf; expected"),
        ({"lr": 0.1, "weight_decay": None}, "weight_decay is None; expected"),
        ({"lr": 0.1, "scale_lr_mult": -1}, "scale_lr_mult is -1; expected .* ≥ 0"),
        ({"lr": 0.1, "scale_lr_mult": True}, "scale_lr_mult is True; expected"),
        ({"lr": 0.1, "head_lr_mult": -1}, "head_lr_mult is -1; expected .* ≥ 0"),
        ({"lr": 0.1, "head_lr_mult": "M"}, "head_lr_mult is 'M'; expected"),
    ],
    ids=str,
)
def test_rates_out_of_range_are_named(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        sn.param_groups(nn.Linear(2, 2), **arguments)


@pytest.mark.parametrize(
    "build",
    [
        lambda groups: torch.optim.SGD(groups, momentum=0.9),
        lambda groups: torch.optim.AdamW(groups),
        lambda groups: torch.optim.Adam(groups),
    ],
    ids=["SGD", "AdamW", "Adam"],
)
def test_groups_fit_optimizers_and_every_parameter_moves(build: Any) -> None:
    ensemble = make(init="normal", shift=True)
    optimizer = build(sn.param_groups(ensemble, 1e-3, 1e-2))
    before = copy.deepcopy(ensemble.state_dict())
    loss_fn = EnsembleLoss(diversity=sn.Diversity(0.1, 1e-2, layers="all"))
    ensemble.backward(torch.randint(9, (16, 3)), torch.randint(4, (16,)), loss_fn)
    assert sn.check_optimizer(ensemble, optimizer) == []
    optimizer.step()
    for name, p in ensemble.named_parameters():
        if name != "network.conv.bias":  # the batch norm behind it takes its mean away
            assert not torch.equal(p, before[name]), name
    again = build(sn.param_groups(ensemble, 1e-3, 1e-2))
    again.load_state_dict(optimizer.state_dict())


def test_weight_decay_leaves_idle_scales_alone() -> None:
    ensemble = make(init="normal")
    optimizer = torch.optim.SGD(sn.param_groups(ensemble, 0.1, 0.5))
    for p in ensemble.parameters():
        p.grad = torch.zeros_like(p)
    scales = [m.scale_logit.detach().clone() for m in ensemble.sigma_norms().values()]
    weight = ensemble.network.get_parameter("conv.weight").detach().clone()
    optimizer.step()
    for old, layer in zip(scales, ensemble.sigma_norms().values(), strict=True):
        assert torch.equal(old, layer.scale_logit)
    assert not torch.equal(weight, ensemble.network.get_parameter("conv.weight"))


# -- the check -----------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_right_set_up_is_silent(options: dict[str, Any]) -> None:
    ensemble = make(**options)
    groups = sn.param_groups(ensemble, 0.1, 1e-2)
    optimizer = torch.optim.AdamW(groups)
    assert sn.check_optimizer(ensemble, optimizer) == []
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=[g["lr"] for g in groups], total_steps=10)
    assert sn.check_optimizer(ensemble, optimizer) == []


def check(ensemble: sn.SigmaEnsemble, optimizer: torch.optim.Optimizer, *words: str) -> None:
    """Each problem is returned and warned of, in this order."""
    with pytest.warns(sn.SigmaNensWarning) as caught:
        problems = sn.check_optimizer(ensemble, optimizer)
    assert [str(w.message) for w in caught] == problems
    assert {w.filename for w in caught} == {__file__}
    assert len(problems) == len(words)
    for problem, word in zip(problems, words, strict=True):
        assert word in problem


def test_decayed_scales_at_the_rate_of_weights_are_reported() -> None:
    ensemble = make(init="normal")
    check(
        ensemble,
        torch.optim.AdamW(ensemble.parameters()),
        "weight decay 0.01 reaches the scales of 5 σNorm layers (first: 'layer_norm')",
        "scales and weights have the same learning rate 0.001",
    )


@pytest.mark.case("T4")
def test_decay_alone_is_reported() -> None:
    ensemble = make(init="normal")
    groups = sn.param_groups(ensemble, 0.1)
    for group in groups:
        group["weight_decay"] = 0.02
    names = [m for m in ensemble.sigma_norms().values() if not isinstance(m, SigmaBatchNorm)]
    check(
        ensemble,
        torch.optim.SGD(groups),
        "the scales of 1 σNorm layers (first: 'batch_norm')",
        f"the scales of {len(names)} σNorm layers",
    )


def test_missing_scales_are_reported() -> None:
    ensemble = make(init="normal")
    groups = [g for g in sn.param_groups(ensemble, 0.1) if g["name"] != "scales_batch_norm"]
    check(ensemble, torch.optim.SGD(groups), "1 σNorm layers have trainable scales that are not")
    heads = torch.optim.SGD(ensemble.network.get_submodule("head").parameters(), lr=0.1)
    check(ensemble, heads, "5 σNorm layers have trainable scales that are not")


def test_frozen_scales_are_not_missed() -> None:
    ensemble = make(init="normal")
    for layer in ensemble.sigma_norms().values():
        layer.logit.requires_grad_(False)
    assert sn.check_optimizer(ensemble, torch.optim.SGD(sn.param_groups(ensemble, 0.1))) == []


def test_an_optimizer_of_the_base_is_reported() -> None:
    base = Net()
    optimizer = torch.optim.SGD(base.parameters(), lr=0.1)
    check(sn.convert(base, 2), optimizer, "5 σNorm layers have trainable scales that are not")


def test_one_maximum_for_all_rates_is_reported() -> None:
    ensemble = make(init="normal")
    optimizer = torch.optim.SGD(sn.param_groups(ensemble, 0.1), momentum=0.9)
    assert sn.check_optimizer(ensemble, optimizer) == []
    torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    check(ensemble, optimizer, "max_lr=[g['lr'] for g in groups]")


def test_heads_as_fast_as_scales_are_not_reported() -> None:
    ensemble = make(init="normal", head="fresh")
    groups = sn.param_groups(ensemble, 0.1, scale_lr_mult=10, head_lr_mult=10)
    assert sn.check_optimizer(ensemble, torch.optim.SGD(groups)) == []


def test_equal_rates_as_asked_are_not_reported() -> None:
    ensemble = make(init="normal")
    optimizer = torch.optim.SGD(sn.param_groups(ensemble, 0.1, scale_lr_mult=1))
    assert sn.check_optimizer(ensemble, optimizer) == []


def test_the_start_of_a_warm_up_is_not_reported() -> None:
    ensemble = make(init="normal")
    optimizer = torch.optim.SGD(sn.param_groups(ensemble, 0.1))
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    assert {g["lr"] for g in optimizer.param_groups} == {0.0}
    assert sn.check_optimizer(ensemble, optimizer) == []


def test_the_check_wants_an_ensemble() -> None:
    plain = nn.Linear(2, 2)
    with pytest.raises(InputError, match="got a Linear in the place of the ensemble"):
        sn.check_optimizer(plain, torch.optim.SGD(plain.parameters(), lr=0.1))  # type: ignore[arg-type]


def test_a_network_may_spare_weights_of_its_own_from_decay() -> None:
    """What ``no_weight_decay`` names, as timm's networks and BatchEnsemble do."""

    class Spared(nn.Sequential):
        def no_weight_decay(self) -> set[str]:
            return {"0.weight"}

    network = Spared(nn.Linear(3, 3), nn.Linear(3, 2))
    groups = {g["name"]: g for g in sn.param_groups(network, lr=0.1, weight_decay=0.01)}
    assert [id(p) for p in groups["decay"]["params"]] == [id(network[1].weight)]
    assert id(network[0].weight) in {id(p) for p in groups["no_decay"]["params"]}
