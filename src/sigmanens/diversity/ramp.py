"""A weight that starts late and rises, so that the backbone can learn first."""

from __future__ import annotations

from dataclasses import dataclass

from sigmanens.diversity.theory import is_number
from sigmanens.errors import DiversityError


@dataclass(frozen=True)
class Ramp:
    r"""A function of the training's progress: 0 until ``start``, then a line up to ``value``.

    .. math:: f(p) = \mathrm{value} \cdot \min\big(1, \max(0, (p - \mathrm{start}) /
              \mathrm{length})\big)

    With ``length`` 0 it jumps to ``value`` at ``start``, 0 to 1.

        >>> weight = Ramp(0.01, start=0.25, length=0.5)
        >>> [weight(p) for p in (0.0, 0.25, 0.5, 0.75, 1.0)]
        [0.0, 0.0, 0.005, 0.01, 0.01]

    Raises:
        DiversityError: if ``value`` is no number, or a share lies outside 0 to 1.
    """

    value: float
    start: float = 0.0
    length: float = 0.0

    def __post_init__(self) -> None:
        if not is_number(self.value):
            raise DiversityError(f"value of the ramp is {self.value!r}; expected a number")
        for name in ("start", "length"):
            share = getattr(self, name)
            if not is_number(share) or not 0 <= share <= 1:
                raise DiversityError(
                    f"{name} of the ramp is {share!r}; expected a share of the training from 0 "
                    "to 1: steps / total steps"
                )

    def __call__(self, progress: float) -> float:
        """The number at a progress of 0 to 1."""
        if progress < self.start:
            return 0.0
        if self.length == 0:
            return float(self.value)
        return self.value * min(1.0, (progress - self.start) / self.length)
