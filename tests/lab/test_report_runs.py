"""The report of a large study: runs in detail, knobs turned, kinds of corruption, warnings."""

from __future__ import annotations

import copy
import re
from typing import Any

import plotly.graph_objects as go
import pytest
from tests.lab.report_bench import KINDS, LAYERS, SETS, TAUS, bench_metrics
from tests.lab.report_fixture import demo_metrics, row, single_row_metrics
from tests.lab.test_report import HOSTILE, concrete

from sigmanens.lab.report.detail import details, first_run
from sigmanens.lab.report.figures import figures
from sigmanens.lab.report.findings import findings
from sigmanens.lab.report.layers import layer_counts, layer_panel, layer_table
from sigmanens.lab.report.page import render
from sigmanens.lab.report.plot import Figure
from sigmanens.lab.report.reading import read_study
from sigmanens.lab.report.scores import histograms, score_panels, score_table
from sigmanens.lab.report.shift import curve_panels, kind_stat, kind_table
from sigmanens.lab.report.study import Study
from sigmanens.lab.report.tables import failures, paired, results
from sigmanens.lab.report.verdict import study_verdict


@pytest.fixture(scope="module")
def metrics() -> dict[str, Any]:
    return bench_metrics()


@pytest.fixture(scope="module")
def study(metrics: dict[str, Any]) -> Study:
    return read_study(metrics)


@pytest.fixture(scope="module")
def page(metrics: dict[str, Any]) -> str:
    return render(metrics)


def drawn(study: Study) -> dict[str, Figure]:
    return {figure.key: figure for figure in figures(study)}


# Runs in detail -----------------------------------------------------------------------------


def test_every_run_has_its_details_and_says_what_it_lacks(study: Study):
    runs = details(study)
    assert [group for group, _ in runs] == list(study.groups)
    assert first_run(study) is study.chosen
    by_method = {group.method: figure for group, figure in reversed(runs)}
    titles = [panel.title for panel in by_method["sigmanens"].panels]
    assert [title.partition(":")[0].partition(",")[0] for title in titles] == [
        *("Reliability", "Owners per layer", "ECE under corruption", "Accuracy under corruption"),
        *("OOD score", "OOD score", "Training", "Training", "Training"),
    ]
    assert by_method["sigmanens"].caption == ""
    assert "Owners" not in " ".join(panel.title for panel in by_method["packed"].panels)
    assert by_method["packed"].caption == ""  # its channels have no owners to miss
    for _, figure in runs[:3] + runs[-3:]:
        for panel in figure.panels:
            go.Figure(concrete(panel.traces), concrete(panel.layout))


def test_rows_of_old_runs_have_fewer_details():
    study = read_study(demo_metrics())
    (figure,) = (figure for group, figure in details(study) if group is study.chosen)
    assert [panel.title.partition(",")[0] for panel in figure.panels] == [
        *("Reliability", "ECE under gaussian noise", "Accuracy under gaussian noise"),
    ]
    assert figure.caption == (
        "Not in this run: owners per layer, distributions of OOD scores, training curves."
    )
    assert figure.summary.startswith("M = 4, τ = 0.5, λ = 0.01, 1.04 × the parameters of one")
    assert details(read_study(single_row_metrics())) == []


def test_owners_of_a_layer_are_summed_over_seeds(metrics: dict[str, Any], study: Study):
    group = study.chosen
    assert group is not None
    name = LAYERS[4]
    each = [r["owners_by_layer"][name] for r in group.rows.values()]
    assert len(each) == 2
    assert layer_counts(group)[name] == [a + b for a, b in zip(*each, strict=True)]
    panel = layer_panel(group)
    assert panel is not None
    shares = panel.traces[0]["z"][4]
    total = sum(map(sum, each))
    assert shares == pytest.approx([(a + b) / total for a, b in zip(*each, strict=True)])
    table = layer_table(study)
    assert table is not None
    line = next(r for r in table.rows if r[0].text == group.label and r[1].text == name)
    assert line[2].value == total / 2
    mean = sum(k * (a + b) for k, (a, b) in enumerate(zip(*each, strict=True))) / total
    assert line[3].value == pytest.approx(mean)


def test_score_histograms_are_shares_of_one_seed(study: Study):
    group = study.chosen
    assert group is not None
    kept = group.rows[0]["ood_histograms"]["max_softmax"]
    first, second = score_panels(study, group)
    assert (first.title, second.title) == ("OOD score: max softmax", "OOD score: energy")
    inside, *sets = first.traces
    assert len(sets) == len(SETS)
    assert inside["x"] == kept["edges"]
    assert inside["y"][:-1] == pytest.approx([n / sum(kept["inside"]) for n in kept["inside"]])
    assert [key.name for key in first.keys][:2] == ["test data", "SVHN"]
    table = score_table(study)
    assert table is not None
    line = next(r for r in table.rows if r[0].text == group.label and r[2].text == "test data")
    assert kept["edges"][0] < line[4].value < line[5].value < line[6].value < kept["edges"][-1]


@pytest.mark.parametrize(
    "damage",
    [None, [], "text", {"max_softmax": None}, {"max_softmax": {"edges": [0, 1], "inside": [1]}},
     {"max_softmax": {"edges": [0, 1], "inside": [1, 2], "sets": {"a": [3, 4]}}},
     {"max_softmax": {"edges": [0, 1, 2], "inside": [1, None], "sets": {"a": [3, 4]}}}],
)  # fmt: skip
def test_damaged_histograms_and_layers_are_left_out(damage: Any):
    metrics = demo_metrics(seeds=1)
    for entry in metrics["rows"]:
        entry |= {"ood_histograms": damage, "owners_by_layer": damage, "findings": damage}
    metrics["histories"] = [damage, {"epochs": damage}, {"method": "single", "epochs": [damage]}]
    study = read_study(metrics)
    assert all(not histograms(group) and not layer_counts(group) for group in study.groups)
    assert "</html>" in render(metrics)


# Kinds of corruption ------------------------------------------------------------------------


def test_kinds_are_means_over_severities_and_the_best_is_darkest(study: Study):
    group = study.chosen
    assert group is not None
    rows = group.rows
    stat = kind_stat(group, "fog", study.severities, "ece")
    each = [sum(r["corruption"]["fog"][s]["ece"] for s in "12345") / 5 for r in rows.values()]
    assert list(stat.by_seed.values()) == pytest.approx(each)
    for metric, best in (("ece", min), ("accuracy", max)):
        table = kind_table(study, metric)
        assert table is not None
        assert table.head[1:3] == ["mean", "gaussian noise"]
        assert len(table.head) == 2 + len(KINDS)
        column = {cells[0].text: cells[7] for cells in table.rows}
        darkest = max(column, key=lambda name: column[name].heat or 0)
        assert column[darkest].value == best(cell.value for cell in column.values())
        assert column[darkest].heat == 1
    assert kind_table(read_study(demo_metrics()), "ece") is None  # one kind has a figure


def test_curves_of_a_run_go_from_the_clean_data_through_every_kind(study: Study):
    group = study.chosen
    assert group is not None
    ece, accuracy = curve_panels(study, group)
    assert len(ece.traces) == len(accuracy.traces) == len(KINDS) + 1
    assert len({(key.colour, key.dash) for key in ece.keys}) == len(KINDS) + 1
    mean = ece.traces[-1]
    assert mean["x"] == [0, 1, 2, 3, 4, 5]
    assert mean["y"][0] == group.stat("ece").mean
    assert mean["y"][5] == pytest.approx(sum(t["y"][5] for t in ece.traces[:-1]) / len(KINDS))


def test_kinds_together_stand_in_the_figure_and_the_table_says_that_few_are_biased():
    metrics = copy.deepcopy(bench_metrics())
    plain = read_study(metrics)
    assert not plain.pooled
    assert "the mean over gaussian noise" in drawn(plain)["severity"].caption
    for entry in metrics["rows"]:
        entry["corruption_pooled"] = {
            str(s): {
                "ece": 0.01 * s, "accuracy": 0.5, "nll": 1.2, "n": 750, "examples": 750,
                "intervals": {"ece": [0.01 * s - 0.002, 0.01 * s + 0.004]},
            }
            for s in range(1, 6)
        }  # fmt: skip
    study = read_study(metrics)
    assert study.pooled
    assert study.corrupted == 750
    group = study.chosen
    assert group is not None
    assert group.corruption("3", "ece").mean == pytest.approx(0.03)
    assert group.corruption("0", "ece").mean == group.stat("ece").mean
    assert "the examples of all kinds together" in drawn(study)["severity"].caption
    (ece, _) = curve_panels(study, group)
    assert ece.keys[0].name == "all together"
    assert "Each kind was measured on 50 examples" in render(metrics)
    assert "Each kind was measured" not in render(bench_metrics())
    del metrics["rows"][0]["corruption_pooled"]  # as an earlier version wrote it
    mixed = read_study(metrics)
    assert not mixed.pooled
    assert mixed.chosen is not None
    assert mixed.chosen.corruption("3", "ece").mean != pytest.approx(0.03)


# Knobs --------------------------------------------------------------------------------------


def test_dial_is_turned_at_equal_members_and_weight(study: Study):
    figure = drawn(study)["tau"]
    (line,) = (t for t in figure.panels[0].traces if t["mode"] == "lines+markers")
    groups = [g for g in study.sigma if g.members == 4 and g.weight == 0.01]
    assert [g.tau for g in groups] == list(TAUS)
    assert line["x"] == pytest.approx(TAUS)
    assert line["y"] == [g.stat("nll_calibrated").mean for g in groups]
    assert line["error_y"]["array"] == [g.stat("nll_calibrated").sd for g in groups]
    levels = {t["hovertext"][0].partition("</b>")[0]: t["y"]
              for t in figure.panels[0].traces if t["mode"] == "lines"}  # fmt: skip
    assert study.single is not None
    assert levels["<b>one network"] == [study.single.stat("nll_calibrated").mean] * 2
    assert "<b>4 separate networks" in levels
    assert "<b>8 separate networks" not in levels  # another M


def test_a_variant_at_several_tau_has_a_line_of_its_own():
    metrics = demo_metrics()
    path = [r | {"variant": "other_path"} for r in metrics["rows"] if r["tau"] is not None]
    metrics["rows"] += path
    figure = drawn(read_study(metrics))["tau"]
    names = [key.name for key in figure.keys]
    assert names[-2:] == ["σN-Ens", "σN-Ens, other path"]
    lines = [t for t in figure.panels[0].traces if t["mode"] == "lines+markers"]
    assert lines[0]["y"] == lines[1]["y"]
    assert [line["line"]["dash"] for line in lines] == ["solid", "dash"]


def test_weight_and_members_have_figures_only_where_they_vary(study: Study):
    found = drawn(study)
    (line,) = (t for t in found["weight"].panels[0].traces if t["mode"] == "lines+markers")
    assert line["x"] == pytest.approx([0.001, 0.01, 0.1])
    names = [key.name for key in found["members"].keys]
    assert names == ["one network", "separate networks", "Packed-Ensembles", "σN-Ens τ=0.5 λ=0.01"]
    assert "lowest at M = 16 for separate networks" in found["members"].summary
    assert not {"weight", "members"} & set(drawn(read_study(demo_metrics())))


def test_dominated_points_are_open_on_the_frontier(study: Study):
    dominated = [g for g in study.sigma if study.dominated(g)]
    assert dominated
    assert len(dominated) < len(study.sigma)
    for panel in drawn(study)["frontier"].panels:
        marks = {t["meta"]: t for t in panel.traces if t.get("customdata")}
        for group in study.groups:
            if group.key in marks:
                is_open = marks[group.key]["marker"]["symbol"].endswith("-open")
                marked = group in dominated and not study.was_chosen(group)
                assert is_open == (marked or group.look.symbol.endswith("-open"))
                assert ("(dominated)" in marks[group.key]["hovertext"][0]) <= (group in dominated)
    marked = {cells[0].text for cells in results(study).rows if cells[0].mark == "dominated"}
    assert marked == {g.label for g in dominated if not study.was_chosen(g)}


# Many methods -------------------------------------------------------------------------------


def test_crowded_figures_show_the_main_methods_first(study: Study):
    main = [group.label for group in study.main]
    assert main == [
        *("one network", "4 separate networks", "FiLM-Ensemble control", "heads only (control)"),
        *("fixed random masks (control)", "σN-Ens λ=0", "σN-Ens τ=0.5 M=4 λ=0.01"),
    ]
    found = drawn(study)
    for key in ("severity", "training"):
        legend = found[key].legend
        assert [g.label for g in legend if g.key not in found[key].rest] == main
        assert found[key].rest_off
    assert not found["frontier"].rest_off
    owners = found["owners"]
    assert owners.first == 3
    assert [p.group in study.main for p in owners.panels if p.group] == [
        *[True] * 3, *[False] * (len(owners.panels) - 3)
    ]  # fmt: skip
    small = read_study(demo_metrics())
    assert small.main == list(small.groups)
    assert not any(figure.rest or figure.first for figure in figures(small))


def test_a_method_keeps_its_look_whatever_its_members_and_rivals_differ(study: Study):
    looks: dict[str, set[Any]] = {}
    for group in study.groups:
        if group.method != "sigmanens":
            looks.setdefault(group.method, set()).add(group.look)
    assert all(len(found) == 1 for found in looks.values())
    drawn_as = [(look.symbol, look.light) for found in looks.values() for look in found]
    assert len(set(drawn_as)) == len(looks)


def test_page_of_a_large_study_holds_every_section_once(page: str):
    keys = re.findall(r'<section id="([\w-]+)"', page)
    assert keys == [
        *("verdict", "warnings", "results", "frontier", "run", "tau", "weight", "members"),
        *("reliability", "severity", "kinds", "owners", "training", "ood", "paired", "failures"),
        *("choice", "seeds"),
    ]
    assert re.findall(r'<a href="#([\w-]+)">', page) == keys
    ids = re.findall(r' id="([\w-]+)"', page)
    assert len(ids) == len(set(ids))
    assert len(page) < 12_000_000


def test_paired_differences_and_failures_are_told(study: Study):
    table = paired(study)
    assert table is not None
    lines = {cells[0].text: cells for cells in table.rows}
    assert len(lines) == 16
    assert lines["one network"][1].mark == "better"
    assert lines["4 separate networks"][1].mark == "worse"
    assert lines["Packed-Ensembles M=4"][1].mark == ""
    assert lines["one network"][1].text == "−0.0680 [−0.0800, −0.0560]"
    failed = failures(study)
    assert failed is not None
    assert [[cell.text for cell in cells] for cells in failed.rows] == [
        ["mimo-m16-seed1", "the loss is NaN after epoch 3: lower the learning rate"]
    ]


# Words --------------------------------------------------------------------------------------


def test_findings_are_told_once_with_their_seeds(study: Study, page: str):
    ((group, text, seeds),) = findings(study)
    assert (group.tau, seeds) == (2.0, [0, 1])
    assert text.startswith("the dial is in its flat part")
    assert "The dial is in its flat part" in page
    assert "seeds 0, 1" in page
    metrics = demo_metrics(seeds=1)
    metrics["rows"][0]["findings"] = [{"kind": "one model", "message": HOSTILE}, HOSTILE, 3, None]
    ((_, text, _),) = findings(read_study(metrics))
    assert text == HOSTILE
    assert HOSTILE not in render(metrics)
    assert 'id="warnings"' not in render(demo_metrics(seeds=1))


def said(metrics: dict[str, Any], start: str) -> str:
    (text,) = [t for t in study_verdict(read_study(metrics)).lines if t.startswith(start)]
    return text


def test_deep_ensemble_equivalent_is_read_off_the_curve_of_separate_networks():
    metrics = demo_metrics()
    curve = {"1": 0.30, "2": 0.22, "3": 0.18, "4": 0.16}
    for entry in metrics["rows"]:
        if entry["method"] == "deep_ensemble":
            entry["curve"] = curve
    mine = read_study(metrics).chosen
    assert mine is not None
    mean = mine.stat("nll_calibrated").mean
    assert mean is not None
    between = 2 + (0.22 - mean) / (0.22 - 0.18)
    assert f"is worth {between:.1f} separate networks (" in said(metrics, "Deep-ensemble")
    for shift, words in ((0.2, "better than all 4 separate networks"), (-0.2, "worse than one")):
        changed = copy.deepcopy(metrics)
        for entry in changed["rows"]:
            if entry["method"] == "deep_ensemble":
                entry["curve"] = {k: v + shift for k, v in curve.items()}
        assert words in said(changed, "Deep-ensemble")


def test_an_equivalent_that_no_interval_bears_out_says_so():
    metrics = demo_metrics()
    for entry in metrics["rows"]:
        if entry["method"] == "deep_ensemble":
            entry["curve"] = {"1": 0.5, "4": 0.4}
    chosen = read_study(metrics).chosen
    assert chosen is not None
    mine = chosen.stat("nll_calibrated").by_seed
    for entry in metrics["rows"]:  # as good in one seed as it is bad in the next
        if entry["method"] == "deep_ensemble":
            entry["nll_calibrated"] = mine[entry["seed"]] + 0.01 * (-1) ** entry["seed"]
    text = said(metrics, "Deep-ensemble")
    assert "is worth about all 4 separate networks that were measured: no difference is" in text


def test_the_best_ood_score_is_named_beside_the_usual_one():
    metrics = demo_metrics()
    for entry in metrics["rows"]:
        for scores in entry["ood"].values():
            scores["knn"] = scores["max_softmax"] + 0.05
    text = said(metrics, "OOD scores")
    assert "the highest mean AUROC over the sets is that of k nearest neighbours, 0.982" in text
    assert "against 0.932 of max softmax. It is the best of 4 on these very sets" in text
    for entry in metrics["rows"]:
        for scores in entry["ood"].values():
            scores["max_softmax"] = 0.999
    assert "that of max softmax, 0.999. It is" in said(metrics, "OOD scores")


def test_verdict_says_when_the_penalty_does_harm_and_how_many_seeds_there_are():
    metrics = demo_metrics()
    for entry in metrics["rows"]:
        if entry["method"] == "sigmanens_lambda0":
            entry["nll_calibrated"] = 0.1
    assert "the diversity penalty itself does harm" in said(metrics, "Controls")
    metrics["rows"] = [r for r in metrics["rows"] if (r["method"], r["seed"]) != ("film", 2)]
    assert said(metrics, "Evidence").startswith("Evidence: 2 to 3 seeds, ")


def test_a_difference_in_every_seed_that_is_within_their_spread_is_told_as_such():
    scaled = [row("deep_ensemble", None, seed)["nll_calibrated"] for seed in range(3)]
    metrics = demo_metrics()
    for entry in metrics["rows"]:
        if entry["method"] == "sigmanens" and entry["tau"] == 0.5:
            entry["nll_calibrated"] = scaled[entry["seed"]] + (0.001, 0.1, 0.002)[entry["seed"]]
    assert study_verdict(read_study(metrics)).headline.endswith(
        "No difference is seen from 4 separate networks (4.00 × the parameters; worse in 3 of 3 "
        "seeds, by less than they differ)."
    )
