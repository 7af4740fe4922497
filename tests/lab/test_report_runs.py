"""The report of a large study: runs in detail, knobs turned, kinds of corruption, warnings."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import plotly.graph_objects as go
import pytest
from tests.lab.report_bench import KINDS, LAYERS, SETS, TAUS, bench_metrics
from tests.lab.report_fixture import demo_metrics
from tests.lab.test_report import PLOTLY

from sigmanens.lab.report.compare import difference, named, survivors, word
from sigmanens.lab.report.corruption import curves_of_a_run, kind_table
from sigmanens.lab.report.owners import layer_counts, layer_panel
from sigmanens.lab.report.page import details, group_findings, render, sections
from sigmanens.lab.report.plot import Section
from sigmanens.lab.report.reading import read_study
from sigmanens.lab.report.scores import histograms, score_panels
from sigmanens.lab.report.study import Study
from sigmanens.lab.report.tables import failures


@pytest.fixture(scope="module")
def metrics() -> dict[str, Any]:
    return bench_metrics()


@pytest.fixture(scope="module")
def study(metrics: dict[str, Any]) -> Study:
    return read_study(metrics)


@pytest.fixture(scope="module")
def page(metrics: dict[str, Any]) -> str:
    return render(metrics)


def drawn(study: Study) -> dict[str, Section]:
    return {section.key: section for section in sections(study)}


# Runs in detail -----------------------------------------------------------------------------


def test_every_run_has_its_details(study: Study):
    assert study.chosen is not None
    titles = [panel.title for panel in details(study, study.chosen)]
    assert [title.partition(":")[0].partition(",")[0] for title in titles] == [
        *("Reliability", "Owners per layer", "ECE under corruption", "Accuracy under corruption"),
        *("OOD score", "OOD score", "Training", "Training", "Training"),
    ]
    packed = next(group for group in study.groups if group.method == "packed")
    assert "Owners" not in " ".join(panel.title for panel in details(study, packed))
    for group in study.groups[:3] + study.groups[-3:]:
        for panel in details(study, group):
            go.Figure(panel.traces, panel.layout)


def test_rows_of_old_runs_have_fewer_details():
    study = read_study(demo_metrics())
    assert study.chosen is not None
    assert [panel.title.partition(",")[0] for panel in details(study, study.chosen)] == [
        *("Reliability", "Confusion", "ECE under gaussian noise", "Accuracy under gaussian noise"),
    ]


def test_owners_of_a_layer_are_summed_over_seeds(study: Study):
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
    assert [name for name, _ in first.keys][:2] == ["test data", "SVHN"]


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
    each = [sum(r["corruption"]["fog"][s]["ece"] for s in "12345") / 5 for r in group.rows.values()]
    found = kind_table(study, "ece")
    assert found is not None
    line = next(cells for cells in found.rows if cells[0].text == group.label)
    assert line[found.head.index("fog")].value == pytest.approx(sum(each) / 2)
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
    ece, accuracy = curves_of_a_run(study, group)
    assert len(ece.traces) == len(accuracy.traces) == len(KINDS) + 1
    assert len({look for _, look in ece.keys}) == len(KINDS) + 1
    mean = ece.traces[-1]
    assert mean["x"] == [0, 1, 2, 3, 4, 5]
    assert mean["y"][0] == group.stat("ece").mean
    assert mean["y"][5] == pytest.approx(sum(t["y"][5] for t in ece.traces[:-1]) / len(KINDS))


@pytest.mark.slow
def test_kinds_together_stand_in_the_figure_and_the_table_says_that_few_are_biased():
    metrics = copy.deepcopy(bench_metrics())
    plain = read_study(metrics)
    assert not plain.pooled
    assert "the mean over gaussian noise" in drawn(plain)["severity"].note
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
    group = study.chosen
    assert group is not None
    assert group.corruption("3", "ece").mean == pytest.approx(0.03)
    assert group.corruption("0", "ece").mean == group.stat("ece").mean
    assert "the examples of all kinds together" in drawn(study)["severity"].note
    (ece, _) = curves_of_a_run(study, group)
    assert ece.keys[-1][0] == "all together"
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
    names = [name for name, _ in figure.keys]
    assert names[-2:] == ["σN-Ens", "σN-Ens, other path"]
    lines = [t for t in figure.panels[0].traces if t["mode"] == "lines+markers"]
    assert lines[0]["y"] == lines[1]["y"]
    assert [line["line"]["dash"] for line in lines] == ["solid", "dash"]


def test_weight_and_members_have_figures_only_where_they_vary(study: Study):
    found = drawn(study)
    (line,) = (t for t in found["weight"].panels[0].traces if t["mode"] == "lines+markers")
    assert line["x"] == pytest.approx([0.001, 0.01, 0.1])
    names = [name for name, _ in found["members"].keys]
    assert names == ["one network", "separate networks", "Packed-Ensembles", "σN-Ens τ=0.5"]
    assert not {"weight", "members"} & set(drawn(read_study(demo_metrics())))


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
    small = read_study(demo_metrics())
    assert small.main == list(small.groups)
    assert [figure.key for figure in sections(small) if figure.rest] == ["reliability", "risk"]


def test_a_method_keeps_its_look_whatever_its_members_and_rivals_differ(study: Study):
    looks: dict[str, set[Any]] = {}
    for group in study.groups:
        if group.method != "sigmanens":
            looks.setdefault(group.method, set()).add(group.look)
    assert all(len(found) == 1 for found in looks.values())
    drawn_as = [(look.symbol, look.colour) for found in looks.values() for look in found]
    assert len(set(drawn_as)) == len(looks)


def test_page_of_a_large_study_holds_every_section_once(page: str):
    keys = re.findall(r'<section id="([\w-]+)"', page)
    assert keys == [
        *("summary", "warnings", "differences", "results", "run", "frontier", "tau", "weight"),
        *(
            "members",
            "reliability",
            "risk",
            "severity",
            "kinds",
            "owners",
            "training",
            "ood",
            "failures",
        ),
        *("choice", "seeds"),
    ]
    linked = re.findall(r'<a href="#([\w-]+)">', page)
    assert linked == [key for key in keys if key != "warnings"]
    ids = re.findall(r'<[^>]* id="([\w-]+)"', page.replace(PLOTLY, ""))
    assert len(ids) == len(set(ids))
    assert len(page) < 12_000_000


def test_any_two_rows_are_compared_and_holm_asks_for_more(study: Study, page: str):
    data = json.loads(re.search(r'id="differences-data">(.*?)</script>', page, re.S)[1])
    assert set(data) == {group.key for group in study.groups}
    assert study.reference is study.single
    kept = survivors(study, study.reference, "nll")
    seen = set()
    places = {group.key: i for i, group in enumerate(study.groups)}
    for group in study.groups:
        gap = difference(study, group, study.reference, "nll")
        if gap is not None and gap.sign:
            seen.add(group.key)
            text, value, mark, _ = data[study.reference.key]["rows"][places[group.key]][1]
            assert (text, value) == (named(gap), gap.value)
            assert mark == word(gap, "nll") + ("†" if group.key in kept else "")
            back = data[group.key]["rows"][places[study.reference.key]][1]
            assert back[1] == -value
            assert back[2][:-1] != mark[:-1]
    assert kept < seen
    failed = failures(study)
    assert failed is not None
    assert [[cell.text for cell in cells] for cells in failed.rows] == [
        ["mimo-m16-seed1", "the loss is NaN after epoch 3: lower the learning rate"]
    ]


def test_findings_are_told_once_with_their_seeds(study: Study, page: str):
    (group,) = (group for group in study.groups if group_findings(group))
    ((text, seeds),) = group_findings(group).items()
    assert (group.tau, seeds) == (2.0, [0, 1])
    assert text in page
    assert "seeds 0, 1" in page
