"""Run one function on several arguments, side by side in worker processes or one by one here."""

from __future__ import annotations

import multiprocessing
import queue
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from sigmanens.errors import RunError

__all__ = ["run_jobs"]

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
        advance: told the cost of what is done.

    Returns:
        the results in the order of the arguments.

    Raises:
        what ``job`` raises, at once: the other workers are ended. RunError: if a worker was killed.
    """
    if workers == 1 or len(arguments) == 1:
        with _one_thread():
            return [job(argument, advance) for argument in arguments]
    context = multiprocessing.get_context("spawn")
    costs = context.Queue()
    others = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(min(workers, len(arguments)), context, _start_worker, (costs,))
    try:
        calls = [pool.submit(_call, job, argument) for argument in arguments]
        pending = set(calls)
        while pending:
            done, pending = wait(pending, timeout=0.2, return_when=FIRST_EXCEPTION)
            for call in done:
                call.result()  # raises what the worker raised
            for cost in _waiting(costs):
                advance(cost)
        pool.shutdown()  # the workers send what they have not yet sent
        for cost in _waiting(costs):
            advance(cost)
        return [call.result() for call in calls]
    except BrokenProcessPool as e:
        raise RunError(
            "a worker process ended before its work was done, for want of memory or because a "
            "script starts this outside of if __name__ == '__main__'. workers=1 needs no other "
            "process"
        ) from e
    except BaseException:
        for child in set(multiprocessing.active_children()) - others:
            child.terminate()  # nobody waits for the other results
        raise
    finally:
        pool.shutdown(cancel_futures=True)
        costs.close()


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _waiting(costs: Any) -> Iterator[float]:
    """What is in the queue by now."""
    while True:
        try:
            yield costs.get_nowait()
        except queue.Empty:
            return


_costs: Any = None
"""In a worker process: the queue for the costs of what is done."""


def _start_worker(costs: Any) -> None:
    global _costs
    _costs = costs
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process ends the workers
    warnings.simplefilter("ignore")  # what libraries tell each other was told in the main process
    torch.set_num_threads(1)


def _call(job: Callable[[A, Advance], R], argument: A) -> R:
    return job(argument, _costs.put)
