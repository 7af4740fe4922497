"""Paired differences: an estimate, its 95 % interval, and which of many survive Holm's correction.

Several seeds: Student's t over the differences seed by seed. One seed: the bootstrap over the same
samples. A difference is settled where its interval leaves out 0.

    gap = seed_difference(ours, theirs)      # one number a seed each
    print(gap.value, gap.low, gap.high, gap.sign)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from sigmanens.errors import InputError, NonFiniteError

__all__ = [
    "Difference",
    "holm",
    "resampled_means",
    "sample_difference",
    "seed_difference",
    "student_p",
    "student_quantile",
]

_ROUNDING = 1e-6
"""Differences no larger than this are rounding: never settled."""
_SLICE_ELEMENTS = 2**22


@dataclass(frozen=True)
class Difference:
    """A mean paired difference with its confidence interval.

    Attributes:
        value: the estimate, in the unit of what was compared.
        low, high: ends of the interval.
        p: chance of so large a difference, either way, if there is none.
        n: number of pairs: seeds or samples.
        basis: "seeds" or "samples".
        level: nominal coverage.
    """

    value: float
    low: float
    high: float
    p: float
    n: int
    basis: Literal["seeds", "samples"]
    level: float = 0.95

    @property
    def sign(self) -> int:
        """+1 or -1 where the interval leaves out 0, else 0."""
        return int(self.low > _ROUNDING) - int(self.high < -_ROUNDING)

    @property
    def half_width(self) -> float:
        """Half the interval: a smaller true difference would mostly have gone unseen."""
        return (self.high - self.low) / 2


def seed_difference(a: Sequence[float], b: Sequence[float], level: float = 0.95) -> Difference:
    """Mean of a − b over paired seeds, with Student's interval.

        d̄ ± t_{(1+level)/2, S−1} · sd(d)/√S,   d_s = a_s − b_s

    Args:
        a, b: one number a seed (S,), S ≥ 2, in the same order of seeds.
        level: nominal coverage, in (0, 1).

    Raises:
        InputError: for fewer than two pairs, or lists of different lengths.
        NonFiniteError: for a value that is not finite.
    """
    if len(a) != len(b) or len(a) < 2:
        raise InputError(
            f"a and b hold {len(a)} and {len(b)} seeds; expected the same number, at least 2: "
            "compare a single seed with sample_difference"
        )
    gaps = [float(x) - float(y) for x, y in zip(a, b, strict=True)]
    if not all(math.isfinite(gap) for gap in gaps):
        raise NonFiniteError(f"the differences by seed are {gaps}; expected finite numbers")
    n = len(gaps)
    mean = math.fsum(gaps) / n
    error = math.sqrt(math.fsum((gap - mean) ** 2 for gap in gaps) / (n - 1) / n)
    half = student_quantile((1 + level) / 2, n - 1) * error
    p = student_p(mean / error, n - 1) if error > 0 else float(mean == 0)
    return Difference(mean, mean - half, mean + half, p, n, "seeds", level)


def resampled_means(
    values: Tensor,
    groups: Tensor | None = None,
    resamples: int = 10_000,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Bootstrap means (R, K) of K columns of values, every column on the same draws.

    As all columns share a draw, the differences of any two of them are paired.

    Args:
        values: one row a sample (n, K), for example −log p of K methods, nats.
        groups: which samples were made from the same example (n,), integers: they are drawn
            together. None: each stands for itself.
        resamples: number of draws R.
        generator: CPU source of the draws; None takes a fresh one of seed 0.

    Raises:
        InputError: for fewer than two samples or groups.
    """
    values = values.double().cpu()
    sums, counts = values, torch.ones(len(values), dtype=torch.float64)
    if groups is not None:
        found, index = groups.cpu().unique(return_inverse=True)
        sums = torch.zeros(len(found), values.shape[1], dtype=torch.float64)
        sums.index_add_(0, index, values)
        counts = torch.bincount(index).double()
    n = len(counts)
    if n < 2:
        raise InputError(f"{n} samples were given; expected at least 2 to draw from")
    generator = generator or torch.Generator().manual_seed(0)
    size = max(1, _SLICE_ELEMENTS // n)
    means = []
    for start in range(0, resamples, size):
        rows = min(size, resamples - start)
        drawn = torch.randint(n, (rows, n), generator=generator)
        drawn += torch.arange(rows)[:, None] * n
        times = torch.bincount(drawn.flatten(), minlength=rows * n).view(rows, n).double()
        means.append(times @ sums / (times @ counts)[:, None])
    return torch.cat(means)


def sample_difference(value: float, draws: Tensor, n: int, level: float = 0.95) -> Difference:
    """A difference on the same samples of one seed, from its bootstrap draws.

    The interval is that of percentiles; p = 2 (1 + min(#draws ≤ 0, #draws ≥ 0)) / (R + 1).

    Args:
        value: the difference on all samples.
        draws: the difference on every resample (R,), such as ``means[:, a] - means[:, b]`` of
            :func:`resampled_means`.
        n: number of samples.
        level: nominal coverage, in (0, 1).

    Raises:
        NonFiniteError: for a value or a draw that is not finite.
    """
    if not math.isfinite(value) or not bool(torch.isfinite(draws).all()):
        raise NonFiniteError(f"the difference is {value}, or NaN on a resample; no interval exists")
    tails = torch.tensor([(1 - level) / 2, (1 + level) / 2], dtype=draws.dtype)
    low, high = torch.quantile(draws, tails).tolist()
    rare = min(int((draws <= 0).sum()), int((draws >= 0).sum()))
    p = min(1.0, 2 * (1 + rare) / (len(draws) + 1))
    return Difference(value, low, high, p, n, "samples", level)


def holm(p: Sequence[float], level: float = 0.05) -> list[bool]:
    """Which of several differences stay settled when all of them are looked at together.

    Holm's step-down procedure: the k-th smallest of m values of p is compared with
    level / (m − k + 1), until one is larger. The chance of any false alarm is then ≤ ``level``.

    Args:
        p: one value a comparison.
        level: chance of a false alarm among all of them.
    """
    kept = [False] * len(p)
    for done, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        if p[i] > level / (len(p) - done):
            break
        kept[i] = True
    return kept


def student_p(t: float, df: int) -> float:
    """Two-sided p of Student's t with ``df`` degrees of freedom, an integer (closed form).

    Abramowitz and Stegun 26.7.3 and 26.7.4.
    """
    angle = math.atan(abs(t) / math.sqrt(df))
    cosine, sine = math.cos(angle), math.sin(angle)
    odd = df % 2
    term = cosine if odd else 1.0
    total = term if df > 1 else 0.0
    for k in range(2 + odd, df - 1, 2):
        term *= (k - 1) / k * cosine**2
        total += term
    inside = 2 / math.pi * (angle + sine * total) if odd else sine * total
    return min(1.0, max(0.0, 1 - inside))


@lru_cache(maxsize=256)
def student_quantile(share: float, df: int) -> float:
    """The t below which ``share`` of Student's distribution lies, ``share`` in [0.5, 1).

    Raises:
        InputError: for another share, or ``df`` below 1.
    """
    if not 0.5 <= share < 1 or df < 1:
        raise InputError(f"share is {share} and df {df}; expected 0.5 to 1, and at least 1")
    tail, high = 2 * (1 - share), 1.0
    while student_p(high, df) > tail:
        high *= 2
    low = 0.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if student_p(middle, df) > tail else (low, middle)
    return high
