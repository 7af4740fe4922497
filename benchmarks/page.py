"""The pages on performance from a benchmark's JSON: `python -m benchmarks.page JSON PAGE`."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

__all__ = ["page", "table", "tables"]

PROSE = """# What an ensemble costs

{members} members in time and memory, on {threads} thread of a CPU. Below 1.00 is cheaper than
what it is compared with. Each row gives the range over networks and batch sizes;
[every figure](performance-tables.md) has a page of its own.

{goals}

## What to do

* **Serve** convolutional networks and small batches from ONNX Runtime: `sn.export_onnx(ens,
  "ens.onnx", example)`. Transformers that answer one text at a time are faster with
  `layout="small"`. Large batches of a transformer take as long as in PyTorch.
* **Serve from PyTorch**: open `with ens.fixed():` around the predictions. `ens.network.compile()`
  helps at small batches.
* **Pay less per member**: let the members part late with `layers=` (the dial below).
* **Train for less**: let each member see a share of the batch (`recipe.member_batches: share`,
  `ens(x, split=True)`). How many epochs that needs is in [results/search.md](results/search.md).

## What limits it

* {members} members need {members} times the convolutions and matrix products, as {members}
  networks do. They share weights, not activations.
* What is really saved is what runs before the first converted norm, and the optimizer's step on
  shared weights.
* All members in one pass save calls: this counts for small batches. One member at a time stays in
  the cache: this counts for large ones.
* Memory with many members: from the second member on, the gradients of the shared weights are there
  while a pass keeps its activations. One network has freed its activations by then.
* Packed-Ensembles are faster by construction: each of their members is a narrower network (here
  α = 2, γ = 2). The other rivals run the full width for every member, as σN-Ens does.

## How many members in a pass

`schedule="auto"` takes as many members as keep the largest normalised activation of a pass within
8 MiB on a CPU, at least one. It takes all of them on other devices, under `torch.compile`, in
exports and in process groups. This is a rule and no measurement on purpose: a schedule changes the
order of sums and, with dropout, which draw is whose. A choice by the clock would make a seed's
results differ from run to run. Set `ens.schedule` to another if it is faster on your machine.

## The compute dial

With `layers=` limited to late norms, what lies before the first of them is one network. It is
computed once for all members, in training and evaluation, under `torch.compile` and in exported
files. Its random layers draw once, and its norms stay plain ones with one set of statistics. So a
late split costs after training what it costs before.

Two traces of the first batch (or of `example=`), in evaluation and in training mode, find these
modules. `ens.plan.prefix` names them, and checkpoints keep them. Nothing is shared, and the report
says why, where

* the network writes into a result of these layers, or draws numbers of Python's or NumPy's between
  them;
* activation checkpointing with `use_reentrant=True` runs these layers;
* parameters are divided over ranks (FSDP), inputs are no tensors, or SyncBatchNorm runs on a CPU.

Training passes whose graph would run these layers anew run uncompiled: members one by one, or
random functions between modules.

Time of {members} members over *one* network:

{dial}
"""

TABLES = """# Every figure of the benchmark

The page for users is [performance.md](performance.md). `python -m benchmarks.page` writes both
from [`{source}`](../{source}); no figure is typed.

{runs}

Every contestant takes its turn in every round. A ratio is the median over rounds of a contestant's
time by that of {members} separate networks in the same round, in brackets the smallest and the
largest. With one thread, times are CPU seconds of the process: waiting for other programs does not
enter, what they do to the shared cache does. ONNX Runtime has as many threads. Its int8 files keep
the weights of linear layers in eight bits; they are off by the largest difference of a probability
from that of the float32 file, for networks with random weights. Requests at once are timed by the
clock, and their ratio is one of medians.

Not measured: {missing}.

## Goals

{goals}

{results}
"""

Row = dict[str, Any]


def page(done: Row) -> str:
    """The page for users, as Markdown."""
    dial = [table("dial", name, rows) for name, rows in done["parts"].get("dial", {}).items()]
    return PROSE.format(
        members=done["members"], threads=done["runs"][-1]["machine"]["threads"],
        goals=_summary(done["goals"]), dial="\n\n".join(dial),
    )  # fmt: skip


def tables(done: Row, source: str) -> str:
    """All goals and rows, as Markdown."""
    parts = done["parts"]
    shown = [p for p in _TABLES if p != "dial"]
    results = [table(p, n, rows) for p in shown for n, rows in parts.get(p, {}).items()]
    names = list(dict.fromkeys(n for rows in parts.values() for n in rows))
    wanted = {p: names[:1] if p.startswith("compiled") else names for p in shown}
    left = [
        f"{_TITLES[p]} of {n}" for p, ns in wanted.items() for n in ns if n not in parts.get(p, ())
    ]
    return TABLES.format(
        source=source, runs=_runs(done["runs"]), members=done["members"],
        missing="; ".join(left) or "nothing", goals=_goals(done["goals"]),
        results="\n\n".join(results),
    )  # fmt: skip


def _runs(runs: Sequence[Row]) -> str:
    """The commands, by the machine they ran on."""
    by: dict[str, list[str]] = {}
    for run in runs:
        facts = run["machine"]
        machine = (
            f"{facts['processor']}, {facts['cores']} cores, "
            f"{', '.join(facts['instructions']) or '–'}, {facts['memory_bytes'] / 2**30:.0f} GiB; "
            f"{facts['threads']} thread; torch {facts['torch']}, Python {facts['python']}, "
            f"malloc: {facts['malloc']}"
        )
        by.setdefault(machine, []).append(run["command"])
    return "\n\n".join(
        f"Measured on {machine}, by\n\n```\n" + "\n".join(commands) + "\n```"
        for machine, commands in by.items()
    )


def _summary(goals: Sequence[Row]) -> str:
    """One line for each goal: the range of its figures."""
    by: dict[str, list[Row]] = {}
    for g in goals:
        by.setdefault(g["goal"], []).append(g)
    lines = []
    for name, rows in by.items():
        bound, known = rows[0]["bound"], [g for g in rows if g["value"] is not None]
        values = [_share(v, bound) for v in sorted(g["value"] for g in known)]
        met = sum(g["met"] for g in known)
        verdict = "met" if met == len(known) else f"**met in {met} of {len(known)}**"
        span = "–".join(dict.fromkeys((values[0], values[-1]))) if values else "not measured"
        lines.append((name, _share(bound, bound), span, verdict if known else "–"))
    return _markdown(("what", "goal: at most", "measured", ""), lines)


def table(part: str, name: str, rows: Sequence[Row]) -> str:
    """One part's rows for one network, as Markdown with a heading."""
    heads, lines = _TABLES[part]
    return f"### {name}: {_TITLES[part]}\n\n" + _markdown(heads, lines(rows))


def _markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    head = "| " + " | ".join(heads) + " |"
    rule = "| " + " | ".join("---" for _ in heads) + " |"
    return "\n".join([head, rule, *("| " + " | ".join(line) + " |" for line in lines)])


def _goals(goals: Sequence[Row]) -> str:
    lines = []
    for g in goals:
        value = "not measured" if g["value"] is None else _share(g["value"], g["bound"])
        verdict = {True: "met", False: "**not met**", None: "–"}[g["met"]]
        bound = _share(g["bound"], g["bound"])
        lines.append((g["goal"], g["subject"], g["where"], bound, value, g["by"] or "–", verdict))
    heads = ("goal", "network", "where", "at most", "measured", "by", "")
    return _markdown(heads, lines)


def _share(value: float, bound: float) -> str:
    return f"{value:.1%}" if bound < 0.1 else f"{value:.2f}"


def _timed(rows: Sequence[Row]) -> Iterator[Sequence[str]]:
    for r in rows:
        how = f"{r['what']}, B={r['batch']}, {r['precision']}" + (", compiled" * r["compiled"])
        if r.get("error"):
            yield how, r["contestant"], "failed", r["error"].replace("|", "/")
            continue
        eager = r.get("ratio_to_eager")
        more = "" if eager is None else f"; {eager:.2f} × eager separate networks"
        low, high = r["spread"]
        ratio = f"{r['ratio']:.2f} [{low:.2f}, {high:.2f}]{more}"
        yield how, r["contestant"], f"{r['seconds'] * 1e3:.1f}", ratio


def _runtime(rows: Sequence[Row]) -> Iterator[Sequence[str]]:
    for r in rows:
        how = f"{r['what']}, B={r['batch']}, {r['precision']}"
        if r.get("error"):
            yield how, r["contestant"], "failed", r["error"].replace("|", "/"), "–", "–"
            continue
        low, high = r["spread"]
        ratio = f"{r['ratio']:.2f} [{low:.2f}, {high:.2f}]"
        size = "–" if r["bytes"] is None else f"{r['bytes'] / 2**20:.1f}"
        gap = "–" if r["gap"] is None else f"{r['gap']:.1e}"
        yield how, r["contestant"], f"{r['seconds'] * 1e3:.1f}", ratio, size, gap


def _shared(rows: Sequence[Row]) -> Iterator[Sequence[str]]:
    for r in rows:
        low, high = r["spread"]
        how = f"{r['what']}, B={r['batch']}"
        ratio = f"{r['ratio']:.2f} [{low:.2f}, {high:.2f}]"
        yield how, r["shared"], f"{r['seconds'] * 1e3:.1f}", ratio


def _costs(rows: Sequence[Row]) -> Iterator[Sequence[str]]:
    for r in rows:
        yield (
            f"{r['norms']:.1%}", f"{r['penalty']:.1%}", f"{r['conversion_seconds']:.2f}",
            f"{r['checkpoint_bytes'] / 1024:.0f}", f"{r['base_bytes'] / 1024:.0f}",
            f"{r['parameters'] / r['base_parameters']:.3f}",
        )  # fmt: skip


def _memory(rows: Sequence[Row]) -> Iterator[Sequence[str]]:
    one = rows[0]["bytes"]
    for r in rows:
        size = "–" if r["bytes"] is None else f"{r['bytes'] / 2**20:.0f}"
        ratio = "–" if not one else f"{r['bytes'] / one:.2f}"
        yield r["contestant"], str(r["members"]), str(r["batch"]), size, ratio


def _under_load(rows: Sequence[Row]) -> Iterator[Sequence[str]]:
    for r in rows:
        one = next(
            o for o in rows
            if o["contestant"] == "separate"
            and (o["batch"], o["requests_at_once"]) == (r["batch"], r["requests_at_once"])
        )  # fmt: skip
        yield (
            f"B={r['batch']}, {r['requests_at_once']} at once", r["contestant"],
            f"{r['throughput']:.0f}", f"{r['throughput'] / one['throughput']:.2f}",
            f"{r['latency'] * 1e3:.1f}", f"{r['latency_95'] * 1e3:.1f}",
            f"{r['wrong']} of {r['answers']:,}",
        )  # fmt: skip


_TITLES = {
    "train": "training step",
    "predict": "prediction",
    "onnx": "prediction in ONNX Runtime",
    "load": "requests at once",
    "compiled prediction": "prediction compiled by torch.compile",
    "compiled training": "training step compiled by torch.compile",
    "dial": "what is computed once",
    "costs": "norms, penalty, conversion, checkpoint",
    "memory": "peak memory of a training step",
}
_TIMES = ("what", "contestant", "ms", "× separate networks")
_TABLES: dict[str, Any] = {
    "train": (_TIMES, _timed),
    "predict": (_TIMES, _timed),
    "onnx": (
        ("what", "contestant", "ms", "× eager separate networks", "files MiB", "int8 off by"),
        _runtime,
    ),
    "load": (
        ("requests", "contestant", "a second", "× separate", "median ms", "95 % ms", "wrong"),
        _under_load,
    ),
    "compiled prediction": (_TIMES, _timed),
    "compiled training": (_TIMES, _timed),
    "dial": (("what", "computed once", "ms", "× one network"), _shared),
    "costs": (
        ("σNorm", "penalty", "conversion s", "checkpoint KiB", "base KiB", "× parameters"),
        _costs,
    ),
    "memory": (("contestant", "members", "B", "MiB", "× one network"), _memory),
}  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Write both pages."""
    if len(argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    source, target = Path(argv[0]), Path(argv[1])
    done = json.loads(source.read_text())
    target.write_text(page(done))
    target.with_name(f"{target.stem}-tables.md").write_text(tables(done, source.as_posix()))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
