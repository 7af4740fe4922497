"""Temperature scaling of the averaged distribution, and the calibrated NLL.

Averaging changes the temperature, so scaling comes after it: softmax(log p̄ / T).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sigmanens.errors import InputError
from sigmanens.evaluation.metrics import as_labels, as_log_probs, sample_nll

TEMPERATURE_BOUNDS = (1e-2, 1e4)
"""Smallest and largest temperature that :func:`fit_temperature` returns."""

_MAX_STEPS = 200


def fit_temperature(log_probs: Any, labels: Any) -> float:
    """Temperature T > 0 that minimises the mean NLL of softmax(log p / T) (arXiv 1706.04599).

    The NLL is convex in 1/T; its derivative is brought to 0 by Newton steps in log T that fall
    back on bisection, which is deterministic and cannot diverge. The search is limited to
    :data:`TEMPERATURE_BOUNDS`. A result equal to a bound says that the data set no finite optimum:
    every sample classified right drives T to the lower one, predictions worse than chance to the
    upper one. Distributions that are all uniform leave T undetermined and give 1.

    Args:
        log_probs: averaged distribution of held-out samples: (B, C), nats.
        labels: (B,), integers.

    Raises:
        InputError: bad input, or a label with probability 0 (its NLL is infinite at every T).
    """
    log_p = as_log_probs(log_probs)
    target = log_p.gather(1, as_labels(labels, log_p)[:, None])
    impossible = int(torch.isneginf(target).sum())
    if impossible:
        raise InputError(
            f"{impossible} of {len(log_p)} labels have probability 0, and an infinite NLL at every "
            "temperature; compute log_softmax of the logits in float32 or float64, not log(softmax)"
        )
    gap = log_p - target
    if gap.masked_fill(torch.isneginf(gap), 0).abs().max() <= 1e-12:
        return 1.0
    coldest, hottest = TEMPERATURE_BOUNDS
    if _slope(gap, 1 / coldest)[0] <= 0:
        return coldest
    if _slope(gap, 1 / hottest)[0] >= 0:
        return hottest

    # theta = log(1/T). The slope is negative at `low` and positive at `high`.
    low, high, theta = -math.log(hottest), -math.log(coldest), 0.0
    step = before = high - low
    for _ in range(_MAX_STEPS):
        beta = math.exp(theta)
        slope, curvature = _slope(gap, beta)
        low, high = (low, theta) if slope > 0 else (theta, high)
        newton = theta - slope / (beta * curvature) if curvature > 0 else math.inf
        fast = low <= newton <= high and abs(newton - theta) <= abs(before) / 2
        candidate = newton if fast else (low + high) / 2
        before, step, theta = step, candidate - theta, candidate
        if abs(step) < 1e-12:
            break
    return math.exp(-theta)


def apply_temperature(log_probs: Any, temperature: float) -> Tensor:
    """log softmax(log p / T): the tempered distribution (B, C), nats, float64.

    Args:
        log_probs: (B, C), nats.
        temperature: T > 0; above 1 flattens, below 1 sharpens; the most probable class stays.

    Raises:
        InputError: bad input, or a temperature that is not a positive finite number.
    """
    if not (temperature > 0 and math.isfinite(temperature)):
        raise InputError(f"temperature is {temperature}; expected a positive finite number")
    return torch.log_softmax(as_log_probs(log_probs) / temperature, 1)


def calibrated_nll(
    log_probs: Any,
    labels: Any,
    folds: int = 2,
    repeats: int = 5,
    generator: torch.Generator | None = None,
) -> float:
    """NLL after temperature scaling by repeated cross-validation on the test set itself.

    The negative of the calibrated log-likelihood (Ashukha et al. 2020, arXiv 2002.06470): random
    halves, T fitted on one and scored on the other, both ways, mean over the repeats. With more
    folds, T is fitted on all folds but the one scored.

    Args:
        log_probs: averaged distribution of the test samples: (B, C), nats.
        labels: (B,), integers.
        folds: parts of each split, 2 … B.
        repeats: number of random splits.
        generator: CPU source of the splits; None takes a fresh one of seed 0, so results repeat.

    Returns:
        Mean NLL in nats; inf if a label has probability 0.

    Raises:
        InputError: bad input, folds outside 2 … B, or repeats below 1.
    """
    log_p = as_log_probs(log_probs)
    target = as_labels(labels, log_p)
    if not 2 <= folds <= len(log_p):
        raise InputError(f"folds is {folds}; expected 2 to {len(log_p)}, the number of samples")
    if repeats < 1:
        raise InputError(f"repeats is {repeats}; expected at least 1")
    if torch.isneginf(log_p.gather(1, target[:, None])).any():
        return math.inf
    generator = generator or torch.Generator().manual_seed(0)
    total = 0.0
    for _ in range(repeats):
        order = torch.randperm(len(log_p), generator=generator).to(log_p.device)
        parts = order.tensor_split(folds)
        for held_out in range(folds):
            test = parts[held_out]
            fit = torch.cat(parts[:held_out] + parts[held_out + 1 :])
            temperature = fit_temperature(log_p[fit], target[fit])
            tempered = apply_temperature(log_p[test], temperature)
            total += sample_nll(tempered, target[test]).sum().item()
    return total / (repeats * len(log_p))


def _slope(gap: Tensor, beta: float) -> tuple[float, float]:
    """First and second derivative in β = 1/T of the mean of logsumexp_c β (log p_c − log p_y).

    Written in the gaps to the label's log-probability: where the label leads, every term is ≤ 0
    and nothing cancels, so certain data cannot change the sign by rounding.
    """
    probs = torch.softmax(beta * gap, 1)
    gap = gap.where(probs > 0, 0.0)
    mean = (probs * gap).sum(1, keepdim=True)
    variance = (probs * (gap - mean).square()).sum(1)
    return mean.mean().item(), variance.mean().item()
