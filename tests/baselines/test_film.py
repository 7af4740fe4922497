"""The FiLM-Ensemble control: an unbounded scale and a shift per member, no penalty."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from tests.networks import dense, randomise
from torch import Tensor, nn

from sigmanens import Diversity, EnsembleLoss, param_groups
from sigmanens.baselines import film_ensemble
from sigmanens.errors import DiversityError, InputError

X = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def by_hand(film: nn.Module, base: nn.Sequential, member: int, x: Tensor, training: bool) -> Tensor:
    """y = γ ⊙ norm(x) + β with the base's own weights, for one member."""
    h = base[0](x)
    for norm, after in (("1", base[3]), ("4", None)):
        layer = film.network.get_submodule(norm)
        if training:
            mean, variance = h.mean(0), h.var(0, unbiased=False)
        else:
            mean, variance = layer.running_mean[member], layer.running_var[member]
        h = (h - mean) / torch.sqrt(variance + 1e-5)
        h = F.relu(layer.scale[member] * h + layer.shift[member])
        if after is not None:
            h = after(h)
    head = film.network.get_submodule("6").heads[member]
    return head(h)


@pytest.mark.parametrize("training", [True, False])
def test_formula(training: bool) -> None:
    torch.manual_seed(3)
    base = dense()
    film = film_ensemble(base, 3, generator=generator())
    with torch.no_grad():  # statistics and shifts of a training, different in each member
        for layer in film.sigma_norms().values():
            layer.running_mean.normal_(generator=generator(1))
            layer.running_var.uniform_(0.5, 2, generator=generator(2))
            layer.shift.normal_(generator=generator(4))
    film.train(training)
    statistics = {k: v.clone() for k, v in film.named_buffers()}
    found = film(X)
    assert (not torch.equal(statistics["network.1.running_mean"],
                            film.network[1].running_mean)) is training  # fmt: skip
    film.load_state_dict(statistics, strict=False)
    for member in range(3):
        torch.testing.assert_close(
            found[member], by_hand(film, base, member, X, training), rtol=1e-4, atol=1e-5
        )
    assert not torch.allclose(found[0], found[1])


def test_scales_and_shifts_start_within_the_xavier_bound() -> None:
    members, channels = 4, 200
    film = film_ensemble(
        nn.Sequential(nn.Linear(4, channels), nn.BatchNorm1d(channels), nn.Linear(channels, 3)),
        members,
        generator=generator(),
    )
    (layer,) = film.sigma_norms().values()
    bound = math.sqrt(6 / (members + channels))
    for parameter in (layer.scale, layer.shift):
        assert parameter.requires_grad
        drawn = parameter.detach()
        assert drawn.shape == (members, channels)
        assert float(drawn.abs().max()) <= bound
        assert float(drawn.max()) > 0.95 * bound
        assert float(drawn.min()) < -0.95 * bound
        assert float(drawn.mean()) == pytest.approx(0, abs=0.1 * bound)
        assert float(drawn.std()) == pytest.approx(bound / math.sqrt(3), rel=0.05)
    assert not torch.equal(layer.scale, layer.shift)
    assert not torch.equal(layer.scale[0], layer.scale[1])


def test_gain_widens_the_start() -> None:
    plain, wide = (film_ensemble(dense(), 3, gain=g, generator=generator()) for g in (1.0, 2.5))
    for ours, theirs in zip(plain.sigma_norms().values(), wide.sigma_norms().values(), strict=True):
        assert torch.equal(2.5 * ours.scale, theirs.scale)
        assert torch.equal(2.5 * ours.shift, theirs.shift)
    with pytest.raises(InputError, match=r"gain is 2\.0, which would change the function"):
        film_ensemble(randomise(dense()), 2, gain=2.0)
    with pytest.raises(InputError, match="gain is 0; expected a number > 0"):
        film_ensemble(dense(), 2, gain=0)


def test_parameters() -> None:
    base = dense()
    film = film_ensemble(base, 4, head="copy")
    plain = sum(p.numel() for p in base.parameters())
    head = 6 * 3 + 3
    assert sum(p.numel() for p in film.parameters()) == plain + 3 * (2 * 2 * 6) + 3 * head


def test_every_rate_is_the_base_rate() -> None:
    groups = {g["name"]: g["lr"] for g in param_groups(film_ensemble(dense(), 2), lr=0.3)}
    assert groups == {"decay": 0.3, "no_decay": 0.3, "scales_linear": 0.3}


def test_no_penalty_applies() -> None:
    film = film_ensemble(dense(), 2)
    loss_fn = EnsembleLoss(diversity=Diversity())
    with pytest.raises(DiversityError, match="scale='linear'"):
        loss_fn(film(X), torch.zeros(9, dtype=torch.long), film)


def test_a_pretrained_base_keeps_its_function() -> None:
    base = randomise(dense()).eval()
    expected = base(X)
    film = film_ensemble(base, 3, generator=generator())
    assert (film.plan.init, film.plan.head) == ("preserve", "copy")
    for member in film(X):
        torch.testing.assert_close(member, expected, rtol=1e-4, atol=1e-5)
    assert film.network[1].shift.shape == (3, 6)
    assert film.network[1].shift.requires_grad
    first, second = film.network[1].scale.detach()[:2]
    assert not torch.equal(first, second)
    with torch.no_grad():
        film.network[1].scale[0] += 0.1
    assert not torch.allclose(film(X)[0], expected, atol=1e-3)
    torch.testing.assert_close(film(X)[1], expected, rtol=1e-4, atol=1e-5)


def test_the_base_is_a_copy() -> None:
    base = dense()
    before = {k: v.clone() for k, v in base.state_dict().items()}
    film = film_ensemble(base, 2)
    film.train()
    film(X).sum().backward()
    assert all(torch.equal(v, before[k]) for k, v in base.state_dict().items())
    assert all(p.grad is None for p in base.parameters())
