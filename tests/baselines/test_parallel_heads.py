"""Heads only: one backbone, M heads on its features."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from tests.baselines.rivals import X, Y, count, digits, generator, trained_statistics
from tests.networks import dense
from torch import nn

from sigmanens import EnsembleLoss
from sigmanens.baselines import heads_only
from sigmanens.errors import HeadNotFoundError, InputError


@pytest.mark.parametrize("head", ["fresh", "copy"])
@pytest.mark.parametrize("training", [True, False])
def test_members_are_the_backbone_with_one_head(head: str, training: bool) -> None:
    base = trained_statistics(digits()).train(training)
    net = heads_only(base, 3, head=head, generator=generator()).train(training)
    heads = copy.deepcopy(net.network.linear.heads)
    found = net(X)
    for m in range(3):
        plain = copy.deepcopy(base)
        plain.linear = heads[m]
        torch.testing.assert_close(found[m], plain(X))


def test_gradients_are_those_of_the_loop() -> None:
    base = digits().eval()
    net = heads_only(base, 2, generator=generator()).eval()
    EnsembleLoss()(net(X), Y, net).backward()
    slow = copy.deepcopy(base)
    heads = copy.deepcopy(net.network.linear.heads)
    for head in heads:
        slow.linear = head
        (F.cross_entropy(slow(X), Y) / 2).backward()
    pairs = zip(net.network.linear.parameters(), heads.parameters(), strict=True)
    for ours, theirs in [*pairs, (net.network.conv1.weight, slow.conv1.weight)]:
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-6)


def test_parameters() -> None:
    """The backbone once and M heads (arXiv 1511.06314); norms are not multiplied."""
    base, members = digits(16), 5
    head = 32 * 10 + 10
    assert count(heads_only(base, members, head="copy")) == count(base) + 4 * head
    fresh = head + 2 * 32  # with a norm
    assert count(heads_only(base, members)) == count(base) - head + 5 * fresh


def test_the_head_is_copied_from_a_trained_base_only() -> None:
    assert isinstance(heads_only(digits(), 2).network.linear.heads[0], nn.Sequential)
    trained = trained_statistics(digits())
    net = heads_only(trained, 2, generator=generator())
    assert isinstance(net.network.linear.heads[0], nn.Linear)
    weight = trained.linear.weight.detach()
    for head in net.network.linear.heads:
        noise = (head.weight.detach() - weight).std() / weight.std()
        assert float(noise) == pytest.approx(0.1, rel=0.2)
        assert torch.equal(head.bias, trained.linear.bias)
    exact = heads_only(trained, 1, head="copy", noise=0.0)
    assert torch.equal(exact(X)[0], trained(X))


def test_norms_may_be_missing() -> None:
    net = heads_only(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)), 2)
    assert net(torch.randn(7, 4)).shape == (2, 7, 3)


def test_refusals() -> None:
    with pytest.raises(InputError, match="3 equal heads on the same features would stay equal"):
        heads_only(dense(), 3, head="copy", noise=0.0)
    with pytest.raises(InputError, match="head is 'shared'"):
        heads_only(dense(), 3, head="shared")
    with pytest.raises(HeadNotFoundError):
        heads_only(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), 3)
    blank = dense()
    (last,) = [m for m in list(blank.modules())[-1:] if isinstance(m, nn.Linear)]
    nn.init.zeros_(last.weight)
    with pytest.raises(InputError, match=r"has 0 everywhere.*Use head='fresh'"):
        heads_only(blank, 3, head="copy")
