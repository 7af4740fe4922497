"""The forces of the penalty, and how fast it parts members under an optimizer."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.oracles import diversity as oracle
from torch import nn

import sigmanens as sn
from sigmanens.diversity import theory


def test_the_scratch_settings_part_the_members_in_ten_steps() -> None:
    path = [float(theory.mean_cosine(s)) for s in theory.descent(0.1, 4, 2000, steps=20)]
    assert len(path) == 21
    for step, cosine in ((0, 0.85), (5, 0.29), (10, 0.10)):
        assert path[step] == pytest.approx(cosine, abs=0.015)
    assert theory.steps_to(path, 0.30) == 5
    assert theory.steps_to(path, 0.9) == 0
    assert theory.steps_to(path, 0.01) is None


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("sgd", {"lr": 0.02, "momentum": 0.9, "nesterov": True}),
        ("adam", {"lr": 0.01}),
        ("adamw", {"lr": 0.01, "weight_decay": 0.0}),
    ],
)
def test_descent_is_that_of_the_library_penalty(kind: str, options: dict[str, Any]) -> None:
    base = nn.Sequential(nn.Linear(2, 50), nn.BatchNorm1d(50))
    ensemble = sn.convert(base, 3, init="normal", head="shared")
    gamma = ensemble.sigma_norms()["1"].scale_logit
    with torch.no_grad():
        gamma.copy_(torch.randn(3, 50, generator=torch.Generator().manual_seed(0)))
    diversity = sn.Diversity(0.2, 0.05)
    groups = sn.param_groups(ensemble, options.pop("lr"))
    cls = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[kind]
    optimizer = cls(groups, **options)
    rate = next(g["lr"] for g in groups if g["name"] == "scales_batch_norm")
    expected = []
    for _ in range(16):
        expected.append(sn.diversity.cosine(ensemble))
        optimizer.zero_grad()
        diversity(ensemble).backward()
        optimizer.step()
    rule = partial(cls, lr=rate, **options)
    path = theory.descent(0.2, 3, 50, weight=0.05, optimizer=rule, steps=15)
    assert [float(theory.mean_cosine(s)) for s in path] == pytest.approx(expected, abs=2e-4)
    assert expected[-1] < expected[0] - 0.02


@given(st.floats(0.02, 5), st.integers(2, 5), st.integers(0, 99))
def test_force_is_the_negative_gradient_in_the_scales(tau: float, members: int, seed: int) -> None:
    gamma = torch.randn(members, 3, generator=torch.Generator().manual_seed(seed)).double()
    s = torch.sigmoid(gamma)
    expected = oracle.penalty_gradient([gamma.tolist()], tau, 0.3)[0]
    got = -s * (1 - s) * theory.force(s, tau, 0.3)
    torch.testing.assert_close(got, torch.tensor(expected, dtype=torch.float64))


def test_force_at_a_corner_of_low_temperature() -> None:
    s = torch.tensor([[1.0], [0.0], [0.0], [0.0]])
    got = theory.force(s, 0.01, 1e-2)
    torch.testing.assert_close(got, torch.tensor([[3.0], [-1.0], [-1.0], [-1.0]]))


@pytest.mark.parametrize("members", [2, 4, 8])
@pytest.mark.parametrize("tau", [0.05, 0.5, 3.0])
def test_full_sharing_pull_is_the_penalty_of_the_last_member(tau: float, members: int) -> None:
    def penalty(last: float) -> float:
        s = [1.0] * (members - 1) + [last]
        return sum(oracle.log_softmax([v / tau for v in s]))

    got = theory.full_sharing_pull(tau, members, 0.01)
    assert got == pytest.approx(0.01 * (penalty(1.0) - penalty(0.0)), rel=1e-9)
    assert got > 0


# -- the map's shape -----------------------------------------------------------------------------


def test_the_map_is_steep_in_the_middle_and_flat_outside() -> None:
    found = theory.flat_range(4)
    assert found is not None
    low, high = found
    assert 0.04 < low < 0.12
    assert 1.0 < high < 4.0
    limit = theory.FLAT * 2
    assert theory.owners_per_doubling(0.2, 4) > 3 * limit
    assert theory.owners_per_doubling(0.025, 4) < limit
    assert theory.owners_per_doubling(8.0, 4) < limit
    rise = theory.reached_owners(0.4, 4) - theory.reached_owners(0.2, 4)
    assert theory.owners_per_doubling(0.2 * 2**0.5, 4) == pytest.approx(rise)
