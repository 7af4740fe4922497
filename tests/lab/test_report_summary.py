"""Grouping of seeds, what counts as a difference, and the words of the summary."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
from scipy.stats import ttest_rel
from tests.lab.report_fixture import demo_metrics, row, shifted, single_row_metrics

from sigmanens.errors import InputError
from sigmanens.lab.report import console_table, summary, write_report
from sigmanens.lab.report.compare import difference, named, word
from sigmanens.lab.report.page import render
from sigmanens.lab.report.reading import read_study

# Reading ------------------------------------------------------------------------------------


def test_seeds_of_one_setting_form_one_group():
    study = read_study(demo_metrics(seeds=3))
    assert [group.label for group in study.groups] == [
        "one network",
        "one network + temperature",
        "4 separate networks",
        "FiLM-Ensemble control",
        "σN-Ens λ=0",
        "σN-Ens τ=0.1",
        "σN-Ens τ=0.5",
        "σN-Ens τ=2",
    ]
    assert all(list(group.rows) == [0, 1, 2] for group in study.groups)
    accuracies = [row("single", None, seed)["accuracy"] for seed in range(3)]
    stat = study.groups[0].stat("accuracy")
    mean = sum(accuracies) / 3
    assert stat.mean == pytest.approx(mean)
    assert stat.sd == pytest.approx(math.sqrt(sum((a - mean) ** 2 for a in accuracies) / 2))


def test_equal_labels_are_told_apart_by_members_and_weight():
    metrics = demo_metrics(seeds=1)
    wide = {**row("sigmanens", 0.5, 0), "members": 8}
    strong = {**row("sigmanens", 2.0, 0), "weight": 0.1}
    metrics["rows"] += [wide, strong]
    metrics["choice"] |= {"members": 4}
    labels = {group.label for group in read_study(metrics).groups}
    assert {"σN-Ens τ=0.5 M=4", "σN-Ens τ=0.5 M=8"} <= labels
    assert {"σN-Ens τ=2 λ=0.01", "σN-Ens τ=2 λ=0.1"} <= labels


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rows": []}, "no rows"),
        ({"rows": None}, "no rows"),
        ({"version": 2}, "version 2"),
        ({"rows": [{"accuracy": 0.5}]}, "row 0 has no method"),
        ({"choice": {"tau": 7.0}}, "choice of metrics is tau 7.0"),
    ],
)
def test_metrics_that_cannot_be_reported_are_named(change: dict[str, Any], words: str, tmp_path):
    metrics = demo_metrics(seeds=1) | change
    for act in (summary, console_table, lambda m: write_report(m, tmp_path / "report.html")):
        with pytest.raises(InputError, match=words):
            act(metrics)
    assert not list(tmp_path.iterdir())


def test_two_rows_for_one_seed_are_refused():
    metrics = demo_metrics(seeds=1)
    metrics["rows"].append(copy.deepcopy(metrics["rows"][0]))
    with pytest.raises(InputError, match="two rows for method 'single'"):
        read_study(metrics)


def test_rows_of_another_split_are_counted_not_mixed():
    metrics = demo_metrics(seeds=1)
    metrics["rows"].append(metrics["rows"][0] | {"split": "validation", "accuracy": 0.1})
    study = read_study(metrics)
    assert study.left_out == 1
    assert study.single is not None
    assert study.single.stat("accuracy").mean > 0.9
    assert "1 of other splits are not shown" in render(metrics)


def test_without_a_stated_choice_validation_decides_and_test_never_does():
    metrics = demo_metrics() | {"choice": None}
    for entry in metrics["rows"]:
        if entry["tau"] == 2.0:
            entry["validation"]["nll_calibrated"] = 0.01  # best on validation, not on test
    assert read_study(metrics).chosen.tau == 2.0
    for entry in metrics["rows"]:
        entry["validation"] = None
    assert read_study(metrics).chosen is None
    assert "none was chosen" in summary(metrics).headline


# Judging ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "ours", "theirs", "said"),
    [
        ("nll", [0.20, 0.21, 0.22], [0.30, 0.31, 0.33], "better"),
        ("nll", [0.30, 0.31, 0.33], [0.20, 0.21, 0.22], "worse"),
        ("accuracy", [0.90, 0.91, 0.90], [0.80, 0.80, 0.80], "better"),
        # Seeds differ by far more than the methods do, but the pairs all agree.
        ("nll", [0.20, 0.30, 0.40], [0.22, 0.321, 0.42], "better"),
        # Better in every seed, and still within what three seeds can say.
        ("nll", [0.20, 0.20, 0.29], [0.30, 0.30, 0.30], ""),
    ],
)
def test_a_difference_is_named_where_its_interval_leaves_out_0(
    key: str, ours: list[float], theirs: list[float], said: str
):
    metrics = shifted(demo_metrics(), "film", key, ours)
    study = read_study(shifted(metrics, "deep_ensemble", key, theirs))
    film = next(g for g in study.groups if g.method == "film")
    assert study.deep is not None
    gap = difference(study, film, study.deep, key)
    assert gap is not None
    low, high = ttest_rel(ours, theirs).confidence_interval(0.95)
    assert (gap.low, gap.high) == pytest.approx((low, high), rel=1e-4)
    assert word(gap, key) == said
    if key == "accuracy":
        assert named(gap) == "+0.103 [0.089, 0.118]"
    back = difference(study, study.deep, film, key)
    assert back is not None
    assert (back.value, back.low, back.high) == (-gap.value, -gap.high, -gap.low)


def one_seed(low: float, high: float) -> dict[str, Any]:
    """One seed, with the difference of the chosen σN-Ens and one network on the same samples."""
    metrics = demo_metrics(seeds=1)
    gap = {"value": (low + high) / 2, "low": low, "high": high, "p": 0.01, "n": 899}
    gap |= {"basis": "samples", "level": 0.95}
    metrics["differences"] = [
        {
            "a": "sigmanens m4 tau0.5 weight0.01", "b": "single m1", "seeds": 1,
            "metrics": {"nll_calibrated": gap},
        }
    ]  # fmt: skip
    return metrics


@pytest.mark.parametrize(
    ("low", "high", "said"),
    [
        (-0.12, -0.08, "is better than one network"),
        (-0.05, 0.25, "is not told apart from one network"),
        (0.05, 0.25, "is worse than one network"),
    ],
)
def test_one_seed_is_judged_on_its_samples_and_says_so(low: float, high: float, said: str):
    headline = summary(one_seed(low, high)).headline
    assert said in headline
    assert "one seed" in headline


def test_one_seed_without_samples_is_not_judged():
    metrics = demo_metrics(seeds=1)
    assert read_study(metrics).differences == {}
    assert summary(metrics).headline == "σN-Ens τ=0.5: accuracy 0.942, NLL 0.206, ECE 0.012."


# The words ----------------------------------------------------------------------------------


def test_the_summary_is_a_headline_and_three_lines():
    found = summary(demo_metrics())
    assert found.headline == (
        "σN-Ens τ=0.5 is better than one network (temperature-scaled NLL −0.084 [−0.087, −0.081], "
        "3 seeds) and is worse than 4 separate networks (+0.019 [0.007, 0.030], 3 seeds)."
    )
    lines = dict(found.lines)
    assert list(lines) == ["Quality", "Cost", "Choice"]
    assert "accuracy +0.021 [0.021, 0.021] better†" in lines["Quality"]
    assert "±0.003 in temperature-scaled NLL, is what this run can resolve" in lines["Quality"]
    assert lines["Cost"].startswith("σN-Ens τ=0.5: 1.04 × the parameters and 3.4 × the training")
    assert "4 separate networks: 4.00 × the parameters" in lines["Cost"]
    assert "by the lowest temperature-scaled NLL on validation data (0.200" in lines["Choice"]


def test_a_run_with_new_heads_is_compared_with_one_network_that_has_such_a_head():
    metrics = demo_metrics()
    tuned = [
        row("single", None, s) | {"method": "single_finetuned", "variant": v, "head": h}
        for s in range(3)
        for v, h in (("", "own"), ("fresh_head", "fresh"))
    ]
    metrics["rows"] += tuned
    study = read_study(metrics)
    assert study.reference is study.single
    for entry in metrics["rows"]:
        if entry["method"] == "sigmanens":
            entry["head"] = "fresh"
    study = read_study(metrics)
    assert study.reference is not None
    assert study.reference.label == "one network, fine-tuned as long, fresh head"
    assert "than one network, fine-tuned as long, fresh head (" in summary(metrics).headline


def test_a_run_of_one_row_says_its_numbers():
    assert summary(single_row_metrics()).headline == "σN-Ens: accuracy 0.910, NLL 0.300."
    rivals = demo_metrics()
    rivals["rows"] = [r for r in rivals["rows"] if r["method"] in ("single", "film")]
    rivals["choice"] = None
    assert summary(rivals).headline.startswith("one network: accuracy 0.92")


def test_single_temperature_row_stands_in_for_a_missing_scaled_single():
    metrics = shifted(demo_metrics(), "single", "nll_calibrated", [None, None, None])
    study = read_study(metrics)
    assert study.scaled_single is not None
    assert study.scaled_single.label == "one network + temperature"
    assert "temperature-scaled NLL −0.08" in summary(metrics).headline
