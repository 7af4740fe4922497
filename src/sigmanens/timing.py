"""Which schedule is fastest on this machine: a measurement that the user asks for."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from torch import Tensor

from sigmanens.ensemble import SigmaEnsemble
from sigmanens.errors import InputError
from sigmanens.inputs import call_arguments
from sigmanens.objective import EnsembleLoss
from sigmanens.plan import check_schedule
from sigmanens.prediction import logits_of
from sigmanens.verify import evaluating

__all__ = ["measure_schedule"]


def measure_schedule(
    ensemble: SigmaEnsemble,
    x: Any,
    y: Tensor | None = None,
    loss_fn: EnsembleLoss | None = None,
    *,
    kwargs: Mapping[str, Any] | None = None,
    candidates: Sequence[str | int] | None = None,
    repeats: int = 3,
) -> dict[str | int, float]:
    """Measure schedules in turn on a batch, and set the ensemble's to the fastest.

    With labels a forward and backward pass are timed in the mode of the ensemble, without them a
    prediction. Parameters, gradients, buffers and random generators are left as they were; the
    choice is written into the report and stored in checkpoints. Call it under the autocast, and
    with the batch size, of the training.

    Args:
        ensemble: M members.
        x: a tensor, a tuple of positional or a mapping of keyword inputs, batch B.
        y: labels (B,) or soft labels (B, C), or None.
        loss_fn: the objective; cross-entropy without a penalty by default.
        kwargs: further keyword inputs of the network.
        candidates: schedules to compare; by default "folded", "sequential" and M // 2.
        repeats: timed runs of each, after one that is not.

    Returns:
        median seconds of each candidate; one that the network cannot be run by is left out.

    Raises:
        InputError: for an unknown candidate, none that runs, or repeats below 1.
    """
    if repeats < 1:
        raise InputError(f"repeats is {repeats!r}; expected a number ≥ 1")
    m = ensemble.num_members
    wanted = dict.fromkeys(candidates or ("folded", "sequential", *((m // 2,) if m > 3 else ())))
    for schedule in wanted:
        check_schedule(schedule, m)
    args, named = call_arguments(x)
    named = named | dict(kwargs or {})
    loss = EnsembleLoss() if loss_fn is None else loss_fn
    parameters = [p for p in ensemble.parameters() if p.requires_grad]

    def step() -> None:
        if y is None:
            with evaluating(ensemble):
                ensemble(*args, **named)
            return
        with torch.enable_grad():
            total = loss(logits_of(ensemble(*args, **named)), y, ensemble)
        torch.autograd.grad(total, parameters, allow_unused=True)

    before = ensemble.schedule
    seconds: dict[str | int, list[float]] = {}
    reasons: list[str] = []
    with _left_as_found(ensemble):
        for turn in range(repeats + 1):
            for schedule in list(wanted):
                try:
                    ensemble.schedule = schedule
                    taken = _timed(step, parameters)
                except InputError as e:
                    reasons.append(f"{schedule!r}: {e}")
                    del wanted[schedule]
                    continue
                finally:
                    ensemble.schedule = before
                if turn:
                    seconds.setdefault(schedule, []).append(taken)
    if not seconds:
        raise InputError(f"no schedule could be measured ({'; '.join(reasons)})")
    medians = {schedule: median(times) for schedule, times in seconds.items()}
    best = min(medians, key=lambda s: medians[s])
    ensemble.schedule = best
    what = "prediction" if y is None else "training"
    figures = ", ".join(f"{s} {t * 1e3:.1f} ms" for s, t in medians.items())
    ensemble.report.notes.append(f"schedule {best!r} measured fastest in {what}: {figures}")
    return medians


def _timed(step: Callable[[], None], parameters: Sequence[Tensor]) -> float:
    on_cuda = any(p.device.type == "cuda" for p in parameters)
    if on_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    if on_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


@contextmanager
def _left_as_found(ensemble: SigmaEnsemble) -> Iterator[None]:
    """Restore buffers and the generators of random numbers."""
    buffers = [(b, b.clone()) for b in ensemble.buffers()]
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
