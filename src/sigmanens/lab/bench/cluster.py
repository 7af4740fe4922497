"""Trainings of a study on a Ray cluster instead of in processes of this machine."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sigmanens.errors import RunError
from sigmanens.lab.bench.runner import Execute, Job, run_trial

_RETRIES = 3
"""How often a training whose worker died is begun again, at its last finished epoch."""


def ray_execute(address: str | None = None, cpus: int | None = None) -> Execute:
    """How :func:`~sigmanens.lab.bench.runner.run_bench` runs its trainings on Ray.

    Each training is one task with one CPU. Its folder has to be on a file system that all nodes
    share, at the same place, and so have ``data_root`` and other files that the configuration names
    (relative paths start at the current folder). A task whose worker dies is started again and
    finds the state of its last finished epoch; after three such deaths it counts as failed.

    Args:
        address: of a running cluster, such as "auto" or "ray://host:10001"; None: a cluster of this
            machine's cores, for as long as the study takes. A connection that exists is used.
        cpus: number of CPUs of the cluster that is started under None; by default all.

    Raises:
        RunError: when called, if Ray is not installed; when run, if no cluster is reached.
    """
    try:
        import ray
    except ImportError as e:
        raise RunError(
            "--ray needs Ray, which is not installed: pip install 'sigmanens[ray]'"
        ) from e

    def execute(jobs: list[Job], advance: Callable[[float], None]) -> list[str]:
        own = not ray.is_initialized()
        if own:
            _connect(ray, address, cpus)
        try:
            return _collect(ray, jobs, advance)
        finally:
            if own:
                ray.shutdown()

    return execute


def _connect(ray: Any, address: str | None, cpus: int | None) -> None:
    # With RAY_ADDRESS set, Ray joins that cluster under None as well.
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None and not os.environ.get("RAY_ADDRESS"):
        settings |= {"num_cpus": cpus, "include_dashboard": False}
    else:
        settings["address"] = address
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # Ray's about its own next release
            ray.init(**settings)
    except (ConnectionError, RuntimeError, ValueError) as e:
        raise RunError(f"no Ray cluster was reached at {address or 'this machine'}: {e}") from e


def _collect(ray: Any, jobs: list[Job], advance: Callable[[float], None]) -> list[str]:
    """Results in the order of the jobs, whatever order they end in."""
    task = ray.remote(num_cpus=1, max_retries=_RETRIES)(_on_worker)
    pending = {task.remote(job, os.getcwd()): i for i, job in enumerate(jobs)}
    errors = [""] * len(jobs)
    while pending:
        done, _ = ray.wait(list(pending), timeout=1.0)
        for reference in done:
            i = pending.pop(reference)
            plain, trial, folder = jobs[i]
            try:
                errors[i] = ray.get(reference)
            except ray.exceptions.RayError as e:
                errors[i] = f"its worker died: {' '.join(str(e).split())[:300]}"
                Path(folder).mkdir(parents=True, exist_ok=True)
                (Path(folder) / "error.txt").write_text(errors[i] + "\n", encoding="utf-8")
            advance(float(trial.members * plain["recipe"]["epochs"]))
    return errors


def _on_worker(job: Job, place: str) -> str:
    """One training in a worker of the cluster; relative paths start where the study was started."""
    import torch

    if os.path.isdir(place):
        os.chdir(place)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return run_trial(job, lambda cost: None)
