"""Which norm classes are converted, which refused, and how users add their own."""

from __future__ import annotations

import pytest
import torch
from tests.networks import randomise
from torch import Tensor, nn
from torch.nn.utils import parametrize

import sigmanens as sn
from sigmanens.conversion import rules
from sigmanens.conversion.rules import SigmaWrappedNorm, is_norm, register_norm, rule_for
from sigmanens.errors import ConversionError, InputError, UnsupportedNormError
from sigmanens.norms import Affine, SigmaBatchNorm, SigmaLayerNorm, SigmaNorm
from sigmanens.passes.context import MemberAxis


class ScaledNorm(nn.Module):
    """A user's norm with a shared part of its own, which is neither scale nor shift."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.power = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.power * x) * self.weight


class GammaNorm(nn.Module):
    """A norm whose scale has another name."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) * self.gamma


class InheritedNorm(nn.LayerNorm):
    """A subclass that normalises just like its base."""


class ActivatedNorm(nn.BatchNorm2d):
    """A subclass that does more than normalise."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(super().forward(x))


class Parametrised(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.abs()


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "_RULES", dict(rules._RULES))


def network(norm: nn.Module, width: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, width), norm, nn.Linear(width, 2))


# -- what is a norm ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "module",
    [
        nn.BatchNorm1d(4),
        nn.GroupNorm(1, 4),
        nn.LazyBatchNorm2d(),
        nn.SyncBatchNorm(4),
        GammaNorm(4),
    ],
    ids=lambda m: type(m).__name__,
)
def test_norms_are_recognised(module: nn.Module) -> None:
    assert is_norm(module)


@pytest.mark.parametrize(
    "module",
    [nn.Linear(4, 4), nn.LocalResponseNorm(2), nn.Sequential(nn.LayerNorm(4)), nn.Dropout()],
    ids=lambda m: type(m).__name__,
)
def test_other_modules_are_not(module: nn.Module) -> None:
    assert not is_norm(module)


def test_a_class_of_an_optional_library_is_found_by_its_name() -> None:
    layer = pytest.importorskip("timm.layers").LayerNorm2d(4)
    assert isinstance(rule_for(layer), rules.NormRule)


# -- refusals ----------------------------------------------------------------------------------


def parametrised_norm() -> nn.Module:
    norm = nn.LayerNorm(4)
    parametrize.register_parametrization(norm, "weight", Parametrised())
    return norm


def patched_norm() -> nn.Module:
    norm = nn.LayerNorm(4)
    norm.forward = lambda x: x.relu()
    return norm


@pytest.mark.case("C3")
@pytest.mark.parametrize(
    ("norm", "message"),
    [
        (
            ActivatedNorm(4),
            "ActivatedNorm is a subclass of BatchNorm2d with a forward of its own",
        ),
        (nn.LazyBatchNorm1d(), "no shape yet.*run one batch through the network first"),
        (nn.LazyBatchNorm1d(affine=False), r"have no shape yet \(first: '1.running_mean'\)"),
        (
            nn.LazyInstanceNorm1d(affine=False, track_running_stats=False),
            "a lazy norm has no",
        ),
        (
            parametrised_norm(),
            "its parameters are parametrised: .*remove_parametrizations",
        ),
        (patched_norm(), r"1 \(LayerNorm\): its forward was replaced on the instance"),
        (
            GammaNorm(4),
            r"no rule covers .*GammaNorm, .* Register a builder for it with .*register_norm",
        ),
    ],
    ids=[
        "own_forward",
        "lazy",
        "lazy_buffers",
        "lazy_bare",
        "parametrised",
        "patched",
        "unknown",
    ],
)
def test_norms_without_a_rule_are_refused_by_name(norm: nn.Module, message: str) -> None:
    base = network(norm)
    before = str(base)
    for convert in (sn.convert, sn.convert_):
        with pytest.raises(UnsupportedNormError, match=message):
            convert(base, 2)
    assert str(base) == before
    assert issubclass(UnsupportedNormError, (sn.SigmaNensError, TypeError))


def test_all_refused_norms_are_listed_at_once() -> None:
    base = nn.Sequential(*(GammaNorm(4) for _ in range(25)), nn.LayerNorm(4), nn.Linear(4, 2))
    with pytest.raises(UnsupportedNormError) as error:
        sn.convert(base, 2)
    text = str(error.value)
    first, reason, advice = text.splitlines()
    assert first == "25 of 26 norms of this Sequential cannot be converted:"
    assert reason.startswith("  0, 1, 2, 3 and 21 more (25 × GammaNorm): no rule covers ")
    assert advice == (
        "To keep them as they are, the same for all members, choose other norms with layers=…"
    )


def test_a_refused_norm_may_be_left_out() -> None:
    base = nn.Sequential(nn.Linear(3, 4), GammaNorm(4), nn.LayerNorm(4), nn.Linear(4, 2))
    ens = sn.convert(base, 2, layers="2")
    assert ens.report.kept == ["1"]
    assert isinstance(ens.network[1], GammaNorm)


def test_leaving_out_a_batch_norm_without_a_rule_warns_that_members_mix() -> None:
    base = nn.Sequential(
        nn.Conv2d(1, 4, 1), ActivatedNorm(4), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2)
    )
    with pytest.warns(
        sn.SigmaNensWarning, match="1 kept norms .first: '1'. take their running"
    ) as w:
        ens = sn.convert(base, 2, layers=["2"])
    assert w[0].filename == __file__
    assert "running statistics mix all members" in str(ens.report)
    before = ens.network[1].running_mean.clone()
    ens.freeze_statistics().train()(torch.randn(4, 1, 1, 1))
    assert torch.equal(ens.network[1].running_mean, before)
    assert not ens.network[1].training
    ens.freeze_statistics(False)(torch.randn(4, 1, 1, 1))
    assert not torch.equal(ens.network[1].running_mean, before)


# -- subclasses and users' classes -------------------------------------------------------------


def test_a_subclass_with_the_inherited_forward_is_converted_and_comes_back_as_itself() -> None:
    base = randomise(network(InheritedNorm(4))).eval()
    ens = sn.convert(base, 2)
    assert isinstance(ens.network[1], SigmaLayerNorm)
    assert type(ens.member(0)[1]) is InheritedNorm


@pytest.mark.parametrize("name", [False, True], ids=["class", "name"])
def test_a_registered_class_is_wrapped(name: bool) -> None:
    register_norm(f"{__name__}.ScaledNorm" if name else ScaledNorm)
    base = network(ScaledNorm(4)).eval()
    with torch.no_grad():
        base[1].weight.normal_()
        base[1].power.fill_(0.3)
    x = torch.randn(5, 3)
    ens = sn.convert(base, 3, example=x)
    assert isinstance(ens.network[1], SigmaWrappedNorm)
    torch.testing.assert_close(ens(x)[2], base(x), rtol=1e-5, atol=1e-6)
    trained = {n for n, p in ens.network[1].named_parameters() if p.requires_grad}
    assert trained == {"scale_logit", "inner.power"}
    with torch.no_grad():
        ens.network[1].inner.power.fill_(0.7)
        ens.network[1].scale_logit.add_(torch.randn(3, 4))
    single = ens.member(1)
    assert type(single[1]) is ScaledNorm
    torch.testing.assert_close(single(x), ens(x)[1])
    members_only = sn.convert(base, 3, train="members")
    assert not members_only.network[1].inner.power.requires_grad


def test_a_norm_whose_scale_has_another_name_cannot_become_plain() -> None:
    register_norm(GammaNorm, shape=lambda m: tuple(m.gamma.shape))
    base = network(GammaNorm(4)).eval()
    ens = sn.convert(base, 2, init="normal", head="copy")
    with pytest.raises(
        InputError, match="layer '1' has a scale per member, which a plain GammaNorm"
    ):
        ens.member(0)


def test_a_trained_norm_is_seen_as_trained_whatever_its_scale_is_called() -> None:
    register_norm(GammaNorm, shape=lambda m: tuple(m.gamma.shape))
    base = network(GammaNorm(4)).eval()
    assert sn.convert(base, 2).plan.init == "normal"
    base[1].gamma.data.normal_()
    x = torch.randn(5, 3)
    ens = sn.convert(base, 2, example=x)
    assert ens.plan.init == "preserve"
    torch.testing.assert_close(ens(x)[1], base(x), rtol=1e-5, atol=1e-6)


def test_a_norm_with_batch_statistics_is_not_wrapped() -> None:
    register_norm(ActivatedNorm)
    base = nn.Sequential(nn.Conv2d(1, 4, 1), ActivatedNorm(4), nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(ConversionError, match="a wrapped ActivatedNorm would take its batch stat"):
        sn.convert_(base, 2)
    assert isinstance(base[1], ActivatedNorm)


def test_a_registered_norm_without_weight_needs_a_shape() -> None:
    register_norm(GammaNorm)
    with pytest.raises(InputError, match="a rule for GammaNorm needs shape"):
        sn.convert(network(GammaNorm(4)), 2)


@pytest.mark.case("C3")
def test_a_registered_builder_is_used() -> None:
    class Halved(SigmaLayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / 2

    def build(source: nn.Module, axis: MemberAxis, affine: Affine) -> SigmaNorm:
        return Halved(source, axis, affine)

    x = torch.randn(5, 3)
    base = randomise(network(InheritedNorm(4)), 2).eval()
    base[2].bias.data.zero_()
    plain = sn.convert(base, 2)(x)
    register_norm(InheritedNorm, build, shape=lambda m: tuple(m.normalized_shape))
    torch.testing.assert_close(sn.convert(base, 2)(x), plain / 2)


def test_a_builder_that_builds_something_else_is_named() -> None:
    register_norm(InheritedNorm, lambda source, axis, affine: nn.Identity())  # type: ignore[arg-type]
    with pytest.raises(ConversionError, match=r"rule for InheritedNorm \('1'\) built a Identity"):
        sn.convert(network(InheritedNorm(4)), 2)


def test_a_registered_rule_for_a_subclass_goes_before_the_one_of_its_base() -> None:
    register_norm(ActivatedNorm, lambda source, axis, affine: SigmaBatchNorm(source, axis, affine))
    base = nn.Sequential(nn.Conv2d(1, 4, 1), ActivatedNorm(4), nn.Flatten(), nn.Linear(4, 2))
    register_norm(ActivatedNorm, SigmaBatchNorm, shape=lambda m: (m.num_features,))
    assert isinstance(sn.convert(base, 2).network[1], SigmaBatchNorm)


@pytest.mark.parametrize(
    ("cls", "channels", "message"),
    [
        (nn.LayerNorm(4), "last", "expected an nn.Module class or its name"),
        (dict, "last", "expected an nn.Module class"),
        (ScaledNorm, "middle", "channels is 'middle'; expected 'last' or 'first'"),
    ],
)
def test_wrong_registrations_are_named(cls: object, channels: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        register_norm(cls, channels=channels)  # type: ignore[arg-type]
