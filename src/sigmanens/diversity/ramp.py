r"""When the penalty acts: not at first, then more and more, so that the backbone can learn first.

.. math:: \mathrm{strength}(t) = \min\!\big(1, \max(0, (t - \mathrm{start}) / \mathrm{ramp})\big)

and a step from 0 to 1 at ``start`` where ``ramp`` is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

from sigmanens.diversity.theory import is_number
from sigmanens.errors import DiversityError

__all__ = ["Ramp", "check_total"]


@dataclass(frozen=True)
class Ramp:
    """Strength of the penalty by step: 0 before ``start``, then rising to 1 for ``ramp``.

    Args:
        start: an int counts optimizer steps, a float is a share of the training (0 … 1).
        ramp: likewise.

    Raises:
        DiversityError: for anything else.
    """

    start: int | float = 0
    ramp: int | float = 0

    def __post_init__(self) -> None:
        for name in ("start", "ramp"):
            value = getattr(self, name)
            counts = isinstance(value, Integral) and int(value) >= 0
            share = not isinstance(value, Integral) and is_number(value) and 0 <= value <= 1
            if isinstance(value, bool) or not (counts or share):
                raise DiversityError(
                    f"{name} is {value!r}; expected steps as an int ≥ 0, or a share of the "
                    "training as a float from 0.0 to 1.0"
                )
            object.__setattr__(self, name, int(value) if counts else float(value))

    def __bool__(self) -> bool:
        return self.start > 0 or self.ramp > 0

    def strength(self, step: int, total_steps: int | None) -> float:
        """Factor on the weight, 0 … 1, after ``step`` optimizer steps.

        Raises:
            DiversityError: if a share is to be taken of an unknown number of steps (after step 0,
                where the strength is 0 in any case).
        """
        if step == 0 and self:
            return 0.0
        start = self._steps("start", total_steps)
        ramp = self._steps("ramp", total_steps)
        if step < start:
            return 0.0
        return 1.0 if ramp == 0 else min(1.0, (step - start) / ramp)

    def _steps(self, name: str, total_steps: int | None) -> float:
        value: int | float = getattr(self, name)
        if isinstance(value, int) or value == 0:
            return value
        if total_steps is None:
            raise DiversityError(
                f"{name}={value!r} is a share of the training, whose length is unknown. Give "
                f"Diversity(total_steps=…), set diversity.total_steps, or give {name} in steps "
                "as an int"
            )
        return value * total_steps


def check_total(total_steps: int | None) -> int | None:
    """``total_steps`` as an int ≥ 1, or None; DiversityError for anything else."""
    if total_steps is None:
        return None
    counts = isinstance(total_steps, Integral) and not isinstance(total_steps, bool)
    if not counts or int(total_steps) < 1:
        raise DiversityError(
            f"total_steps is {total_steps!r}; expected the optimizer steps of the training, an int "
            "≥ 1, or None"
        )
    return int(total_steps)
