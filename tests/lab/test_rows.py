"""Rows of metrics.json: the evaluation functions' numbers, each from the pictures it may see."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("lightning")

from tests.lab.small import ensemble, network, penalised

from sigmanens import EnsembleLoss, SigmaEnsemble, diversity
from sigmanens.baselines import SeparateNetworks, mimo
from sigmanens.ensemble.features import head_weights, member_features
from sigmanens.ensemble.prediction import log_mean_exp
from sigmanens.errors import InputError, NonFiniteError, SigmaNensWarning
from sigmanens.evaluation import intervals, metrics, ood, risk
from sigmanens.evaluation.calibration import apply_temperature, calibrated_nll, fit_temperature
from sigmanens.evaluation.mahalanobis import Mahalanobis, RelativeMahalanobis
from sigmanens.evaluation.neighbours import KNN
from sigmanens.evaluation.summary import summarize
from sigmanens.evaluation.vim import ViM
from sigmanens.lab.digits import Labelled, digits_sets, noisy
from sigmanens.lab.ood_scores import feature_options, feature_reader
from sigmanens.lab.report import console_table
from sigmanens.lab.report.reading import read_study
from sigmanens.lab.rows import EvaluationData, evaluate, member_logits, tempered
from sigmanens.lab.training import Recipe, train_network

RECIPE = Recipe(epochs=8, batch_size=40, lr=0.2, weight_decay=0.0)


@pytest.fixture(scope="module")
def data() -> EvaluationData:
    digits = digits_sets(train=200, validation=200, ood=80, seed=1)
    test = Labelled(digits.test.images[:300], digits.test.labels[:300])
    generator = torch.Generator().manual_seed(0)
    corrupted = {s: noisy(test.images, s, generator) for s in (1, 3, 5)}
    return EvaluationData(digits.validation, test, digits.ood, {"gaussian_noise": corrupted})


@pytest.fixture(scope="module")
def trained() -> SigmaEnsemble:
    model = ensemble(3)
    train_network(model, digits_sets(train=200, validation=200, ood=1, seed=1).train, RECIPE,
                  penalised())  # fmt: skip
    return model


@pytest.fixture(scope="module")
def single() -> SeparateNetworks:
    model = SeparateNetworks([network()])
    train_network(model, digits_sets(train=200, validation=200, ood=1, seed=1).train, RECIPE,
                  EnsembleLoss())  # fmt: skip
    return model


def measured(model: nn.Module, data: EvaluationData, **options: Any) -> dict[str, Any]:
    given = {"method": "sigmanens", "members": 3, "params": 7, "network": model}
    return evaluate(member_logits(model), data, **(given | options))[0]


@torch.no_grad()
def plain(model: nn.Module, images: Tensor) -> Tensor:
    """Member logits in one pass, without the code under test."""
    return model.eval()(images)


def average(model: nn.Module, images: Tensor) -> Tensor:
    """Log of the members' mean probabilities, computed in the obvious way in float64."""
    return torch.softmax(plain(model, images).double(), 2).mean(0).log()


def test_row_equals_the_evaluation_functions(trained: SigmaEnsemble, data: EvaluationData) -> None:
    row = measured(trained, data, tau=0.5, weight=0.01, seed=4, train_seconds=1.5, resamples=200)
    log_p, labels = average(trained, data.test.images), data.test.labels
    held_out = average(trained, data.validation.images)
    temperature = fit_temperature(held_out, data.validation.labels)
    scaled = apply_temperature(log_p, temperature)
    expected = {
        "temperature": temperature,
        "accuracy": metrics.accuracy(log_p, labels),
        "nll": metrics.nll(log_p, labels),
        "ece": metrics.ece(log_p, labels),
        "brier": metrics.brier(log_p, labels),
        "nll_calibrated": metrics.nll(scaled, labels),
        "ece_calibrated": metrics.ece(scaled, labels),
        "nll_calibrated_2fold": calibrated_nll(log_p, labels),
        "adaptive_ece": metrics.adaptive_ece(log_p, labels),
        "classwise_ece": metrics.classwise_ece(log_p, labels),
        "ece_debiased": metrics.ece_debiased(log_p, labels),
        "sharpness": metrics.sharpness(log_p),
        "aurc": risk.aurc(log_p, labels),
        "eaurc": risk.eaurc(log_p, labels),
    }
    assert {k: row[k] for k in expected} == pytest.approx(expected, rel=1e-5)
    given = {"method": "sigmanens", "members": 3, "tau": 0.5, "weight": 0.01, "seed": 4,
             "split": "test", "params": 7, "train_seconds": 1.5, "n": 300, "bins": 15}  # fmt: skip
    assert {k: row[k] for k in given} == given
    assert row["validation"] == pytest.approx(
        {
            "n": 200,
            "accuracy": metrics.accuracy(held_out, data.validation.labels),
            "nll": metrics.nll(held_out, data.validation.labels),
            "ece": metrics.ece(held_out, data.validation.labels),
            "nll_calibrated": metrics.nll(
                apply_temperature(held_out, temperature), data.validation.labels
            ),
        },
        rel=1e-5,
    )
    assert 0.5 < row["accuracy"] < 1
    assert row["disagreement"] > 0
    bounds = intervals.bootstrap(metrics.nll, log_p, labels, resamples=200)
    assert row["intervals"]["nll"] == pytest.approx([bounds.low, bounds.high], rel=1e-5)
    assert set(row["intervals"]) == {
        "accuracy", "nll", "brier", "ece", "adaptive_ece", "classwise_ece", "ece_debiased",
        "sharpness", "aurc", "eaurc", "nll_calibrated", "ece_calibrated",
    }  # fmt: skip
    for name in row["intervals"]:
        low, high = row["intervals"][name]
        assert low - 1e-6 <= row[name] <= high + 1e-6, name
    json.dumps(row, allow_nan=False)


def test_a_row_says_where_to_abstain_and_what_is_confused(
    trained: SigmaEnsemble, data: EvaluationData
) -> None:
    row, labels = measured(trained, data), data.test.labels
    log_p = apply_temperature(average(trained, data.test.images), row["temperature"])
    confidence, predicted = log_p.max(1)
    wrong = (predicted != labels).double()[confidence.argsort(descending=True)]
    found = row["risk_coverage"]
    assert found["coverage"] == pytest.approx([i / 20 for i in range(1, 21)])
    risks = [float(wrong[: 15 * i].mean()) for i in range(1, 21)]  # 300 examples
    assert found["risk"] == pytest.approx(risks, abs=1e-9)
    assert found["risk"][-1] == pytest.approx(1 - row["accuracy"])
    for true, counts in enumerate(row["confusion"]):
        for guess, count in enumerate(counts):
            assert count == int(((labels == true) & (predicted == guess)).sum())


def test_every_key_of_a_row_is_explained(trained: SigmaEnsemble, data: EvaluationData) -> None:
    text = (Path(__file__).parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
    row = measured(trained, data)
    named = set(re.findall(r"`([a-z_0-9]+)`", text))
    assert row.keys() - named == set()
    assert row["intervals"].keys() - named == set()
    for score in row["ood_detail"]["photo_patches"].values():
        assert score.keys() - named == set()


def test_kept_tensors_give_the_row_again(trained: SigmaEnsemble, data: EvaluationData) -> None:
    row, kept = evaluate(
        member_logits(trained), data, method="sigmanens", network=trained, members=3, params=0
    )
    again = summarize(kept["member_log_probs"], kept["labels"], temperature=row["temperature"])
    numbers = {k: v for k, v in again.items() if isinstance(v, float)}
    assert {k: row[k] for k in numbers} == pytest.approx(numbers, rel=1e-5)
    held_out = log_mean_exp(kept["validation_member_log_probs"])
    assert fit_temperature(held_out, kept["validation_labels"]) == row["temperature"]
    assert kept["member_log_probs"].shape == (3, 300, 10)
    assert kept["validation_member_log_probs"].shape == (3, 200, 10)


def test_temperature_is_fitted_on_validation_pictures_only(
    trained: SigmaEnsemble, data: EvaluationData
) -> None:
    row = measured(trained, data)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(2))
    wrong = Labelled(data.test.images, data.test.labels[order])
    leaky = measured(trained, replace(data, test=wrong))
    assert leaky["accuracy"] < row["accuracy"]
    assert leaky["temperature"] == row["temperature"]
    assert leaky["validation"] == row["validation"]
    noise = Labelled(torch.rand(300, 1, 8, 8), data.test.labels)
    assert measured(trained, replace(data, test=noise))["temperature"] == row["temperature"]
    mixed = data.validation.labels.roll(1)
    other = measured(trained, replace(data, validation=Labelled(data.validation.images, mixed)))
    assert other["temperature"] != row["temperature"]
    assert other["nll"] == row["nll"]

    def choices(given: EvaluationData) -> float:
        one = SeparateNetworks([trained.member(0)])
        logits = tempered(member_logits(one), given.validation)
        return float((member_logits(one)(X) / logits(X)).mean())

    X = data.test.images[:5]
    assert choices(data) == choices(replace(data, test=wrong))
    assert choices(data) != choices(
        replace(data, validation=Labelled(data.validation.images, mixed))
    )


def test_one_network_with_a_temperature(single: SeparateNetworks, data: EvaluationData) -> None:
    raw = member_logits(single)
    cooled = tempered(raw, data.validation)
    images = data.test.images
    held_out = torch.log_softmax(raw(data.validation.images)[0], 1)
    temperature = fit_temperature(held_out, data.validation.labels)
    assert abs(temperature - 1) > 0.2
    torch.testing.assert_close(cooled(images), raw(images) / temperature)
    assert torch.equal(cooled(images).argmax(2), raw(images).argmax(2))

    def row(logits: Any) -> dict[str, Any]:
        return evaluate(logits, data, method="single", members=1, params=0)[0]

    before, after = row(raw), row(cooled)
    assert after["validation"]["nll"] < before["validation"]["nll"]
    assert after["validation"]["nll"] == pytest.approx(before["validation"]["nll_calibrated"])
    assert after["nll"] == pytest.approx(before["nll_calibrated"])
    assert after["temperature"] == pytest.approx(1, abs=1e-4)
    assert after["accuracy"] == before["accuracy"]
    inside, outside = ood.scores(cooled(images)), ood.scores(cooled(data.ood["uniform_noise"]))
    found = after["ood"]["uniform_noise"]
    assert found == {s: ood.auroc(inside[s], outside[s]) for s in inside}
    assert found["energy"] != 0.5
    assert found["max_logit"] == pytest.approx(before["ood"]["uniform_noise"]["max_logit"])


def test_a_temperature_of_members_is_refused(trained: SigmaEnsemble, data: EvaluationData) -> None:
    with pytest.raises(InputError, match="3 members; expected one network"):
        tempered(member_logits(trained), data.validation)


def test_scales_are_measured(trained: SigmaEnsemble, data: EvaluationData) -> None:
    row = measured(trained, data)
    assert len(row["owners"]) == 4
    assert sum(row["owners"]) == 4 + 8
    mean = sum(k * n for k, n in enumerate(row["owners"])) / sum(row["owners"])
    assert mean == pytest.approx(diversity.owners(trained))
    assert row["cosine"] == diversity.cosine(trained, "auto")
    assert row["saturation"] == diversity.saturation(trained)


def test_scales_without_a_meaning_are_none(single: SeparateNetworks, data: EvaluationData) -> None:
    for model in (single, ensemble(1)):
        row = measured(model, replace(data, ood={}), members=1)
        assert (row["cosine"], row["owners"], row["saturation"]) == (None, None, None)
        assert (row["owners_by_layer"], row["ood_histograms"]) == (None, None)
    row = measured(ensemble(2, scale="linear"), data, members=2)
    assert -1 <= row["cosine"] <= 1
    assert (row["owners"], row["saturation"]) == (None, None)


def test_report_reads_ood_and_corruption(trained: SigmaEnsemble, data: EvaluationData) -> None:
    row = measured(trained, data, tau=0.5)
    raw, labels = plain(trained, data.test.images), data.test.labels
    assert set(row["ood"]) == {"photo_patches", "uniform_noise", "gaussian_noise"}
    inside, outside = ood.scores(raw), ood.scores(plain(trained, data.ood["photo_patches"]))
    expected = {s: ood.auroc(inside[s], outside[s]) for s in inside}
    assert row["ood"]["photo_patches"] == pytest.approx(expected, abs=1e-4)
    assert expected["max_softmax"] > 0.5
    for score, found in row["ood_detail"]["photo_patches"].items():
        pair = inside[score], outside[score]
        assert found == pytest.approx(
            {
                "n": 80,
                "aupr_in": ood.aupr_in(*pair),
                "aupr_out": ood.aupr_out(*pair),
                "fpr95": ood.fpr_at_tpr(*pair),
            },
            abs=1e-4,
        )
    levels = row["corruption"]["gaussian_noise"]
    assert list(levels) == ["1", "3", "5"]
    for severity, found in levels.items():
        log_p = average(trained, data.corruption["gaussian_noise"][int(severity)])
        assert found == pytest.approx(
            {
                "accuracy": metrics.accuracy(log_p, labels),
                "nll": metrics.nll(log_p, labels),
                "ece": metrics.ece(log_p, labels),
            },
            rel=1e-5,
        )
    (group,) = read_study({"version": 1, "rows": [row]}).groups
    assert group.stat("ood", "photo_patches", "modulation").mean == expected["modulation"]
    assert group.stat("corruption", "gaussian_noise", "3", "nll").mean == levels["3"]["nll"]
    assert console_table({"version": 1, "rows": [row]}).row_count == 1


@pytest.mark.parametrize("many", [True, False])
def test_scores_of_features_stand_beside_those_of_logits(
    many: bool, trained: SigmaEnsemble, single: SeparateNetworks, data: EvaluationData
) -> None:
    model: nn.Module = trained if many else single
    train = digits_sets(train=200, validation=200, ood=1, seed=1).train
    read, head = feature_reader(model, batch=64), head_weights(model)
    plain = measured(model, data, members=len(head[0]))
    row = measured(model, data, members=len(head[0]), features=read, train=train, head=head)
    fitted = {
        "mahalanobis": Mahalanobis().fit(read(train.images), train.labels),
        "relative_mahalanobis": RelativeMahalanobis().fit(read(train.images), train.labels),
        "knn": KNN().fit(read(train.images)),
        "vim": ViM().fit(read(train.images), head=head),
    }
    for name, images in data.ood.items():
        old, found = plain["ood"][name], dict(row["ood"][name])
        inside, outside = read(data.test.images), read(images)
        for key, score in fitted.items():
            pair = score.score(inside), score.score(outside)
            assert found.pop(key) == ood.auroc(*pair)
            detail = row["ood_detail"][name][key]
            assert detail["aupr_out"] == ood.aupr_out(*pair)
            assert detail["member_auroc"] == [
                ood.auroc(score.member_scores(inside)[m], score.member_scores(outside)[m])
                for m in range(len(head[0]))
            ]
        assert found == old
    (group,) = read_study({"version": 1, "rows": [row]}).groups
    assert group.stat("ood", "uniform_noise", "knn").mean == row["ood"]["uniform_noise"]["knn"]
    json.dumps(row, allow_nan=False)
    for key in plain.keys() - {"ood", "ood_detail", "ood_histograms"}:
        assert row[key] == plain[key], key


def test_features_are_read_in_batches_and_need_training_pictures(
    trained: SigmaEnsemble, data: EvaluationData
) -> None:
    read = feature_reader(trained, batch=64)
    found = read(data.test.images)
    assert found.shape == (3, 300, 8)
    torch.testing.assert_close(found, member_features(trained, data.test.images))
    with pytest.raises(InputError, match="features are given without train"):
        measured(trained, data, features=read)
    train = digits_sets(train=200, validation=200, ood=1, seed=1).train
    weight, bias = head_weights(trained)
    headless = measured(trained, data, features=read, train=train)
    assert "vim" not in headless["ood"]["photo_patches"]
    negative, _ = evaluate(
        lambda x: member_logits(trained)(x) - 1e3, data, method="sigmanens", members=3, params=0,
        features=read, train=train, head=(weight, bias - 1e3),
    )  # fmt: skip
    assert "vim" not in negative["ood"]["photo_patches"]
    assert "mostly negative" in negative["ood_detail"]["photo_patches"]["vim"]["reason"]
    assert set(negative["ood"]["photo_patches"]) == set(headless["ood"]["photo_patches"])


def test_options_for_features_where_a_network_has_them(
    trained: SigmaEnsemble, single: SeparateNetworks, data: EvaluationData
) -> None:
    train = digits_sets(train=200, validation=200, ood=1, seed=1).train
    options = feature_options(trained, train, batch=64)
    row = measured(trained, data, **options)
    assert {"knn", "vim"} <= row["ood"]["photo_patches"].keys()
    # A temperature is a factor on the logits and does no harm to a head; another head does.
    cooled = tempered(member_logits(single), data.validation)
    for logits, fits in ((cooled, True), (lambda x: plain(single, x).flip(2), False)):
        found, _ = evaluate(
            logits, data, method="single", members=1, params=0, **feature_options(single, train)
        )
        assert ("vim" in found["ood"]["photo_patches"]) == fits
    reason = found["ood_detail"]["photo_patches"]["vim"]["reason"]
    assert "differ from the network's" in reason
    with pytest.warns(SigmaNensWarning, match="no OOD scores of features: the head was given 2"):
        assert feature_options(mimo(network(), 2), train) == {}
    conv = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(2))
    with pytest.warns(SigmaNensWarning, match="no ViM: the head's last layer is Conv2d"):
        options = feature_options(conv, train, head_name="0")
    assert options["head"] is None


def test_probabilities_have_no_energy(single: SeparateNetworks, data: EvaluationData) -> None:
    """Of log-probabilities it is rounding, whose order would stand in the row as an AUROC."""
    row, _ = evaluate(
        lambda x: plain(single, x).log_softmax(2), data, method="laplace", members=1, params=0
    )
    found, detail = row["ood"]["photo_patches"], row["ood_detail"]["photo_patches"]
    assert set(measured(single, data)["ood"]["photo_patches"]) - set(found) == {
        "energy",
        "max_logit",
    }
    assert "log-probabilities" in detail["energy"]["reason"]


def test_logits_come_in_batches_without_gradients_in_evaluation_mode(
    trained: SigmaEnsemble, data: EvaluationData
) -> None:
    images = data.test.images
    expected = plain(trained, images)
    trained.train()
    found = member_logits(trained, batch=64)(images)
    torch.testing.assert_close(found, expected)
    assert not trained.training
    assert not found.requires_grad
    two = member_logits(trained, members=2)(images)
    torch.testing.assert_close(two, expected[:2])
    assert plain(trained, images).shape == (3, 300, 10)


def test_members_that_cannot_be_chosen_are_refused(
    trained: SigmaEnsemble, single: SeparateNetworks
) -> None:
    for members in (0, 4, -1):
        with pytest.raises(InputError, match=f"members is {members}; expected 1 to 3"):
            member_logits(trained, members=members)
    with pytest.raises(InputError, match="SeparateNetworks"):
        member_logits(single, members=1)


def test_a_network_that_diverged_is_named(data: EvaluationData) -> None:
    broken = ensemble(2)
    with torch.no_grad():
        broken.network.conv1.weight[0] = float("nan")
    with pytest.raises(NonFiniteError, match="training has diverged"):
        measured(broken, data)
    patched = data.test.images.clone()
    patched[3] = float("nan")
    with pytest.raises(NonFiniteError, match="pictures hold NaN"):
        measured(ensemble(2), replace(data, test=Labelled(patched, data.test.labels)))
