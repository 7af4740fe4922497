"""What the penalty alone prefers and reaches: published thresholds, end states and speed."""

from __future__ import annotations

import math
from collections import deque
from decimal import Decimal, localcontext
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.oracles import diversity as oracle
from torch import Tensor, nn

import sigmanens as sn
from sigmanens.diversity import theory
from sigmanens.errors import DiversityError

# -- what it prefers -----------------------------------------------------------------------------

# From which τ on the penalty alone prefers so many owners.
THRESHOLDS = [
    *[(4, owners, tau) for owners, tau in [(2, 0.596)]],
    *[(8, owners, tau) for owners, tau in [(2, 0.185), (3, 0.397), (4, 1.30)]],
    *[(16, owners, tau) for owners, tau in [(2, 0.090), (3, 0.156), (4, 0.231), (8, 2.65)]],
]


@pytest.mark.parametrize(("members", "owners", "tau"), THRESHOLDS)
def test_thresholds(members: int, owners: int, tau: float) -> None:
    last_digit = 10 ** -(3 if tau < 1 else 2)
    assert theory.preferred_owners(tau + last_digit, members) == owners
    assert theory.preferred_owners(tau - last_digit, members) == owners - 1


@pytest.mark.parametrize("members", range(2, 20))
def test_preferred_owners_minimise_the_penalty(members: int) -> None:
    for tau in np.geomspace(0.01, 30, 60).tolist():
        values = {k: oracle.corner(k, members, tau) for k in range(1, members + 1)}
        best = max(values.values())
        assert values[theory.preferred_owners(tau, members)] == pytest.approx(best, abs=1e-13)


@pytest.mark.parametrize("members", range(2, 20))
def test_preferred_owners_are_the_integer_next_to_the_continuous_optimum(members: int) -> None:
    for tau in np.geomspace(0.01, 1e3, 60).tolist():
        owners = theory.preferred_owners(tau, members)
        exact = members * (tau - 1 / (math.exp(1 / tau) - 1))
        assert abs(owners - max(exact, 1)) < 1


@pytest.mark.parametrize("members", [2, 3, 4, 7, 8, 16, 33])
def test_preferred_owners_rise_with_the_temperature_from_1_to_half(members: int) -> None:
    taus = np.geomspace(1e-3, 1e6, 300).tolist()
    found = [theory.preferred_owners(tau, members) for tau in taus]
    assert found == sorted(found)
    assert (found[0], found[-1]) == (1, members // 2)


@pytest.mark.parametrize("members", [4, 7, 16])
@pytest.mark.parametrize("tau", [1e6, 1e12, 1e300])
def test_preferred_owners_at_high_temperature_to_forty_digits(tau: float, members: int) -> None:
    with localcontext() as context:
        context.prec = 2 * int(math.log10(tau)) + 40

        def corner(k: int) -> Decimal:
            t = Decimal(tau)
            mean = (k * (1 / t).exp() + members - k) / members
            return t * mean.ln() - Decimal(k) / members

        best = max(range(1, members + 1), key=corner)
    assert theory.preferred_owners(tau, members) == best


@pytest.mark.parametrize("tau", [5e-324, 1e-300, 1e-9, 1e-4])
@pytest.mark.parametrize("members", [2, 4, 1000])
def test_one_owner_at_tiny_temperature(tau: float, members: int) -> None:
    assert theory.preferred_owners(tau, members) == 1


# -- what it reaches: the real thing -------------------------------------------------------------

TAUS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
# Mean pairwise cosine (mean owners) after 2,000 steps from γ ~ N(0, 1).
END_STATES = {
    4: [(0.02, 1.04), (0.07, 1.12), (0.16, 1.32), (0.27, 1.66), (0.32, 1.81), (0.35, 1.91)],
    8: [(0.07, 1.29), (0.14, 1.74), (0.24, 2.5), (0.35, 3.3), (0.40, 3.6), (0.43, 3.8)],
    16: [(0.09, 2.0), (0.16, 3.2), (0.26, 4.7), (0.38, 6.5), (0.42, 7.2), (0.45, 7.6)],
}
CHANNELS = 1000


def cosine_of(s: Tensor) -> float:
    """Mean pairwise cosine of s (M, N)."""
    unit = torch.nn.functional.normalize(s.double(), dim=1)
    a, b = torch.triu_indices(len(s), len(s), 1)
    return float((unit @ unit.T)[a, b].mean())


def owners_of(s: Tensor) -> float:
    return float((s > 0.5).sum(0).double().mean())


def descend(tau: Tensor, members: int, channels: int, **options: Any) -> Tensor:
    """Where the descent ends: (τ, M, N)."""
    path = theory.descent(tau.view(-1, 1, 1), members, channels, **options)
    return deque(path, maxlen=1)[0]


@cache
def end_states(members: int) -> Tensor:
    """(τ, M, N)"""
    return descend(torch.tensor(TAUS), members, CHANNELS)


def converted(members: int, channels: int = CHANNELS) -> sn.SigmaEnsemble:
    """An ensemble with the start that ``descent`` has."""
    base = nn.Sequential(nn.Linear(2, channels), nn.BatchNorm1d(channels))
    ensemble = sn.convert(base, members, init="normal", head="shared")
    start = descend(torch.tensor([1.0]), members, channels, steps=0)[0]
    with torch.no_grad():
        ensemble.sigma_norms()["1"].scale_logit.copy_(torch.logit(start))
    return ensemble


def train(ensemble: sn.SigmaEnsemble, tau: float, steps: int) -> None:
    """SGD on the library's penalty with the scratch CNN settings: base rate 0.1, so γ rate 10."""
    diversity = sn.Diversity(tau, 1e-2)
    optimizer = torch.optim.SGD(sn.param_groups(ensemble, lr=0.1), momentum=0.9)
    assert {g["name"]: g["lr"] for g in optimizer.param_groups}["scales_batch_norm"] == 10
    for _ in range(steps):
        optimizer.zero_grad()
        diversity(ensemble).backward()
        optimizer.step()


@pytest.mark.parametrize("members", END_STATES)
@pytest.mark.parametrize("tau", TAUS)
def test_end_state_of_penalty_only_descent(tau: float, members: int) -> None:
    s = end_states(members)[TAUS.index(tau)]
    cosine, owners = END_STATES[members][TAUS.index(tau)]
    assert cosine_of(s) == pytest.approx(cosine, abs=0.03)
    assert owners_of(s) == pytest.approx(owners, abs=0.15)


@pytest.mark.parametrize(("tau", "members"), [(0.1, 4), (1.0, 4), (0.2, 8)])
def test_end_state_of_a_converted_ensemble(tau: float, members: int) -> None:
    ensemble = converted(members)
    train(ensemble, tau, 2000)
    cosine, owners = END_STATES[members][TAUS.index(tau)]
    assert sn.diversity.cosine(ensemble) == pytest.approx(cosine, abs=0.03)
    assert sn.diversity.owners(ensemble) == pytest.approx(owners, abs=0.15)
    expected = end_states(members)[TAUS.index(tau)]
    gates = ensemble.sigma_norms()["1"].gates().detach()
    assert float((gates - expected).abs().mean()) < 1e-3


def test_descent_starts_at_a_standard_normal_and_follows_its_seed() -> None:
    start = descend(torch.tensor([0.1, 1.0]), 4, 4000, steps=0)
    assert start.shape == (2, 4, 4000)
    assert torch.equal(start[0], start[1])
    gamma = torch.logit(start[0])
    assert float(gamma.mean()) == pytest.approx(0, abs=0.03)
    assert float(gamma.std()) == pytest.approx(1, abs=0.03)
    assert cosine_of(start[0]) == pytest.approx(0.85, abs=0.01)
    again, other = (descend(torch.tensor([0.1]), 4, 9, steps=3, seed=s) for s in (0, 1))
    assert torch.equal(again, descend(torch.tensor([0.1]), 4, 9, steps=3))
    assert not torch.equal(again, other)


def test_smaller_rates_have_not_converged() -> None:
    tau = torch.tensor([0.1])
    sgd = partial(torch.optim.SGD, lr=0.01, momentum=0.9)
    slow = descend(tau, 4, CHANNELS, optimizer=sgd)[0]
    assert cosine_of(slow) > cosine_of(end_states(4)[1]) + 0.1


# -- what it reaches: the map from τ to owners and back ------------------------------------------


@pytest.mark.parametrize("members", [4, 8])
@pytest.mark.parametrize("tau", [0.033, 0.37, 1.7, 7.0])
def test_map_agrees_with_descent_off_its_grid_and_from_another_start(
    tau: float, members: int
) -> None:
    s = descend(torch.tensor([tau]), members, 1500, seed=5)[0]
    assert theory.reached_owners(tau, members) == pytest.approx(owners_of(s), abs=0.08)
    assert theory.reached_cosine(tau, members) == pytest.approx(cosine_of(s), abs=0.02)


@pytest.mark.parametrize("members", [3, 4, 8])
def test_map_is_monotone(members: int) -> None:
    taus = np.geomspace(0.02, 5, 100).tolist()
    owners = [theory.reached_owners(t, members) for t in taus]
    cosines = [theory.reached_cosine(t, members) for t in taus]
    assert min(np.diff(owners)) > -1e-3
    assert min(np.diff(cosines)) > -1e-3
    assert owners[0] < 1.3
    assert owners[-1] > 0.48 * members


@pytest.mark.parametrize("members", [4, 8])
def test_more_owners_are_reached_than_preferred(members: int) -> None:
    # the start decides; at high τ both approach M/2
    for tau in (0.02, 0.1, 0.15):
        assert theory.reached_owners(tau, members) >= theory.preferred_owners(tau, members)


def test_map_is_constant_beyond_its_grid_and_continuous_at_the_ends() -> None:
    for fn in (theory.reached_owners, theory.reached_cosine):
        assert fn(1e-9, 4) == fn(0.02, 4) == pytest.approx(fn(0.0201, 4), abs=1e-3)
        assert fn(1e9, 4) == pytest.approx(fn(20.0, 4), abs=1e-9)
        assert fn(20.0, 4) == pytest.approx(fn(19.9, 4), abs=1e-2)


@pytest.mark.parametrize(("owners", "members"), [(1.05, 4), (1.5, 4), (1.9, 4), (2.0, 8), (3.3, 8)])
def test_tau_for_owners_inverts_the_map(owners: float, members: int) -> None:
    tau = theory.tau_for_owners(owners, members)
    assert theory.reached_owners(tau, members) == pytest.approx(owners, abs=2e-2)
    s = descend(torch.tensor([tau]), members, 1500, seed=7)[0]
    assert owners_of(s) == pytest.approx(owners, abs=0.08)


def test_tau_for_owners_rises_with_owners() -> None:
    found = [theory.tau_for_owners(k, 8) for k in np.linspace(1.15, 3.9, 30).tolist()]
    assert found == sorted(found)


def test_whole_owners_at_the_ends_of_the_range_are_within_reach() -> None:
    assert theory.tau_for_owners(1, 2) == 0.02  # two members: one owner at any τ
    assert theory.tau_for_owners(1, 4) == 0.02
    assert 2 < theory.tau_for_owners(2, 4) <= 20


@pytest.mark.parametrize("owners", [0, 1.0, 4.5, 8, math.nan, math.inf, -1, "2", None, True])
def test_owners_out_of_reach_are_refused_with_the_range(owners: object) -> None:
    message = r"out of reach for 8 members: .* between 1\.\d\d \(τ = 0\.02\) and 3\.9\d owners"
    with pytest.raises(DiversityError, match=message):
        theory.tau_for_owners(owners, 8)  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers() -> None:
    assert theory.preferred_owners(np.float32(1.5), np.int64(8)) == 4
    assert theory.reached_owners(np.float64(0.1), np.int64(4)) == theory.reached_owners(0.1, 4)
    assert theory.tau_for_owners(np.float64(1.5), np.int64(4)) == theory.tau_for_owners(1.5, 4)


@pytest.mark.parametrize(
    "fn", [theory.preferred_owners, theory.reached_owners, theory.reached_cosine]
)
def test_bad_arguments_are_named(fn: object) -> None:
    assert callable(fn)
    for tau in (0.0, -1.0, math.nan, math.inf, "0.1"):
        with pytest.raises(DiversityError, match=r"tau \(τ\) is .*; expected a finite number > 0"):
            fn(tau, 4)
    for members in (1, 0, -3, 2.0, "4", True):
        with pytest.raises(DiversityError, match=r"members is .*; expected an integer ≥ 2"):
            fn(0.1, members)


def test_owners_of_bad_members_are_named() -> None:
    with pytest.raises(DiversityError, match="members is 1; expected an integer ≥ 2"):
        theory.tau_for_owners(1.0, 1)
