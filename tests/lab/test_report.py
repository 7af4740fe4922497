"""The report's figures, its page and the page's safety, the table for the terminal."""

from __future__ import annotations

import copy
import io
import os
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from plotly.offline import get_plotlyjs
from rich.console import Console
from scipy.stats import binomtest
from tests.lab.report_fixture import demo_metrics, row, single_row_metrics

from sigmanens.errors import InputError, RunError
from sigmanens.lab.report import console_table, summary, write_report
from sigmanens.lab.report.owners import counts
from sigmanens.lab.report.page import render, sections
from sigmanens.lab.report.reading import read_study
from sigmanens.lab.report.reliability import bins
from sigmanens.lab.report.selective import confusion_panel

PLOTLY = get_plotlyjs()
HOSTILE = "</script><img src=https://x.invalid/p.png onerror=alert(1)>\"'<b>%{x}"

# Figures ------------------------------------------------------------------------------------


def test_figures_are_valid_plotly_and_drawn_for_what_was_measured():
    drawn = [section for section in sections(read_study(demo_metrics())) if section.panels]
    keys = ["frontier", "tau", "reliability", "risk", "severity", "owners"]
    assert [figure.key for figure in drawn] == keys
    assert [len(figure.panels) for figure in drawn] == [2, 3, 2, 1, 3, 1]
    for figure in drawn:
        for panel in figure.panels:
            go.Figure(panel.traces, panel.layout)
    assert [s.key for s in sections(read_study(single_row_metrics()))] == ["results", "seeds"]


def test_frontier_plots_means_and_joins_the_dial_in_order_of_tau():
    study = read_study(demo_metrics())
    panel = sections(study)[1].panels[0]
    dial = next(trace for trace in panel.traces if trace["mode"] == "lines")
    assert dial["x"] == [group.stat("ece").mean for group in study.sigma]
    labels = {trace["text"][0] for trace in panel.traces if trace["mode"] == "markers+text"}
    assert labels == {
        "one net",
        "one net + T",
        "4 nets",
        "FiLM",
        "λ=0",
        "τ=0.1",
        "<b>τ=0.5</b>",
        "τ=2",
    }


def test_risk_is_the_mean_over_seeds_and_the_curve_ends_at_the_error_rate():
    study = read_study(demo_metrics(seeds=2))
    section = next(s for s in sections(study) if s.key == "risk")
    assert len(section.legend) == len(study.groups)
    for group, trace in zip(study.groups, section.panels[0].traces, strict=True):
        assert trace["x"] == [i / 20 for i in range(1, 21)]
        assert trace["y"][-1] == pytest.approx(1 - group.stat("accuracy").mean, abs=0.05)
        first, second = (row["risk_coverage"]["risk"][9] for row in group.rows.values())
        assert trace["y"][9] == pytest.approx((first + second) / 2)


def test_confusion_is_a_share_of_each_true_class_under_the_names_of_the_classes():
    metrics = demo_metrics()
    metrics["data"]["classes"] = ["cat", "dog", "<b>fox</b>"]
    study = read_study(metrics)
    panel = confusion_panel(study, study.groups[0])
    trace = panel.traces[0]
    assert trace["x"] == trace["y"] == ["cat", "dog", "&lt;b&gt;fox&lt;/b&gt;"]
    assert trace["z"][1] == [0.03, 0.95, 0.02]
    assert trace["customdata"][2] == [0, 10, 90]
    del metrics["data"]["classes"]
    for entry in metrics["rows"]:
        entry["confusion"][0].append(1)  # not square
    study = read_study(metrics)
    assert confusion_panel(study, study.groups[0]) is None


def test_reliability_bins_are_pooled_by_count_over_seeds():
    metrics = demo_metrics(seeds=2)
    first, second = (r for r in metrics["rows"] if r["method"] == "single")
    for entry, accuracy, count in ((first, 0.5, 30), (second, 0.9, 10)):
        entry["reliability"]["accuracy"][14] = accuracy
        entry["reliability"]["count"][14] = count
    group = read_study(metrics).single
    assert group is not None
    last = bins(group)[-1]
    assert last.accuracy == pytest.approx((0.5 * 30 + 0.9 * 10) / 40)
    assert last.count == 20
    oracle = binomtest(12, 20).proportion_ci(0.95, method="wilson")
    assert last.interval == pytest.approx((oracle.low, oracle.high), abs=1e-4)
    assert all(b.count > 0 for b in bins(group))


def test_owners_are_summed_over_seeds():
    study = read_study(demo_metrics())
    assert study.chosen is not None
    assert counts(study.chosen, "owners") == [0, 3 * 46, 3 * 67, 3 * 7, 0]


# The page -----------------------------------------------------------------------------------


class Elements(HTMLParser):
    """Every element of a page with its attributes."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def hostile_metrics() -> dict[str, Any]:
    """Markup in every text that comes from the metrics."""
    metrics = demo_metrics(seeds=2)
    for name in ("command", "preset"):
        metrics[name] = HOSTILE
    metrics["data"]["description"] = metrics["environment"]["cpu"] = HOSTILE
    metrics["choice"]["reason"] = HOSTILE
    metrics["environment"][HOSTILE] = HOSTILE
    for seed in range(2):
        entry = row("film", None, seed) | {"method": HOSTILE}
        entry["ood"][HOSTILE] = {HOSTILE: 0.9}
        entry["corruption"][HOSTILE] = {"5": {"ece": 0.2, "accuracy": 0.5, "nll": 1.0}}
        metrics["rows"].append(entry)
    return metrics


@pytest.mark.parametrize(
    "metrics",
    [demo_metrics(), demo_metrics(seeds=1), single_row_metrics(), hostile_metrics()],
    ids=["demo", "one seed", "one row", "hostile"],
)
def test_page_loads_nothing_and_holds_no_markup_from_the_metrics(metrics: dict[str, Any]):
    page = render(metrics)
    elements = Elements(page).found
    assert {tag for tag, _ in elements} <= {
        *("html", "head", "meta", "title", "style", "script", "body", "a", "header", "p", "nav"),
        *("ul", "li", "main", "section", "h1", "h2", "h3", "div", "table", "caption", "thead"),
        *("tbody", "tfoot", "tr", "th", "td", "button", "span", "small", "b", "dl", "dt", "dd"),
        *("figure", "figcaption", "details", "summary", "footer", "noscript", "i", "template"),
        *("select", "option", "label", "br"),
    }
    for tag, attributes in elements:
        assert "src" not in attributes
        assert not any(name.startswith("on") for name in attributes)
        if tag == "a":
            assert (attributes["href"] or "").startswith("#")
    styles = "".join(re.findall(r"<style>(.*?)</style>", page, re.S))
    assert "@import" not in styles
    assert "url(" not in styles
    assert "default-src 'none'" in page
    # Scripts: ours, plotly's, and one for each plot; no text of the metrics ends one early.
    opened = len(re.findall(r"<script[^>]*>", page)) - PLOTLY.count("<script")
    scripts = [attributes for tag, attributes in elements if tag == "script"]
    assert len(scripts) == opened
    assert "alert(1)" not in re.sub(r"(?s)<script.*?</script>|[^<]*", "", page)


def test_texts_for_plots_carry_no_markup():
    page = render(hostile_metrics())
    drawn = re.findall(r"Plotly\.newPlot\((.*?)</script>", page.replace(PLOTLY, ""), re.S)
    assert len(drawn) > 11
    assert not any("<" in text for text in drawn)
    texts = "".join(drawn).encode().decode("unicode_escape")
    assert "&lt;img" in texts
    assert "<img" not in texts


def test_page_says_what_it_stands_on():
    metrics = demo_metrics()
    page = render(metrics)
    assert len(re.findall(r"plotly\.js v\d", page)) == 1
    assert "<html lang=" in page
    assert page.count("<h1>") == 1
    for text in (
        "sigmanens demo --out runs/demo",
        "train 300",
        "torch 2.9.0",
        "93 s",
        "24 of split",
        "half an interval",
    ):
        assert text in page
    plots = [
        attributes for _, attributes in Elements(page).found if attributes.get("role") == "img"
    ]
    # 12 of the study, and of each of 8 runs a reliability diagram, who is confused with whom, and 2
    # curves under noise.
    assert len(plots) == page.count('class="plotly-graph-div"') == 12 + 8 * 4
    assert all(attributes["aria-label"] for attributes in plots)
    # Every seed on hover, and in its own row with its interval.
    assert "seed 1: " in page
    assert re.search(r"0\.921 \[0\.906, 0\.935\]", page)


def test_missing_null_and_non_finite_numbers_are_dashes():
    metrics = demo_metrics()
    for entry in metrics["rows"]:
        if entry["method"] == "film":
            entry |= {"nll": float("nan"), "ece": float("inf"), "brier": None, "reliability": None}
            entry |= {"ood": None, "corruption": {"fog": None}, "owners": [], "intervals": None}
            del entry["accuracy"], entry["validation"]
    page = render(metrics)
    console_table(metrics)
    summary(metrics)
    prose = re.sub(r"<script[^>]*>.*?</script>", "", page, flags=re.S)
    assert not re.search(r"\b(nan|inf|None)\b", prose)
    name = r"<a[^>]*>FiLM-Ensemble control</a>"
    film = re.search(rf"<tr[^>]*><th[^>]*><i[^>]*></i>{name}</th>(.*?)</tr>", prose, re.S)
    assert film is not None
    assert '<td data-v="">–</td>' in film[1]


@pytest.mark.parametrize("key", demo_metrics())
def test_what_a_run_does_not_say_is_left_out(key: str):
    metrics = demo_metrics()
    del metrics[key]
    if key == "rows":
        with pytest.raises(InputError, match="rows"):
            render(metrics)
    else:
        assert "</html>" in render(metrics)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside nested dictionaries and lists."""
    items = list(value.items()) if isinstance(value, dict) else []
    items = list(enumerate(value)) if isinstance(value, list) else items
    return [p for k, item in items for p in ((*path, k), *places(item, (*path, k)))]


@pytest.mark.parametrize("seed", range(20))
def test_damaged_numbers_never_break_a_report(seed: int):
    chance = random.Random(seed)
    metrics = demo_metrics(seeds=2)
    for entry in metrics["rows"]:
        entry["corruption_pooled"] = {"3": {"ece": 0.1, "nll": 0.9, "n": 750}}
        entry["corruption"]["fog"] = copy.deepcopy(entry["corruption"]["gaussian_noise"])
    settings = ("method", "members", "tau", "weight", "seed", "split")
    found = [p for p in places(metrics["rows"]) if len(p) > 1 and p[1] not in settings]
    damaged = chance.sample(found, len(found) // (3 if seed % 2 else 30))
    for *path, last in sorted(damaged, key=len, reverse=True):  # What is inside first.
        inner = metrics["rows"]
        for step in path:
            inner = inner[step]
        inner[last] = chance.choice(
            [None, float("nan"), float("inf"), "text", [], {}, -1, 1e30, True]
        )
    assert "</html>" in render(metrics)
    assert console_table(metrics).row_count == 8


def test_report_replaces_an_old_one_and_leaves_it_whole_on_failure(tmp_path: Path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("old")
    assert write_report(demo_metrics(seeds=1), path) == path
    assert path.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    path.write_text("old")

    def full(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="No space left"):
        write_report(demo_metrics(seeds=1), path)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["report.html"]


def test_report_into_a_missing_folder_is_a_run_error(tmp_path: Path):
    with pytest.raises(RunError, match="expected a folder"):
        write_report(demo_metrics(seeds=1), tmp_path / "missing" / "report.html")


# The terminal -------------------------------------------------------------------------------


def printed(metrics: dict[str, Any], width: int = 80) -> str:
    console = Console(width=width, file=io.StringIO(), color_system=None)
    console.print(console_table(metrics))
    return console.file.getvalue()


def test_console_table_fits_a_terminal_and_marks_the_choice():
    text = printed(demo_metrics())
    assert max(len(part) for part in text.splitlines()) <= 80
    chosen = next(part for part in text.splitlines() if "τ=0.5" in part)
    assert re.findall(r"\S+", chosen) == [
        *("σN-Ens", "τ=0.5", "←", "1.04×", "0.942", "0.205", "0.197", "0.013", "0.083", "0.932"),
    ]
    assert "±0.004" in text
    assert "…" not in text


def test_console_table_shows_markup_in_names_as_it_is():
    metrics = demo_metrics(seeds=1)
    metrics["rows"].append(row("film", None, 0) | {"method": "[red]mine[/red]"})
    assert "[red]mine[/red]" in printed(metrics, width=120)
