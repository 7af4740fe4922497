"""Separate networks behind the ensemble's interface."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tests.networks import dense
from torch import Tensor, nn

from sigmanens import EnsembleLoss, param_groups
from sigmanens.baselines import SeparateNetworks
from sigmanens.errors import InputError

X = torch.randn(7, 4, generator=torch.Generator().manual_seed(0))


def networks(count: int) -> list[nn.Module]:
    torch.manual_seed(1)
    return [dense() for _ in range(count)]


def test_members_are_the_networks() -> None:
    nets = networks(3)
    rival = SeparateNetworks(nets)
    assert rival.num_members == 3
    assert all(a is b for a, b in zip(rival.networks, nets, strict=True))
    for mode in (True, False):
        rival.train(mode)
        expected = [net(X) for net in nets]
        found = rival(X)
        assert found.shape == (3, 7, 3)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not torch.equal(found[0], found[1])


def test_nothing_is_shared() -> None:
    rival = SeparateNetworks(networks(4))
    one = sum(p.numel() for p in dense().parameters())
    assert sum(p.numel() for p in rival.parameters()) == 4 * one
    loss = EnsembleLoss()(rival(X), torch.zeros(7, dtype=torch.long))
    loss.backward()
    oracle = networks(4)[2]
    (nn.functional.cross_entropy(oracle(X), torch.zeros(7, dtype=torch.long)) / 4).backward()
    for ours, theirs in zip(rival.networks[2].parameters(), oracle.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_no_group_of_scales() -> None:
    groups = param_groups(SeparateNetworks(networks(2)), lr=0.1, weight_decay=1e-3)
    assert [g["name"] for g in groups] == ["decay", "no_decay"]
    assert {g["lr"] for g in groups} == {0.1}


def test_outputs_of_other_kinds_and_keywords() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = dense()

        def forward(self, *, inputs: Tensor) -> SimpleNamespace:
            return SimpleNamespace(logits=self.inner(inputs), hidden=None)

    rival = SeparateNetworks([Wrapped().eval(), Wrapped().eval()])
    found = rival(inputs=X)
    assert found.shape == (2, 7, 3)
    assert torch.equal(found[1], rival.networks[1].inner(X))


def test_no_network_is_refused() -> None:
    with pytest.raises(InputError, match="at least one"):
        SeparateNetworks([])
