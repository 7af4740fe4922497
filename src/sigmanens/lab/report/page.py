"""The report of a run as one HTML file that works offline and asks the network for nothing."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

from markupsafe import Markup

from sigmanens.errors import RunError
from sigmanens.lab.report import tables
from sigmanens.lab.report.compare import METRICS, RULE, difference, named, survivors, word
from sigmanens.lab.report.corruption import MEASURED, kind_table, severity
from sigmanens.lab.report.corruption import curve_panels as corruption_panels
from sigmanens.lab.report.dial import by_members, by_tau, by_weight
from sigmanens.lab.report.frontier import frontier
from sigmanens.lab.report.owners import layer_panel, layer_table, owners
from sigmanens.lab.report.plot import Figure, Panel
from sigmanens.lab.report.reading import read_study
from sigmanens.lab.report.reliability import reliability, reliability_panel
from sigmanens.lab.report.scores import score_panels, score_table
from sigmanens.lab.report.study import Group, Study, finite
from sigmanens.lab.report.summary import CRITERIA, study_summary
from sigmanens.lab.report.tables import Cell, Table
from sigmanens.lab.report.template import environment
from sigmanens.lab.report.training import curve_panels as training_panels
from sigmanens.lab.report.training import training

__all__ = ["Section", "details", "document", "figures", "render", "write_report"]


@dataclass(frozen=True)
class Section:
    """A part of a page: a figure or a table, and tables that are folded away."""

    key: str
    title: str
    note: str = ""
    figure: Figure | None = None
    table: Table | None = None
    folded: tuple[tuple[str, Table], ...] = ()


def write_report(metrics: Mapping[str, Any], path: Path) -> Path:
    """Write the report of a parsed ``metrics.json`` to ``path``, whole or not at all.

    Raises:
        InputError: where the metrics have no rows or are not understood. RunError: where the file
            cannot be written.
    """
    text = render(metrics)
    path = Path(path)
    part = path.with_name(f"{path.name}.{secrets.token_hex(4)}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise RunError(
            f"the report cannot be written to {path}: {error.strerror or error}; expected a folder "
            "that exists, may be written to and has about 6 MB free"
        ) from error
    finally:
        part.unlink(missing_ok=True)
    return path


def render(metrics: Mapping[str, Any]) -> str:
    """The HTML of the report. Raises ``InputError`` as :func:`write_report` does."""
    study = read_study(metrics)
    runs = [(group, panels) for group in study.groups if (panels := details(study, group))]
    return document(
        "report.html.j2",
        title=f"sigmanens report: {metrics.get('preset') or 'run'}",
        summary=study_summary(study),
        rule=RULE,
        study=study,
        sections=_sections(study, linked=len(study.groups) > 1 and bool(runs)),
        comparison=_comparison(study),
        runs=[(group, _run(study, group), panels) for group, panels in runs],
        shown=study.chosen or study.groups[-1],
        warnings=[(g, text, s) for g in study.groups for text, s in group_findings(g).items()],
        facts=_facts(study),
    )


def document(template: str, **values: Any) -> str:
    """A page from a template, with its style, its script and plotly inside."""
    assets = {name: Markup(_asset(f"{name}.{kind}")) for name, kind in _ASSETS}
    page = environment(html=True).get_template(template)
    return page.render(plotly=_plotly(), **assets, **values)


_ASSETS = (("style", "css"), ("guard", "js"), ("script", "js"))


@lru_cache(maxsize=8)
def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


@lru_cache(maxsize=1)
def _plotly() -> Markup:
    from plotly.offline import get_plotlyjs

    return Markup(get_plotlyjs())  # a constant of the package


def figures(study: Study) -> list[Figure]:
    """The figures that this run has numbers for, in their order."""
    builds = (frontier, by_tau, by_weight, by_members, reliability, severity, owners, training)
    return [figure for build in builds if (figure := build(study)) is not None]


def _sections(study: Study, linked: bool) -> list[Section]:
    found = [Section("results", "Results", table=tables.results(study, linked=linked))]
    for figure in figures(study):
        found.append(Section(figure.key, figure.title, figure=figure))
        if figure.key == "severity" and (kinds := _kinds(study)) is not None:
            found.append(kinds)
    chance = "0.5 is chance, 1 is perfect, and the tint grows between; OOD is the positive class."
    bracket = "In brackets: 95 % bootstrap interval over the samples, where it was measured."
    criterion = CRITERIA.get(study.criterion or "", study.criterion)
    for key, title, note, table in (
        ("ood", "Out of distribution", chance, tables.ood(study)),
        ("failures", "Failed trainings", "", tables.failures(study)),
        ("choice", "Choice of τ", f"By {criterion}.", tables.choice(study)),
        ("layers", "Owners per layer", "Of every run.", layer_table(study)),
        ("scores", "Quartiles of the OOD scores", "Of every run.", score_table(study)),
        ("seeds", "Every seed", bracket, tables.seeds(study)),
    ):
        if table is not None:
            found.append(Section(key, title, note, table=table))
    return found


def _kinds(study: Study) -> Section | None:
    kinds = [(m, table) for m in MEASURED if (table := kind_table(study, m)) is not None]
    if not kinds:
        return None
    few = ""
    if study.pooled:
        few = (
            f" Each kind was measured on {study.corrupted // len(study.kinds):,} examples: an ECE "
            "of few is too large by what their noise adds, which that of all kinds together is not."
        )
    note = f"The darker a cell, the better the method beside the others in its column.{few}"
    folded = tuple((f"The same for {METRICS[m].name}", table) for m, table in kinds[1:])
    return Section("kinds", "Corruptions kind by kind", note, table=kinds[0][1], folded=folded)


def _comparison(study: Study) -> dict[str, Any] | None:
    """Every row less a reference that the reader chooses: a table, and the data of all others."""
    reference = study.reference or study.groups[0]
    if not study.differences or len(study.groups) < 2:
        return None
    measured = {key for gaps in study.differences.values() for key in gaps}
    keys = [key for key in METRICS if key in measured]
    data = {ref.key: _less(study, ref, keys) for ref in study.groups}
    rows, halves = [], []
    for group in study.groups:
        cells = [Cell.of(group.label, group=group)]
        for key, entry in zip(keys, data[reference.key][group.key], strict=True):
            gap = difference(study, group, reference, key) if group is not reference else None
            if gap is None:
                cells.append(Cell.of(None))
                continue
            mark = word(gap, key) + ("†" if abs(entry[3]) == 2 else "")
            hint = "one seed" if gap.basis == "samples" else f"{gap.n} seeds"
            cells.append(Cell(named(gap), gap.value, mark=mark, hint=hint))
        rows.append(cells)
    for i in range(len(keys)):
        widths = [(e[i][2] - e[i][1]) / 2 for e in data[reference.key].values() if e[i]]
        halves.append(f"±{median(widths):.3f}" if widths else "–")
    heads = [METRICS[key].name for key in keys]
    return {
        "reference": reference,
        "table": Table(
            "Each method minus the reference", ["method", *heads], rows,
            meaning={METRICS[k].name: f"{METRICS[k].better} is better" for k in keys},
        ),
        "halves": halves,
        "data": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
    }  # fmt: skip


def _less(study: Study, reference: Group, keys: list[str]) -> dict[str, list[Any]]:
    """[value, low, high, sign, one seed] of every group less the reference; ±2 survives Holm."""
    kept = {key: survivors(study, reference, key) for key in keys}
    found: dict[str, list[Any]] = {}
    for group in study.groups:
        entries: list[Any] = []
        for key in keys:
            gap = None if group is reference else difference(study, group, reference, key)
            if gap is None:
                entries.append(None)
                continue
            sign = {"better": 1, "worse": -1, "": 0}[word(gap, key)]
            sign *= 2 if group.key in kept[key] else 1
            one = int(gap.basis == "samples")
            entries.append([*(round(x, 6) for x in (gap.value, gap.low, gap.high)), sign, one])
        found[group.key] = entries
    return found


def details(study: Study, group: Group) -> list[Panel]:
    """One run in detail: reliability, owners per layer, corruptions, OOD scores, training."""
    alone = (reliability_panel(group), layer_panel(group))
    return [
        *(panel for panel in alone if panel is not None),
        *corruption_panels(study, group),
        *score_panels(study, group),
        *training_panels(study, group),
    ]


def _run(study: Study, group: Group) -> str:
    keys = ("accuracy", "nll", "nll_calibrated", "ece")
    numbers = [f"{METRICS[k].name} {group.stat(k)}" for k in keys if group.stat(k).by_seed]
    numbers += [f"{study.multiple(group)} the parameters"] if study.multiple(group) else []
    return ", ".join(numbers)


def group_findings(group: Group) -> dict[str, list[Any]]:
    """The warnings that a group's trainings gave by themselves, each with its seeds."""
    found: dict[str, list[Any]] = {}
    for seed, row in group.rows.items():
        entries = row.get("findings")
        for text in entries if isinstance(entries, list) else ():
            if isinstance(text, str) and text.strip():
                found.setdefault(text.strip(), []).append(seed)
    return found


def _facts(study: Study) -> dict[str, str]:
    metrics = study.metrics
    facts = {}
    if metrics.get("command"):
        facts["Command"] = str(metrics["command"])
    for name, key in (("Data", "data"), ("Environment", "environment")):
        if isinstance(metrics.get(key), Mapping) and metrics[key]:
            facts[name] = _listed(metrics[key])
    seconds = finite(metrics.get("seconds"))
    if seconds is not None:
        facts["Time"] = f"{seconds / 60:.1f} minutes" if seconds >= 120 else f"{seconds:.0f} s"
    rows = sum(len(group.rows) for group in study.groups)
    left = f"; {study.left_out} of other splits are not shown" if study.left_out else ""
    facts["Rows"] = f"{rows} of split {study.split}{left}"
    return facts


def _listed(values: Mapping[str, Any]) -> str:
    """A flat or nested mapping as one line: "train 300, ood patches 899"."""
    parts = []
    for key, value in values.items():
        name = str(key).replace("_", " ")
        if isinstance(value, Mapping):
            parts.append(f"{name} {_listed(value)}")
        elif value is not None:
            text = f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)
            parts.append(text if name == "description" else f"{name} {text}")
    return ", ".join(parts)
