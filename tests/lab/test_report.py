"""The report's figures, its page and the page's safety, the table for the terminal."""

from __future__ import annotations

import io
import json
import os
import random
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from rich.console import Console
from scipy.stats import binomtest
from tests.lab.report_fixture import demo_metrics, row, shifted, single_row_metrics

from sigmanens.errors import RunError
from sigmanens.lab.report import console_table, verdict, write_report
from sigmanens.lab.report.figures import figures
from sigmanens.lab.report.frontier import frontier, place_labels
from sigmanens.lab.report.page import render
from sigmanens.lab.report.reading import read_study
from sigmanens.lab.report.reliability import bins

HOSTILE = "</script><img src=https://x.invalid/p.png onerror=alert(1)>\"'<b>%{x}"

# Figures ------------------------------------------------------------------------------------


def concrete(value: Any) -> Any:
    """A plotly specification with the page's CSS colours replaced by a real one."""
    if isinstance(value, dict):
        return {key: concrete(item) for key, item in value.items()}
    if isinstance(value, list):
        return [concrete(item) for item in value]
    return "#123456" if isinstance(value, str) and value.startswith("var(--") else value


def test_figures_are_valid_plotly_and_drawn_for_what_was_measured():
    drawn = figures(read_study(demo_metrics()))
    keys = ["frontier", "tau", "reliability", "severity", "owners"]
    assert [figure.key for figure in drawn] == keys
    assert [len(figure.panels) for figure in drawn] == [2, 3, 3, 3, 4]
    for figure in drawn:
        assert figure.summary
        for panel in figure.panels:
            go.Figure(concrete(panel.traces), concrete(panel.layout))
    assert figures(read_study(single_row_metrics())) == []


@pytest.mark.parametrize(("accuracy", "drawn"), [(0.5, False), (None, True)])
def test_a_reference_far_off_is_named_instead_of_drawn(accuracy: float | None, drawn: bool):
    metrics = demo_metrics()
    worst = min(row["accuracy"] for row in metrics["rows"] if row["method"] != "film")
    value = worst - 1e-3 if accuracy is None else accuracy  # a little worse is drawn
    metrics = shifted(metrics, "film", "accuracy", [value] * 3)
    study = read_study(metrics)
    figure = frontier(study)
    film = next(g for g in study.groups if g.method == "film")
    points = [t for panel in figure.panels for t in panel.traces if t.get("meta") == film.key]
    assert bool(points) is drawn
    assert (film in figure.legend) is drawn
    assert (f"{film.label} (accuracy 0.500, " in figure.caption) is not drawn


def test_frontier_plots_means_and_joins_the_dial_in_order_of_tau():
    study = read_study(demo_metrics())
    panel = figures(study)[0].panels[0]
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


def test_reliability_bins_are_pooled_by_count_over_seeds():
    metrics = demo_metrics(seeds=2)
    first, second = (r for r in metrics["rows"] if r["method"] == "single")
    for entry, accuracy, count in ((first, 0.5, 30), (second, 0.9, 10)):
        entry["reliability"]["accuracy"][14] = accuracy
        entry["reliability"]["count"][14] = count
    group = read_study(metrics).single
    assert group is not None
    last = bins(group)[14]
    assert last.accuracy == pytest.approx((0.5 * 30 + 0.9 * 10) / 40)
    assert last.count == 20
    oracle = binomtest(12, 20).proportion_ci(0.95, method="wilson")
    assert last.interval == pytest.approx((oracle.low, oracle.high), abs=1e-4)
    assert bins(group)[0].accuracy is None


def test_owners_are_shares_of_all_channels():
    study = read_study(demo_metrics())
    assert study.chosen is not None
    assert study.chosen.owners == pytest.approx({0: 0, 1: 46 / 120, 2: 67 / 120, 3: 7 / 120, 4: 0})


def test_labels_cover_neither_each_other_nor_a_point():
    points = [(0.5, 0.5), (0.52, 0.5), (0.5, 0.54), (0.95, 0.95), (0.02, 0.02)]
    spots = place_labels(points, ["τ=0.5"] * 5)
    assert spots[0] is not None
    assert spots[3] in ("bottom left", "middle left")
    assert spots[4] in ("top right", "middle right")
    crowd = place_labels([(0.5, 0.5)] * 12, ["one network"] * 12)
    assert crowd[0] is not None
    assert None in crowd


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
        *("tbody", "tr", "th", "td", "button", "span", "small", "b", "dl", "dt", "dd", "svg"),
        *("path", "figure", "figcaption", "details", "summary", "footer", "noscript"),
        *("select", "option", "label", "br"),
    }
    for tag, attributes in elements:
        assert "src" not in attributes
        assert not any(name.startswith("on") for name in attributes)
        if tag == "a":
            assert (attributes["href"] or "").startswith("#")
    scripts = [attributes for tag, attributes in elements if tag == "script"]
    assert scripts == [{}, {"type": "application/json", "id": "report-data"}, {}, {}]
    styles = "".join(re.findall(r"<style>(.*?)</style>", page, re.S))
    assert "@import" not in styles
    assert "url(" not in styles
    assert "default-src 'none'" in page


def test_page_embeds_the_plotting_script_once():
    page = render(demo_metrics())
    assert len(re.findall(r"plotly\.js v\d", page)) == 1
    data = re.search(r'id="report-data">(.*?)</script>', page, re.S)
    assert data is not None
    # 15 of the study, and of each of 8 runs a reliability diagram and 2 curves under noise.
    assert len(json.loads(data[1])["plots"]) == 15 + 8 * 3


def test_texts_for_plots_carry_no_markup():
    page = render(hostile_metrics())
    data = re.search(r'id="report-data">(.*?)</script>', page, re.S)
    assert data is not None
    assert "<" not in data[1]
    plots = json.loads(data[1])["plots"]
    texts = [t for p in plots.values() for trace in p["traces"] for t in trace.get("hovertext", [])]
    assert any("&lt;img" in text for text in texts)
    assert not any("<img" in text or "<a" in text for text in texts)
    assert not any("hovertemplate" in trace for p in plots.values() for trace in p["traces"])


def test_page_says_what_it_stands_on():
    metrics = demo_metrics()
    page = render(metrics)
    assert "<html lang=" in page
    assert page.count("<h1>") == 1
    for text in (
        "sigmanens demo --out runs/demo",
        "train 300",
        "torch 2.9.0",
        "93 s",
        "24 of split",
    ):
        assert text in page
    plots = [
        attributes for _, attributes in Elements(page).found if attributes.get("role") == "img"
    ]
    assert len(plots) == 15 + 8 * 3
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
    verdict(metrics)
    prose = re.sub(r"<script>.*?</script>", "", page, flags=re.S)
    assert not re.search(r"\b(nan|inf|None)\b", prose)
    name = r"<a[^>]*>FiLM-Ensemble control</a>"
    film = re.search(rf"<tr><th[^>]*>(?:<svg[^\n]*?</svg>){name}</th>(.*?)</tr>", prose, re.S)
    assert film is not None
    assert '<td data-v="">–</td>' in film[1]


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of every value inside nested dictionaries and lists."""
    items = list(value.items()) if isinstance(value, dict) else []
    items = list(enumerate(value)) if isinstance(value, list) else items
    return [p for k, item in items for p in ((*path, k), *places(item, (*path, k)))]


@pytest.mark.parametrize("seed", range(20))
def test_damaged_numbers_never_break_a_report(seed: int):
    chance = random.Random(seed)
    metrics = demo_metrics(seeds=2)
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
