"""Metrics against loops, scikit-learn, torchmetrics and values known by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import accuracy_score, brier_score_loss, log_loss
from tests.evaluation.draws import draw
from tests.oracles import metrics as oracle
from torchmetrics.functional.classification import multiclass_calibration_error

from sigmanens import evaluation as ev

POINTWISE = [ev.accuracy, ev.nll, ev.brier, ev.ece, ev.adaptive_ece, ev.classwise_ece]
ALL = [*POINTWISE, ev.ece_debiased, ev.aurc, ev.eaurc]

problems = st.builds(
    draw,
    samples=st.integers(1, 40),
    classes=st.integers(2, 6),
    scale=st.floats(0.1, 8.0),
    seed=st.integers(0, 10**6),
    temperature=st.floats(0.3, 3.0),
)


@given(problems, st.integers(1, 20))
@settings(max_examples=60)
def test_calibration_errors_equal_brute_force_counts(problem, bins) -> None:
    log_probs, labels = problem
    probs, y = log_probs.exp().tolist(), labels.tolist()
    assert ev.ece(*problem, bins) == pytest.approx(oracle.ece(probs, y, bins), abs=1e-12)
    assert ev.classwise_ece(*problem, bins) == pytest.approx(
        oracle.classwise_ece(probs, y, bins), abs=1e-12
    )
    if len(set(log_probs.amax(1).tolist())) == len(y):
        assert ev.adaptive_ece(*problem, bins) == pytest.approx(
            oracle.adaptive_ece(probs, y, bins), abs=1e-12
        )
        assert ev.ece_debiased(*problem, bins, squared=True) == pytest.approx(
            oracle.ece_debiased_squared(probs, y, bins), abs=1e-12
        )
        assert ev.aurc(*problem) == pytest.approx(oracle.aurc(probs, y), abs=1e-12)
        assert ev.eaurc(*problem) == pytest.approx(oracle.eaurc(probs, y), abs=1e-12)


@given(problems, st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_order_of_samples_does_not_matter_even_with_ties(problem, random) -> None:
    log_probs, labels = problem
    log_probs = torch.log_softmax((log_probs * 2).round(), 1)
    order = list(range(len(labels)))
    random.shuffle(order)
    for metric in ALL:
        shuffled = metric(log_probs[order], labels[order])
        assert shuffled == pytest.approx(metric(log_probs, labels), abs=1e-12), metric.__name__


@given(problems, st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_names_of_classes_do_not_matter(problem, random) -> None:
    log_probs, labels = problem
    names = list(range(log_probs.shape[1]))
    random.shuffle(names)
    renamed = torch.empty_like(log_probs)
    renamed[:, names] = log_probs
    for metric in ALL:
        value = metric(renamed, torch.tensor(names)[labels])
        assert value == pytest.approx(metric(log_probs, labels), abs=1e-12), metric.__name__


def test_proper_scores_agree_with_scikit_learn() -> None:
    log_probs, labels = draw(500, 7, seed=3)
    probs = log_probs.exp().numpy()
    classes = list(range(7))
    assert ev.accuracy(log_probs, labels) == accuracy_score(labels, probs.argmax(1))
    assert ev.nll(log_probs, labels) == pytest.approx(log_loss(labels, probs, labels=classes))
    expected = brier_score_loss(labels, probs, labels=classes, scale_by_half=False)
    assert ev.brier(log_probs, labels) == pytest.approx(expected)


@pytest.mark.parametrize("bins", [5, 15, 30])
def test_ece_agrees_with_torchmetrics_inside_the_bins(bins: int) -> None:
    log_probs, labels = draw(2000, 5, seed=4)
    expected = multiclass_calibration_error(log_probs.exp(), labels, num_classes=5, n_bins=bins)
    assert ev.ece(log_probs, labels, bins) == pytest.approx(expected.item(), abs=1e-7)


@pytest.mark.case("P5")
@pytest.mark.parametrize("bins", [1, 2, 10, 15])
def test_confidence_of_exactly_0_or_1_has_no_bin_of_its_own(bins: int) -> None:
    # Certain rows, right and wrong; rows at 0.9 share their bin when bins < 10.
    probs = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.1, 0.9], [0.9, 0.1]]).double()
    labels = torch.tensor([0, 1, 1, 1, 1])
    table = ev.reliability(probs.log(), labels, bins)
    assert len(table.count) == bins
    assert sum(table.count) == 5
    assert table.count[-1] == (5 if bins < 10 else 3)
    assert ev.ece(probs.log(), labels, bins) == pytest.approx(
        oracle.ece(probs.tolist(), labels.tolist(), bins), abs=1e-15
    )
    # Class-wise, probabilities of exactly 0 are binned too: they lie in the first bin.
    assert ev.classwise_ece(probs.log(), labels, bins) == pytest.approx(
        oracle.classwise_ece(probs.tolist(), labels.tolist(), bins), abs=1e-15
    )


def test_edges_belong_to_the_bin_below() -> None:
    values = torch.tensor([0.0, 0.25, 0.2500001, 0.5, 0.75, 1.0], dtype=torch.float64)
    assert ev.metrics.bin_index(values, 4).tolist() == [0, 0, 1, 1, 2, 3]


def test_certain_and_right_is_perfect_certain_and_wrong_is_worst() -> None:
    certain = torch.tensor([[0.0, -math.inf], [-math.inf, 0.0]])
    right, wrong = torch.tensor([0, 1]), torch.tensor([1, 0])
    assert (ev.accuracy(certain, right), ev.nll(certain, right)) == (1, 0)
    assert str(ev.nll(certain, right)) == "0.0"
    assert (ev.brier(certain, right), ev.ece(certain, right)) == (0, 0)
    assert (ev.accuracy(certain, wrong), ev.nll(certain, wrong)) == (0, math.inf)
    assert (ev.brier(certain, wrong), ev.ece(certain, wrong)) == (2, 1)
    assert (ev.aurc(certain, right), ev.aurc(certain, wrong)) == (0, 1)


def test_values_by_hand() -> None:
    probs = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.8, 0.1]])
    labels = torch.tensor([2, 1])
    assert ev.nll(probs.log(), labels) == pytest.approx(-(math.log(0.2) + math.log(0.8)) / 2, 1e-6)
    assert ev.brier(probs.log(), labels) == pytest.approx(
        ((0.25 + 0.09 + 0.64) + (0.01 + 0.04 + 0.01)) / 2, 1e-6
    )
    assert ev.sharpness(probs.log()) == pytest.approx(0.65, 1e-6)
    assert ev.ece(probs.log(), labels, 2) == pytest.approx((0.5 + 0.2) / 2, 1e-6)
    assert ev.ece(probs.log(), labels, 1) == pytest.approx(abs(0.65 - 0.5), 1e-6)


@pytest.mark.case("P8")
@pytest.mark.parametrize("metric", [*ALL, ev.ece_interval])
def test_one_sided_logits_of_ten_thousand_stay_finite(metric: Callable[..., object]) -> None:
    # Float32 logits at ±1e4, in log_softmax rather than log(softmax).
    logits = torch.tensor([[1e4, -1e4, 0.0], [-1e4, 1e4, 1e4], [1e4, 1e4, -1e4]])
    labels = torch.tensor([1, 2, 0])
    value = metric(torch.log_softmax(logits, 1), labels)
    value = value.value if isinstance(value, ev.Interval) else value
    assert isinstance(value, float)
    assert math.isfinite(value)
    if metric is ev.nll:
        assert value == pytest.approx((2e4 + 2 * math.log(2)) / 3)


def test_reliability_holds_what_a_plot_needs_and_survives_json() -> None:
    log_probs, labels = draw(300, 4, seed=5)
    for scheme, error in (("equal_width", ev.ece), ("equal_mass", ev.adaptive_ece)):
        table = ev.reliability(log_probs, labels, 10, scheme)
        assert (table.n, table.scheme, len(table.edges)) == (300, scheme, 11)
        assert (table.edges[0], table.edges[-1], sum(table.count)) == (0, 1, 300)
        assert list(table.edges) == sorted(table.edges)
        assert table.ece == error(log_probs, labels, 10)
        for i, (count, confidence) in enumerate(zip(table.count, table.confidence, strict=True)):
            assert (count == 0) == (confidence is None)
            if confidence is not None:
                assert table.edges[i] < confidence <= table.edges[i + 1]
        loaded = json.loads(json.dumps(table.to_dict(), allow_nan=False))
        assert loaded["bins"] == 10
        assert loaded["count"] == list(table.count)
        assert loaded["accuracy"] == list(table.accuracy)
    assert 0 in ev.reliability(log_probs, labels, 10).count, "no empty bin was tried"


def test_bins_of_equal_mass_hold_equal_numbers() -> None:
    log_probs, labels = draw(103, 4, seed=6)
    counts = ev.reliability(log_probs, labels, 10, "equal_mass").count
    assert sorted(set(counts)) == [10, 11]


def test_equal_confidences_share_a_bin_of_equal_mass() -> None:
    log_probs = torch.tensor([[0.9, 0.1]]).log().repeat(20, 1)
    labels = torch.tensor([0] * 15 + [1] * 5)
    assert ev.adaptive_ece(log_probs, labels, 10) == pytest.approx(0.15, 1e-5)


@pytest.mark.case("P6")
def test_debiased_error_averages_to_the_truth() -> None:
    # Squared error of the calibrated model is 0; the plain ECE is far from it.
    calibrated = [draw(200, 5, seed=s) for s in range(0, 600, 2)]
    squared = torch.tensor([ev.ece_debiased(*p, squared=True) for p in calibrated])
    standard_error = squared.std().item() / len(squared) ** 0.5
    assert abs(squared.mean().item()) < 3 * standard_error
    assert standard_error < 5e-4
    plain = sum(ev.adaptive_ece(*p) for p in calibrated) / len(calibrated)
    debiased = sum(ev.ece_debiased(*p) for p in calibrated) / len(calibrated)
    assert plain > 0.08
    assert debiased < plain / 2

    # One bin, confidence 0.8 and true accuracy 0.6 throughout: the truth is 0.2.
    generator = torch.Generator().manual_seed(0)
    row = torch.tensor([[0.8, 0.2]], dtype=torch.float64).log()
    estimates = []
    for _ in range(300):
        labels = (torch.rand(30, generator=generator) > 0.6).long()
        estimates.append(ev.ece_debiased(row.expand(30, 2), labels, 1, squared=True))
    spread = torch.tensor(estimates).std().item() / len(estimates) ** 0.5
    assert sum(estimates) / len(estimates) == pytest.approx(0.04, abs=3 * spread)


def test_fifteen_bin_ece_of_a_calibrated_model_is_as_biased_as_documented() -> None:
    for samples, low, high in ((50, 0.1, 0.17), (1000, 0.02, 0.045)):
        values = [ev.ece(*draw(samples, 10, seed=s)) for s in range(0, 60, 2)]
        assert low < sum(values) / len(values) < high


def test_risk_coverage_by_hand_and_ties_in_expectation() -> None:
    probs = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3], [0.6, 0.4]])
    curve = ev.risk_coverage(probs.log(), torch.tensor([0, 1, 0, 1]))
    assert curve.coverage == (0.25, 0.5, 0.75, 1)
    assert curve.risk == pytest.approx((0, 1 / 2, 1 / 3, 1 / 2))
    assert ev.aurc(probs.log(), torch.tensor([0, 1, 0, 1])) == pytest.approx(4 / 3 / 4)
    assert json.loads(json.dumps(curve.to_dict()))["risk"] == list(curve.risk)
    # The best order of two errors has the risks 0, 0, 1/3, 1/2.
    assert curve.eaurc == pytest.approx(4 / 3 / 4 - 5 / 6 / 4)
    assert ev.eaurc(probs.log(), torch.tensor([0, 0, 1, 1])) == 0
    tied = torch.tensor([[0.9, 0.1]]).log().repeat(4, 1)
    assert ev.risk_coverage(tied, torch.tensor([0, 1, 0, 0])).risk == pytest.approx([0.25] * 4)


def test_float_types_and_numpy_give_the_same() -> None:
    log_probs, labels = draw(200, 4, seed=7)
    exact = [metric(log_probs, labels) for metric in ALL]
    single = [metric(log_probs.float(), labels.int()) for metric in ALL]
    assert single == pytest.approx(exact, abs=1e-5)
    arrays = [metric(log_probs.numpy(), labels.numpy()) for metric in ALL]
    assert arrays == exact
    frozen = log_probs.numpy().copy()
    frozen.setflags(write=False)
    assert ev.nll(frozen, labels) == ev.nll(log_probs, labels)
    for dtype in (torch.bfloat16, torch.float16):
        half = log_probs.to(dtype)
        rounded = -half.double()[torch.arange(200), labels].mean().item()
        assert ev.nll(half, labels) == pytest.approx(rounded, abs=1e-12)
    assert ev.nll(log_probs.clone().requires_grad_(), labels) == ev.nll(log_probs, labels)
    assert np.isclose(ev.sharpness(log_probs.numpy()), ev.sharpness(log_probs))
