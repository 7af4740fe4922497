"""Interleaved timing: every contestant in turn, ratios within a turn, medians over turns."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch

__all__ = ["Timing", "interleaved"]


@dataclass(frozen=True)
class Timing:
    """What was measured of one contestant.

    Attributes:
        seconds: median over the turns; None if it failed.
        ratio: median over the turns of its seconds by those of the reference in the same turn.
        spread: smallest and largest of these ratios.
        runs: number of turns.
        error: why it failed.
    """

    seconds: float | None
    ratio: float | None
    spread: tuple[float, float] | None
    runs: int
    error: str | None = None


def interleaved(
    functions: Mapping[str, Callable[[], object]],
    reference: str,
    *,
    runs: int = 5,
    seconds: float = 20.0,
) -> dict[str, Timing]:
    """Time functions in turn.

    Args:
        functions: what to call, by name.
        reference: the name of what the others are compared with; must not fail.
        runs: turns, after one that is not counted; at least 2 are made.
        seconds: no new turn is begun after this many in total.

    Seconds are CPU seconds of this process where it has one thread, which waiting for other
    programs does not enter; wall seconds with several.
    """
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    taken: dict[str, list[float]] = {name: [] for name in functions}
    errors: dict[str, str] = {}
    begin = clock()
    for turn in range(runs + 1):
        if turn > 2 and clock() - begin > seconds:
            break
        for name, function in functions.items():
            if name in errors:
                continue
            start = clock()
            try:
                function()
            except Exception as e:
                if name == reference:
                    raise
                errors[name] = f"{type(e).__name__}: {' '.join(str(e).split())[:160]}"
                continue
            if turn:
                taken[name].append(clock() - start)
    found = {}
    for name, times in taken.items():
        if name in errors:
            found[name] = Timing(None, None, None, 0, errors[name])
            continue
        ratios = [t / r for t, r in zip(times, taken[reference], strict=True)]
        spread = (min(ratios), max(ratios))
        found[name] = Timing(median(times), median(ratios), spread, len(times))
    return found
