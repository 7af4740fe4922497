"""Grouping of seeds, what counts as a difference, and the words of the verdict."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
from tests.lab.report_fixture import demo_metrics, row, shifted, single_row_metrics

from sigmanens.errors import InputError
from sigmanens.lab.report import Verdict, console_table, verdict, write_report
from sigmanens.lab.report.compare import METRICS, judge
from sigmanens.lab.report.page import render
from sigmanens.lab.report.reading import read_study
from sigmanens.lab.report.study import Stat


def line(found: Verdict, start: str) -> str:
    """The one line of a verdict that begins with ``start``."""
    (text,) = [text for text in found.lines if text.startswith(start)]
    return text


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
    for act in (verdict, console_table, lambda m: write_report(m, tmp_path / "report.html")):
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
    assert verdict(metrics).chosen["tau"] == 2.0
    for entry in metrics["rows"]:
        entry["validation"] = None
    found = verdict(metrics)
    assert found.chosen is None
    assert "none was chosen" in found.headline


# Judging ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ours", "theirs", "direction", "phrase"),
    [
        ([0.20, 0.21, 0.22], [0.30, 0.31, 0.32], 1, "better"),
        ([0.30, 0.31, 0.32], [0.20, 0.21, 0.22], -1, "worse"),
        # Seeds differ by far more than the methods do, but the pairs all agree.
        ([0.20, 0.30, 0.40], [0.22, 0.32, 0.42], 1, "better"),
        ([0.20, 0.31, 0.42], [0.21, 0.30, 0.42], 0, "no difference seen: worse in 1 of 3 seeds"),
        ([0.2001, 0.2001], [0.2003, 0.2003], 0, "no difference seen"),
        ([0.20, 0.20, 0.31], [0.30, 0.30, 0.30], 0, "no difference seen: better in 2 of 3 seeds"),
        ([0.20, 0.20, 0.305], [0.30, 0.30, 0.30], 1, "better, but worse in 1 of 3 seeds"),
    ],
)
def test_a_difference_must_exceed_its_spread_over_paired_seeds(ours, theirs, direction, phrase):
    stats = (Stat(dict(enumerate(values))) for values in (ours, theirs))
    found = judge(*stats, METRICS["nll"])
    assert found is not None
    assert (found.direction, found.phrase) == (direction, phrase)


def test_one_seed_is_judged_by_intervals_or_named_unconfirmed():
    ours, theirs = Stat({0: 0.2}), Stat({0: 0.3})
    apart = judge(ours, theirs, METRICS["nll"], [(0.18, 0.22), (0.27, 0.33)])
    overlapping = judge(ours, theirs, METRICS["nll"], [(0.15, 0.26), (0.25, 0.33)])
    bare = judge(ours, theirs, METRICS["nll"])
    assert [c.phrase for c in (apart, overlapping, bare)] == [
        "better",
        "no difference seen",
        "better in this one seed",
    ]
    assert judge(ours, Stat({}), METRICS["nll"]) is None


def test_the_difference_on_the_same_samples_decides_for_one_seed():
    ours, theirs = Stat({0: 0.2}), Stat({0: 0.3})
    overlapping = [(0.15, 0.26), (0.25, 0.33)]
    seen = judge(ours, theirs, METRICS["nll"], overlapping, (-0.12, -0.08))
    not_seen = judge(ours, theirs, METRICS["nll"], [(0.18, 0.22), (0.27, 0.33)], (-0.22, 0.02))
    worse = judge(theirs, ours, METRICS["nll"], overlapping, (0.08, 0.12))
    higher = judge(ours, theirs, METRICS["accuracy"], overlapping, (-0.12, -0.08))
    found = (seen, not_seen, worse, higher)
    assert [c.phrase for c in found] == ["better", "no difference seen", "worse", "worse"]
    assert {c.basis for c in found} == {"samples"}
    several = Stat({0: 0.2, 1: 0.2, 2: 0.2}), Stat({0: 0.3, 1: 0.1, 2: 0.2})
    assert judge(*several, METRICS["nll"], difference=(-0.12, -0.08)).basis == "seeds"


def test_the_verdict_of_one_seed_reads_the_paired_differences():
    metrics = demo_metrics(seeds=1)
    chosen = read_study(metrics).chosen
    film = next(r for r in metrics["rows"] if r["method"] == "film")
    ours = next(r for r in metrics["rows"] if (r["method"], r["tau"]) == ("sigmanens", chosen.tau))
    ours["nll_calibrated"] = film["nll_calibrated"] + 0.1
    pair = {
        "against": "film", "members": film["members"], "tau": None, "weight": None,
        "variant": None, "metric": "nll_calibrated", "seeds": 1, "value": 0.1,
    }  # fmt: skip
    for low, high, said in ((0.05, 0.15, "worse than"), (-0.05, 0.25, "not seen to differ from")):
        metrics["paired"] = [pair | {"low": low, "high": high}]
        parts = line(verdict(metrics), "Controls").split("; ")
        assert said in next(part for part in parts if "FiLM" in part)


def test_accuracy_is_better_when_higher():
    found = judge(Stat({0: 0.9, 1: 0.9}), Stat({0: 0.8, 1: 0.8}), METRICS["accuracy"])
    assert found is not None
    assert found.direction == 1


# The verdict --------------------------------------------------------------------------------


def test_verdict_of_a_run_in_which_sigmanens_wins():
    found = verdict(demo_metrics())
    assert found.headline == (
        "σN-Ens τ=0.5 beats one network on NLL, temperature-scaled or not, at 1.04 × the "
        "parameters. 4 separate networks (4.00 × the parameters) are better."
    )
    assert found.chosen == {
        "method": "sigmanens",
        "members": 4,
        "tau": 0.5,
        "weight": 0.01,
        "label": "σN-Ens τ=0.5",
        "criterion": "validation nll_calibrated",
        "reason": "0.200 against 0.206 (τ=2) and 0.235 (τ=0.1), mean of 3 seeds",
    }
    assert "NLL 0.205 ± 0.004 against 0.354 ± 0.007 (better)" in line(
        found, "Against one network as trained"
    )
    assert "ECE" in line(found, "Against one network with a temperature fitted to each")
    assert "(worse)" in line(found, "Against 4 separate networks")
    assert "4 separate networks take 4.00 ×" in line(found, "Parameters")
    assert "the lowest temperature-scaled NLL on the validation data: 0.200" in line(
        found, "Choice of τ"
    )
    assert "better than FiLM-Ensemble control and σN-Ens λ=0" in line(found, "Controls")
    assert "severity 5" in line(found, "Corruption")
    assert "AUROC" in line(found, "OOD set “patches”")
    assert line(found, "Evidence") == (
        "Evidence: 3 seeds, 899 test samples; ± is the standard deviation over seeds."
    )


@pytest.mark.parametrize(("gap", "said"), [(0.05, "(worse)"), (0.005, "(no difference seen)")])
def test_under_corruption_the_intervals_of_one_seed_decide(gap: float, said: str):
    """Of the one seed that was measured there."""
    metrics = demo_metrics(seeds=3)
    for found in metrics["rows"]:
        if found["seed"]:
            found["corruption"] = None
    assert "in this one seed" in line(verdict(metrics), "Corruption")
    for found in metrics["rows"]:
        if found["seed"]:
            continue
        ece = 0.1 + (gap if found["method"] == "sigmanens" else 0.0)
        found["corruption_pooled"] = {
            "5": {"ece": ece, "n": 800, "intervals": {"ece": [ece - 0.01, ece + 0.01]}}
        }
    text = line(verdict(metrics), "Corruption").partition("; accuracy")[0]
    assert text.count(said) == 2, text


def test_verdict_says_plainly_when_temperature_scaling_does_better():
    metrics = shifted(demo_metrics(), "sigmanens", "nll_calibrated", [0.31, 0.32, 0.30])
    found = verdict(metrics)
    assert found.headline.startswith(
        "σN-Ens τ=0.5 is worse than one network with temperature scaling on NLL, "
        "though better than the plain one"
    )
    metrics = shifted(metrics, "sigmanens", "nll", [0.5, 0.5, 0.5])
    assert "though" not in verdict(metrics).headline


def test_verdict_calls_a_difference_within_the_noise_no_difference():
    metrics = shifted(demo_metrics(), "sigmanens", "nll_calibrated", [0.25, 0.30, 0.29])
    assert verdict(metrics).headline.startswith(
        "σN-Ens τ=0.5 beats one plain network on NLL, but no difference is seen from one network "
        "with temperature scaling (worse in 2 of 3 seeds)"
    )
    metrics = shifted(metrics, "deep_ensemble", "nll_calibrated", [0.24, 0.31, 0.29])
    assert "No difference is seen from 4 separate networks (4.00 ×" in verdict(metrics).headline
    metrics = shifted(metrics, "sigmanens", "nll", [0.30, 0.36, 0.40])
    assert "shows no difference from one network on NLL (worse in" in verdict(metrics).headline


def test_verdict_counts_the_seeds_that_disagree():
    scaled = [row("single", None, seed)["nll_calibrated"] for seed in range(3)]
    values = [scaled[0] - 0.1, scaled[1] - 0.1, scaled[2] + 0.003]
    metrics = shifted(demo_metrics(), "sigmanens", "nll_calibrated", values)
    found = verdict(metrics)
    assert "beats one network on NLL in 2 of 3 seeds" in found.headline
    assert "(better, but worse in 1 of 3 seeds)" in line(
        found, "Against one network with a temperature"
    )
    assert "but worse in 1 of 3 seeds" in render(metrics)
    values[2] = scaled[2] + 0.03
    metrics = shifted(metrics, "sigmanens", "nll_calibrated", values)
    assert "(better in 2 of 3 seeds)" in verdict(metrics).headline
    assert "no difference seen <small>(better in 2 of 3 seeds)</small>" in render(metrics)


def test_verdict_names_a_lost_accuracy_and_a_win_over_separate_networks():
    metrics = shifted(demo_metrics(), "sigmanens", "accuracy", [0.88, 0.87, 0.88])
    metrics = shifted(metrics, "sigmanens", "nll_calibrated", [0.10, 0.10, 0.10])
    headline = verdict(metrics).headline
    assert "Its accuracy is lower." in headline
    assert "It is better than 4 separate networks" in headline


def test_verdict_does_not_credit_the_penalty_without_a_difference_from_lambda_0():
    values = [row("sigmanens", 0.5, seed)["nll_calibrated"] for seed in range(3)]
    metrics = shifted(demo_metrics(), "sigmanens_lambda0", "nll_calibrated", values)
    text = line(verdict(metrics), "Controls")
    assert "not seen to differ from σN-Ens λ=0" in text
    assert "does not show that the diversity penalty itself helps" in text


def test_verdict_admits_that_another_tau_did_better_on_test():
    metrics = demo_metrics()
    metrics["choice"]["tau"] = 2.0
    text = line(verdict(metrics), "Choice of τ")
    assert "played no part in the choice, σN-Ens τ=0.5 comes out first" in text


def test_verdict_on_one_seed_is_named_unconfirmed():
    found = verdict(demo_metrics(seeds=1))
    assert found.headline.endswith("One seed only: not confirmed.")
    assert line(found, "Evidence") == "Evidence: 1 seed, 899 test samples."


def test_verdict_on_members_that_are_one_model():
    metrics = shifted(demo_metrics(), "sigmanens", "disagreement", [0.001, 0.002, 0.001])
    assert "one model in disguise" in line(verdict(metrics), "Members")


def test_verdict_without_anything_to_compare_with():
    found = verdict(single_row_metrics())
    assert found.headline == (
        "σN-Ens: accuracy 0.910, NLL 0.300. Nothing in this run to compare it with."
    )
    rivals = demo_metrics()
    rivals["rows"] = [r for r in rivals["rows"] if r["method"] in ("single", "film")]
    rivals["choice"] = None
    assert verdict(rivals).headline == "2 methods were compared; σN-Ens is not among them."


def test_single_temperature_row_stands_in_for_a_missing_scaled_single():
    metrics = shifted(demo_metrics(), "single", "nll_calibrated", [None, None, None])
    study = read_study(metrics)
    assert study.scaled_single is not None
    assert study.scaled_single.label == "one network + temperature"
    assert "temperature-scaled or not" in verdict(metrics).headline
