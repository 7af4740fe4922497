"""Temperature scaling of the averaged distribution, and the calibrated NLL.

Averaging changes the temperature, so scaling comes after it: softmax(log p̄ / T).
"""

from __future__ import annotations

import math
import warnings
from typing import Any

import torch
from torch import Tensor

from sigmanens.errors import InputError, SigmaNensWarning
from sigmanens.evaluation.metrics import as_labels, as_log_probs, as_tensor, sample_nll

_MAX_STEPS = 200
_FLAT = 1e-12  # differences of log-probabilities that are none
_NEVER = 1e-6  # a β at which the largest difference that is left counts for nothing
_ALL_RIGHT = (
    "every sample is classified right, so that the NLL falls as T goes to 0 and has no minimum. "
    "Hold out more samples, or samples that training has not seen"
)
_CHANCE = (
    "the labels are no more probable than by chance, so that the NLL falls as T grows without end. "
    "Look for labels in another order than the classes, or for a training that has diverged"
)


def fit_temperature(log_probs: Any, labels: Any, weights: Any = None) -> float:
    """Temperature T > 0 that minimises the mean NLL of softmax(log p / T) (arXiv 1706.04599).

    The NLL is convex in β = 1/T. Its slope at β = 0 and at β → ∞ says whether there is a minimum in
    between. If there is, however small or large T may be, it is found to 12 digits. If there is
    none, T stays at 1 and a warning says why:

    * every sample is classified right: the NLL falls as T → 0;
    * the labels are no more probable than by chance: the NLL falls as T → ∞.

    Rows that are the same at any T (uniform, or certain and right) give 1.

    For several labels per sample take :meth:`sigmanens.Prediction.rows`, whose temperature acts on
    the averaged logit of each label.

    Args:
        log_probs: averaged distribution of held-out samples: (B, C), nats.
        labels: (B,), integers.
        weights: factors > 0 on the samples' NLL (B,); 1 by default.

    Raises:
        InputError: bad input, or a label with probability 0 (its NLL is infinite at every T).
    """
    temperature, problem = search_temperature(log_probs, labels, weights)
    if problem:
        warnings.warn(
            f"the {len(as_tensor(labels, 'labels'))} samples set no temperature, which stays at 1: "
            f"{problem}",
            SigmaNensWarning,
            stacklevel=2,
        )
    return temperature


def search_temperature(log_probs: Any, labels: Any, weights: Any = None) -> tuple[float, str]:
    """:func:`fit_temperature` without its warning: T, and why there is no minimum, or ""."""
    log_p = as_log_probs(log_probs)
    factors = torch.ones(len(log_p), dtype=torch.float64, device=log_p.device)
    if weights is not None:
        factors = as_tensor(weights, "weights").to(factors)
        right = factors.isfinite() & (factors > 0)
        if factors.shape != log_p.shape[:1] or not bool(right.all()):
            raise InputError(
                f"weights have shape {tuple(factors.shape)}, {int((~right).sum())} of them not "
                f"above 0 or not finite; expected {len(log_p)} finite numbers above 0"
            )
    factors = factors / factors.mean()
    target = log_p.gather(1, as_labels(labels, log_p)[:, None])
    impossible = int(torch.isneginf(target).sum())
    if impossible:
        raise InputError(
            f"{impossible} of {len(log_p)} labels have probability 0, and an infinite NLL at every "
            "temperature; compute log_softmax of the logits in float32 or float64, not log(softmax)"
        )
    gap = log_p - target
    scale = float(gap.masked_fill(torch.isneginf(gap), 0).abs().max())
    if scale <= _FLAT:
        return 1.0, ""
    # A class that leads by no more than the input was rounded by is level with the label.
    rounding = torch.finfo(as_tensor(log_probs, "log_probs").dtype).eps * float(
        log_p.masked_fill(torch.isneginf(log_p), 0).abs().max()
    )
    if gap.max() <= max(rounding, _FLAT):
        return 1.0, _ALL_RIGHT
    if _slope(gap, _NEVER / scale, factors)[0] >= 0:
        return 1.0, _CHANCE
    return 1 / _root(gap, 1 / scale, _NEVER / scale, factors), ""


def _root(gap: Tensor, beta: float, least: float, factors: Tensor) -> float:
    """The β at which the slope of the NLL is 0, from a first guess and a β where it is negative.

    Newton steps in log β, which fall back on bisection: deterministic, and cannot diverge.
    """
    low, high, theta = math.log(least), math.log(beta), math.log(beta)
    while _slope(gap, math.exp(high), factors)[0] <= 0:
        high += 2
    before = high - low
    for _ in range(_MAX_STEPS):
        beta = math.exp(theta)
        slope, curvature = _slope(gap, beta, factors)
        low, high = (low, theta) if slope > 0 else (theta, high)
        newton = theta - slope / (beta * curvature) if curvature > 0 else math.inf
        fast = low <= newton <= high and abs(newton - theta) <= abs(before) / 2
        candidate = newton if fast else (low + high) / 2
        before, theta = candidate - theta, candidate
        if abs(before) < 1e-12:
            break
    return math.exp(theta)


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
    folds, T is fitted on all folds but the one scored. Parts without an optimum are scored at T = 1
    (see :func:`fit_temperature`).

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
            temperature = search_temperature(log_p[fit], target[fit])[0]
            tempered = apply_temperature(log_p[test], temperature)
            total += sample_nll(tempered, target[test]).sum().item()
    return total / (repeats * len(log_p))


def _slope(gap: Tensor, beta: float, factors: Tensor) -> tuple[float, float]:
    """First and second derivative in β = 1/T of the mean of v · logsumexp_c β (log p_c − log p_y).

    Written in the gaps to the label's log-probability: where the label leads, every term is ≤ 0
    and nothing cancels, so certain data cannot change the sign by rounding.
    """
    probs = torch.softmax(beta * gap, 1)
    gap = gap.where(probs > 0, 0.0)
    mean = (probs * gap).sum(1, keepdim=True)
    variance = (probs * (gap - mean).square()).sum(1)
    return (factors * mean[:, 0]).mean().item(), (factors * variance).mean().item()
