"""Intervals: what they contain, how often, and that shortcuts equal the general way."""

from __future__ import annotations

import json
import math
from functools import partial

import pytest
import torch
from tests.evaluation.draws import draw

from sigmanens import evaluation as ev
from sigmanens.errors import InputError, NonFiniteError


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("method", ["percentile", "basic"])
@pytest.mark.parametrize(
    "metric",
    [
        ev.accuracy, ev.nll, ev.brier, ev.ece, ev.adaptive_ece, ev.classwise_ece, ev.ece_debiased,
        ev.aurc, ev.eaurc,
    ],
)  # fmt: skip
def test_fast_resampling_equals_calling_the_metric(metric, method) -> None:
    # Equal mass bins are held fixed in the fast way; constant confidences leave no other choice.
    log_probs, labels = draw(40, 3, seed=1)
    if metric in (ev.adaptive_ece, ev.ece_debiased):
        log_probs = log_probs[:1].expand(40, -1)
    if metric in (ev.aurc, ev.eaurc):
        log_probs = torch.log_softmax((2 * log_probs).round(), 1)  # ties
    settings = {"resamples": 50, "method": method}
    fast = ev.bootstrap(metric, log_probs, labels, **settings)
    slow = ev.bootstrap(lambda p, y: metric(p, y), log_probs, labels, **settings)
    assert fast.value == metric(log_probs, labels)
    assert (fast.low, fast.high) == pytest.approx((slow.low, slow.high), abs=1e-12)


def test_fast_resampling_of_the_sharpness_equals_calling_it() -> None:
    log_probs, _ = draw(40, 3, seed=1)
    fast = ev.bootstrap(ev.sharpness, log_probs, resamples=50)
    slow = ev.bootstrap(lambda p: ev.sharpness(p), log_probs, resamples=50)
    assert (fast.low, fast.value, fast.high) == pytest.approx((slow.low, slow.value, slow.high))
    assert fast.low < fast.value < fast.high


def test_percentile_interval_of_a_mean_is_near_the_normal_one() -> None:
    values = torch.randn(2000, generator=seeded(0), dtype=torch.float64)
    interval = ev.bootstrap(torch.mean, values, resamples=2000)
    half = 1.96 * values.std().item() / 2000**0.5
    assert interval.value == values.mean().item()
    assert interval.low == pytest.approx(interval.value - half, abs=half / 8)
    assert interval.high == pytest.approx(interval.value + half, abs=half / 8)
    assert (interval.n, interval.level, interval.method) == (2000, 0.95, "percentile")
    assert json.loads(json.dumps(interval.to_dict()))["low"] == interval.low
    narrow = ev.bootstrap(torch.mean, values, resamples=2000, level=0.5)
    assert interval.low < narrow.low < narrow.high < interval.high


def test_basic_interval_reflects_the_percentiles_about_the_estimate() -> None:
    data = draw(100, 6, seed=2)
    percentile = ev.bootstrap(ev.classwise_ece, *data, resamples=60, method="percentile")
    basic = ev.bootstrap(ev.classwise_ece, *data, resamples=60, method="basic")
    assert (percentile.method, basic.method) == ("percentile", "basic")
    assert basic.value == percentile.value
    assert basic.low == pytest.approx(2 * basic.value - percentile.high)
    assert basic.high == pytest.approx(2 * basic.value - percentile.low)
    # The reason for it: a statistic biased upwards has percentiles above the estimate.
    assert percentile.low > percentile.value - 0.005
    assert basic.low < percentile.low


def test_interval_of_the_nll_covers_the_truth_as_often_as_it_says() -> None:
    truth = ev.nll(*draw(200_000, 4, seed=99))
    covered = 0
    for seed in range(0, 200, 2):
        interval = ev.bootstrap(ev.nll, *draw(150, 4, seed=seed), resamples=200, level=0.9)
        covered += interval.low <= truth <= interval.high
    assert 80 <= covered <= 99


@pytest.mark.case("P6")
@pytest.mark.parametrize("metric", [ev.ece, ev.adaptive_ece, ev.classwise_ece, ev.ece_debiased])
@pytest.mark.parametrize("samples", [50, 300])
def test_interval_of_the_ece_covers_0_for_a_calibrated_model(metric, samples: int) -> None:
    # At least 97.5 % by construction, and not by always starting at 0 (next test).
    covered = 0
    for seed in range(0, 80, 2):
        data = draw(samples, 10, seed=seed)
        interval = ev.bootstrap(metric, *data, resamples=80)
        assert interval.low <= interval.value <= interval.high
        assert interval.value == pytest.approx(metric(*data))
        covered += interval.low == 0
    assert covered >= 36
    percentile = ev.bootstrap(metric, *data, resamples=80, method="percentile")
    if metric is not ev.ece_debiased:
        assert percentile.low > 0, "the plain bootstrap would have done"


@pytest.mark.parametrize(
    ("metric", "samples"), [(ev.ece, 500), (ev.classwise_ece, 2000), (ev.ece_debiased, 500)]
)
@pytest.mark.parametrize("temperature", [0.4, 0.8])
def test_interval_of_the_ece_covers_the_truth_of_a_miscalibrated_model(
    metric, samples: int, temperature: float
) -> None:
    truth = metric(*draw(400_000, 10, seed=99, temperature=temperature))
    covered = excluded = 0
    for seed in range(0, 80, 2):
        data = draw(samples, 10, seed=seed, temperature=temperature)
        interval = ev.ece_interval(*data, metric=metric, resamples=80)
        covered += interval.low <= truth <= interval.high
        excluded += interval.low > 0
    assert covered >= 34
    assert excluded >= (40 if temperature == 0.4 else 15)


def test_bins_of_a_partial_reach_the_interval() -> None:
    data = draw(200, 4, seed=3)
    by_partial = ev.bootstrap(partial(ev.ece, bins=5), *data, resamples=80)
    assert by_partial == ev.ece_interval(*data, 5, resamples=80)
    assert by_partial.value != ev.ece(*data)
    equal_mass = ev.bootstrap(partial(ev.adaptive_ece, bins=5), *data, resamples=80)
    assert equal_mass == ev.ece_interval(*data, 5, metric=ev.adaptive_ece, resamples=80)


@pytest.mark.case("P6")
def test_what_bins_says_how_in_its_interval() -> None:
    data = draw(200, 4, seed=3)
    schemes = {
        ev.ece: "equal_width",
        ev.classwise_ece: "equal_width",
        ev.adaptive_ece: "equal_mass",
        ev.ece_debiased: "equal_mass",
    }
    for metric, scheme in schemes.items():
        for method in ("auto", "basic"):
            found = ev.bootstrap(partial(metric, bins=7), *data, resamples=40, method=method)
            assert (found.bins, found.scheme, found.n) == (7, scheme, 200)
            assert found.value == pytest.approx(metric(*data, 7), abs=1e-15)
        both = ev.paired_difference(metric, data[0], data[0], data[1], resamples=40)
        assert (both.bins, both.scheme, both.value) == (15, scheme, 0)
    assert ev.bootstrap(ev.nll, *data, resamples=40).bins is None
    with pytest.raises(InputError, match="metric is 'nll'; expected ece"):
        ev.ece_interval(*data, metric=ev.nll)


def test_perfect_predictions_have_an_interval_of_width_0() -> None:
    certain = torch.tensor([[0.0, -math.inf]]).expand(10, 2)
    interval = ev.ece_interval(certain, torch.zeros(10).long())
    assert (interval.low, interval.value, interval.high) == (0, 0, 0)


def test_pairing_removes_what_samples_have_in_common() -> None:
    log_probs, labels = draw(500, 5, seed=4)
    noise = torch.randn(500, 5, generator=seeded(1), dtype=torch.float64)
    better, worse = log_probs, torch.log_softmax(log_probs + 0.3 * noise, 1)
    interval = ev.paired_difference(ev.nll, better, worse, labels)
    difference = ev.nll(better, labels) - ev.nll(worse, labels)
    assert interval.value == pytest.approx(difference, abs=1e-14)
    assert interval.low < difference < interval.high < 0
    assert (interval.n, interval.method) == (500, "percentile")
    alone = ev.bootstrap(ev.nll, better, labels)
    assert interval.high - interval.low < (alone.high - alone.low) / 3
    # Fast and general way agree, and exchanging the runs changes the sign.
    slow = ev.paired_difference(lambda p, y: ev.nll(p, y), better, worse, labels, resamples=100)
    fast = ev.paired_difference(ev.nll, better, worse, labels, resamples=100)
    assert (slow.low, slow.high) == pytest.approx((fast.low, fast.high), abs=1e-12)
    swapped = ev.paired_difference(ev.nll, worse, better, labels)
    assert swapped.value == -interval.value
    assert swapped.low == pytest.approx(-interval.high, abs=0.002)


def test_run_compared_with_itself_differs_by_nothing() -> None:
    log_probs, labels = draw(100, 3, seed=5)
    for metric in (ev.nll, ev.accuracy, ev.aurc):
        same = ev.paired_difference(metric, log_probs, log_probs, labels, resamples=50)
        assert (same.low, same.value, same.high) == (0, 0, 0)
    ece = ev.paired_difference(ev.ece, log_probs, log_probs, labels, resamples=50)
    assert ece.low < 0 == ece.value < ece.high


def test_difference_of_two_eces_is_not_fooled_by_their_bias() -> None:
    # 0.073 against 0: the plug-in difference is far too small at n = 500.
    truth = ev.ece(*draw(400_000, 10, seed=99, temperature=0.8))
    covered = basic = 0
    for seed in range(0, 60, 2):
        calibrated, labels = draw(500, 10, seed=seed)
        sharpened = torch.log_softmax(calibrated / 0.8, 1)
        pair = (sharpened, calibrated, labels)
        interval = ev.paired_difference(ev.ece, *pair, resamples=80)
        assert interval.low <= interval.value <= interval.high
        covered += interval.low <= truth <= interval.high
        rough = ev.paired_difference(ev.ece, *pair, resamples=80, method="basic")
        basic += rough.low <= truth <= rough.high
    assert covered >= 28
    assert basic < 28, "the basic bootstrap would have done"


def test_any_function_of_arrays_with_samples_first() -> None:
    members = torch.log_softmax(torch.randn(3, 60, 4, generator=seeded(2)), 2)
    labels = torch.arange(60) % 4
    interval = ev.bootstrap(
        lambda m, y: ev.jensen_gap(m.movedim(1, 0), y), members.movedim(1, 0), labels, resamples=60
    )
    assert 0 < interval.low < interval.value < interval.high
    assert interval.value == ev.jensen_gap(members, labels)


def test_infinite_values_stay_infinite_and_nan_is_refused() -> None:
    log_probs = torch.tensor([[0.0, -math.inf]]).expand(20, 2)
    labels = torch.tensor([1] + [0] * 19)
    interval = ev.bootstrap(ev.nll, log_probs, labels, resamples=100)
    assert (interval.low, interval.value, interval.high) == (0, math.inf, math.inf)
    with pytest.raises(NonFiniteError, match="two infinite values"):
        ev.paired_difference(ev.nll, log_probs, log_probs, labels, resamples=100)


def test_results_repeat_and_leave_the_global_generator_alone() -> None:
    data = draw(50, 3, seed=6)
    state = torch.get_rng_state()
    for call in (partial(ev.bootstrap, ev.nll), partial(ev.bootstrap, ev.ece)):
        assert call(*data, resamples=60) == call(*data, resamples=60)
        assert call(*data, resamples=60, generator=seeded(1)) != call(*data, resamples=60)
    assert torch.equal(torch.get_rng_state(), state)


def test_slices_of_resamples_do_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    data = draw(50, 3, seed=7)
    whole = ev.bootstrap(ev.brier, *data, resamples=60)
    monkeypatch.setattr(ev.resampling, "_SLICE_ELEMENTS", 7 * 50)
    assert ev.bootstrap(ev.brier, *data, resamples=60) == whole


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"level": 1.0}, "level is 1.0"),
        ({"level": 95}, "level is 95"),
        ({"resamples": 39}, "39 resamples are too few for level 0.95; expected at least 40"),
        ({"method": "bca"}, "method is 'bca'"),
    ],
)
def test_settings_are_checked(change, says: str) -> None:
    log_probs, labels = draw(10, 3)
    with pytest.raises(InputError, match=says):
        ev.bootstrap(ev.nll, log_probs, labels, **change)
    with pytest.raises(InputError, match=says):
        ev.paired_difference(ev.nll, log_probs, log_probs, labels, **change)


def test_arrays_are_checked() -> None:
    log_probs, labels = draw(10, 3)
    with pytest.raises(InputError, match=r"hold \[10, 9\] samples"):
        ev.bootstrap(ev.nll, log_probs, labels[:9])
    with pytest.raises(InputError, match=r"hold \[1, 1\] samples"):
        ev.bootstrap(ev.nll, log_probs[:1], labels[:1])
    with pytest.raises(InputError, match="no arrays"):
        ev.bootstrap(ev.nll)
    with pytest.raises(InputError, match=r"hold \[10, 8, 10\] samples"):
        ev.paired_difference(ev.nll, log_probs, log_probs[:8], labels)
