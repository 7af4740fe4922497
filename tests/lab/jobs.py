"""Jobs that a worker process can import."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import torch

from sigmanens.errors import DataError

Advance = Callable[[float], None]


def double(number: int, advance: Advance) -> tuple[int, int, int]:
    """Twice the number, the process, and its threads; a cost of 1 three times."""
    for _ in range(3):
        advance(1.0)
    return 2 * number, os.getpid(), torch.get_num_threads()


def refuse_two(number: int, advance: Advance) -> int:
    """Fails at once for 2, and takes very long for others."""
    if number == 2:
        raise DataError("two is not a number of this job")
    time.sleep(120)
    return number


def die(number: int, advance: Advance) -> int:
    """What the operating system does for want of memory."""
    os.kill(os.getpid(), signal.SIGKILL)
    return number
