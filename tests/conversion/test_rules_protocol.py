"""Norms of unknown classes: probed, and wrapped exactly or refused with what the probe saw."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.networks import apart, randomise, snapshot, unchanged
from tests.oracles.norms import member_networks
from torch import Tensor, nn

import sigmanens as sn
from sigmanens.conversion import probing as protocol
from sigmanens.conversion import rules
from sigmanens.conversion.probing import Protocol, probe
from sigmanens.conversion.rules import is_norm, rule_for
from sigmanens.errors import ConversionError, UnsupportedNormError
from sigmanens.norms.wrapped import SigmaWrappedNorm

C = 6


class Affine(nn.Module):
    """Base of norms by authors: a weight of one value per channel, and maybe a bias."""

    def __init__(self, width: int = C, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))
        if bias:
            self.bias = nn.Parameter(torch.randn(width))


class CastRMSNorm(Affine):
    """As in Llama: normalised in float32, cast back, then scaled."""

    def forward(self, hidden: Tensor) -> Tensor:
        h = hidden.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.to(hidden.dtype)


class OnePlusRMSNorm(Affine):
    """As in Gemma: scaled by 1 + weight in float32, then cast back."""

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (h * (1.0 + self.weight.float())).type_as(x)


class TwoFormatNorm(nn.LayerNorm):
    """As in ConvNext: channels last or first, by an argument."""

    def __init__(self, width: int, first: bool) -> None:
        super().__init__(width)
        self.first = first

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return super().forward(x)


class SequenceNorm(nn.LayerNorm):
    """As in SqueezeBert: (N, C, L) only."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 1)).permute(0, 2, 1)


class FrozenNorm(Affine):
    """Affine and statistics are buffers, as in detection networks."""

    def __init__(self) -> None:
        super().__init__(bias=True)
        for name in ("weight", "bias"):
            value = getattr(self, name).data
            delattr(self, name)
            self.register_buffer(name, value)
        self.register_buffer("running_mean", torch.randn(C))
        self.register_buffer("running_var", torch.rand(C) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        shape = (1, -1, 1, 1)
        scale = self.weight.reshape(shape) * (self.running_var.reshape(shape) + 1e-5).rsqrt()
        return x * scale + self.bias.reshape(shape) - self.running_mean.reshape(shape) * scale


class ActivatedNorm(Affine):
    """Scaled, then dropped out and activated by submodules of other names than usual."""

    def __init__(self) -> None:
        super().__init__(bias=True)
        self.thin = nn.Dropout(0.4)
        self.bend = nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.bend(self.thin(F.layer_norm(x, (C,)) * self.weight + self.bias))


class WideNorm(nn.LayerNorm):
    """Scales two trailing dimensions."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 0.0


class BareNorm(nn.Module):
    """Knows a weight, has none."""

    def __init__(self) -> None:
        super().__init__()
        self.normalized_shape = (C,)
        self.register_parameter("weight", None)

    def forward(self, x: Tensor) -> Tensor:
        y = F.rms_norm(x, (C,))
        return y if self.weight is None else y * self.weight


def found(last: bool = True, neutral: float = 1.0, tail: tuple[str, ...] = ()) -> Protocol:
    return Protocol(last, neutral, tail)


FITTING: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], Protocol]] = {
    "cast": (CastRMSNorm, (4, C), found()),
    "one_plus": (OnePlusRMSNorm, (4, C), found(neutral=0.0)),
    "format_last": (lambda: TwoFormatNorm(C, False), (4, 4, C), found()),
    "format_first": (lambda: TwoFormatNorm(C, True), (C, 4, 3), found(last=False)),
    "sequence": (lambda: SequenceNorm(C), (C, 4), found(last=False)),
    "frozen": (FrozenNorm, (C, 4, 3), found(last=False)),
    "bare": (BareNorm, (4, C), found()),
    "wide": (lambda: WideNorm((3, C)), (2, 3, C), Protocol(True, 1.0, ())),
}


class Around(nn.Module):
    """A norm between two linear maps of everything: (B, *shape) → (B, 3)."""

    def __init__(self, norm: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.norm = norm
        self.fc = nn.Linear(torch.Size(shape).numel(), 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.tanh(self.norm(x)).flatten(1))


@pytest.mark.case("C3")
@pytest.mark.parametrize("name", FITTING)
def test_norms_that_follow_the_protocol_are_wrapped_exactly(name: str, tmp_path: Path) -> None:
    make, shape, expected = FITTING[name]
    norm = make()
    assert is_norm(norm)
    assert probe(norm) == expected
    base = Around(norm, shape).eval()
    x = torch.randn(5, *shape)
    before = snapshot(base)
    ens = sn.convert(base, 3, init="preserve", example=x)
    assert unchanged(base, before)
    assert isinstance(ens.network.norm, SigmaWrappedNorm)
    torch.testing.assert_close(ens(x), base(x).expand(3, -1, -1), rtol=1e-5, atol=1e-5)
    apart(ens)
    for m in range(3):
        single = ens.member(m)
        assert type(single.norm) is type(norm)
        torch.testing.assert_close(single(x), ens(x)[m], rtol=1e-5, atol=1e-5)
    if name != "one_plus":  # the oracle writes the scale into the weight
        for m, alone in enumerate(member_networks(base, ens)):
            torch.testing.assert_close(alone(x), ens(x)[m], rtol=1e-5, atol=1e-5)
    ens(x).square().sum().backward()
    assert bool((ens.network.norm.scale_logit.grad.flatten(1).abs().sum(1) > 0).all())
    ens.save_pretrained(tmp_path)
    assert torch.equal(sn.load(tmp_path, base=base)(x), ens(x))


def test_the_offset_of_a_weight_goes_into_the_scale_and_out_again() -> None:
    base = Around(OnePlusRMSNorm(), (C,)).eval()
    base.norm.weight.data[0] = -1.0  # scale 0
    ens = sn.convert(base, 2, init="preserve")
    torch.testing.assert_close(ens.network.norm.scales()[1], 1 + base.norm.weight)
    torch.testing.assert_close(ens.member(1).norm.weight, base.norm.weight, rtol=0, atol=1e-6)
    fresh = sn.convert(base, 2, init="normal", head="copy")
    gates = torch.sigmoid(fresh.network.norm.scale_logit)
    torch.testing.assert_close(fresh.member(0).norm.weight, gates[0] - 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", [CastRMSNorm, OnePlusRMSNorm])
def test_the_dtype_of_the_result_is_the_one_of_the_base(
    kind: type[Affine], dtype: torch.dtype
) -> None:
    norm = kind().to(dtype)
    assert isinstance(rule_for(norm), rules.NormRule)
    net = nn.Sequential(nn.Identity(), norm)
    x = torch.randn(4, 3, C).to(dtype)
    tolerance = {torch.float16: 2e-3, torch.bfloat16: 2e-2}.get(dtype, 1e-5)
    before = sn.convert(net, 2, init="preserve", head="shared")
    for ens in (before, sn.convert(net.float(), 2, init="preserve", head="shared").to(dtype)):
        y = ens(x)
        assert y.dtype == dtype
        assert ens.network[1].scale_logit.dtype in (torch.float32, torch.float64)
        torch.testing.assert_close(y[1], norm.to(dtype)(x), rtol=tolerance, atol=tolerance)


def test_hooks_of_a_wrapped_norm_run_once() -> None:
    seen: list[int] = []
    base = Around(CastRMSNorm(), (C,)).eval()
    base.norm.register_forward_hook(lambda *_: seen.append(1))
    ens = sn.convert(base, 2, init="preserve", schedule="sequential")
    seen.clear()
    with ens.axis.choosing(start=0, stop=1):
        ens(torch.randn(2, C))
    assert seen == [1]


# -- fused with submodules of any name ---------------------------------------------------------


def test_submodules_applied_last_are_found_and_kept() -> None:
    norm = ActivatedNorm()
    assert probe(norm) == found(tail=("thin", "bend"))
    base = Around(norm, (4, C)).eval()
    x = torch.randn(5, 4, C)
    ens = apart(sn.convert(base, 2, init="preserve", example=x))
    assert [n for n, _ in ens.network.norm.named_children()] == ["thin", "bend", "inner"]
    torch.testing.assert_close(ens.member(1)(x), ens(x)[1], rtol=1e-5, atol=1e-5)
    assert str(ens.member(0)) == str(base)
    for m, alone in enumerate(member_networks(base, ens)):
        torch.testing.assert_close(alone(x), ens(x)[m], rtol=1e-5, atol=1e-5)


# -- refused -----------------------------------------------------------------------------------


class Twice(Affine):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (C,)) * self.weight * self.weight


class Residual(Affine):
    def forward(self, x: Tensor) -> Tensor:
        return x + F.layer_norm(x, (C,)) * self.weight


class Rectified(Affine):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(F.layer_norm(x, (C,)) * self.weight)


class Positive(Affine):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, (C,)) * self.weight.abs()


class AcrossRows(Affine):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)) * self.weight


class OwnBatchNorm(Affine):
    """Statistics of the batch in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(C))

    def forward(self, x: Tensor) -> Tensor:
        centre = x.flatten(0, -2).mean(0) if self.training else self.mean
        return (x - centre) * self.weight


class Counting(Affine):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += float(self.training)
        return x * self.weight


class Noisy(Affine):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training) * self.weight


class Gated(Affine):
    def forward(self, x: Tensor, gate: Tensor | None = None) -> Tensor:
        return x * self.weight


class Listed(Affine):
    def forward(self, x: Tensor) -> list[Tensor]:
        return [x * self.weight]


class Halved(Affine):
    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight)[..., : C // 2]


class Broken(Affine):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("needs a card\nof its own")


class Idle(Affine):
    def forward(self, x: Tensor) -> Tensor:
        return x * 1.0


class Either(Affine):
    """Scales dimension 1 where it fits, else the last."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 4:
            return x * self.weight.view(1, -1, 1, 1)
        return x * self.weight


class Middle(Affine):
    """Applies its submodule before the scale."""

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(F.layer_norm(x, (C,))) * self.weight


class Reserved(Affine):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.shift(x * self.weight)


class OddBias(Affine):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias


class Single(Affine):
    def __init__(self) -> None:
        super().__init__(1)

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * self.weight


REFUSED = {
    Twice: r"its output is not weight ⊙ norm\(x\) \+ bias along the last dimension",
    Residual: "with a weight of 0 it answers more than its bias",
    Rectified: r"its output is not weight ⊙ norm\(x\)",
    Positive: r"its output is not weight ⊙ norm\(x\)",
    AcrossRows: "the output for a sample depends on the other samples",
    OwnBatchNorm: "it answers otherwise in training than in evaluation",
    Noisy: "it answers otherwise in training than in evaluation",
    Counting: "a training pass changes its buffer 'calls'",
    Gated: r"its forward takes further inputs \(gate\)",
    Listed: "it answers with a list, not a tensor",
    Halved: r"it answers \(3, .*6\) with shape \(3, .*3\)",
    Broken: r"it fails on 2-D inputs \(RuntimeError: needs a card\)",
    Idle: "its weight does not act on its output",
    Either: "it scales another dimension for another number of dimensions",
    Middle: "after normalising it does more than act, in this order",
    Reserved: "its submodule 'shift' has a name that σNorm layers use",
    OddBias: r"its bias has shape \(1,\) and its weight \(6,\)",
    Single: "its 'weight' has one value only",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda k: k.__name__)
def test_other_norms_are_refused_with_what_the_probe_saw(kind: type[nn.Module]) -> None:
    named = type(f"{kind.__name__}Norm", (kind,), {})
    base = nn.Sequential(nn.Linear(C, C), named(), nn.Linear(C, 3))
    before = snapshot(base)
    with pytest.raises(
        UnsupportedNormError,
        match=rf"1 \(\w+\): no rule covers .*Norm, and it does not compute .*: {REFUSED[kind]}",
    ):
        sn.convert(base, 2)
    assert unchanged(base, before)


def test_a_subclass_that_does_more_names_its_base() -> None:
    class Shifted(nn.LayerNorm):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 1

    with pytest.raises(
        UnsupportedNormError, match=r"Shifted is a subclass of LayerNorm with .*: with a"
    ):
        sn.convert(nn.Sequential(nn.Linear(3, C), Shifted(C), nn.Linear(C, 3)), 2)


def test_a_norm_without_values_is_refused() -> None:
    with torch.device("meta"):
        norm = CastRMSNorm()
    assert "meta device" in str(rule_for(norm))
    with pytest.raises(ConversionError, match="meta device"):
        sn.convert(nn.Sequential(norm, nn.Linear(C, 2)), 2, init="preserve")


def test_layers_that_are_called_norms_but_hold_matrices_are_none() -> None:
    class NormLinear(nn.Linear):
        pass

    class NormedBlock(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))
            self.fc = nn.Linear(4, 4)

    assert not is_norm(NormLinear(4, 4))
    assert not is_norm(NormedBlock())


# -- what a probe leaves behind ----------------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", [CastRMSNorm, ActivatedNorm, FrozenNorm, OwnBatchNorm])
def test_a_probe_changes_neither_module_nor_random_state(
    kind: type[nn.Module], training: bool
) -> None:
    module = kind().train(training)
    seen: list[int] = []
    module.register_forward_hook(lambda *_: seen.append(1))
    before, state = snapshot(module), torch.random.get_rng_state()
    probe(module)
    assert unchanged(module, before)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert seen == []
    assert torch.is_grad_enabled()


def test_a_norm_that_warns_or_needs_gradients_off_is_probed_all_the_same() -> None:
    class Warning_(Affine):
        def forward(self, x: Tensor) -> Tensor:
            import warnings

            warnings.warn("old", DeprecationWarning, stacklevel=1)
            assert not torch.is_grad_enabled()
            return x * self.weight

    assert probe(Warning_()) == found()


@settings(max_examples=25)
@given(
    width=st.integers(2, 9), last=st.booleans(), offset=st.sampled_from((0.0, 1.0)),
    bias=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_affine_is_found(width: int, last: bool, offset: float, bias: bool, seed: int) -> None:
    torch.manual_seed(seed)

    class Any_(Affine):
        def forward(self, x: Tensor) -> Tensor:
            y = x if last else x.movedim(1, -1)
            y = F.rms_norm(y, (width,)) * (self.weight + offset)
            y = y + self.bias if bias else y
            return y if last else y.movedim(-1, 1)

    assert probe(Any_(width, bias)) == Protocol(last, 1.0 - offset, ())


# -- the authors' classes themselves -----------------------------------------------------------


def transformers_norm(model: str, kind: str) -> type[nn.Module]:
    module = pytest.importorskip(f"transformers.models.{model}.modeling_{model}")
    return getattr(module, kind)


@pytest.mark.parametrize(
    ("model", "kind", "neutral", "last"),
    [
        ("llama", "LlamaRMSNorm", 1.0, True),
        ("t5", "T5LayerNorm", 1.0, True),
        ("qwen2", "Qwen2RMSNorm", 1.0, True),
        ("mistral", "MistralRMSNorm", 1.0, True),
        ("gemma", "GemmaRMSNorm", 0.0, True),
        ("nemotron", "NemotronLayerNorm1P", 0.0, True),
        ("convnext", "ConvNextLayerNorm", 1.0, True),
        ("squeezebert", "SqueezeBertLayerNorm", 1.0, False),
        ("detr", "DetrFrozenBatchNorm2d", 1.0, False),
    ],
)
def test_norms_of_transformers(model: str, kind: str, neutral: float, last: bool) -> None:
    norm = transformers_norm(model, kind)(C)
    assert probe(randomise(norm)) == found(last, neutral)


def test_convnext_norms_in_their_other_format() -> None:
    norm = transformers_norm("convnext", "ConvNextLayerNorm")(C, data_format="channels_first")
    assert probe(norm) == found(last=False)


def test_frozen_batch_norm_of_torchvision() -> None:
    norm = pytest.importorskip("torchvision.ops").FrozenBatchNorm2d(C)
    assert probe(randomise(norm)) == found(last=False)
    base = Around(norm, (C, 2, 2))
    ens = sn.convert(base, 2, init="preserve").train()
    ens(torch.randn(3, C, 2, 2)).sum().backward()
    assert torch.equal(ens.network.norm.inner.running_mean, norm.running_mean)
    assert ens.network.norm.scale_logit.grad is not None


# -- how often ---------------------------------------------------------------------------------


@pytest.fixture
def probes(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    """The modules that are probed, one by one."""
    seen: list[nn.Module] = []

    def counted(module: nn.Module) -> Protocol | str:
        seen.append(module)
        return probe(module)

    monkeypatch.setattr(rules, "probe", counted)
    return seen


def test_norms_of_one_class_and_setting_are_probed_once_in_a_conversion(
    probes: list[nn.Module],
) -> None:
    base = randomise(nn.Sequential(*(CastRMSNorm() for _ in range(5)), nn.Linear(C, 3))).eval()
    x = torch.randn(4, C)
    ens = sn.convert(base, 2, init="preserve", example=x)
    assert len(probes) == 1
    assert ens.report.converted == ["0", "1", "2", "3", "4"]
    torch.testing.assert_close(ens(x)[1], base(x), rtol=1e-5, atol=1e-5)
    sn.convert(base, 2, init="preserve", layers=["1", "3"])
    assert len(probes) == 2  # kept ones need no second look


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (TwoFormatNorm(C, True), TwoFormatNorm(C, False)),
        (CastRMSNorm(C), CastRMSNorm(C + 1)),
        (CastRMSNorm(C), CastRMSNorm(C).double()),
        (CastRMSNorm(C), OnePlusRMSNorm(C)),
        (Affine(C), Affine(C, bias=True)),
    ],
)
def test_another_setting_is_another_probe(first: nn.Module, second: nn.Module) -> None:
    assert protocol.settings(first) is not None
    assert protocol.settings(first) != protocol.settings(second)


class Last:
    """A function that is printed like any other."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        self.function = function

    def __repr__(self) -> str:
        return "Last()"


class LastNorm(nn.Module):
    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(C))
        self.last = (Last(function),)

    def forward(self, x: Tensor) -> Tensor:
        return self.last[0].function(self.weight * F.layer_norm(x, (C,)))


def test_settings_that_print_alike_are_probed_each() -> None:
    base = nn.Sequential(LastNorm(lambda y: y), LastNorm(torch.relu), nn.Linear(C, 2))
    with pytest.raises(UnsupportedNormError, match=r"1 \(LastNorm\)"):
        sn.convert(base, 2)


@pytest.mark.parametrize("make", [FrozenNorm, ActivatedNorm], ids=["buffers", "submodules"])
def test_norms_whose_values_or_submodules_may_matter_are_probed_each(
    make: Callable[[], nn.Module], probes: list[nn.Module]
) -> None:
    norms = [make(), make()]
    probed: dict[Hashable, rules.NormRule | str] = {}
    found = [rule_for(norm, probed) for norm in norms]
    assert probes == norms
    assert all(isinstance(rule, rules.NormRule) for rule in found)


def test_a_setting_that_cannot_be_compared_is_probed_each(probes: list[nn.Module]) -> None:
    probed: dict[Hashable, rules.NormRule | str] = {}
    for norm in (CastRMSNorm(), CastRMSNorm()):
        norm.extra = torch.nn.functional.relu
        rule_for(norm, probed)
    assert len(probes) == 2
