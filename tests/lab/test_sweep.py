"""The sweep: its grid, and its trainings on a Ray cluster."""

from __future__ import annotations

import copy
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning")
pytest.importorskip("sklearn")

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.lab.test_bench import TINY, without_times

from sigmanens.errors import ConfigError, RunError
from sigmanens.lab.bench.grid import geometric
from sigmanens.lab.bench.runner import run_bench
from sigmanens.lab.cli import main
from sigmanens.lab.runs import read_config, read_metrics


def test_a_range_is_a_geometric_grid() -> None:
    assert geometric("0.1:10:3") == [0.1, 1.0, 10.0]
    assert geometric("0.05:4:2") == [0.05, 4.0]


@settings(max_examples=50, deadline=None)
@given(
    st.floats(0.01, 1.0), st.floats(1.5, 100.0), st.integers(2, 12)
)  # ratios that three digits can tell apart
def test_a_grid_has_equal_ratios(low: float, ratio: float, count: int) -> None:
    values = geometric(f"{low!r}:{low * ratio!r}:{count}")
    assert len(values) == count
    step = ratio ** (1 / (count - 1))
    for a, b in itertools.pairwise(values):
        assert b / a == pytest.approx(step, rel=0.015)


@pytest.mark.parametrize("text", ["", "1", "0:1:3", "1:0.5:3", "0.1:1:1", "a:b:c", "1:1.0001:5"])
def test_ranges_that_are_none_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match="range of τ"):
        geometric(text)


def test_the_command_line_sweeps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    arguments = ["sweep", "--preset", "digits", "--out", str(out), "--tau_range", "0.1:2:2",
                 "--references", "[]", "--seeds", "[0]", "--recipe.epochs", "1", "--workers", "1",
                 "--model.options", "{width: 4}"]  # fmt: skip
    assert main(arguments) == 0
    assert "σN-Ens τ=0.1" in capsys.readouterr().out
    assert read_config(out)["taus"] == [0.1, 2.0]
    assert read_metrics(out)["choice"]["criterion"] == "validation nll_calibrated"
    assert main(["report", str(out), "--out", str(tmp_path / "again.html")]) == 0
    assert "<!DOCTYPE html>" in (tmp_path / "again.html").read_text(encoding="utf-8")
    assert main(["report", str(out), "--out", str(tmp_path / "again.html")]) == 1
    assert main(["report", str(tmp_path / "none")]) == 1


def workers_of_ray() -> list[int]:
    """Processes of this machine that train a trial for Ray."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            title = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if title.startswith(b"ray::_on_worker"):
            found.append(int(folder.name))
    return found


SWEEP = """
import sys
from sigmanens.lab.bench.cluster import ray_execute
from sigmanens.lab.bench.config import BenchConfig
from sigmanens.lab.bench.runner import run_bench
from sigmanens.lab.runs import read_config
from pathlib import Path
import json
config = BenchConfig.from_dict(json.loads(sys.argv[1]))
run_bench(config, Path(sys.argv[2]), execute=ray_execute(None, 2))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/cmdline").exists(), reason="needs /proc to find workers")
def test_a_worker_of_the_cluster_is_killed_and_the_numbers_are_the_same(tmp_path: Path) -> None:
    """Two workers of a real local cluster; one dies by SIGKILL in the middle of the sweep."""
    pytest.importorskip("ray")
    import json

    config = replace(
        TINY, methods=["sigmanens"], taus=[0.5, 1.0, 2.0], seeds=[0],
        recipe=replace(TINY.recipe, epochs=12),
    )  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0"}
    environment.pop("RAY_ADDRESS", None)
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SWEEP, json.dumps(config.to_dict()),
         str(tmp_path / "ray")],
        env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        limit = time.monotonic() + 540
        killed: set[int] = set()
        while process.poll() is None and time.monotonic() < limit:
            begun = list((tmp_path / "ray").glob("trials/*/training/network/last.ckpt"))
            if begun and not killed:
                victim = workers_of_ray()[:1]
                for pid in victim:
                    os.kill(pid, signal.SIGKILL)
                    killed.add(pid)
            time.sleep(0.05)
        if process.poll() is None:
            process.kill()
        error = process.communicate()[1]
    assert process.returncode == 0, error[-2000:]
    assert killed, "no worker was found to kill"
    there = read_metrics(tmp_path / "ray")
    here = run_bench(config, tmp_path / "here")
    assert there["failures"] == {}
    assert without_times(copy.deepcopy(there)) == without_times(here)


def test_failures_on_the_cluster_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """What Ray raises for a worker that keeps dying becomes the training's error."""
    from types import SimpleNamespace

    from sigmanens.lab.bench import cluster
    from sigmanens.lab.bench.trials import Trial

    class RayError(Exception):
        pass

    class Task:
        def remote(self, job: Any, place: str) -> Any:
            return job[1].tau

    def get(reference: float) -> str:
        if reference == 2.0:
            raise RayError("the worker\ndied")
        return ""

    ray = SimpleNamespace(
        remote=lambda **options: lambda function: Task(),
        wait=lambda pending, timeout: (pending[:1], pending[1:]),
        get=get,
        exceptions=SimpleNamespace(RayError=RayError),
    )
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        jobs = [
            (TINY.to_dict(), Trial(0, "sigmanens", 2, tau), f"{folder}/{tau}") for tau in (0.5, 2.0)
        ]
        told: list[float] = []
        assert cluster._collect(ray, jobs, told.append) == ["", "its worker died: the worker died"]
        assert (Path(folder) / "2.0" / "error.txt").exists()
        assert sum(told) == 2 * 2 * TINY.recipe.epochs


def test_without_ray_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from sigmanens.lab.bench.cluster import ray_execute

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RunError, match=r"sigmanens\[ray\]"):
        ray_execute()
