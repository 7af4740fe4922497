"""Run the compatibility matrix; write docs/compatibility.json and, from it, docs/compatibility.md.

    python docs/make_compatibility.py                        # every network, every behaviour
    python docs/make_compatibility.py --only 'timm/swin'     # some rows; the others stay
    python docs/make_compatibility.py --skip compile export ONNX
    python docs/make_compatibility.py --render               # the page from the JSON, no run
    python docs/make_compatibility.py --check                # is the page what would be written?

The section on real weights is rendered from docs/real_weights.json (docs/make_real_weights.py).

Exits with 1 if a cell is a fault or the page is not up to date. The networks and behaviours are
those of tests/matrix; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
JSON, PAGE = HERE / "compatibility.json", HERE / "compatibility.md"
REAL_WEIGHTS = HERE / "real_weights.json"
PACKAGES = ("torch", "timm", "torchvision", "transformers", "peft", "onnx", "onnxruntime")
SIGNS = {"pass": "✓", "refused": "refused", "upstream": "base", "FAIL": "**FAULT**", "": "·"}
# A worker is replaced after so many networks, which bounds what libraries keep.
TASKS_PER_WORKER = 15

sys.path.insert(0, str(HERE.parent))
os.environ["HF_HUB_OFFLINE"] = "1"


def main(argv: Sequence[str] | None = None) -> int:
    """Run, write or compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", metavar="REGEX", help="rows by library/name")
    parser.add_argument("--skip", nargs="*", default=[], metavar="BEHAVIOUR", help="columns")
    parser.add_argument("--workers", type=int, default=1, help="processes, one thread each")
    parser.add_argument("--render", action="store_true", help="write the page from the JSON")
    parser.add_argument("--check", action="store_true", help="compare the page with the JSON")
    options = parser.parse_args(argv)
    if not options.render and not options.check:
        for document in measure(options.only, options.skip, options.workers):
            text = json.dumps(document, indent=1, ensure_ascii=False)
            JSON.write_text(text + "\n", encoding="utf-8")
    document = json.loads(JSON.read_text(encoding="utf-8"))
    page = render(document, _read(REAL_WEIGHTS))
    if options.check:
        same = PAGE.exists() and PAGE.read_text(encoding="utf-8") == page
        print(
            "up to date" if same else f"{PAGE.name} is not what docs/make_compatibility.py writes"
        )
        return 0 if same else 1
    PAGE.write_text(page, encoding="utf-8")
    return (
        1
        if any(kind(c) == "FAIL" for row in document["rows"] for c in row["cells"].values())
        else 0
    )


# -- running --------------------------------------------------------------------------------------


def measure(only: str, skip: Sequence[str], workers: int) -> Iterator[dict[str, Any]]:
    """Run rows and columns; those not asked for are taken from the last run.

    Yields:
        the whole document after every row, so that what was run outlives an interruption.
    """
    from tests.matrix.behaviours import CHEAP, COSTLY
    from tests.matrix.networks import networks

    columns = [*CHEAP, *COSTLY]
    unknown = set(skip) - set(columns)
    if unknown:
        raise SystemExit(f"--skip: no behaviour {unknown}; there are {', '.join(columns)}")
    known = [entry.id for entry in networks()]
    wanted = [name for name in known if re.search(only, name)]
    if not wanted:
        raise SystemExit(f"--only {only!r} matches none of the {len(known)} networks")
    chosen = [c for c in columns if c not in skip]
    before = _read(JSON)
    rows = {row["network"]: row for row in before["rows"] if row["network"] in known}
    for row in _rows(wanted, chosen, workers):
        known_row = rows.get(row["network"], {"cells": {}, "refusal": "", "notes": []})
        old = {} if row["refusal"] else known_row["cells"]
        if "convert" in skip:  # what the conversion said was not asked again
            row["refusal"] = row["refusal"] or known_row["refusal"]
            fresh = [note for note in row["notes"] if note not in known_row["notes"]]
            row["notes"] = [*known_row["notes"], *fresh]
        row["cells"] = {c: v for c in columns if (v := row["cells"].get(c, old.get(c)))}
        rows[row["network"]] = row
        bad = {k: v for k, v in row["cells"].items() if v != "pass"}
        print(
            f"{row['network']}: {row['refusal'] or bad or 'pass'} ({row['seconds']} s)", flush=True
        )
        yield {
            "version": 1,
            "environment": environment(),
            "behaviours": columns,
            "rows": [rows[name] for name in known if name in rows],
        }


def _read(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {"rows": []}
    document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return document


def _rows(names: list[str], columns: list[str], workers: int) -> Iterator[dict[str, Any]]:
    if workers == 1:
        _one_thread()
        yield from (_row(name, columns) for name in names)
        return
    context = get_context("spawn")
    with context.Pool(workers, _one_thread, maxtasksperchild=TASKS_PER_WORKER) as pool:
        yield from pool.imap(partial(_row, columns=columns), names)


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _row(name: str, columns: list[str]) -> dict[str, Any]:
    from tests.matrix.behaviours import CHEAP, COSTLY, run
    from tests.matrix.networks import networks

    (entry,) = [e for e in networks() if e.id == name]
    every = CHEAP | COSTLY
    row = asdict(run(entry, {c: every[c] for c in columns}))
    return row | {"seconds": round(row["seconds"])}


def environment() -> dict[str, str]:
    """Versions of what a run depends on."""
    found = {"python": platform.python_version()}
    for package in ("sigmanens", *PACKAGES):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


# -- the page -------------------------------------------------------------------------------------


def kind(cell: str) -> str:
    """ "pass", "refused", "upstream", "FAIL", or "" for a cell that was not run."""
    return cell.partition(":")[0]


def render(document: Mapping[str, Any], pretrained: Mapping[str, Any]) -> str:
    """The whole page."""
    from tests.matrix.behaviours import CHEAP, COSTLY

    rows, columns = document["rows"], document["behaviours"]
    packages = ", ".join(f"{k} {v}" for k, v in document["environment"].items())
    counts = {c: Counter(kind(row["cells"].get(c, "")) for row in rows) for c in columns}
    parts = [
        "# Compatibility\n",
        "Made by `make matrix` (`python docs/make_compatibility.py`); never edited. Networks have "
        "random weights and the smallest valid sizes, and their norms, statistics, LayerScale and "
        "constant tensors are drawn at random first, so that dropped or swapped state shows. "
        "Differences are measured in parts of how far the base's outputs move over the inputs, in "
        f"float64 where the base runs in it.\n\nWith {packages}.\n",
        "✓ holds · **refused**: a named error, below · **base**: the unconverted network fails "
        "too · **FAULT**: neither · ·: not run (compile, export and ONNX take most of the time: "
        "they are run on the networks of the tests' core first, then in the order of the seconds "
        "that the other columns took)\n",
        "| behaviour | what holds | ✓ | refused | base | fault | not run |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name in columns:
        means = (({**CHEAP, **COSTLY}[name].__doc__) or "").partition("\n")[0]
        found = [str(counts[name][k]) for k in ("pass", "refused", "upstream", "FAIL", "")]
        parts.append(f"| {name} | {means} | " + " | ".join(found) + " |")
    parts.append("")
    parts += _pretrained(pretrained)
    for library in dict.fromkeys(row["network"].partition("/")[0] for row in rows):
        mine = [row for row in rows if row["network"].startswith(f"{library}/")]
        parts += _table(library, mine, columns)
    parts += _messages("Refusals", "refused", rows)
    parts += _messages("Limits of the base networks", "upstream", rows)
    parts += _messages("Faults", "FAIL", rows)
    parts += _notes(rows)
    return "\n".join(parts)


def _pretrained(document: Mapping[str, Any]) -> list[str]:
    """The section on real weights; nothing if none were measured."""
    if not document["rows"]:
        return []
    lines = [
        "## Real weights on real data\n",
        "Made by `python docs/make_real_weights.py`. Public pretrained networks, converted with "
        "`sn.convert(base, members)` and not trained: accuracy of the base, of the ensemble at "
        "step 0 and of `member(0)`, a plain network; the largest difference between a member's "
        "logit and the base's, beside the base's largest logit. Parameters grow by the scales and "
        "one head per member.\n",
        "| network | weights | data | n | M | σNorms | accuracy: base | ensemble | member(0) "
        "| NLL: base | ensemble | largest difference | largest logit | parameters: base "
        "| ensemble |",
        "| --- " * 15 + "|",
    ]
    for row in document["rows"]:
        accuracy = [f"{row['accuracy'][k]:.4f}" for k in ("base", "ensemble", "member 0")]
        nll = [f"{row['nll'][k]:.4f}" for k in ("base", "ensemble")]
        cells = [
            row["network"], row["weights"], row["data"], f"{row['n']:,}", str(row["members"]),
            str(row["norms"]), *accuracy, *nll, f"{row['largest_difference']:.0e}",
            f"{row['largest_logit']:.1f}", *(f"{v:,}" for v in row["parameters"].values()),
        ]  # fmt: skip
        lines.append("| " + " | ".join(cells) + " |")
    return [*lines, ""]


def _table(library: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> list[str]:
    lines = [
        f"## {library}: {len(rows)} networks\n",
        "| network | norms | parameters | " + " | ".join(columns) + " |",
        "| --- " * (3 + len(columns)) + "|",
    ]
    for row in rows:
        cells = [SIGNS[kind(row["cells"].get(c, ""))] for c in columns]
        name = row["network"].partition("/")[2]
        head = f"| {name} | {row['norms']} | {_count(row['parameters'])} | "
        lines.append(head + " | ".join(cells) + " |")
    return [*lines, ""]


def _count(parameters: int) -> str:
    if parameters < 1e4:
        return f"{parameters:,}"
    return f"{parameters / 1e6:.1f} M" if parameters >= 1e5 else f"{parameters / 1e3:.0f} k"


def _messages(title: str, what: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Messages of one kind, each once, with where they stand."""
    places: dict[str, list[str]] = {}
    for row in rows:
        if what == "refused" and row["refusal"]:
            places.setdefault(row["refusal"], []).append(f"{row['network']}: conversion")
            continue
        found: dict[str, list[str]] = {}
        for column, text in row["cells"].items():
            if kind(text) == what:
                found.setdefault(text.partition(": ")[2], []).append(column)
        for text, at in found.items():
            places.setdefault(text, []).append(f"{row['network']}: {', '.join(at)}")
    if not places:
        return []
    lines = [f"## {title}\n"]
    for text, where in places.items():
        lines += [*(f"* {w}" for w in where), "", *(f"      {t}" for t in text.splitlines()), ""]
    return lines


def _notes(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [f"* {row['network']}: {note}" for row in rows for note in row["notes"]]
    return ["## Notes\n", *lines, ""] if lines else []


if __name__ == "__main__":
    sys.exit(main())
