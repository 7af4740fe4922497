"""A trained method under corruption: kind by kind, and over all kinds of a severity together.

The ECE of few samples is too large by what their noise adds, and a mean over kinds keeps that bias.
So the kinds of a severity are also taken together: accuracy and NLL are then their means, the ECE
is that of all their samples in the same bins.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from sigmanens.ensemble.prediction import log_mean_exp
from sigmanens.evaluation import metrics
from sigmanens.evaluation.calibration import apply_temperature
from sigmanens.evaluation.intervals import Interval, bootstrap
from sigmanens.lab.digits import Labelled
from sigmanens.lab.rows import MemberLogits


def measure_corrupted(
    logits: MemberLogits,
    temperature: float,
    corrupt: Callable[[str, int], Labelled],
    rows: Mapping[str, Tensor],
    resamples: int,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Measure one method under every kind and severity.

    Args:
        logits: maps examples to member logits (M, n, K).
        temperature: of the averaged distribution, fitted on clean validation data.
        corrupt: gives the examples of a kind and severity.
        rows: positions (n,) of the test examples, by kind.
        resamples: of each interval.

    Returns:
        what a row holds: ``corruption`` by kind and severity, and ``corruption_pooled`` by severity
        with ``n``, the number of different test ``examples`` and ``intervals``. Intervals draw
        test examples, each with all it was made into; the ECE has one only where none serves twice.
        And per sample, averaged over the severities, ``nll_corrupted`` and
        ``nll_calibrated_corrupted`` (Σn,), nats, with ``corrupted_rows`` (Σn,).
    """
    by_kind: dict[str, dict[str, Any]] = {name: {} for name in rows}
    pooled: dict[str, dict[str, Any]] = {}
    drawn = torch.cat(list(rows.values()))
    distinct = len(drawn.unique())
    losses: dict[str, list[Tensor]] = {"nll": [], "nll_calibrated": []}
    for severity in range(1, 6):
        parts: list[tuple[Tensor, Tensor]] = []
        for name in rows:
            examples = corrupt(name, severity)
            parts.append((_averaged(logits, examples), examples.labels))
            by_kind[name][str(severity)] = _numbers(*parts[-1], temperature)
        mean, labels = (torch.cat(x) for x in zip(*parts, strict=True))
        scaled = apply_temperature(mean, temperature)
        losses["nll"].append(metrics.sample_nll(mean, labels))
        losses["nll_calibrated"].append(metrics.sample_nll(scaled, labels))
        values = {key: of_severity[-1] for key, of_severity in losses.items()}
        values["accuracy"] = metrics.sample_accuracy(mean, labels)
        found = {key: clustered_mean(v, drawn, resamples) for key, v in values.items()}
        if distinct == len(drawn) > 1:
            for key, log_probs in (("ece", mean), ("ece_calibrated", scaled)):
                found[key] = bootstrap(metrics.ece, log_probs, labels, resamples=resamples)
        pooled[str(severity)] = _numbers(mean, labels, temperature) | {
            "n": len(drawn),
            "examples": distinct,
            "intervals": {k: [v.low, v.high] for k, v in found.items() if v is not None},
        }
    kept = {f"{key}_corrupted": torch.stack(parted).mean(0) for key, parted in losses.items()}
    measured = {"corruption": by_kind, "corruption_pooled": pooled}
    return measured, kept | {"corrupted_rows": drawn}


def brief(logits: MemberLogits, temperature: float, examples: Labelled) -> dict[str, float]:
    """Numbers on other examples; the temperature is that of the clean validation data."""
    return _numbers(_averaged(logits, examples), examples.labels, temperature)


def clustered_mean(values: Tensor, groups: Tensor, resamples: int = 1000) -> Interval | None:
    """Mean with a 95 % bootstrap interval that draws whole groups; None with fewer than two.

    Args:
        values: (n,).
        groups: which values were made from the same example: (n,), any integers.
        resamples: number of draws.
    """
    found, index = groups.unique(return_inverse=True)
    if len(found) < 2:
        return None
    if len(found) == len(values):
        return bootstrap(torch.mean, values, resamples=resamples)
    sums = torch.zeros(len(found), dtype=torch.float64).index_add_(0, index, values.double())
    counts = torch.bincount(index).double()
    return bootstrap(_ratio, sums, counts, resamples=resamples)


def _ratio(sums: Tensor, counts: Tensor) -> float:
    return float(sums.sum() / counts.sum())


def _averaged(logits: MemberLogits, examples: Labelled) -> Tensor:
    return log_mean_exp(torch.log_softmax(logits(examples.images), 2))


def _numbers(mean: Tensor, labels: Tensor, temperature: float) -> dict[str, float]:
    scaled = apply_temperature(mean, temperature)
    return {
        "accuracy": metrics.accuracy(mean, labels),
        "nll": metrics.nll(mean, labels),
        "ece": metrics.ece(mean, labels),
        "nll_calibrated": metrics.nll(scaled, labels),
        "ece_calibrated": metrics.ece(scaled, labels),
    }
