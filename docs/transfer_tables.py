"""What make_tables.py writes into docs/results/transfer.md: all transfer tasks on one page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from sigmanens.evaluation.equivalent import deep_ensemble_equivalent
from sigmanens.lab.report.compare import RULE, difference, named, survivors, word
from sigmanens.lab.report.reading import read_study
from sigmanens.lab.report.study import Group, Study

HEAD = """# Transfer: a pretrained network, a new head, 1,000 examples

Each seed draws 1,000 training and 500 validation examples; the rest is the test part. `splits.json`
lists what was drawn. All methods have new heads of the same kind (a norm and a Linear). They
average their weights (exponentially, 0.98) unless the row says "no average", and keep the epoch
with the lowest temperature-scaled NLL on the validation examples.
"Long" is one network trained for as many passes as all members together. The best single network is
the one with the lowest validation NLL, in the seeds that all single networks have.

NLL (T): in nats, after a temperature fitted on the validation examples. Worth: the number of
separate networks with the same NLL (T). Size: parameters over those of one network. Training s: by
the clock, beside other programs.
"""
_ONE = ("single_temperature", "single")


def page(results: Path) -> str | None:
    """The whole page, from all studies whose name begins with ``transfer-``; None without one."""
    folders = sorted(p.parent for p in results.glob("transfer-*/metrics.json"))
    if not folders:
        return None
    parts = [HEAD, f"{RULE}\n"]
    for folder in folders:
        metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
        seeds = len({r["seed"] for r in metrics["rows"]})
        parts += [
            f"## {folder.name}\n",
            f"{metrics['data']['description']}; {metrics['data']['test']:,} test examples; "
            f"{'one seed' if seeds == 1 else f'{seeds} seeds'}.\n",
            f"    {metrics['command']}\n",
            *table(metrics),
            "",
        ]
        notes = folder / "notes.md"
        if notes.exists():
            parts.append(notes.read_text(encoding="utf-8").strip() + "\n")
    return "\n".join(parts)


BRIEF = ("seeds", "size", "accuracy", "ECE", "NLL (T)")
"""The columns in the README, beside the differences."""


def table(metrics: Mapping[str, Any], columns: Sequence[str] | None = None) -> list[str]:
    """Lines of a table: every method by its NLL (T), and what it is less than one and all networks.

    Differences are taken from the single network with the most seeds, from the one that is best on
    validation examples, where that is another, and from all separate networks.
    """
    study = read_study(metrics)
    singles = [g for g in study.groups if g.method == _ONE[0] and g.members == 1]
    shared = set.intersection(*(set(g.rows) for g in singles))
    best = min(singles, key=lambda g: _validation(g, shared))
    many = max(
        (g for g in study.groups if g.method == "deep_ensemble"), key=lambda g: g.members or 0
    )
    others = {"one network": max(singles, key=lambda g: len(g.rows))}
    if best is not others["one network"]:
        others[best.label.removesuffix(" + temperature")] = best
    others["four networks"] = many
    kept = {g.key: survivors(study, g, "nll_calibrated") for g in others.values()}
    rows = []
    shown = [g for g in study.groups if g.method != "single"]  # its row has the same NLL (T)
    for group in sorted(shown, key=lambda g: _mean(g, "nll_calibrated")):
        cells = {
            "method": group.label + (" — best single" if group is best else ""),
            "seeds": str(len(group.rows)),
            "size": f"{group.row['params'] / best.row['params']:.2f} ×",
            "accuracy": str(group.stat("accuracy")),
            "ECE": str(group.stat("ece")),
            "NLL (T)": str(group.stat("nll_calibrated")),
        }
        for name, other in others.items():
            star = group.key in kept[other.key]
            cells[f"less {name}"] = _against(study, group, other, star)
        cells["worth"] = _worth(group, many)
        cells["training s"] = group.stat("train_seconds").text(0)
        rows.append(cells)
    heads = [h for h in rows[0] if columns is None or h in (*columns, "method") or "less " in h]
    lines = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    return lines + [f"| {' | '.join(cells[h] for h in heads)} |" for cells in rows]


def _validation(group: Group, seeds: set[Any]) -> float:
    values = group.stat("validation", "nll_calibrated").by_seed
    return fmean(values[s] for s in seeds) if seeds <= set(values) else float("inf")


def _mean(group: Group, *path: str) -> float:
    found = group.stat(*path).mean
    return float("inf") if found is None else found


def _against(study: Study, group: Group, other: Group, star: bool) -> str:
    gap = None if group is other else difference(study, group, other, "nll_calibrated")
    if gap is None:
        return ""
    said = word(gap, "nll_calibrated")
    return f"{named(gap)}{f' **{said}**' if said else ''}{'†' if star and said else ''}"


def _worth(group: Group, many: Group) -> str:
    """How many networks it equals, in the seeds of both."""
    shared = [s for s in group.rows if s in many.rows]
    curves = [many.rows[s]["curve"] for s in shared]
    curve = {int(k): [c[k] for c in curves] for k in curves[0]}
    return str(deep_ensemble_equivalent([group.rows[s]["nll_calibrated"] for s in shared], curve))
