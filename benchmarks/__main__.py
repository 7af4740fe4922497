"""`python -m benchmarks --out FILE`: measure on this machine, write JSON, print a table."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import sigmanens as sn
from benchmarks.contestants import OURS, RIVALS, Contestant, build
from benchmarks.costs import overheads, storage
from benchmarks.goals import judged
from benchmarks.load import DIFFERENT, SERVED, served, under_load
from benchmarks.measure import interleaved
from benchmarks.memory import peak_memory
from benchmarks.page import table
from benchmarks.runtime import FLOAT, INT8, exported, is_mostly_linear
from benchmarks.subjects import MEMBERS, SUBJECTS

MANY = 16
LARGE = 256


def main(argv: Sequence[str] | None = None) -> int:
    """Run what the options ask for; each finished part is written at once."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="JSON file; parts in it are kept")
    parser.add_argument("--subjects", nargs="+", default=list(SUBJECTS), choices=list(SUBJECTS))
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--runs", type=int, default=7, help="turns of each measurement")
    parser.add_argument("--seconds", type=float, default=20.0, help="bound of each measurement")
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    done: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    done |= {"version": 2, "members": MEMBERS}
    words = ["python", "-m", "benchmarks", *(sys.argv[1:] if argv is None else argv)]
    run = {"command": shlex.join(words), "machine": machine(options.threads)}
    done.setdefault("runs", []).append(run)
    done.setdefault("parts", {})
    for part in options.parts:
        for name in options.subjects:
            rows = PARTS[part](name, options)
            if rows:
                done["parts"].setdefault(part, {})[name] = rows
                done["goals"] = judged(done)
                options.out.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n")
                print(table(part, name, rows), flush=True)
    return 0


def machine(threads: int) -> dict[str, Any]:
    """Facts about processor and software that the figures depend on."""
    cpu = Path("/proc/cpuinfo")
    lines = cpu.read_text().splitlines() if cpu.exists() else []
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    facts = {k.strip(): v.strip() for k, v in fields.items()}
    kinds = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
    return {
        "processor": facts.get("model name", platform.processor()),
        "cores": os.cpu_count(),
        "instructions": [f for f in kinds if f in facts.get("flags", "").split()],
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "threads": threads,
        "malloc": os.environ.get("GLIBC_TUNABLES", "default"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "sigmanens": sn.__version__,
    }


def _rows(
    name: str, what: str, batch: int, names: Sequence[str], options: Any, **how: Any
) -> list[dict[str, Any]]:
    """Time contestants against M separate networks on one batch size."""
    subject = SUBJECTS[name]
    x, y = subject.inputs(batch), subject.labels(batch)
    made, failed = _made(names, lambda c: build(c, subject, MEMBERS, **how))
    functions = {c: _call(contestant, what, x, y) for c, contestant in made.items()}
    timings = interleaved(functions, "separate", runs=options.runs, seconds=options.seconds)
    head = {"what": what, "batch": batch, "precision": how.get("precision", "fp32")}
    head["compiled"] = how.get("compiled", False)
    rows = [head | {"contestant": c} | asdict(t) for c, t in timings.items()]
    return rows + [head | {"contestant": c, "error": e} for c, e in failed.items()]


def _made(
    names: Iterable[str], make: Callable[[str], Any]
) -> tuple[dict[str, Any], dict[str, str]]:
    """What was made by name, and why the others were not."""
    made, failed = {}, {}
    for name in names:
        try:
            made[name] = make(name)
        except Exception as e:
            failed[name] = f"{type(e).__name__}: {' '.join(str(e).split())[:160]}"
    return made, failed


def _call(contestant: Contestant, what: str, x: Any, y: Tensor) -> Callable[[], object]:
    if what == "train":
        return lambda: contestant.step(x, y)
    return lambda: contestant.predict(x)


def _train(name: str, options: Any) -> list[dict[str, Any]]:
    rows = []
    for batch in SUBJECTS[name].train_batches:
        rows += _rows(name, "train", batch, (*OURS, *RIVALS), options)
    batch = SUBJECTS[name].train_batches[-1]
    return rows + _rows(name, "train", batch, (*OURS, "separate"), options, precision="bf16")


def _predict(name: str, options: Any) -> list[dict[str, Any]]:
    rows = []
    for batch in SUBJECTS[name].predict_batches:
        # Rivals of a large batch take minutes and stand where they stand at the one before.
        names = (*OURS, *RIVALS) if batch < LARGE else (*OURS, "separate")
        rows += _rows(name, "predict", batch, names, options)
    batch = SUBJECTS[name].predict_batches[-1]
    return rows + _rows(name, "predict", batch, (*OURS, "separate"), options, precision="bf16")


def _onnx(name: str, options: Any) -> list[dict[str, Any]]:
    """ONNX Runtime against eager separate networks; int8 where most weights can be quantised."""
    subject, rows = SUBJECTS[name], []
    eager = build("separate", subject, MEMBERS)
    names = (*FLOAT, *(INT8 if is_mostly_linear(subject.make()) else ()))
    with tempfile.TemporaryDirectory() as folder:
        made, failed = _made(names, lambda c: exported(c, subject, MEMBERS, Path(folder)))
        for batch in subject.predict_batches:
            x = subject.inputs(batch)
            functions = {c: partial(e.predict, x) for c, e in ({"separate": eager} | made).items()}
            timings = interleaved(functions, "separate", runs=options.runs, seconds=options.seconds)
            head = {"what": "predict", "batch": batch, "precision": "fp32", "compiled": False}
            rows += [head | {"contestant": c, "error": e} for c, e in failed.items()]
            for c, timing in timings.items():
                row = head | {"contestant": c} | asdict(timing) | {"ratio_to_eager": timing.ratio}
                row |= {"bytes": made[c].size if c in made else None, "gap": None}
                if c in INT8:
                    row["precision"] = "int8"
                    if timing.error is None:
                        exact = made[c.removesuffix(" int8")].predict(x)
                        row["gap"] = float((made[c].predict(x) - exact).abs().max())
                rows.append(row)
    return rows


def _compiled(what: str) -> Callable[[str, Any], list[dict[str, Any]]]:
    """The first subject only: a compilation takes longer than all its timings."""

    def part(name: str, options: Any) -> list[dict[str, Any]]:
        if name != next(iter(SUBJECTS)):
            return []
        sizes = getattr(SUBJECTS[name], f"{what}_batches")
        ours = ("sigmanens folded", *["sigmanens sequential"] * (what == "train"))
        rows = []
        for batch in [sizes[-1]] if what == "train" else [sizes[0], sizes[-1]]:
            eager = _rows(name, what, batch, ["separate"], options)[0]["seconds"]
            found = _rows(name, what, batch, [*ours, "separate"], options, compiled=True)
            for row in found:
                seconds = row.get("seconds")
                row["ratio_to_eager"] = None if seconds is None else seconds / eager
            rows += found
        return rows

    return part


def _memory(name: str, options: Any) -> list[dict[str, Any]]:
    batch = max(SUBJECTS[name].train_batches)
    kinds = (("one network", 1), ("sigmanens sequential", MANY), ("sigmanens folded", MEMBERS))
    return [peak_memory(name, kind, members, batch) for kind, members in kinds]


def _costs(name: str, options: Any) -> list[dict[str, Any]]:
    subject = SUBJECTS[name]
    batch = subject.train_batches[-1]
    found = overheads(subject, MEMBERS, batch, options.runs, options.seconds)
    return [found | storage(subject, MEMBERS)]


def _dial(name: str, options: Any) -> list[dict[str, Any]]:
    """Compute against how much is shared: M members over one network, not over M."""
    subject, rows = SUBJECTS[name], []
    for what, sizes in (("train", subject.train_batches), ("predict", subject.predict_batches)):
        if not subject.stages:
            return []
        batch = 64 if 64 in sizes else sizes[-1]
        x, y = subject.inputs(batch), subject.labels(batch)
        made = {"one network": build("one network", subject, 1)}
        for shared, layers in subject.stages:
            made[shared] = build("sigmanens auto", subject, MEMBERS, layers=layers or None)
        functions = {n: _call(c, what, x, y) for n, c in made.items()}
        timings = interleaved(functions, "one network", runs=options.runs, seconds=options.seconds)
        for shared, timing in timings.items():
            rows.append({"what": what, "batch": batch, "shared": shared} | asdict(timing))
    return rows


def _load(name: str, options: Any) -> list[dict[str, Any]]:
    """Threads × batch; each request on one thread of torch and of ONNX Runtime."""
    subject, rows = SUBJECTS[name], []
    with tempfile.TemporaryDirectory() as folder:
        predict = {c: served(c, subject, MEMBERS, Path(folder)) for c in SERVED}
        for batch in (1, 8):
            inputs = [subject.inputs(batch) for _ in range(DIFFERENT)]
            for threads in (1, 2, 8):
                found = under_load(predict, inputs, threads, 800 // batch, options.runs)
                head = {"batch": batch, "requests_at_once": threads}
                rows += [head | {"contestant": c} | numbers for c, numbers in found.items()]
    return rows


PARTS = {
    "train": _train,
    "predict": _predict,
    "onnx": _onnx,
    "load": _load,
    "dial": _dial,
    "costs": _costs,
    "memory": _memory,
    "compiled prediction": _compiled("predict"),
    "compiled training": _compiled("train"),
}

if __name__ == "__main__":
    sys.exit(main())
