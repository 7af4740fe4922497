"""Selective prediction, slowly: scipy's binomial distribution, one threshold after the other."""

from __future__ import annotations

from collections.abc import Sequence

from scipy.stats import beta, binom


def threshold(
    confidence: Sequence[float],
    correct: Sequence[bool],
    risk: float,
    others: Sequence[float],
    delta: float,
) -> tuple[float | None, float]:
    """The lowest threshold that the fallback procedure passes, and the least risk it could."""
    ordered = sorted(others, reverse=True)
    found, level, bounds = None, 0.0, []
    for percent in range(1, 101):
        t = ordered[-(-percent * len(ordered) // 100) - 1]
        answered = [ok for c, ok in zip(confidence, correct, strict=True) if c >= t]
        n, k = len(answered), sum(not ok for ok in answered)
        share = {13: delta / 4, 25: delta / 4, 50: delta / 4, 75: delta / 4}.get(percent, 0.0)
        if share:
            bounds.append(1.0 if k == n else beta.ppf(1 - share, k + 1, n - k))
        level += share
        if level > 0 and binom.cdf(k, n, risk) <= level:
            found = t
        else:
            level = 0.0
    return found, min(bounds)
