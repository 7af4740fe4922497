"""The sections of a report in their order: each has a name in the navigation and its HTML."""

from __future__ import annotations

from dataclasses import replace

from sigmanens.lab.report import tables
from sigmanens.lab.report.compare import METRICS, RULE
from sigmanens.lab.report.detail import details, first_run
from sigmanens.lab.report.figures import figures
from sigmanens.lab.report.findings import findings
from sigmanens.lab.report.layers import layer_table
from sigmanens.lab.report.markup import (
    esc,
    figure_body,
    figure_html,
    glance_html,
    glyph,
    prose,
    table_html,
)
from sigmanens.lab.report.plot import Figure
from sigmanens.lab.report.scores import score_table
from sigmanens.lab.report.shift import MEASURED, kind_table
from sigmanens.lab.report.study import Group, Study
from sigmanens.lab.report.verdict import criterion_words, study_verdict

__all__ = ["sections"]

_RING = "The ring marks the run shown in detail; a click on a point selects another."
Sections = dict[str, tuple[str, str]]


def sections(study: Study) -> tuple[Sections, list[Figure]]:
    """Name and HTML of every section by its id, and the figures that the script draws."""
    drawn = figures(study)
    runs = details(study)
    found: Sections = {"verdict": ("Verdict", _verdict(study))}
    if (warned := _findings(study)) is not None:
        found["warnings"] = ("Warnings", warned)
    results = tables.results(study, linked=bool(runs))
    found["results"] = ("Results", _section("results", "Results", results))
    shown = {figure.key: figure for figure in drawn}
    if (frontier := shown.pop("frontier", None)) is not None:
        ringed = replace(frontier, caption=f"{frontier.caption} {_RING}") if runs else frontier
        found["frontier"] = ("The dial", figure_html(ringed))
    if runs:
        found["run"] = ("One run", _runs(study, runs))
    for figure in shown.values():
        name = figure.title.partition(":")[0].partition(",")[0]
        found[figure.key] = (name, figure_html(figure))
        if figure.key == "severity":
            found |= _kinds(study)
    found |= _tables(study)
    return found, [*drawn, *(figure for _, figure in runs)]


def _tables(study: Study) -> Sections:
    found: Sections = {}
    if (out := tables.ood(study)) is not None:
        note = "0.5 is chance, 1 is perfect, and the tint grows between; OOD is the positive class."
        found["ood"] = ("OOD", _section("ood", "Out of distribution", out, note))
    if (pairs := tables.paired(study)) is not None:
        note = (
            "Below 0 the chosen σN-Ens is better. The interval says which examples happened to be "
            "drawn, not how trainings vary: for that, see the spread over seeds."
        )
        found["paired"] = ("Paired", _section("paired", "On the same examples", pairs, note))
    if (failed := tables.failures(study)) is not None:
        found["failures"] = ("Failed", _section("failures", "Failed trainings", failed))
    if (candidates := tables.choice(study)) is not None:
        note = f"Criterion: {criterion_words(study.criterion or 'none stated')}."
        found["choice"] = ("Choice of τ", _section("choice", "Choice of τ", candidates, note))
    measured = any(row.get("intervals") for g in study.groups for row in g.rows.values())
    note = "In brackets: 95 % bootstrap interval over the samples." if measured else ""
    found["seeds"] = ("Every seed", _section("seeds", "Every seed", tables.seeds(study), note))
    return found


def _verdict(study: Study) -> str:
    found = study_verdict(study)
    glance = glance_html(study)
    lines = []
    for line in found.lines:
        topic, _, rest = line.partition(": ")
        if glance and topic.startswith("Against "):
            continue  # The glance holds the same comparisons.
        rest = rest[:1].upper() + rest[1:] if rest[:1].isascii() else rest
        lines.append(f"<div><dt>{esc(topic)}</dt><dd>{prose(rest)}</dd></div>")
    rule = f'<p class="rule">{esc(RULE)}</p>' if glance else ""
    return (
        f'<section id="verdict"><h1>{prose(found.headline)}</h1>{glance}'
        f'<dl class="lines">{"".join(lines)}</dl>{rule}</section>'
    )


def _findings(study: Study) -> str | None:
    found = findings(study)
    if not found:
        return None
    items = []
    for group, text, seeds in found:
        which = f"seed{'s' if len(seeds) > 1 else ''} {', '.join(str(seed) for seed in seeds)}"
        items.append(
            f"<div><dt>{glyph(group)}{esc(group.label)}<br><small>{esc(which)}</small></dt>"
            f"<dd>{prose(_capital(text))}</dd></div>"
        )
    return (
        '<section id="warnings"><h2>Warnings</h2><p class="said">What the numbers of the trainings '
        f'say is wrong, and what to try.</p><dl class="lines">{"".join(items)}</dl></section>'
    )


def _capital(text: str) -> str:
    """``text`` with a capital first letter, unless it begins with a symbol or a setting."""
    return text[:1].upper() + text[1:] if text.partition(" ")[0].isalpha() else text


def _runs(study: Study, runs: list[tuple[Group, Figure]]) -> str:
    """Every run in a part of its own, of which the script shows one at a time."""
    first = first_run(study)
    options = "".join(
        f'<option value="{group.key}"{" selected" if group is first else ""}>{esc(group.label)}'
        "</option>"
        for group, _ in runs
    )
    parts = "".join(
        f'<div class="run" id="{figure.key}"{"" if group is first else " hidden"}>'
        f"<h3>{glyph(group)}<b>{esc(group.label)}</b></h3>{figure_body(figure)}</div>"
        for group, figure in runs
    )
    numbers = "".join(
        f"<details><summary>{summary}</summary>{table_html(table, key)}</details>"
        for summary, key, table in (
            ("Owners per layer of every run", "layers-table", layer_table(study)),
            ("OOD scores of every run", "scores-table", score_table(study)),
        )
        if table is not None
    )
    return (
        '<section id="run"><h2>One run in detail</h2><p class="picker"><label for="pick">Run'
        f'</label> <select id="pick" autocomplete="off">{options}</select> <small>or click a point '
        "of the frontier, or a name in the results</small></p>"
        f'<div role="status" class="unseen" id="picked"></div>{parts}{numbers}</section>'
    )


def _kinds(study: Study) -> Sections:
    """The table of corruptions kind by kind, and the same for the other metrics."""
    found = [(m, table) for m in MEASURED if (table := kind_table(study, m)) is not None]
    if not found:
        return {}
    (metric, first), *rest = found
    few = ""
    if study.pooled:
        few = (
            f" Each kind was measured on {study.corrupted // len(study.kinds):,} examples: an ECE "
            "of few is too large by what their noise adds, which that of all kinds together is not."
        )
    more = "".join(
        f"<details><summary>The same for {esc(METRICS[m].name)}</summary>"
        f"{table_html(table, f'kinds-{m}-table')}</details>"
        for m, table in rest
    )
    return {
        "kinds": (
            "By kind",
            '<section id="kinds"><h2>Corruptions kind by kind</h2><p class="said">The darker a '
            f"cell, the better the method beside the others in its column.{few}</p>"
            f"{table_html(first, f'kinds-{metric}-table')}{more}</section>",
        )
    }


def _section(key: str, title: str, table: tables.Table, note: str = "") -> str:
    words = f'<p class="said">{esc(note)}</p>' if note else ""
    return (
        f'<section id="{key}"><h2>{esc(title)}</h2>{words}{table_html(table, f"{key}-table")}'
        "</section>"
    )
