"""Initial scales: exact for whatever a pretrained network holds, and trainable all the same."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from tests.networks import Pictures, dense, randomise
from tests.oracles.norms import effective_scales
from torch import Tensor, nn

import sigmanens as sn
from sigmanens.errors import ConversionError
from sigmanens.norms.inits import initial_affine

WEIGHTS: dict[str, Callable[[Tensor], Tensor]] = {
    "positive": lambda w: torch.rand_like(w) + 0.1,
    "negative": lambda w: -torch.rand_like(w) - 0.1,
    "mixed": torch.randn_like,
    "large": lambda w: 5 * torch.randn_like(w),
    "huge": lambda w: 1e30 * torch.randn_like(w),
    "tiny": lambda w: 1e-12 * torch.randn_like(w),
    "some_zero": lambda w: torch.randn_like(w) * (torch.arange(w.numel()) % 2).view_as(w),
    "all_zero": torch.zeros_like,
    "mixed_sizes": lambda w: torch.randn_like(w) * torch.logspace(-12, 3, w.numel()).view_as(w),
}


def norms(network: nn.Module) -> list[nn.Module]:
    return [m for m in network.modules() if hasattr(m, "weight") and "Norm" in type(m).__name__]


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.GroupNorm(2, 6),
        nn.ReLU(), nn.InstanceNorm2d(6, affine=True), nn.AvgPool2d(4), nn.Flatten(),
        nn.LayerNorm(6), nn.RMSNorm(6), nn.Linear(6, 5),
    )  # fmt: skip


@pytest.mark.case("C14")
@pytest.mark.parametrize("scale", ["sigmoid", "linear"])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_preserve_reproduces_any_scales(kind: str, scale: str) -> None:
    base = randomise(convolutional()).eval()
    with torch.no_grad():
        for norm in norms(base):
            if kind == "huge" and not isinstance(norm, nn.RMSNorm):
                continue  # one huge layer, not a product of five
            norm.weight.copy_(WEIGHTS[kind](norm.weight))
    x = torch.randn(9, 1, 8, 8)
    expected = base(x)
    ens = sn.convert(base, 4, init="preserve", scale=scale)
    got = ens(x)
    for m in range(4):
        assert (got[m] - expected).abs().max() <= 1e-5 * expected.abs().max()
    gates = torch.cat([layer.logit.detach().flatten(1) for layer in ens.sigma_norms().values()], 1)
    for a in range(4):
        for b in range(a):
            assert (gates[a] - gates[b]).abs().mean() > 0.05


def test_preserve_draws_standard_normal_logits_and_derives_the_carrier() -> None:
    w, b = torch.randn(2000), torch.randn(2000)
    affine = initial_affine(w, b, (2000,), 3, init="preserve")
    assert abs(float(affine.logit.mean())) < 0.05
    assert abs(float(affine.logit.std()) - 1) < 0.05
    torch.testing.assert_close(affine.carrier, w / torch.sigmoid(affine.logit))
    assert affine.offset is None
    assert torch.equal(affine.shift, b)


@pytest.mark.case("C14")
def test_channels_with_scale_zero_are_exact_get_a_gradient_and_move() -> None:
    base = randomise(dense()).eval()
    with torch.no_grad():
        base[1].weight[:3] = 0
        base[4].weight.zero_()
    ens = sn.convert(base, 2, init="preserve")
    for name, dead in (("1", slice(0, 3)), ("4", slice(0, 6))):
        layer = ens.sigma_norms()[name]
        assert torch.equal(layer.scales()[:, dead], torch.zeros_like(layer.scales()[:, dead]))
    optimizer = torch.optim.SGD(sn.param_groups(ens, lr=0.01))
    y = torch.randint(3, (32,))
    sn.EnsembleLoss()(ens.train()(torch.randn(32, 4)), y).backward()
    last = ens.sigma_norms()["4"]
    assert (last.scale_logit.grad != 0).any(1).all()
    optimizer.step()
    assert (effective_scales(last).abs() > 0).any(1).all()


def test_a_layer_of_zeros_gets_carriers_of_size_one_and_others_their_mean() -> None:
    zero = initial_affine(torch.zeros(4), None, (4,), 2, init="preserve")
    assert torch.equal(zero.carrier, torch.ones(2, 4))
    some = initial_affine(torch.tensor([0.0, 2.0, -4.0]), None, (3,), 2, init="preserve")
    assert some.carrier[:, 0].tolist() == [3.0, 3.0]
    assert (some.offset[:, 1:] == 0).all()


# -- members part company ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor, Tensor]:
    data = load_digits()
    x = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 16
    y = torch.tensor(data.target)
    return x[:600], y[:600], x[600:1200]


def train(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    x: Tensor,
    y: Tensor,
    steps: int,
) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.randint(len(x), (64,), generator=generator)
        optimizer.zero_grad()
        loss(model(x[rows]), y[rows]).backward()
        optimizer.step()


@pytest.mark.parametrize("batch_norm", [True, False], ids=["batch", "layer"])
def test_preserved_members_part_company_in_training_without_noise(
    batch_norm: bool, digits: tuple[Tensor, Tensor, Tensor]
) -> None:
    x, y, held_out = digits
    base: nn.Module = Pictures()
    if not batch_norm:
        base = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 16), nn.LayerNorm(16), nn.ReLU(), nn.Linear(16, 10)
        )
    train(base, F.cross_entropy, torch.optim.Adam(base.parameters(), 0.01), x, y, 60)
    base.eval()
    ens = sn.convert(base, 4)
    assert ens.plan.init == "preserve"
    assert ens.plan.head == "copy"
    before = ens(held_out)
    assert (before - base(held_out)).abs().max() <= 1e-5 * before.abs().max()
    assert sn.diversity.disagreement(before) == 0
    scales = {n: effective_scales(m) for n, m in ens.sigma_norms().items()}
    for s in scales.values():
        torch.testing.assert_close(s, s[:1].expand_as(s))

    optimizer = torch.optim.SGD(sn.param_groups(ens, lr=0.02), momentum=0.9)
    train(ens.train(), sn.EnsembleLoss(), optimizer, x, y, 30)
    ens.eval()
    after = ens(held_out)
    for a in range(4):
        for b in range(a):
            assert (after[a] - after[b]).abs().mean() > 0.02
    assert sn.diversity.disagreement(after) > 0
    for layer in ens.sigma_norms().values():
        s = effective_scales(layer)
        assert (s - s.mean(0)).abs().mean() > 1e-3
    heads = ens.member_heads()[ens.plan.heads[0]].heads
    assert not torch.equal(heads[0].weight, heads[1].weight)


# -- the other inits ---------------------------------------------------------------------------


def test_normal_draws_standard_normal_logits_and_nothing_else() -> None:
    affine = initial_affine(torch.randn(3000), torch.randn(3000), (3000,), 2, init="normal")
    assert abs(float(affine.logit.mean())) < 0.05
    assert abs(float(affine.logit.std()) - 1) < 0.05
    assert not torch.equal(affine.logit[0], affine.logit[1])
    assert (affine.carrier, affine.offset, affine.shift) == (None, None, None)
    ens = sn.convert(dense(), 4)
    assert ens.plan.init == "normal"
    assert 0.6 < sn.diversity.cosine(ens) < 0.98


def test_paper_init_is_the_published_formula() -> None:
    w = torch.tensor([0.2, 1.9, 0.7])
    affine = initial_affine(w, torch.ones(3), (3,), 2, init="paper")
    k = 1.9 / 0.95
    expected = [math.log((v / k) / (1 - v / k)) for v in w.tolist()]
    for m in range(2):
        assert affine.logit[m].tolist() == pytest.approx(expected, rel=1e-5)
    assert affine.carrier.flatten().tolist() == pytest.approx([k])
    assert torch.equal(affine.shift, torch.ones(3))


def test_paper_init_keeps_the_function_and_needs_fresh_heads() -> None:
    base = randomise(dense()).eval()
    with torch.no_grad():
        for norm in (base[1], base[4]):
            norm.weight.abs_().add_(0.1)
    x = torch.randn(5, 4)
    ens = sn.convert(base, 3, init="paper", head="copy")
    torch.testing.assert_close(ens(x)[2], base(x), rtol=1e-5, atol=1e-6)
    assert any("training keeps them so" in note for note in ens.report.notes)
    assert sn.diversity.symmetric(ens)
    assert sn.convert(base, 3, init="paper").plan.head == "fresh"


def test_paper_init_refuses_scales_that_are_not_positive() -> None:
    base = randomise(dense())
    with torch.no_grad():
        base[1].weight.copy_(torch.tensor([1.0, -1.0, 0.0, 1.0, 1.0, 1.0]))
    with pytest.raises(ConversionError, match=r"2 of 6 in norm '1' .*Use init='preserve'"):
        sn.convert(base, 2, init="paper")
    with pytest.raises(ConversionError, match="scale='sigmoid' only"):
        sn.convert(base, 2, init="paper", scale="linear")


@pytest.mark.parametrize(("members", "channels"), [(2, 3), (4, 64)])
def test_linear_init_is_uniform_within_the_xavier_bound(members: int, channels: int) -> None:
    bound = math.sqrt(6 / (members + channels))
    draws = [
        initial_affine(None, None, (channels,), members, init="normal", scale="linear")
        for _ in range(200)
    ]
    logits = torch.stack([d.logit for d in draws])
    shifts = torch.stack([d.shift for d in draws])
    for values in (logits, shifts):
        assert values.abs().max() <= bound
        assert values.abs().max() > 0.95 * bound
        assert float(values.std()) == pytest.approx(bound / math.sqrt(3), rel=0.1)
    assert draws[0].shift.shape == (members, channels)
    assert not torch.equal(logits, shifts)
    preserved = initial_affine(torch.randn(3), None, (3,), 2, init="preserve", scale="linear")
    assert (preserved.logit - 1).abs().max() <= 0.5


@pytest.mark.parametrize("init", ["normal", "preserve"])
@pytest.mark.parametrize(
    ("shift", "expected"),
    [
        (None, {"normal": "none", "preserve": "shared"}),
        (True, {"normal": "member", "preserve": "member"}),
        (False, {"normal": "none", "preserve": "refused"}),
    ],
)
def test_shifts(init: str, shift: bool | None, expected: dict[str, str]) -> None:
    base = randomise(dense(batch_norm=False)).eval()
    if expected[init] == "refused":
        with pytest.raises(ConversionError, match=r"norm '1' has a trained shift.*shift=True"):
            sn.convert(base, 2, init=init, shift=shift)
        return
    ens = sn.convert(base, 2, init=init, shift=shift)
    layer = ens.sigma_norms()["1"]
    kinds = {"none": type(None), "shared": Tensor, "member": nn.Parameter}
    assert type(layer.shift) is kinds[expected[init]]
    if init == "preserve":
        torch.testing.assert_close(layer.shifts().expand(2, 6)[1], base[1].bias.detach())
    elif shift:
        assert (layer.shift == 0).all()


def test_a_shift_of_zero_may_be_dropped() -> None:
    base = randomise(dense(batch_norm=False)).eval()
    with torch.no_grad():
        base[1].bias.zero_()
        base[4].bias.zero_()
    ens = sn.convert(base, 2, init="preserve", shift=False)
    assert ens.sigma_norms()["1"].shift is None
    x = torch.randn(3, 4)
    torch.testing.assert_close(ens(x)[0], base(x), rtol=1e-5, atol=1e-6)


# -- randomness --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"scale": "linear"}, {"init": "preserve", "head": "fresh"}]
)
def test_a_generator_fixes_scales_and_heads_and_leaves_the_global_state(
    options: dict[str, str],
) -> None:
    base = dense()
    state = torch.get_rng_state()
    first, second, third = (
        sn.convert(base, 3, generator=torch.Generator().manual_seed(seed), **options).state_dict()
        for seed in (5, 5, 6)
    )
    assert torch.equal(torch.get_rng_state(), state)
    for key, value in first.items():
        assert torch.equal(value, second[key]), key
    assert not torch.equal(first["network.6.heads.0.1.weight"], third["network.6.heads.0.1.weight"])
    name = "scale" if options.get("scale") == "linear" else "scale_logit"
    assert not torch.equal(first[f"network.1.{name}"], third[f"network.1.{name}"])
    assert not torch.equal(first["network.6.heads.0.1.weight"], first["network.6.heads.1.1.weight"])


def test_without_a_generator_the_global_seed_decides() -> None:
    states = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        states.append(sn.convert(dense(), 2).state_dict()["network.1.scale_logit"])
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


# -- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("init", ["normal", "preserve"])
def test_a_network_without_values_is_refused(init: str) -> None:
    with torch.device("meta"):
        base = dense()
    with pytest.raises(ConversionError, match=r"lies on the meta device.*load the weights first"):
        sn.convert(base, 2, init=init)


def test_damaged_weights_are_refused() -> None:
    base = randomise(dense())
    with torch.no_grad():
        base[4].weight[0] = float("nan")
    with pytest.raises(ConversionError, match="norm '4' has scales that are not finite"):
        sn.convert(base, 2)
