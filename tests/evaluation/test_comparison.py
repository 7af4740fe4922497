"""Paired differences against scipy, and how often they see what is not there."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from sigmanens.errors import InputError, NonFiniteError
from sigmanens.evaluation import comparison
from sigmanens.evaluation.comparison import (
    holm,
    resampled_means,
    sample_difference,
    seed_difference,
)


@pytest.mark.parametrize("df", [1, 2, 3, 4, 5, 8, 19, 40, 101])
def test_students_distribution_is_scipys(df: int) -> None:
    for t in (0.0, 0.1, 0.8, 2.0, 4.3, 12.7, 60.0):
        expected = 2 * stats.t.sf(t, df)
        assert comparison.student_p(t, df) == pytest.approx(expected, rel=1e-6, abs=1e-12)
        assert comparison.student_p(-t, df) == comparison.student_p(t, df)
    for share in (0.5, 0.6, 0.9, 0.975, 0.999):
        expected = stats.t.ppf(share, df)
        assert comparison.student_quantile(share, df) == pytest.approx(expected, rel=1e-6, abs=1e-9)


@given(
    st.lists(st.tuples(st.floats(-5, 5), st.floats(-5, 5)), min_size=2, max_size=9),
    st.sampled_from([0.5, 0.9, 0.95, 0.99]),
)
@settings(max_examples=60, deadline=None)
def test_the_interval_over_seeds_is_that_of_the_paired_t_test(
    pairs: list[tuple[float, float]], level: float
) -> None:
    a, b = zip(*pairs, strict=True)
    gaps = [x - y for x, y in pairs]
    found = seed_difference(a, b, level)
    if torch.tensor(gaps, dtype=torch.float64).std() < 1e-8:
        assert found.low == pytest.approx(found.high, abs=1e-5)
        return
    theirs = stats.ttest_rel(a, b)
    low, high = theirs.confidence_interval(level)
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-6, abs=1e-8)
    assert found.p == pytest.approx(theirs.pvalue, rel=1e-5, abs=1e-10)
    assert found.half_width == pytest.approx((high - low) / 2, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("seeds", [2, 3, 4, 8])
def test_no_difference_is_seen_in_five_percent_of_studies(seeds: int) -> None:
    draws = torch.randn(4000, 2, seeds, generator=torch.Generator().manual_seed(seeds))
    seen = sum(seed_difference(a, b).sign != 0 for a, b in draws.tolist())
    assert 0.04 < seen / len(draws) < 0.06


def test_one_seed_sees_no_difference_in_five_percent_of_studies() -> None:
    generator = torch.Generator().manual_seed(0)
    hits = 0
    for _ in range(600):
        values = torch.randn(150, 1, generator=generator).exp() + torch.randn(
            150, 2, generator=generator
        )
        means = resampled_means(values, resamples=400, generator=generator)
        gap = float((values[:, 0] - values[:, 1]).mean())
        hits += sample_difference(gap, means[:, 0] - means[:, 1], 150).sign != 0
    assert 0.03 < hits / 600 < 0.08


def test_columns_share_their_draws_and_groups_are_drawn_whole() -> None:
    values = torch.randn(40, 2, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    values[:, 1] = values[:, 0] + 0.25
    means = resampled_means(values, resamples=200)
    assert (means[:, 1] - means[:, 0] - 0.25).abs().max() < 1e-12
    groups = torch.arange(40) % 5
    drawn = resampled_means(values, groups, resamples=2000)
    slow = _slow(values, groups, 2000)
    assert drawn.std(0) == pytest.approx(slow.std(0), rel=0.1)
    assert drawn.mean(0) == pytest.approx(slow.mean(0), abs=0.02)
    assert resampled_means(values, torch.arange(40), 50) == pytest.approx(
        resampled_means(values, None, 50)
    )


def _slow(values: torch.Tensor, groups: torch.Tensor, resamples: int) -> torch.Tensor:
    """Draw whole groups, one resample at a time, and average what they hold."""
    generator = torch.Generator().manual_seed(1)
    names = groups.unique()
    means = []
    for _ in range(resamples):
        chosen = names[torch.randint(len(names), (len(names),), generator=generator)]
        means.append(torch.cat([values[groups == g] for g in chosen]).mean(0))
    return torch.stack(means)


def test_holm_compares_the_smallest_first() -> None:
    assert holm([0.012, 0.2, 0.001, 0.03]) == [True, False, True, False]
    assert holm([0.03, 0.03]) == [False, False]  # 0.03 > 0.05/2 stops at once
    assert holm([0.01, 0.04]) == [True, True]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_holm_lies_between_bonferroni_and_no_correction(p: list[float]) -> None:
    kept = holm(p)
    for value, keep in zip(p, kept, strict=True):
        assert keep or value > 0.05 / len(p)
        assert not keep or value <= 0.05


def test_rounding_is_no_difference_and_equal_seeds_are_settled() -> None:
    same = seed_difference([1.0, 2.0, 3.0], [1.0, 2.0, 3.0])
    assert (same.sign, same.p, same.half_width) == (0, 1.0, 0.0)
    assert seed_difference([1.0, 1.0], [1.0 - 1e-9, 1.0 - 1e-9]).sign == 0
    assert seed_difference([1.0, 1.0], [0.5, 0.5]).sign == 1


def test_what_cannot_be_compared_is_named() -> None:
    with pytest.raises(InputError, match="sample_difference"):
        seed_difference([1.0], [2.0])
    with pytest.raises(InputError, match="3 and 2 seeds"):
        seed_difference([1.0, 2.0, 3.0], [2.0, 1.0])
    with pytest.raises(NonFiniteError):
        seed_difference([1.0, math.nan], [2.0, 1.0])
    with pytest.raises(NonFiniteError):
        sample_difference(math.nan, torch.zeros(3), 3)
    with pytest.raises(InputError, match="at least 2"):
        resampled_means(torch.ones(3, 1), torch.zeros(3, dtype=torch.long))
    with pytest.raises(InputError, match="share"):
        comparison.student_quantile(0.2, 3)
