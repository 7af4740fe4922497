"""Metrics one sample, bin or pair at a time, in plain Python: slow, obvious and independent."""

from __future__ import annotations

import math
from collections.abc import Sequence

Rows = Sequence[Sequence[float]]


def first_argmax(row: Sequence[float]) -> int:
    return max(range(len(row)), key=lambda c: (row[c], -c))


def top_labels(probs: Rows, labels: Sequence[int]) -> list[tuple[float, int]]:
    """(confidence, 1 if right else 0) of each sample."""
    return [(max(row), int(first_argmax(row) == y)) for row, y in zip(probs, labels, strict=True)]


def width_bin(confidence: float, bins: int) -> int:
    """The bin (i/bins, (i+1)/bins] that holds the confidence; 0 belongs to the first."""
    for i in range(bins):
        if confidence <= (i + 1) / bins:
            return i
    return bins - 1


def binned_error(pairs: Sequence[tuple[float, float]], bins: int) -> float:
    """Σ_b (n_b/n) |mean outcome − mean forecast| over bins of equal width."""
    total = 0.0
    for b in range(bins):
        inside = [(p, hit) for p, hit in pairs if width_bin(p, bins) == b]
        if inside:
            forecast = sum(p for p, _ in inside) / len(inside)
            outcome = sum(hit for _, hit in inside) / len(inside)
            total += len(inside) / len(pairs) * abs(outcome - forecast)
    return total


def ece(probs: Rows, labels: Sequence[int], bins: int) -> float:
    return binned_error(top_labels(probs, labels), bins)


def classwise_ece(probs: Rows, labels: Sequence[int], bins: int) -> float:
    classes = len(probs[0])
    errors = []
    for c in range(classes):
        pairs = [(row[c], float(y == c)) for row, y in zip(probs, labels, strict=True)]
        errors.append(binned_error(pairs, bins))
    return sum(errors) / classes


def equal_parts(items: Sequence[tuple[float, int]], bins: int) -> list[list[tuple[float, int]]]:
    """Sorted items without ties, item r of n in part floor((r + ½) bins / n)."""
    parts: list[list[tuple[float, int]]] = [[] for _ in range(bins)]
    for rank, item in enumerate(sorted(items)):
        parts[math.floor((rank + 0.5) * bins / len(items))].append(item)
    return parts


def adaptive_ece(probs: Rows, labels: Sequence[int], bins: int) -> float:
    pairs = top_labels(probs, labels)
    total = 0.0
    for part in equal_parts(pairs, bins):
        if part:
            total += abs(sum(hit - p for p, hit in part)) / len(pairs)
    return total


def ece_debiased_squared(probs: Rows, labels: Sequence[int], bins: int) -> float:
    """Kumar et al. 2019, definition of the debiased estimator, over equal parts."""
    pairs = top_labels(probs, labels)
    total = 0.0
    for part in equal_parts(pairs, bins):
        k = len(part)
        if k > 1:
            accuracy = sum(hit for _, hit in part) / k
            confidence = sum(p for p, _ in part) / k
            variance = sum((hit - accuracy) ** 2 for _, hit in part) / (k - 1) / k
            total += k / len(pairs) * ((accuracy - confidence) ** 2 - variance)
    return total


def aurc(probs: Rows, labels: Sequence[int]) -> float:
    """Mean over k of the error rate of the k most confident samples; no ties assumed."""
    pairs = sorted(top_labels(probs, labels), reverse=True)
    risks = [sum(1 - hit for _, hit in pairs[:k]) / k for k in range(1, len(pairs) + 1)]
    return sum(risks) / len(risks)


def eaurc(probs: Rows, labels: Sequence[int]) -> float:
    """AURC minus that of the same samples with the errors last."""
    right = sum(hit for _, hit in top_labels(probs, labels))
    risks = [max(0, k - right) / k for k in range(1, len(labels) + 1)]
    return aurc(probs, labels) - sum(risks) / len(risks)


def auroc(inside: Sequence[float], outside: Sequence[float]) -> float:
    wins = sum((o > i) + 0.5 * (o == i) for i in inside for o in outside)
    return wins / (len(inside) * len(outside))


def fpr_at_tpr(inside: Sequence[float], outside: Sequence[float], tpr: float) -> float:
    """Smallest false positive rate over all thresholds that reach the true positive rate."""
    rates = []
    for threshold in outside:
        if sum(o >= threshold for o in outside) / len(outside) >= tpr:
            rates.append(sum(i >= threshold for i in inside) / len(inside))
    return min(rates)


def entropy(probs: Sequence[float]) -> float:
    return -sum(p * math.log(p) for p in probs if p > 0)


def kl(p: Sequence[float], q: Sequence[float]) -> float:
    return sum(a * (math.log(a) - math.log(b)) for a, b in zip(p, q, strict=True) if a > 0)


def mean_rows(members: Sequence[Rows]) -> list[list[float]]:
    """Probabilities (M, B, C) averaged over members: (B, C)."""
    return [
        [sum(m[b][c] for m in members) / len(members) for c in range(len(members[0][b]))]
        for b in range(len(members[0]))
    ]


def disagreement(members: Sequence[Rows]) -> float:
    pairs = [(a, b) for a in range(len(members)) for b in range(a)]
    samples = range(len(members[0]))
    differs = [
        first_argmax(members[a][i]) != first_argmax(members[b][i])
        for a, b in pairs
        for i in samples
    ]
    return sum(differs) / len(differs) if differs else 0.0


def pairwise_kl(members: Sequence[Rows]) -> float:
    values = [
        kl(p, q)
        for a, first in enumerate(members)
        for b, second in enumerate(members)
        if a != b
        for p, q in zip(first, second, strict=True)
    ]
    return sum(values) / len(values) if values else 0.0


def first_not_above(points: Sequence[float], target: float) -> float | None:
    """Walk from 1 along straight lines through the points at 1, 2, … in steps of 1/1000."""
    for step in range((len(points) - 1) * 1000 + 1):
        left, share = divmod(step, 1000)
        right = min(left + 1, len(points) - 1)
        if points[left] + (points[right] - points[left]) * share / 1000 <= target:
            return 1 + step / 1000
    return None
