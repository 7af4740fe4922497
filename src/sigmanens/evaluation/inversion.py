"""Interval of a binned calibration error by inverting a test: valid near 0, where resampling fails.

Candidate models have the gaps of all cells (a bin, or a bin of one class) scaled by κ ≥ 0. For a
candidate, outcomes are drawn anew and the error is estimated from them as it was from the data; the
interval holds the true errors of the candidates among whose estimates the observed one is no
outlier. Described in full at :func:`sigmanens.evaluation.intervals.ece_interval`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sigmanens.evaluation import metrics

_HALVINGS = 10  # of the range of κ: its ends are found to a thousandth


@dataclass(frozen=True)
class Cells:
    """What a calibration error is made of.

    Attributes:
        count: samples in each cell that holds any: (b,), float64.
        forecast: mean forecast probability of each: (b,).
        outcome: how often the forecast event came true in each: (b,).
        total: Σ count, or C times the samples for a mean over C classes.
        squared: the error is √(Σ (count/total) gap²) rather than Σ (count/total) |gap|.
    """

    count: Tensor
    forecast: Tensor
    outcome: Tensor
    total: int
    squared: bool = False

    def error(self, gap: Tensor) -> float:
        """True error of a model with these gaps (b,)."""
        total = (self.count * (gap.square() if self.squared else gap.abs())).sum() / self.total
        return (total.sqrt() if self.squared else total).item()

    def estimate(self, outcome: Tensor) -> Tensor:
        """Estimate from drawn outcomes (…, b); under ``squared`` debiased, and not rooted."""
        gap = self.forecast - outcome
        if not self.squared:
            return (self.count * gap.abs()).sum(-1) / self.total
        variance = outcome * (1 - outcome) / (self.count - 1)
        return (self.count * (gap.square() - variance)).sum(-1) / self.total


def cells(log_probs: Any, labels: Any, metric: Any, bins: int, scheme: metrics.Scheme) -> Cells:
    """Cells of ``ece``, ``adaptive_ece``, ``ece_debiased`` or ``classwise_ece``."""
    if metric is metrics.classwise_ece:
        count, forecast, outcome = (
            x.flatten() for x in metrics.class_bins(log_probs, labels, bins)
        )
        total = int(count.sum())
    else:
        table = metrics.reliability(log_probs, labels, bins, scheme)
        count = torch.tensor(table.count, dtype=torch.float64)
        means = [[x or 0.0 for x in row] for row in (table.confidence, table.accuracy)]
        forecast, outcome = torch.tensor(means, dtype=torch.float64) * count
        total = table.n
    squared = metric is metrics.ece_debiased
    kept = count > squared  # one sample has no variance
    count, forecast, outcome = count[kept], forecast[kept], outcome[kept]
    return Cells(count, forecast / count, outcome / count, total, squared)


def inverted_ends(
    cells: Cells, resamples: int, level: float, generator: torch.Generator
) -> tuple[float, float]:
    """Ends of the interval of the true error at this level."""
    observed = cells.estimate(cells.outcome).item()
    value = max(observed, 0.0) ** 0.5 if cells.squared else observed
    gap = cells.forecast - cells.outcome
    count = cells.count.expand(resamples, -1).contiguous()

    def chance(kappa: float) -> Tensor:
        return (cells.forecast - kappa * gap).clamp(0, 1)

    def error(kappa: float) -> float:
        return cells.error(cells.forecast - chance(kappa))

    def quantile(kappa: float, q: float, side: str) -> float:
        drawn = torch.binomial(
            count, chance(kappa).expand(resamples, -1).contiguous(), generator=generator
        )
        estimates = cells.estimate(drawn / cells.count)
        return torch.quantile(estimates, q, interpolation=side).item()

    def not_too_large(kappa: float) -> bool:
        return observed <= quantile(kappa, (1 + level) / 2, "higher")

    def not_too_small(kappa: float) -> bool:
        return observed >= quantile(kappa, (1 - level) / 2, "lower")

    low = high = value
    if not_too_large(0.0):
        low = 0.0
    elif not_too_large(1.0):
        low = min(value, error(_boundary(not_too_large, 1.0, 0.0)))
    if not_too_small(0.0):
        # Up to four standard errors beyond: that of a mean of n outcomes is at most ½/√n.
        plain = cells.error(gap)
        reach = 1 + 2 / (float(cells.count.sum()) ** 0.5 * plain) if plain > 0 else 1.0
        end = reach if not_too_small(reach) else _boundary(not_too_small, 0.0, reach)
        high = max(value, error(end))
    return low, high


def _boundary(accepted: Callable[[float], bool], inside: float, outside: float) -> float:
    """The last accepted κ between one that is accepted and one that is not."""
    for _ in range(_HALVINGS):
        middle = (inside + outside) / 2
        if accepted(middle):
            inside = middle
        else:
            outside = middle
    return inside
