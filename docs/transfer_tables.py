"""What make_tables.py writes into docs/results/transfer.md: all transfer tasks on one page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sigmanens.evaluation.equivalent import deep_ensemble_equivalent
from sigmanens.lab.report.compare import RULE, difference, named, survivors, word
from sigmanens.lab.report.reading import read_study
from sigmanens.lab.report.study import Group, Study

HEAD = """# Transfer: a pretrained network, a new head, 1,000 examples

Each seed draws 1,000 training and 500 validation examples; the rest is the test part. `splits.json`
lists what was drawn. All methods have new heads of the same kind (a norm and a Linear), average
their weights and keep the epoch with the lowest temperature-scaled NLL on the validation examples.
"Long" is one network trained for as many passes as all members together. The best single network is
the one with the lower validation NLL, of those that have run.

NLL (T): in nats, after a temperature fitted on the validation examples. Worth: the number of
separate networks with the same NLL (T). Size: parameters over those of one network.
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


COLUMNS = ("size", "accuracy", "ECE", "NLL (T)", "less best single", "less four networks",
           "worth", "training s")  # fmt: skip


def table(metrics: Mapping[str, Any], columns: Sequence[str] = COLUMNS) -> list[str]:
    """Lines of a table: every method by its NLL, beside the best single network and all of them."""
    study = read_study(metrics)
    singles = [g for g in study.groups if g.method == _ONE[0] and g.members == 1]
    one = min(singles, key=lambda g: _mean(g, "validation", "nll_calibrated"))
    many = max(
        (g for g in study.groups if g.method == "deep_ensemble"), key=lambda g: g.members or 0
    )
    size = one.row["params"]
    kept = {g.key: survivors(study, g, "nll_calibrated") for g in (one, many)}
    lines = [f"| method | {' | '.join(columns)} |", "| --- " * (1 + len(columns)) + "|"]
    shown = [g for g in study.groups if g.method != "single"]  # its row has the same NLL (T)
    for group in sorted(shown, key=lambda g: _mean(g, "nll_calibrated")):
        cells = [
            f"{group.row['params'] / size:.2f} ×",
            *(str(group.stat(key)) for key in ("accuracy", "ece", "nll_calibrated")),
            *(_against(study, group, other, group.key in kept[other.key]) for other in (one, many)),
            _worth(group, many),
            group.stat("train_seconds").text(0),
        ]
        shown_cells = [c for name, c in zip(COLUMNS, cells, strict=True) if name in columns]
        name = group.label + (" — best single" if group is one else "")
        lines.append(f"| {' | '.join([name, *shown_cells])} |")
    return lines


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
