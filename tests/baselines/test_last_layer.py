"""Last-layer Laplace: against the full Gauss-Newton matrix in a loop."""

from __future__ import annotations

import pytest
import torch
from tests.baselines.rivals import count
from tests.oracles.rivals import last_layer_laplace
from torch import nn

from sigmanens.baselines import laplace
from sigmanens.errors import InputError

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()


def network() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def test_closed_form() -> None:
    base = network()
    net = laplace(base, structure="full")
    delta = net.fit(X, Y)
    assert delta > 0
    found = net(X[:8])
    assert found.shape == (1, 8, 3)
    assert net.num_members == 1
    with torch.no_grad():
        features = base[1](base[0](X))
        expected = last_layer_laplace(features, base[2].weight, base[2].bias, features[:8], delta)
    torch.testing.assert_close(found[0].exp(), expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(1, 8))
    assert torch.equal(net(X[:8]), found)


@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_samples_have_the_posteriors_mean_and_spread(structure: str) -> None:
    base = network()
    net = laplace(base, samples=4000, structure=structure)
    net.fit(X, Y)
    found = net(X[:3]).detach()
    assert found.shape == (4000, 3, 3)
    assert net.num_members == 4000
    posterior = net._posterior
    mean, covariance = posterior._glm_predictive_distribution(X[:3])
    torch.testing.assert_close(mean, base(X[:3]).detach(), rtol=1e-4, atol=1e-5)
    spread = covariance.diagonal(dim1=1, dim2=2).sqrt()
    assert bool(((found.mean(0) - mean).abs() < 5 * spread / 4000**0.5).all())
    torch.testing.assert_close(found.std(0), spread, rtol=0.1, atol=0.0)
    assert torch.equal(net(X[:3]).detach(), found)


def test_more_data_leave_less_doubt() -> None:
    def doubt(repeats: int) -> float:
        net = laplace(network(), samples=200)
        net.fit(X.repeat(repeats, 1), Y.repeat(repeats))
        return float(net(X[:5]).detach().std(0).mean())

    assert doubt(20) < doubt(1)


def test_training_is_that_of_one_network() -> None:
    base = network()
    net = laplace(base).train()
    assert torch.equal(net(X), base(X)[None])
    net(X).sum().backward()
    assert all(p.grad is not None for p in net.parameters())
    assert count(net) == count(base)


def test_refusals() -> None:
    with pytest.raises(InputError, match=r"not fitted: call fit\(x, y\)"):
        laplace(network()).eval()(X)
    with pytest.raises(InputError, match="structure is 'dense'"):
        laplace(network(), structure="dense")
    with pytest.raises(InputError, match="samples is 0"):
        laplace(network(), samples=0)
