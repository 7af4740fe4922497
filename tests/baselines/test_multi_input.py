"""MIMO: the joint pass by hand, the order of its training, torch-uncertainty's own network."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.baselines.rivals import X, count, digits, generator
from torch import nn

from sigmanens.baselines import mimo
from sigmanens.errors import ConversionError, InputError
from sigmanens.lab.backbones import WideResNet, build_backbone

DENSE = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


@pytest.mark.parametrize("base", [digits(), DENSE])
def test_evaluation_repeats_the_input(base: nn.Module) -> None:
    x = X if base is not DENSE else torch.randn(5, 4)
    net = mimo(base, 3, generator=generator()).eval()
    joint = net.network(torch.cat([x, x, x], 1))
    for m, logits in enumerate(net(x)):
        torch.testing.assert_close(logits, joint.chunk(3, 1)[m])


@pytest.mark.parametrize(("rho", "repetitions"), [(1.0, 1), (0.0, 1), (0.5, 3)])
def test_training_puts_the_logits_back_in_order(rho: float, repetitions: int) -> None:
    net = mimo(digits(), 3, rho=rho, repetitions=repetitions, generator=generator()).train()
    for module in net.modules():  # so that a row does not depend on the rest of the batch
        if isinstance(module, nn.BatchNorm2d):
            module.eval()
    torch.manual_seed(5)
    found = net(X)
    assert found.shape == (3 * repetitions, 6, 10)
    torch.manual_seed(5)
    order = net.draw_order(6)
    found = found.unflatten(0, (3, repetitions))
    for place in range(6 * repetitions):
        rows = order[:, place]  # which sample each member sees in this row
        joint = net.network(torch.cat([X[row % 6][None] for row in rows], 1))[0].chunk(3)
        for m, row in enumerate(rows):
            expected = found[m, row // 6, row % 6]
            torch.testing.assert_close(joint[m], expected, rtol=1e-4, atol=1e-5)


@given(
    size=st.integers(1, 12),
    members=st.integers(1, 4),
    repetitions=st.integers(1, 3),
    rho=st.floats(0, 1),
)
@settings(max_examples=25)
def test_orders_are_permutations_that_share_their_places(
    size: int, members: int, repetitions: int, rho: float
) -> None:
    net = mimo(DENSE, members, rho=rho, repetitions=repetitions, generator=generator())
    order = net.draw_order(size, generator=generator(1))
    rows = size * repetitions
    assert order.shape == (members, rows)
    assert torch.equal(order.sort(1).values, torch.arange(rows).expand(members, -1))
    shared = (order == order[0]).all(0)
    assert bool(shared[int(rows * (1 - rho)) :].all())


def test_members_see_samples_of_their_own() -> None:
    order = mimo(DENSE, 3, rho=0.0).draw_order(50, generator=generator())
    assert float((order[0] == order[1]).float().mean()) < 0.2
    order = mimo(DENSE, 3, rho=1.0).draw_order(50, generator=generator())
    assert torch.equal(order[0], order[1])


def test_equals_the_network_of_torch_uncertainty() -> None:
    module = importlib.import_module("torch_uncertainty.models.classification.wideresnet.mimo")
    theirs = module._MIMOWideResNet(
        depth=10, widen_factor=1, in_channels=1, num_classes=10, num_estimators=4,
        conv_bias=True, dropout_rate=0.0, style="cifar",
    ).eval()  # fmt: skip
    ours = mimo(WideResNet(10, 1, in_channels=1), 4).eval()
    ours.network.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(X).flatten(0, 1), theirs(X))


def test_parameters() -> None:
    """Over one network: (M - 1) first kernels and (M - 1) heads (arXiv 2010.06610)."""
    base = digits(16)
    assert count(mimo(base, 5)) == count(base) + 4 * 16 * 9 + 4 * (32 * 10 + 10)


@pytest.mark.parametrize(
    ("name", "millions"), [("resnet18", 11.19), ("resnet50", 23.59), ("wrn28_10", 36.51)]
)
def test_parameters_of_the_published_networks(name: str, millions: float) -> None:
    """M = 4, 10 classes (table 1 of arXiv 2210.09184)."""
    assert round(count(mimo(lambda: build_backbone(name), 4)) / 1e6, 2) == millions


def test_refusals() -> None:
    with pytest.raises(ConversionError, match="both the first and the last"):
        mimo(nn.Sequential(nn.Linear(4, 3)), 2)
    with pytest.raises(ConversionError, match="has 2 groups"):
        mimo(nn.Sequential(nn.Conv2d(2, 4, 1, groups=2), nn.Flatten(), nn.Linear(4, 3)), 2)
    with pytest.raises(InputError, match="rho is 2"):
        mimo(digits(), 2, rho=2)
    with pytest.raises(InputError, match="repetitions is 0"):
        mimo(digits(), 2, repetitions=0)
