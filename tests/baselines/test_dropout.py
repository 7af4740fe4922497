"""MC dropout: a network by hand with the same masks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.baselines.rivals import X, count, digits
from tests.networks import Pictures
from torch import nn

from sigmanens.baselines import mc_dropout
from sigmanens.errors import InputError


def test_samples_are_passes_with_seeded_masks() -> None:
    base = Pictures(dropout=0.3).eval()
    net = mc_dropout(base, 5, 0.2, seed=11).eval()
    found = net(X)
    h = F.relu(base.bn1(base.conv1(X)))
    h = F.relu(base.bn2(base.conv2(h))).mean((2, 3))
    for s in range(5):
        torch.manual_seed(11 + s)
        expected = base.fc(F.dropout(F.dropout(h, 0.3), 0.2))
        torch.testing.assert_close(found[s], expected)


def test_training_is_one_pass_of_one_network() -> None:
    net = mc_dropout(digits(), 5, 0.2).train()
    torch.manual_seed(3)
    found = net(X)
    assert found.shape == (1, 6, 10)
    torch.manual_seed(3)
    assert not torch.equal(net(X), net(X))  # masks differ from call to call


def test_evaluation_leaves_random_state_and_modes() -> None:
    net = mc_dropout(Pictures(dropout=0.3), 3).eval()
    state = torch.get_rng_state()
    first = net(X)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    assert torch.equal(net(X), first)
    assert not any(m.training for m in net.modules())


def test_only_dropout_is_active() -> None:
    net = mc_dropout(digits(), 4).eval()
    before = {k: v.clone() for k, v in net.state_dict().items()}
    net(X)
    assert all(torch.equal(v, before[k]) for k, v in net.state_dict().items())


def test_the_mean_of_many_samples_is_that_of_dropout() -> None:
    """Inverted dropout before a linear head keeps the expected logits (arXiv 1506.02142)."""
    base = digits().eval()
    samples = mc_dropout(base, 2000, 0.1).eval()(X[:2])
    spread = samples.std(0) / 2000**0.5
    assert bool(((samples.mean(0) - base(X[:2])).abs() < 5 * spread).all())


def test_parameters_are_those_of_one_network() -> None:
    assert count(mc_dropout(digits(), 10)) == count(digits())


def test_the_bases_own_dropout_alone() -> None:
    net = mc_dropout(Pictures(dropout=0.5), 3, None).eval()
    assert isinstance(net.network.fc, nn.Linear)
    assert not torch.equal(*net(X)[:2])
    with pytest.raises(InputError, match="has no dropout module with p > 0"):
        mc_dropout(Pictures(), 3, None)


@pytest.mark.parametrize("p", [0, 1, -0.1])
def test_a_probability_is_between_0_and_1(p: float) -> None:
    with pytest.raises(InputError, match=r"expected a probability in \(0, 1\)"):
        mc_dropout(digits(), 3, p)
