"""Run one function on several arguments, side by side in worker processes or one by one here."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import joblib
import torch
from joblib.externals.loky import get_reusable_executor
from joblib.externals.loky.process_executor import TerminatedWorkerError

from sigmanens.errors import RunError

A = TypeVar("A")
R = TypeVar("R")
Advance = Callable[[float], None]
"""Told the cost of each step of a job as it is done."""


def run_jobs(
    job: Callable[[A, Advance], R], arguments: Sequence[A], workers: int, advance: Advance
) -> list[R]:
    """Call ``job(argument, advance)`` for every argument, each with one CPU thread.

    Args:
        job: a function of a module, so that a worker process can import it; its arguments and
            results are pickled.
        arguments: one per call.
        workers: number of processes; with 1, or one argument, all calls run in this process.
        advance: told the cost of what is done; of a job in another process when it has ended.

    Returns:
        the results in the order of the arguments.

    Raises:
        what ``job`` raises, at once: the other workers are ended. RunError: if a worker was killed.
    """
    if workers == 1 or len(arguments) == 1:
        with _one_thread():
            return [job(argument, advance) for argument in arguments]
    calls = (joblib.delayed(_call)(job, argument) for argument in arguments)
    side_by_side = joblib.Parallel(min(workers, len(arguments)), return_as="generator")
    results: list[R] = []
    try:
        for result, cost in side_by_side(calls):
            results.append(result)
            advance(cost)
    except TerminatedWorkerError as e:
        raise RunError(
            "a worker process ended before its work was done, for want of memory or because a "
            "script starts this outside of if __name__ == '__main__'. workers=1 needs no other "
            "process"
        ) from e
    finally:
        get_reusable_executor(reuse=True).shutdown(kill_workers=True)
    return results


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _call(job: Callable[[A, Advance], R], argument: A) -> tuple[R, float]:
    """In a worker process: the result, and what it cost."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends the workers
    warnings.simplefilter("ignore")  # what libraries tell each other was told in the main process
    torch.set_num_threads(1)
    costs: list[float] = []
    result = job(argument, costs.append)
    return result, sum(costs)
