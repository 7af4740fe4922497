"""The report of a run as one HTML file that works offline and asks the network for nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from sigmanens.lab.report import corruption, naming, tables, training
from sigmanens.lab.report.compare import (
    METRICS,
    RULE,
    difference,
    measured,
    named,
    seeds_word,
    survivors,
    word,
)
from sigmanens.lab.report.dial import dial
from sigmanens.lab.report.frontier import frontier
from sigmanens.lab.report.owners import layer_panel, owners
from sigmanens.lab.report.plot import Panel, Section
from sigmanens.lab.report.reading import read_study
from sigmanens.lab.report.reliability import reliability, reliability_panels
from sigmanens.lab.report.scores import score_panels
from sigmanens.lab.report.selective import confusion_panel, risk_coverage
from sigmanens.lab.report.study import Group, Study
from sigmanens.lab.report.summary import CRITERIA, study_summary
from sigmanens.lab.report.tables import Cell, Table
from sigmanens.lab.report.template import document, write_page

_OF_A_RUN = ("accuracy", "nll", "nll_calibrated", "ece")


def write_report(metrics: Mapping[str, Any], path: Path) -> Path:
    """Write the report of a parsed ``metrics.json`` to ``path``, whole or not at all.

    Raises:
        InputError: where the metrics have no rows or are not understood. RunError: where the file
            cannot be written.
    """
    return write_page(render(metrics), path)


def render(metrics: Mapping[str, Any]) -> str:
    """The HTML of the report. Raises ``InputError`` as :func:`write_report` does."""
    study = read_study(metrics)
    runs = [
        (group, _words(study, group), panels)
        for group in study.groups
        if (panels := details(study, group))
    ]
    return document(
        "report.html.j2",
        title=f"sigmanens report: {metrics.get('preset') or 'run'}",
        summary=study_summary(study),
        rule=RULE,
        study=study,
        sections=sections(study, linked=len(study.groups) > 1 and bool(runs)),
        comparison=comparison(study),
        runs=runs,
        shown=study.chosen or study.groups[-1],
        warnings=[(g, text, s) for g in study.groups for text, s in group_findings(g).items()],
    )


def sections(study: Study, linked: bool = False) -> list[Section]:
    """Figures and tables of what this run has numbers for, in their order."""
    criterion = CRITERIA.get(study.criterion or "", study.criterion)
    found = [
        _tabled("results", "Results", tables.results(study, linked)),
        frontier(study),
        *dial(study),
        reliability(study),
        risk_coverage(study),
        corruption.severity(study),
        corruption.kinds(study),
        owners(study),
        training.training(study),
        _tabled(
            "ood", "Out of distribution", tables.ood(study),
            "0.5 is chance, 1 is perfect, and the tint grows between; OOD is the positive class.",
        ),
        _tabled("failures", "Failed trainings", tables.failures(study)),
        _tabled("choice", "Choice of τ", tables.choice(study), f"By {criterion}."),
        _tabled(
            "seeds", "Every seed", tables.seeds(study),
            "In brackets: 95 % bootstrap interval over the samples, where it was measured.",
        ),
    ]  # fmt: skip
    return [section for section in found if section is not None]


def _tabled(key: str, title: str, table: Table | None, note: str = "") -> Section | None:
    return None if table is None else Section(key, title, note, table=table)


def details(study: Study, group: Group) -> list[Panel]:
    """One run in detail: reliability, confusion, owners, corruptions, OOD scores, training."""
    return [
        *reliability_panels(group),
        *(panel for panel in (confusion_panel(study, group), layer_panel(group)) if panel),
        *corruption.curves_of_a_run(study, group),
        *score_panels(study, group),
        *training.curves_of_a_run(study, group),
    ]


def _words(study: Study, group: Group) -> str:
    multiple = naming.times(study.multiple(group))
    parts = [measured(group, _OF_A_RUN), f"{multiple} the parameters" if multiple else ""]
    return ", ".join(part for part in parts if part)


def comparison(study: Study) -> dict[str, Any] | None:
    """Every row less a reference that the reader chooses: a table, and the data of all others."""
    reference = study.reference or study.groups[0]
    known = {key for gaps in study.differences.values() for key in gaps}
    keys = [key for key in METRICS if key in known]
    if not keys or len(study.groups) < 2:
        return None
    found = {ref.key: less(study, ref, keys) for ref in study.groups}
    data = {
        key: {
            "rows": [[[c.text, c.value, c.mark, c.hint] for c in row[1:]] for row in table.rows],
            "halves": halves,
        }
        for key, (table, halves) in found.items()
    }
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False).replace("<", "\\u003c")
    table, halves = found[reference.key]
    return {"reference": reference, "table": table, "halves": halves, "data": text}


def less(study: Study, reference: Group, keys: list[str]) -> tuple[Table, list[str]]:
    """Every method minus a reference, and half an interval of each column, the median."""
    rows = [[Cell.of(group.label, group=group)] for group in study.groups]
    halves = []
    for key in keys:
        kept = survivors(study, reference, key)
        widths = []
        for group, cells in zip(study.groups, rows, strict=True):
            gap = None if group is reference else difference(study, group, reference, key)
            if gap is None:
                cells.append(Cell.of(None))
                continue
            widths.append(gap.half_width)
            mark = word(gap, key) + ("†" if group.key in kept else "")
            cells.append(Cell(named(gap), gap.value, mark=mark, hint=seeds_word(gap)))
        halves.append(f"±{median(widths):.3f}" if widths else "–")
    heads = [METRICS[key].name for key in keys]
    meaning = {METRICS[key].name: f"{METRICS[key].better} is better" for key in keys}
    title = "Each method minus the reference"
    return Table(title, ["method", *heads], rows, meaning=meaning), halves


def group_findings(group: Group) -> dict[str, list[Any]]:
    """The warnings that a group's trainings gave by themselves, each with its seeds."""
    found: dict[str, list[Any]] = {}
    for seed, row in group.rows.items():
        entries = row.get("findings")
        for text in entries if isinstance(entries, list) else ():
            if isinstance(text, str) and text.strip():
                found.setdefault(text.strip(), []).append(seed)
    return found
