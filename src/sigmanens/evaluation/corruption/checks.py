"""Arguments that pictures, texts and files share."""

from __future__ import annotations

from collections.abc import Iterable
from numbers import Integral
from operator import index
from typing import Any

from sigmanens.errors import InputError

SEVERITIES = (1, 2, 3, 4, 5)


def check_severity(severity: Any) -> None:
    """Raise :class:`~sigmanens.errors.InputError` unless ``severity`` is an integer of 1 to 5."""
    whole = isinstance(severity, Integral) and not isinstance(severity, bool)
    if not whole or severity not in SEVERITIES:
        raise InputError(f"severity is {severity!r}; expected 1, 2, 3, 4 or 5")


def check_seed(seed: Any) -> None:
    """Raise :class:`~sigmanens.errors.InputError` unless ``seed`` is an integer of 0 or more."""
    if not isinstance(seed, Integral) or seed < 0:
        raise InputError(f"seed is {seed!r}; expected an integer of 0 or more")


def sample_numbers(indices: Iterable[int] | None, count: int, what: str) -> list[int]:
    """The number of each of ``count`` samples in its set: ``indices``, or 0 … count − 1."""
    if indices is None:
        return list(range(count))
    try:
        numbers = [index(number) for number in indices]
    except TypeError as e:
        raise InputError(f"indices must be several integers: {e}") from e
    if len(numbers) != count:
        raise InputError(f"{len(numbers)} indices for {count} {what}; expected one for each")
    if numbers and min(numbers) < 0:
        raise InputError(f"an index is {min(numbers)}; expected 0 or more")
    return numbers
