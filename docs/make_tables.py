"""Write the pages of docs/results and the results in the README from the files of the runs.

    python docs/make_tables.py            # write
    python docs/make_tables.py --check    # exit with 1 if the file is not what would be written

Each folder of docs/results holds the ``metrics.json`` of one run and, optionally, ``notes.md``,
what the run shows in words. Tables are never typed.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import search_tables
import transfer_tables
from rich.console import Console
from study_tables import (
    bounded,
    corruption,
    dial,
    groups_of,
    label_of,
    ood,
    pairs,
    path,
    shift,
    spread,
)

from sigmanens.lab.report import print_run
from sigmanens.lab.report.compare import RULE

RESULTS = Path(__file__).parent / "results"
README = Path(__file__).parent.parent / "README.md"
COLUMNS = (
    ("accuracy", "accuracy"),
    ("NLL", "nll"),
    ("NLL (T)", "nll_calibrated"),
    ("ECE", "ece"),
    ("ECE (T)", "ece_calibrated"),
    ("disagreement", "disagreement"),
    ("Jensen gap", "jensen_gap"),
)
README_COLUMNS = COLUMNS[:4] + COLUMNS[5:6]


def main(check: bool) -> int:
    """Write the pages, or compare them."""
    pages = {
        RESULTS / "README.md": render(),
        RESULTS / "search.md": search_tables.page(RESULTS),
        README: readme(),
    }
    if transfer := transfer_tables.page(RESULTS):
        pages[RESULTS / "transfer.md"] = transfer
    stale = [p for p, text in pages.items() if not p.exists() or p.read_text("utf-8") != text]
    for page in stale:
        if check:
            print(f"{page.name} is not what docs/make_tables.py writes")
        else:
            page.write_text(pages[page], encoding="utf-8")
    return 1 if check and stale else 0


def readme() -> str:
    """The README with its two results put in again."""
    text = README.read_text(encoding="utf-8")
    demo = json.loads((RESULTS / "digits-demo" / "metrics.json").read_text("utf-8"))
    metrics = json.loads((RESULTS / "cifar10-resnet20" / "metrics.json").read_text("utf-8"))
    transfer = json.loads((RESULTS / "transfer-tiny20" / "metrics.json").read_text("utf-8"))
    blocks = {
        "transfer": "\n".join(transfer_tables.table(transfer, transfer_tables.BRIEF)),
        "demo": "\n".join([*table(demo, README_COLUMNS, seconds=False), "", verdict(demo)]),
        "cifar": "\n".join(table(metrics, README_COLUMNS, seconds=False)),
    }
    for name, block in blocks.items():
        begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}\n{block}\n{end}{rest.partition(end)[2]}"
    return text


def verdict(metrics: Mapping[str, Any]) -> str:
    """The sentence that a command ends the table of a run with."""
    console = Console(file=io.StringIO(), width=100, color_system=None)
    print_run(metrics, console)
    last = console.file.getvalue().rstrip().rpartition("\n\n")[2]
    return "\n".join(line.rstrip() for line in last.partition("\n•")[0].splitlines())


def render() -> str:
    """The whole page."""
    parts = [
        "# Results\n",
        "Made by `python docs/make_tables.py` from the `metrics.json` in each folder. Fractions, "
        "NLL and Jensen gap in nats; (T): after temperature scaling of the averaged prediction, "
        "fitted on held-out pictures; ECE with 15 bins; ± is the standard deviation over seeds, "
        "brackets the 95 % bootstrap interval of a single run. OOD is the AUROC of 1 − max "
        "softmax, mean over the sets. The tries for a better recipe: [search.md](search.md).\n",
        f"{RULE} In studies of one seed † rests on a p that was read off the interval's width.\n",
    ]
    for folder in sorted(p.parent for p in RESULTS.glob("*/metrics.json")):
        if folder.name.endswith("-search") or folder.name.startswith("transfer-"):  # own pages
            continue
        metrics = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))
        parts.append(section(folder, metrics))
    return "\n".join(parts)


def section(folder: Path, metrics: Mapping[str, Any]) -> str:
    """One run: what, by which command, where; the table; the notes."""
    data, env = metrics["data"], metrics["environment"]
    rows = metrics["rows"]
    seeds = len({r["seed"] for r in rows})
    lines = [
        f"## {folder.name}\n",
        f"{data['description']}. {data['validation']:,} validation and {data['test']:,} test "
        f"examples; {seeds} seed{'s' if seeds > 1 else ''}. {metrics['seconds'] / 60:.1f} minutes "
        f"{'of training ' if 'failures' in metrics else ''}on {env['cpu']}, torch "
        f"{env['torch']}.\n",
        f"    {metrics['command']}\n",
        *table(metrics, COLUMNS),
    ]
    for title, part in (
        ("Under corruption", corruption(metrics)),
        ("Out of distribution", ood(metrics)),
        ("Under a shift of the domain", shift(metrics)),
        ("Differences", pairs(metrics)),
        ("The dial", dial(metrics)),
        ("By continuation", path(metrics)),
    ):
        if part:
            lines += [f"\n### {title}\n", *part]
    failed = metrics.get("failures") or {}
    if failed:
        lines.append(f"\nFailed and in no table: {', '.join(failed)}.")
    if "checkpoint_bytes" in metrics:
        lines.append(f"\nThe members on disk: {metrics['checkpoint_bytes'] / 1000:,.0f} kB.")
    notes = folder / "notes.md"
    if notes.exists():
        lines.append("\n" + notes.read_text(encoding="utf-8").strip())
    return "\n".join(lines) + "\n"


def table(
    metrics: Mapping[str, Any], columns: Sequence[tuple[str, str]], seconds: bool = True
) -> list[str]:
    """Lines of a Markdown table with a row for every method."""
    counted = any(row.get("multiply_adds") for row in metrics["rows"])
    lines = [
        f"| method | M | τ | λ | parameters | {'multiply-adds | ' if counted else ''}"
        + " | ".join(title for title, _ in columns)
        + f" | OOD | {'training s |' if seconds else ''}",
        "| --- " * (6 + seconds + bool(counted) + len(columns)) + "|",
    ]
    for group in groups_of(metrics["rows"]):
        first = group[0]
        cells = [
            label_of(first) + (f", {first['variant']}" if first.get("variant") else ""),
            str(first["members"]),
            "" if first["tau"] is None else f"{first['tau']:g}",
            "" if first["weight"] is None else f"{first['weight']:g}",
            f"{first['params']:,}",
            *([_millions(first.get("multiply_adds"))] if counted else ()),
            *(_cell(group, key) for _, key in columns),
            spread([_ood(r) for r in group]),
            *([spread([r["train_seconds"] for r in group], digits=0)] if seconds else ()),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def _cell(group: Sequence[Mapping[str, Any]], key: str) -> str:
    ends = (group[0].get("intervals") or {}).get(key)
    if len(group) == 1 and ends and group[0].get(key) is not None:
        return bounded(group[0][key], ends)
    return spread([r.get(key) for r in group])


def _millions(count: int | None) -> str:
    return "–" if count is None else f"{count / 1e6:.2f} M"


def _ood(row: Mapping[str, Any]) -> float | None:
    sets = row.get("ood") or {}
    return mean(s["max_softmax"] for s in sets.values()) if sets else None


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
