"""How many separate networks a method is worth."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import fmean, variance
from typing import Any, Literal

from sigmanens.errors import InputError

Numbers = float | Sequence[float]


@dataclass(frozen=True)
class Equivalent:
    """A number of separate networks, as far as the measured curve reaches.

    Attributes:
        value: the number of networks, between the smallest and the largest measured.
        relation: ``"="``; ``"<"`` if the method is worse than the smallest deep ensemble measured,
            ``">"`` if it is better than every one measured. ``value`` is then that end.
        low: lower end by the spread over seeds; None if every point has one seed only.
        high: upper end, likewise. An end equal to the smallest or largest measured number may lie
            beyond it.
        smallest: smallest number of networks measured.
        largest: largest number of networks measured.
    """

    value: float
    relation: Literal["<", "=", ">"]
    low: float | None
    high: float | None
    smallest: int
    largest: int

    def __str__(self) -> str:
        sign = "" if self.relation == "=" else f"{self.relation} "
        spread = "" if self.low == self.high else f" ({self.low:.1f} to {self.high:.1f})"
        return f"{sign}{self.value:.1f}{spread}"

    def to_dict(self) -> dict[str, Any]:
        """A dict that ``json`` can write."""
        return asdict(self)


def deep_ensemble_equivalent(nll_calibrated: Numbers, curve: Mapping[int, Numbers]) -> Equivalent:
    """Smallest number of separate networks whose calibrated NLL is as low (arXiv 2002.06470).

    Between measured numbers k of networks the NLL is interpolated linearly in k; beyond them
    nothing is extrapolated, and the result says so in ``relation``. Where the measured curve rises
    by chance, its first crossing counts.

    With several seeds all values are means, and the ends are those of the curve moved by s_k
    towards and away from the method, s_k² the sum of the variances over seeds of the curve at k and
    of the method (a variance of one seed counts as 0).

    Args:
        nll_calibrated: NLL of the method after temperature scaling in nats, one number per seed.
        curve: number of networks k ≥ 1 → NLL of that deep ensemble, calibrated in the same way on
            the same samples, one number per seed.

    Raises:
        InputError: an empty curve, a k that is no integer ≥ 1, or an NLL that is not finite.
    """
    method = _numbers(nll_calibrated, "nll_calibrated")
    if not curve:
        raise InputError("the curve is empty; expected the NLL of one network at least, {1: …}")
    for k in curve:
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise InputError(
                f"the curve has a key {k!r}; expected numbers of networks, integers ≥ 1"
            )
    seeds = {k: _numbers(curve[k], f"the curve at {k}") for k in sorted(curve)}
    points = {k: fmean(v) for k, v in seeds.items()}
    target = fmean(method)
    value, relation = _crossing(points, target)
    low = high = None
    if any(len(v) > 1 for v in (method, *seeds.values())):
        spread = {k: math.sqrt(_variance(v) + _variance(method)) for k, v in seeds.items()}
        low = _crossing({k: nll - spread[k] for k, nll in points.items()}, target)[0]
        high = _crossing({k: nll + spread[k] for k, nll in points.items()}, target)[0]
    return Equivalent(value, relation, low, high, min(seeds), max(seeds))


def _crossing(points: Mapping[int, float], target: float) -> tuple[float, Literal["<", "=", ">"]]:
    """The first k at which the interpolated curve is not above the target."""
    numbers = list(points)
    if target > points[numbers[0]]:
        return float(numbers[0]), "<"
    if target == points[numbers[0]]:
        return float(numbers[0]), "="
    for left, right in pairwise(numbers):
        if points[right] <= target:
            share = (points[left] - target) / (points[left] - points[right])
            return left + share * (right - left), "="
    return float(numbers[-1]), ">"


def _variance(values: Sequence[float]) -> float:
    return variance(values) if len(values) > 1 else 0.0


def _numbers(values: Numbers, name: str) -> list[float]:
    found = [float(values)] if isinstance(values, (int, float)) else [float(v) for v in values]
    if not found or not all(math.isfinite(v) for v in found):
        raise InputError(f"{name} is {values!r}; expected finite NLLs in nats, one or more")
    return found
