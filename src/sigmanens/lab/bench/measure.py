"""From a trained method to its row of ``metrics.json``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sigmanens.evaluation import metrics
from sigmanens.evaluation.calibration import apply_temperature, fit_temperature
from sigmanens.lab.bench.methods import Outcome
from sigmanens.lab.bench.work import Workshop
from sigmanens.lab.rows import EvaluationData, MemberLogits, evaluate, member_logits
from sigmanens.lab.training import members_of, parameters
from sigmanens.prediction import log_mean_exp

__all__ = ["measure_outcome"]


def measure_outcome(
    shop: Workshop, outcome: Outcome, detailed: bool
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Measure one outcome of a trial.

    Args:
        shop: the trial.
        outcome: what it gave.
        detailed: measure OOD sets and corruptions too.

    Returns:
        the row and what it was computed from, as :func:`sigmanens.lab.rows.evaluate`.
    """
    data, trial = shop.material.data, shop.trial
    if not detailed:
        data = EvaluationData(data.validation, data.test)
    logits = outcome.logits or member_logits(outcome.network)
    row, kept = evaluate(
        logits, data, method=outcome.method, network=outcome.network,
        members=members_of(outcome.network), params=parameters(outcome.network), tau=trial.tau,
        weight=trial.weight, seed=trial.seed, train_seconds=outcome.seconds,
        resamples=shop.config.measure.resamples,
    )  # fmt: skip
    row["variant"] = trial.variant or None
    row["epochs"] = outcome.history or None
    if detailed and shop.material.corrupt is not None:
        row["corruption"] = {
            name: {
                str(s): _corrupted(shop, logits, row["temperature"], name, s) for s in range(1, 6)
            }
            for name in shop.material.corruptions
        }
    if outcome.method == "deep_ensemble":
        row["curve"] = _curve(kept)
    return row | outcome.extra, kept


def _corrupted(
    shop: Workshop, logits: MemberLogits, temperature: float, name: str, severity: int
) -> dict[str, float]:
    """Numbers under one corruption; the temperature is that of the clean validation data."""
    assert shop.material.corrupt is not None
    images, labels = shop.material.corrupt(name, severity)
    mean = log_mean_exp(torch.log_softmax(logits(images), 2))
    scaled = apply_temperature(mean, temperature)
    return {
        "accuracy": metrics.accuracy(mean, labels),
        "nll": metrics.nll(mean, labels),
        "ece": metrics.ece(mean, labels),
        "nll_calibrated": metrics.nll(scaled, labels),
        "ece_calibrated": metrics.ece(scaled, labels),
    }


def _curve(kept: dict[str, Tensor]) -> dict[str, float]:
    """Temperature-scaled NLL of the first k networks, for every k."""
    found = {}
    for k in range(1, len(kept["member_log_probs"]) + 1):
        held_out = log_mean_exp(kept["validation_member_log_probs"][:k])
        temperature = fit_temperature(held_out, kept["validation_labels"])
        mean = log_mean_exp(kept["member_log_probs"][:k])
        found[str(k)] = metrics.nll(apply_temperature(mean, temperature), kept["labels"])
    return found
