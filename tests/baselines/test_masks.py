"""Fixed masks: σN-Ens without a penalty, but for the frozen scales of R."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.baselines.rivals import X, count, digits, generator, trained_statistics

import sigmanens as sn
from sigmanens.baselines import fixed_masks
from sigmanens.baselines.masks import draw_masks
from sigmanens.errors import DiversityError, InputError

R = ("layer1.0.bn2", "layer2.0.bn2")  # the second norm of each block


@given(members=st.integers(1, 6), owners=st.integers(1, 6), channels=st.integers(1, 40))
@settings(max_examples=25)
def test_every_channel_has_its_owners(members: int, owners: int, channels: int) -> None:
    owners = min(owners, members)
    masks = draw_masks(torch.Size((members, channels)), owners, generator())
    assert masks.dtype == torch.bool
    assert masks.sum(0).tolist() == [owners] * channels


def test_owners_are_spread_evenly() -> None:
    masks = draw_masks(torch.Size((4, 4000)), 1, generator())
    assert masks.sum(1).tolist() == pytest.approx([1000] * 4, abs=120)


@pytest.mark.parametrize("keep", [1, 3, 0.5])
def test_the_scales_of_r_are_masks_and_frozen(keep: float) -> None:
    net = fixed_masks(digits(), 4, keep=keep, generator=generator())
    assert net.report.regularised == R
    owners = 2 if keep == 0.5 else keep
    for name, norm in net.sigma_norms().items():
        scales = norm.scales().detach()
        if name in R:
            assert not norm.logit.requires_grad
            assert set(scales.unique().tolist()) == {0.0, 1.0}
            assert scales.sum(0).tolist() == [float(owners)] * scales.shape[1]
        else:
            assert norm.logit.requires_grad
            assert bool(((scales > 0) & (scales < 1)).all())
    assert sn.diversity.owners(net, "auto") == owners


def test_all_else_is_the_ensemble_without_a_penalty() -> None:
    base = digits()
    net = fixed_masks(base, 4, generator=generator())
    free = sn.convert(base, 4, generator=generator())
    frozen = sum(net.sigma_norms()[name].logit.numel() for name in R)
    assert count(net) == count(free)
    assert count(net, trained=True) == count(free) - frozen
    theirs = free.state_dict()
    for name, value in net.state_dict().items():
        masked = any(name == f"network.{r}.scale_logit" for r in R)
        assert torch.equal(value, theirs[name]) is not masked


def test_a_pretrained_base_lends_its_scales_and_shifts() -> None:
    base = trained_statistics(digits())
    with torch.no_grad():
        base.layer1[0].bn2.weight.uniform_(-2, 2)
        base.layer1[0].bn2.weight[3] = 0.0
        base.layer1[0].bn2.bias.normal_()
    net = fixed_masks(base, 4, keep=1, generator=generator())
    assert net.plan.init == "preserve"
    plain = base.layer1[0].bn2
    norm = net.sigma_norms()["layer1.0.bn2"]
    torch.testing.assert_close(norm.scales().detach().sum(0), plain.weight.detach())
    assert torch.equal(norm.shifts().detach()[0], plain.bias.detach())
    for m in range(4):
        torch.testing.assert_close(net.member(m)(X), net.eval()(X)[m], rtol=1e-4, atol=1e-5)


def test_nothing_moves_the_masks() -> None:
    net = fixed_masks(digits(), 4, generator=generator())
    norm = net.sigma_norms()[R[0]]
    before = norm.scales().detach().clone()
    optimizer = torch.optim.SGD(sn.param_groups(net, 0.1, 0.1), momentum=0.9)
    for _ in range(2):
        sn.EnsembleLoss()(net(X), torch.arange(6), net).backward()
        optimizer.step()
    assert torch.equal(norm.scales(), before)


@pytest.mark.parametrize("trained", [True, False])
def test_checkpoint(tmp_path, trained: bool) -> None:
    base = trained_statistics(digits()) if trained else digits().eval()
    net = fixed_masks(base, 4, generator=generator()).eval()
    net.save_pretrained(tmp_path / "masks")
    assert torch.equal(sn.load(tmp_path / "masks", base=base).eval()(X), net(X))


def test_refusals() -> None:
    for keep, message in (
        (0, "expected 1 to 4 owners"),
        (5, "expected 1 to 4 owners"),
        (1.5, "expected a share"),
        (True, "expected an integer or a share"),
    ):
        with pytest.raises(InputError, match=message):
            fixed_masks(digits(), 4, keep=keep)
    with pytest.raises(InputError, match="the masks are the scales"):
        fixed_masks(digits(), 4, scale="linear")
    with pytest.raises(DiversityError, match="selects no converted norm"):
        fixed_masks(digits(), 4, layers="nothing")
