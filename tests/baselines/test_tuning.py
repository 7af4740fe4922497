"""Norm tuning: what is frozen stays, what is not trains."""

from __future__ import annotations

import pytest
import torch
from tests.baselines.rivals import X, count, digits, generator
from torch import nn

import sigmanens as sn
from sigmanens.baselines import norm_tuning
from sigmanens.errors import InputError, NoNormError


@pytest.mark.parametrize(
    ("options", "head"),
    [({}, False), ({"train_head": True}, True), ({"head": "fresh"}, True),
     ({"head": "fresh", "train_head": False}, False)],
)  # fmt: skip
def test_norms_train_and_the_rest_does_not(options: dict, head: bool) -> None:
    net = norm_tuning(digits(), generator=generator(), **options)
    before = {k: p.detach().clone() for k, p in net.named_parameters()}
    optimizer = torch.optim.SGD(sn.param_groups(net, 0.1, 0.1))
    sn.EnsembleLoss()(net(X), torch.arange(6), net).backward()
    optimizer.step()
    for name, p in net.named_parameters():
        trains = "bn" in name or (head and ".linear." in name)
        assert p.requires_grad is trains, name
        assert torch.equal(p, before[name]) is not trains, name


def test_parameters() -> None:
    """Two for each normalised channel (arXiv 2003.00152)."""
    net = norm_tuning(digits(16))
    assert count(net) == count(digits(16))
    assert count(net, trained=True) == 2 * (16 + 2 * 16 + 2 * 32)


def test_the_function_is_the_bases() -> None:
    base = digits().eval()
    net = norm_tuning(base)
    assert net.num_members == 1
    assert torch.equal(net(X), base(X)[None])
    drawn = norm_tuning(base, head="fresh", generator=generator())
    assert torch.equal(drawn(X), norm_tuning(base, head="fresh", generator=generator())(X))
    assert not torch.equal(drawn(X), net(X))


def test_refusals() -> None:
    with pytest.raises(NoNormError, match="nothing to tune"):
        norm_tuning(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=False)))
    with pytest.raises(InputError, match="head is 'shared'"):
        norm_tuning(digits(), head="shared")
