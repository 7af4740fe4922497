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
from tests.lab.report_fixture import demo_metrics, row

from sigmanens.lab.report import write_report
from sigmanens.lab.report.reading import read_study
from sigmanens.lab.report.study import Group

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
  key.click();
  await wait(100);
  found.lines.push(lines());
  found.pressed = key.getAttribute("aria-pressed");
  key.click();
  await wait(100);
  found.lines.push(lines());
  const bar = document.querySelector("#owners-0 .bars .point path");
  found.bar = bar && getComputedStyle(bar).fill;
  found.paper = getComputedStyle(document.body).backgroundColor;
  found.inside = [...document.querySelectorAll(".plot")].every((plot) => {
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
    done = subprocess.run(command, capture_output=True, timeout=120, check=True)
    return done.stdout.decode("utf-8")


def probe(page: Path, width: int, *flags: str) -> dict[str, Any]:
    """What the probe found on ``page``."""
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", f"{PROBE}</body>"), "utf-8")
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


def owners_first(metrics: dict[str, Any]) -> Group:
    """The method of the first owners plot."""
    return next(group for group in read_study(metrics).groups if group.owners)


def test_report_works_on_a_wide_light_screen(tmp_path: Path):
    metrics = hostile()
    page = write_report(metrics, tmp_path / "report.html")
    found = probe(page, 1280)
    assert found["problems"] == []
    assert found["resources"] == 0
    assert found["hacked"] is False
    assert found["drawn"] == "12"
    assert found["svgs"] >= 12
    assert found["inside"] is True
    assert found["scroll"] <= found["inner"]
    assert found["unnamed"] == 0
    assert colour(found["bar"]) == colour(owners_first(metrics).look.light)

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
    assert found["pressed"] == "false"


def test_report_works_on_a_narrow_dark_screen(tmp_path: Path):
    metrics = demo_metrics()
    page = write_report(metrics, tmp_path / "report.html")
    found = probe(page, 390, "--blink-settings=preferredColorScheme=0")
    assert found["problems"] == []
    assert found["inner"] <= 500
    assert found["scroll"] <= found["inner"]
    assert found["inside"] is True
    assert sum(colour(found["paper"])) < 150
    assert colour(found["bar"]) == colour(owners_first(metrics).look.dark)


def test_the_page_itself_would_stop_and_note_a_request(tmp_path: Path):
    page = write_report(demo_metrics(seeds=1), tmp_path / "report.html")
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("<main>", '<main><img src="https://x.invalid/p.png">'), "utf-8")
    assert [p for p in probe(page, 1280)["problems"] if p.startswith("blocked img-src")]
