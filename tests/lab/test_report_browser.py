"""The report in a real browser: it draws, sorts, copies, hides, and makes no request."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.lab.report_bench import bench_metrics
from tests.lab.report_fixture import demo_metrics, row

from sigmanens.lab.report import write_report
from sigmanens.lab.report.reading import read_study

BROWSER = next(
    (p for n in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(n))), None
)
pytestmark = pytest.mark.skipif(
    BROWSER is None, reason="no chromium, chromium-browser or google-chrome on the PATH"
)

PROBE = """
<script>
"use strict";
(async () => {
  const root = document.documentElement;
  const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
  for (let i = 0; i < 200 && !root.dataset.drawn; i += 1) await wait(50);
  const found = {
    drawn: root.dataset.drawn, inner: innerWidth, scroll: root.scrollWidth,
    resources: performance.getEntriesByType("resource").length,
    svgs: document.querySelectorAll(".plot svg.main-svg").length,
  };
  const table = document.getElementById("results-table");
  const heads = [...table.tHead.rows[table.tHead.rows.length - 1].cells];
  const column = heads.findIndex((head) => head.textContent === "NLL");
  const state = () => ({
    sort: heads[column].getAttribute("aria-sort"),
    others: heads.filter((_, i) => i !== column).every((h) => h.ariaSort === "none"),
    first: table.tBodies[0].rows[0].cells[0].textContent,
    numbers: [...table.tBodies[0].rows].map((r) => r.cells[column].dataset.v),
  });
  found.sorts = [state()];
  for (let i = 0; i < 3; i += 1) {
    heads[column].querySelector("button").click();
    found.sorts.push(state());
  }
  navigator.clipboard.writeText = async (text) => { found.copied = text; };
  const copy = document.querySelector("button.copy[aria-controls=results-table]");
  copy.click();
  await wait(50);
  found.status = copy.nextElementSibling.textContent;
  const key = document.querySelector('button.key[data-figure="severity"]');
  const lines = () => document.querySelectorAll("#severity-0 .scatterlayer .trace").length;
  found.lines = [lines()];
  for (let i = 0; i < 2; i += 1) {
    key.click();
    await wait(200);
    found.lines.push(lines());
  }
  const pick = document.getElementById("reference");
  const cells = () => [...document.querySelectorAll("#differences-table tbody tr")]
    .map((row) => [...row.cells].map((cell) => cell.textContent));
  found.less = [pick.value, cells()];
  pick.selectedIndex = 2;
  pick.dispatchEvent(new Event("change", { bubbles: true }));
  found.other = [pick.value, cells()];
  pick.selectedIndex = 0;
  pick.dispatchEvent(new Event("change", { bubbles: true }));
  found.again = [pick.value, cells()];
  found.paper = getComputedStyle(document.body).backgroundColor;
  found.filter = getComputedStyle(document.querySelector(".plotly-graph-div")).filter;
  const shown = [...document.querySelectorAll(".plot")].filter((plot) => plot.clientWidth);
  found.inside = shown.every((plot) => {
    const svg = plot.querySelector("svg.main-svg");
    return Math.abs(svg.getBoundingClientRect().width - plot.clientWidth) <= 1;
  });
  const buttons = [...document.querySelectorAll("main button")];
  found.unnamed = buttons.filter((b) => b.tabIndex < 0 || !b.textContent.trim()).length;
  found.hacked = window.hacked || false;
  found.problems = JSON.parse(root.dataset.problems);
  const out = document.createElement("pre");
  out.id = "probe";
  out.textContent = JSON.stringify(found);
  document.body.append(out);
})();
</script>
"""

RUNS = """
<script>
"use strict";
(async () => {
  const root = document.documentElement;
  const wait = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
  for (let i = 0; i < 400 && !root.dataset.drawn; i += 1) await wait(50);
  const pick = document.getElementById("pick");
  const state = () => ({
    value: pick.value, title: document.querySelector("#run-view h3 b").textContent,
    drawn: document.querySelectorAll("#run-view .plot > div svg.main-svg:first-child").length,
    said: document.getElementById("picked").textContent,
  });
  const found = { scroll: root.scrollWidth, inner: innerWidth };
  found.start = state();

  // A real click: the mouse moves to a point of the frontier, presses and lets go.
  const plot = document.getElementById("frontier-1");
  const named = (trace) => trace.text?.[0]?.replace(/<.?b>/g, "");
  const point = plot.data.find((trace) => named(trace) === "λ=0");
  found.point = point.meta;
  const area = plot.querySelector(".nsewdrag");
  const box = area.getBoundingClientRect();
  const { xaxis, yaxis } = plot._fullLayout;
  const at = { bubbles: true, view: window, clientX: box.left + xaxis.d2p(point.x[0]),
    clientY: box.top + yaxis.d2p(point.y[0]) };
  area.dispatchEvent(new MouseEvent("mousemove", at));
  await wait(300);
  area.dispatchEvent(new MouseEvent("mousedown", at));
  await wait(50);
  (document.querySelector(".dragcover") || area).dispatchEvent(new MouseEvent("mouseup", at));
  await wait(800);
  found.clicked = state();

  // By keyboard: the list of runs is a native select, one key down is one run on.
  pick.focus();
  found.focused = document.activeElement === pick;
  pick.selectedIndex += 1;
  pick.dispatchEvent(new Event("change", { bubbles: true }));
  await wait(300);
  found.keyed = state();

  const link = document.querySelector("#results-table a[data-run]");
  link.click();
  await wait(300);
  found.linked = state();
  found.first = link.dataset.run;

  const every = document.querySelector('button.every[data-figure="severity"]');
  const lines = () => document.querySelectorAll("#severity-0 .scatterlayer .trace").length;
  const buttons = () => [...document.querySelectorAll('#severity button.key')]
    .filter((button) => button.offsetWidth).length;
  found.legend = [[lines(), buttons(), every.textContent]];
  for (let i = 0; i < 2; i += 1) {
    every.click();
    await wait(500);
    found.legend.push([lines(), buttons(), every.textContent]);
  }

  const scroller = document.querySelector("#seeds .scroll");
  scroller.scrollTop = 500;
  await wait(50);
  found.head = scroller.querySelector("thead th").getBoundingClientRect().top
    - scroller.getBoundingClientRect().top;
  found.scrolled = scroller.scrollTop;
  found.outside = [...document.querySelectorAll(".plot, .keys, .legend, select")].filter((part) =>
    part.getBoundingClientRect().right > innerWidth + 1).length;
  found.resources = performance.getEntriesByType("resource").length;
  found.problems = JSON.parse(root.dataset.problems);
  const out = document.createElement("pre");
  out.id = "probe";
  out.textContent = JSON.stringify(found);
  document.body.append(out);
})();
</script>
"""


def browse(page: Path, width: int, *flags: str) -> str:
    """The document of ``page`` after its scripts ran in a browser window of ``width`` pixels."""
    assert BROWSER is not None
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={page.parent / 'profile'}",
        f"--window-size={width},900",
        "--virtual-time-budget=20000",
        *flags,
        "--dump-dom",
        page.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, timeout=300, check=True)
    return done.stdout.decode("utf-8")


def probe(page: Path, width: int, *flags: str, script: str = PROBE) -> dict[str, Any]:
    """What the probe found on ``page``."""
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("</body>", f"{script}</body>"), encoding="utf-8")
    document = browse(page, width, *flags)
    found = re.search(r'<pre id="probe">(.*?)</pre>', document, re.S)
    assert found is not None, re.findall(r"data-problems=.*?>", document)[:1]
    return json.loads(html.unescape(found[1]))


def colour(text: str) -> tuple[int, ...]:
    """The channels of ``#rrggbb`` or ``rgb(r, g, b)``."""
    if text.startswith("#"):
        return tuple(int(text[i : i + 2], 16) for i in (1, 3, 5))
    return tuple(int(part) for part in re.findall(r"\d+", text))[:3]


def hostile() -> dict[str, Any]:
    """The demo with a method whose name tries to run a script."""
    metrics = demo_metrics()
    attack = "</script><script>window.hacked=true</script><img src=x onerror='window.hacked=true'>"
    metrics["rows"].append(row("film", None, 0) | {"method": attack})
    metrics["preset"] = metrics["command"] = metrics["choice"]["reason"] = attack
    return metrics


def test_report_works_on_a_wide_light_screen(tmp_path: Path):
    metrics = hostile()
    page = write_report(metrics, tmp_path / "report.html")
    found = probe(page, 1280)
    assert found["problems"] == []
    assert found["resources"] == 0
    assert found["hacked"] is False
    assert found["drawn"] == "16"  # 12 of the study and 4 of the run in detail
    assert found["svgs"] >= 14
    assert found["inside"] is True
    assert found["scroll"] <= found["inner"]
    assert found["unnamed"] == 0
    assert found["filter"] == "none"

    start, up, down, back = found["sorts"]
    assert [s["sort"] for s in found["sorts"]] == ["none", "ascending", "descending", "none"]
    assert all(s["others"] for s in found["sorts"])
    numbers = [float(n) for n in start["numbers"]]
    assert [float(n) for n in up["numbers"]] == sorted(numbers)
    assert [float(n) for n in down["numbers"]] == sorted(numbers, reverse=True)
    assert up["first"] == "4 separate networks"
    assert back == start

    lines = [part.split("\t") for part in found["copied"].split("\n")]
    assert len(lines) == 1 + len(numbers)
    assert len({len(part) for part in lines}) == 1
    table = [dict(zip(lines[0], part, strict=True)) for part in lines[1:]]
    single = read_study(metrics).single
    assert single is not None
    entry = next(part for part in table if part["method"] == "one network")
    assert float(entry["NLL"]) == pytest.approx(single.stat("nll").mean, rel=1e-4)
    assert float(entry["NLL sd"]) == pytest.approx(single.stat("nll").sd, rel=1e-4)
    assert found["status"] == f"{len(numbers)} rows copied"

    every, fewer, again = found["lines"]
    assert (fewer, again) == (every - 1, every)

    (first, less), (second, other), (last, again) = (found[k] for k in ("less", "other", "again"))
    assert first == last != second
    assert less == again  # the script writes what the page was made with
    assert less[0][1:] == ["–"] * (len(less[0]) - 1)
    assert other[2][1:] == ["–"] * (len(other[2]) - 1)
    assert less[2][2].startswith("−")
    assert other[0][2].startswith("+")


def test_report_works_on_a_narrow_dark_screen(tmp_path: Path):
    metrics = demo_metrics()
    page = write_report(metrics, tmp_path / "report.html")
    found = probe(page, 390, "--blink-settings=preferredColorScheme=0")
    assert found["problems"] == []
    assert found["inner"] <= 500
    assert found["scroll"] <= found["inner"]
    assert found["inside"] is True
    assert sum(colour(found["paper"])) < 150
    assert found["filter"].startswith("invert(1)")


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 390])
def test_a_large_study_is_explored_by_click_key_and_link(width: int, tmp_path: Path):
    metrics = bench_metrics()
    study = read_study(metrics)
    assert study.chosen is not None
    page = write_report(metrics, tmp_path / "report.html")
    found = probe(page, width, script=RUNS)
    assert found["problems"] == []
    assert found["resources"] == 0
    assert found["scroll"] <= found["inner"]
    assert found["outside"] == 0

    by_key = {group.key: group for group in study.groups}
    start, clicked, keyed, linked = (found[k] for k in ("start", "clicked", "keyed", "linked"))
    for state in (start, clicked, keyed, linked):
        assert state["title"] == by_key[state["value"]].label
    assert start["value"] == study.chosen.key
    assert start["drawn"] == 9
    assert by_key[found["point"]].method == "sigmanens_lambda0"
    assert clicked["value"] == found["point"]
    assert clicked["said"] == "σN-Ens λ=0 is shown in detail"
    assert found["focused"] is True
    order = [group.key for group in study.groups]
    assert keyed["value"] == order[order.index(clicked["value"]) + 1]
    assert linked["value"] == found["first"] == order[0]

    everything = len(study.groups)
    fewer = len(study.main)
    assert found["legend"] == [
        [fewer, fewer, f"Show all {everything}"],
        [everything, everything, "Show fewer"],
        [fewer, fewer, f"Show all {everything}"],
    ]
    assert found["scrolled"] > 400
    assert 0 <= found["head"] < 2  # the head of a long table stays in sight


def test_without_scripts_the_numbers_are_there_and_no_dead_controls(tmp_path: Path):
    page = write_report(bench_metrics(seeds=1), tmp_path / "report.html")
    text = page.read_text(encoding="utf-8")
    bare = re.sub(r"<script[^>]*>.*?</script>", "", text, flags=re.S)
    bare = bare.replace("<noscript>", "").replace("</noscript>", "")  # as a browser without them
    measure = """<script>addEventListener("load", () => {
      const all = (name) => [...document.querySelectorAll(name)];
      const seen = (name) => all(name).filter((part) => part.offsetWidth).length;
      const names = [".plotly-graph-div", ".picker", ".tools", ".legend", "#results-table tr"];
      const out = document.createElement("pre");
      out.id = "probe";
      out.textContent = JSON.stringify(Object.fromEntries(names.map((n) => [n, seen(n)])));
      document.body.append(out);
    });</script>"""
    page.write_text(bare, encoding="utf-8")
    found = probe(page, 1280, script=measure)
    runs = len(read_study(bench_metrics(seeds=1)).groups)
    assert found == {
        ".plotly-graph-div": 0, ".picker": 0, ".tools": 0, ".legend": 0,
        "#results-table tr": runs + 1,
    }  # fmt: skip


def test_the_page_itself_would_stop_and_note_a_request(tmp_path: Path):
    page = write_report(demo_metrics(), tmp_path / "report.html")
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("<main>", '<main><img src="https://x.invalid/p.png">'), "utf-8")
    assert [p for p in probe(page, 1280)["problems"] if p.startswith("blocked img-src")]
