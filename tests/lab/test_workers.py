"""Jobs side by side: results in order, errors at once, nothing left behind."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time

import pytest
import torch
from tests.lab.jobs import die, double, refuse_two

from sigmanens.errors import DataError, RunError
from sigmanens.lab.workers import run_jobs


@pytest.mark.parametrize(("numbers", "workers"), [([1, 2, 3], 1), ([7], 4)])
def test_jobs_in_this_process(numbers: list[int], workers: int) -> None:
    costs: list[float] = []
    torch.set_num_threads(2)
    done = run_jobs(double, numbers, workers, costs.append)
    assert done == [(2 * n, os.getpid(), 1) for n in numbers]
    assert sum(costs) == 3 * len(numbers)
    assert torch.get_num_threads() == 2


def test_jobs_in_worker_processes() -> None:
    costs: list[float] = []
    done = run_jobs(double, [1, 2, 3], 2, costs.append)
    assert [result for result, _, _ in done] == [2, 4, 6]
    assert os.getpid() not in {process for _, process, _ in done}
    assert {threads for _, _, threads in done} == {1}
    assert costs == [3.0] * 3
    assert multiprocessing.active_children() == []


def test_an_error_of_a_worker_comes_at_once() -> None:
    begin = time.monotonic()
    with pytest.raises(DataError, match="two is not a number"):
        run_jobs(refuse_two, [1, 2, 3, 4], 2, lambda cost: None)
    assert time.monotonic() - begin < 60
    assert multiprocessing.active_children() == []


def test_an_error_in_this_process_leaves_the_threads() -> None:
    torch.set_num_threads(2)
    with pytest.raises(DataError, match="two is not a number"):
        run_jobs(refuse_two, [2, 1], 1, lambda cost: None)
    assert torch.get_num_threads() == 2


def test_a_worker_that_is_killed_is_named() -> None:
    with pytest.raises(RunError, match=r"a worker process ended before.*workers=1"):
        run_jobs(die, [1, 2], 2, lambda cost: None)
    assert multiprocessing.active_children() == []


def test_ctrl_c_ends_the_workers() -> None:
    timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    begin = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            run_jobs(refuse_two, [1, 3], 2, lambda cost: None)
    finally:
        timer.join()
    assert time.monotonic() - begin < 60
    assert multiprocessing.active_children() == []
