"""Time this tree against an older commit: two processes that take turns, ratios of CPU seconds.

python -m benchmarks.against d2f22af --out benchmarks/results/against-d2f22af.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

__all__ = ["operations"]

ROOT = Path(__file__).resolve().parent.parent
MEMBERS = 4


def operations(names: list[str] | None = None) -> dict[str, Callable[[], object]]:
    """What is timed, by name: first call, prediction, a training step, member by member."""
    import torch

    import sigmanens as sn
    from benchmarks.subjects import SUBJECTS

    found: dict[str, Callable[[], object]] = {}
    for name, subject in SUBJECTS.items():
        if names and name not in names:
            continue
        torch.manual_seed(0)
        base = subject.make()
        train = sn.convert(base, MEMBERS, init="normal").train()
        test = sn.convert(base, MEMBERS, init="normal").eval()
        loss = sn.EnsembleLoss(diversity=sn.Diversity(tau=0.5, weight=1e-3))
        size = subject.train_batches[0]
        x, y = subject.inputs(size), subject.labels(size)

        def call(ens: Any, x: Any) -> Any:
            result = ens(**x) if isinstance(x, dict) else ens(x)
            return getattr(result, "logits", result)

        def step(ens: Any = train, x: Any = x, y: Any = y, loss: Any = loss) -> None:
            loss(call(ens, x), y, ens).backward()
            ens.zero_grad()

        def memberwise(ens: Any = train, x: Any = x, y: Any = y, loss: Any = loss) -> None:
            ens.backward(x, y, loss)
            ens.zero_grad()

        def first(base: Any = base, x: Any = x) -> None:
            sn.convert(base, MEMBERS, init="normal").eval().predict(x)

        found[f"{name}: convert and first prediction"] = first
        found[f"{name}: training step, B={size}"] = step
        found[f"{name}: backward, B={size}"] = memberwise
        for batch in subject.predict_batches[:3]:
            held = subject.inputs(batch)
            found[f"{name}: predict, B={batch}"] = partial(test.predict, held)
    return found


def _serve(names: list[str] | None, seconds: float) -> None:
    """Answer each name on standard input with the CPU seconds of one call."""
    import torch

    torch.set_num_threads(1)
    found = operations(names)
    repeats: dict[str, int] = {}
    for name, function in found.items():  # warm up, and see how often fills a turn
        function()
        start = time.process_time()
        function()
        repeats[name] = max(1, round(seconds / max(time.process_time() - start, 1e-6)))
    print(json.dumps(list(found)), flush=True)
    for line in sys.stdin:
        function, count = found[line.strip()], repeats[line.strip()]
        start = time.process_time()
        for _ in range(count):
            function()
        print((time.process_time() - start) / count, flush=True)


def _worker(tree: Path, arguments: list[str]) -> subprocess.Popen[str]:
    path = os.pathsep.join([str(tree / "src"), str(ROOT)])
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "benchmarks.against", "--serve", *arguments],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    )  # fmt: skip


def _line(worker: subprocess.Popen[str], asked: str = "") -> str:
    """What a worker answers."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    if asked:
        print(asked, file=worker.stdin, flush=True)
    return worker.stdout.readline()


def main() -> None:
    """Read the command line, measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit", nargs="?", help="the older commit")
    parser.add_argument("--out", type=Path, help="JSON file of the ratios, new by old")
    parser.add_argument("--runs", type=int, default=9, help="turns")
    parser.add_argument("--seconds", type=float, default=0.5, help="of one turn of one operation")
    parser.add_argument("--subjects", nargs="*", help="networks; all by default")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        _serve(given.subjects, given.seconds)
        return
    arguments = ["--seconds", str(given.seconds)]
    arguments += ["--subjects", *given.subjects] if given.subjects else []
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder) / "old"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run([*git, "add", "--detach", str(old), given.commit], check=True)
        try:
            workers = {"new": _worker(ROOT, arguments), "old": _worker(old, arguments)}
            lists = {k: json.loads(_line(w)) for k, w in workers.items()}
            found = {}
            for name in lists["new"]:
                turns = []
                for _ in range(given.runs):
                    turns.append({k: float(_line(w, name)) for k, w in workers.items()})
                ratios = sorted(t["new"] / t["old"] for t in turns)
                found[name] = {
                    "ratio": median(ratios), "low": ratios[0], "high": ratios[-1],
                    "seconds": median(t["new"] for t in turns), "runs": given.runs,
                }  # fmt: skip
                print(f"{name:50} {median(ratios):.3f} [{ratios[0]:.3f}, {ratios[-1]:.3f}]")
            for worker in workers.values():
                worker.terminate()
        finally:
            subprocess.run([*git, "remove", "--force", str(old)], check=True)
    if given.out:
        text = json.dumps({"commit": given.commit, "threads": 1, "operations": found}, indent=1)
        given.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
