"""Risk and coverage: the errors left when only the most confident samples are answered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sigmanens.evaluation.metrics import top_label


@dataclass(frozen=True)
class RiskCoverage:
    """Error among the k most confident samples, k = 1 … n.

    Attributes:
        coverage: k/n.
        risk: fraction of errors among the k most confident samples.
    """

    coverage: tuple[float, ...]
    risk: tuple[float, ...]

    @property
    def aurc(self) -> float:
        """Area under the curve: the mean risk over k = 1 … n."""
        return sum(self.risk) / len(self.risk)

    @property
    def eaurc(self) -> float:
        """Excess: the area minus that of the best order, in which the errors come last."""
        n = len(self.risk)
        errors = torch.tensor(round(self.risk[-1] * n), dtype=torch.float64)
        return max(0.0, self.aurc - best_aurc(errors, n).item())

    def to_dict(self) -> dict[str, list[float]]:
        """A dict that ``json`` can write."""
        return {"coverage": list(self.coverage), "risk": list(self.risk)}


def risk_coverage(log_probs: Any, labels: Any) -> RiskCoverage:
    """Selective risk when only the most confident samples are answered (arXiv 1805.08206).

    Samples of equal confidence count with their mean error, which is the expectation over their
    order.

    Args:
        log_probs: (B, C), nats.
        labels: (B,), integers.
    """
    confidence, correct = top_label(log_probs, labels)
    groups, sizes = confidence_groups(confidence)
    errors = torch.bincount(groups, weights=1 - correct) / sizes
    k = torch.arange(1, len(confidence) + 1, dtype=torch.float64)
    risk = errors.repeat_interleave(sizes).cumsum(0) / k
    return RiskCoverage(tuple((k / len(k)).tolist()), tuple(risk.tolist()))


def aurc(log_probs: Any, labels: Any) -> float:
    """Area under the risk–coverage curve (arXiv 1805.08206); a fraction, lower is better.

    It mixes two things: how many errors there are, and whether the confidence ranks them last.
    :func:`eaurc` is the second alone.
    """
    return risk_coverage(log_probs, labels).aurc


def eaurc(log_probs: Any, labels: Any) -> float:
    """Excess AURC: AURC minus that of the best order of the same errors (arXiv 1805.08206).

    With e errors among n samples the best order has the area (1/n) Σ_{k > n−e} (k − n + e)/k. 0 if
    every right answer is more confident than every wrong one.
    """
    return risk_coverage(log_probs, labels).eaurc


def confidence_groups(confidence: Tensor) -> tuple[Tensor, Tensor]:
    """Rank of each sample (B,), the most confident first and equals together; size of each rank."""
    groups, sizes = torch.unique(-confidence, return_inverse=True, return_counts=True)[1:]
    return groups, sizes


def best_aurc(errors: Tensor, n: int) -> Tensor:
    """AURC with all ``errors`` (any shape) of ``n`` samples at the end: same shape, float64."""
    harmonic = harmonic_numbers(n)
    right = n - errors.round().long()
    return (errors - right * (harmonic[n] - harmonic[right])) / n


def harmonic_numbers(n: int) -> Tensor:
    """H_k = Σ_{j ≤ k} 1/j for k = 0 … n: (n+1,), float64."""
    terms = 1 / torch.arange(1, n + 1, dtype=torch.float64)
    return torch.cat([terms.new_zeros(1), terms.cumsum(0)])
