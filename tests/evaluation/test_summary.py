"""The row of metrics.json: its keys, and one predictive tensor behind all of them."""

from __future__ import annotations

import json
import math

import pytest
import torch
from tests.evaluation.draws import draw_logits, draw_members

from sigmanens import evaluation as ev
from sigmanens.diversity import measures
from sigmanens.ensemble.prediction import log_mean_exp

KEYS = {
    "n",
    "bins",
    "accuracy",
    "nll",
    "ece",
    "nll_calibrated",
    "ece_calibrated",
    "temperature",
    "brier",
    "member_nll",
    "member_accuracy",
    "disagreement",
    "pairwise_kl",
    "modulation",
    "jensen_gap",
    "adaptive_ece",
    "classwise_ece",
    "ece_debiased",
    "sharpness",
    "aurc",
    "eaurc",
    "reliability",
}


@pytest.mark.case("P8")
def test_every_value_comes_from_the_same_averaged_distribution() -> None:
    logits = draw_logits(300, 5, 4, seed=1)
    labels = draw_members(300, 5, 4, seed=1)[1]
    members = torch.log_softmax(logits, 2)
    averaged = log_mean_exp(members)
    row = ev.summarize(logits, labels, temperature=1.7, bins=10)
    assert set(row) == KEYS
    tempered = ev.apply_temperature(averaged, 1.7)
    assert row == {
        "n": 300,
        "bins": 10,
        "accuracy": ev.accuracy(averaged, labels),
        "nll": ev.nll(averaged, labels),
        "ece": ev.ece(averaged, labels, 10),
        "nll_calibrated": ev.nll(tempered, labels),
        "ece_calibrated": ev.ece(tempered, labels, 10),
        "temperature": 1.7,
        "brier": ev.brier(averaged, labels),
        "member_nll": ev.member_nll(members, labels),
        "member_accuracy": ev.member_accuracy(members, labels),
        "disagreement": ev.disagreement(members),
        "pairwise_kl": ev.pairwise_kl(members),
        "modulation": ev.modulation(members),
        "jensen_gap": ev.jensen_gap(members, labels),
        "adaptive_ece": ev.adaptive_ece(averaged, labels, 10),
        "classwise_ece": ev.classwise_ece(averaged, labels, 10),
        "ece_debiased": ev.ece_debiased(averaged, labels, 10),
        "sharpness": ev.sharpness(averaged),
        "aurc": ev.aurc(averaged, labels),
        "eaurc": ev.eaurc(averaged, labels),
        "reliability": ev.reliability(averaged, labels, 10).to_dict(),
    }
    assert row["jensen_gap"] == pytest.approx(row["member_nll"] - row["nll"])
    # Averaged logits would give other values.
    wrong = torch.log_softmax(logits.mean(0), 1)
    assert ev.ece(wrong, labels, 10) != pytest.approx(row["ece"], abs=1e-4)
    json.dumps(row, allow_nan=False)


def test_logits_and_log_probabilities_give_the_same_row() -> None:
    logits = draw_logits(100, 4, 3, seed=2)
    labels = torch.arange(100) % 4
    from_logits = ev.summarize(logits + 7, labels)
    from_log_probs = ev.summarize(torch.log_softmax(logits, 2).numpy(), labels.numpy())
    for key in KEYS - {"reliability", "nll_calibrated", "ece_calibrated", "temperature"}:
        assert from_logits[key] == pytest.approx(from_log_probs[key], abs=1e-12), key


def test_without_a_temperature_the_calibrated_values_are_null() -> None:
    row = ev.summarize(draw_logits(10, 3, 2), torch.arange(10) % 3)
    assert set(row) == KEYS
    assert row["nll_calibrated"] is row["ece_calibrated"] is row["temperature"] is None


@pytest.mark.case("P4")
def test_one_member_is_the_single_model() -> None:
    logits = draw_logits(200, 6, 1, seed=3)
    labels = draw_members(200, 6, 1, seed=3)[1]
    row = ev.summarize(logits, labels)
    alone = torch.log_softmax(logits[0], 1)
    for key, metric in (("accuracy", ev.accuracy), ("nll", ev.nll), ("ece", ev.ece)):
        assert row[key] == metric(alone, labels)
    assert row["brier"] == ev.brier(alone, labels)
    assert row["member_accuracy"] == row["accuracy"]
    assert row["member_nll"] == pytest.approx(row["nll"], abs=1e-14)
    for key in ("disagreement", "pairwise_kl", "modulation", "jensen_gap"):
        assert row[key] == 0, key


@pytest.mark.case("P8")
def test_logits_of_ten_thousand_stay_finite() -> None:
    # Two members, both certain, one wrong; p̄ = ½ although log(softmax) would be −inf.
    logits = torch.tensor([[[1e4, -1e4, -1e4]], [[-1e4, 1e4, -1e4]]])
    row = ev.summarize(logits, torch.tensor([0]), temperature=2.0)
    assert row["nll"] == pytest.approx(math.log(2))
    assert row["member_nll"] == pytest.approx(1e4)
    assert row["jensen_gap"] == pytest.approx(1e4 - math.log(2))
    assert row["pairwise_kl"] == pytest.approx(2e4)
    assert row["modulation"] == pytest.approx(math.log(2))
    json.dumps(row, allow_nan=False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_and_cpu_agree() -> None:
    logits = draw_logits(200, 5, 3, seed=4)
    labels = torch.arange(200) % 5
    here, there = (ev.summarize(x, labels, temperature=1.5) for x in (logits, logits.cuda()))
    assert there.pop("reliability")["count"] == here.pop("reliability")["count"]
    assert there == pytest.approx(here, abs=1e-10)
    averaged = log_mean_exp(torch.log_softmax(logits, 2))
    for function in (ev.fit_temperature, ev.calibrated_nll, ev.classwise_ece, ev.aurc):
        on_device = function(averaged.cuda(), labels.cuda())
        assert on_device == pytest.approx(function(averaged, labels), abs=1e-9)
    for statistic in (ev.nll, ev.ece, ev.classwise_ece):
        pair = (
            ev.bootstrap(statistic, x, labels, resamples=40) for x in (averaged, averaged.cuda())
        )
        low, low_on_device = (interval.low for interval in pair)
        assert low_on_device == pytest.approx(low, abs=1e-10)
    inside, outside = ev.ood.scores(logits.cuda()), ev.ood.scores(logits.cuda() / 3)
    assert 0.5 < ev.auroc(inside["energy"], outside["energy"]) <= 1


@pytest.mark.case("P7")
def test_slices_of_samples_do_not_change_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = draw_logits(103, 4, 3, seed=5)
    labels = torch.arange(103) % 4
    whole = ev.summarize(logits, labels, temperature=0.8)
    monkeypatch.setattr(measures, "SLICE_ELEMENTS", 10 * 12)
    sliced = ev.summarize(logits, labels, temperature=0.8)
    assert sliced.pop("reliability") == whole.pop("reliability")
    assert sliced == pytest.approx(whole, abs=1e-13)
