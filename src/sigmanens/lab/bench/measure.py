"""From a trained method to its row of ``metrics.json``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import Tensor

from sigmanens.ensemble.prediction import log_mean_exp
from sigmanens.errors import InputError, SigmaNensWarning
from sigmanens.evaluation import metrics
from sigmanens.evaluation.calibration import apply_temperature, fit_temperature
from sigmanens.lab.bench.corrupted import first_of
from sigmanens.lab.bench.cost import multiply_adds
from sigmanens.lab.bench.methods import Outcome
from sigmanens.lab.bench.under_corruption import brief, measure_corrupted
from sigmanens.lab.bench.work import Workshop
from sigmanens.lab.data import take
from sigmanens.lab.digits import Labelled
from sigmanens.lab.ood_scores import feature_options
from sigmanens.lab.rows import EvaluationData, evaluate, member_logits
from sigmanens.lab.training import members_of, parameters

FITTED_ON = 5000
"""Training examples that OOD scores of features are fitted on, at most."""


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
    tau = trial.tau
    if not detailed:
        data = EvaluationData(data.validation, data.test)
    logits = outcome.logits or member_logits(outcome.network)
    features: dict[str, Any] = {}
    if detailed and data.ood and shop.config.measure.features and outcome.logits is None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SigmaNensWarning)  # the row lacks those scores, then
            features = feature_options(outcome.network, _first(shop.material.train))
    measure = partial(
        evaluate, logits, data, method=outcome.method, network=outcome.network,
        members=members_of(outcome.network), params=parameters(outcome.network), tau=tau,
        weight=trial.weight, seed=trial.seed, train_seconds=outcome.seconds,
        resamples=shop.config.measure.resamples,
    )  # fmt: skip
    try:
        row, kept = measure(**features)
    except InputError as error:
        if not features:
            raise
        row, kept = measure()
        row["features_unfit"] = str(error)  # no score of features could be fitted
    row["variant"] = trial.variant or None
    plan = getattr(outcome.network, "plan", None)
    row["head"] = plan.head if plan else shop.options.get("head")
    row["epochs"] = outcome.history or None
    few = shop.material.train.images[:2].to(shop.device)
    row["multiply_adds"] = multiply_adds(outcome.network, few)
    if detailed and shop.material.corrupt is not None:
        found, losses = measure_corrupted(
            logits, row["temperature"], shop.material.corrupt, shop.material.corrupted,
            shop.config.measure.resamples,
        )  # fmt: skip
        row |= found
        kept |= losses
    row["shift"] = {
        name: brief(logits, row["temperature"], examples)
        for name, examples in shop.material.shift.items()
    } or None
    if outcome.method == "deep_ensemble":
        row["curve"] = _curve(kept)
    return row | outcome.extra, kept


def prediction_name(row: Mapping[str, Any]) -> str:
    """What the predictions of a row are called in its trial's file."""
    tau = "" if row["tau"] is None else f"_tau{row['tau']:g}"
    return f"{row['method']}_m{row['members']}{tau}"


def _first(train: Labelled) -> Labelled:
    """Enough examples to fit scores of features on."""
    rows = first_of(train.labels, FITTED_ON)
    return Labelled(take(train.images, rows), train.labels[rows])


def _curve(kept: dict[str, Tensor]) -> dict[str, float]:
    """Temperature-scaled NLL of the first k networks, for every k."""
    found = {}
    for k in range(1, len(kept["member_log_probs"]) + 1):
        held_out = log_mean_exp(kept["validation_member_log_probs"][:k])
        temperature = fit_temperature(held_out, kept["validation_labels"])
        mean = log_mean_exp(kept["member_log_probs"][:k])
        found[str(k)] = metrics.nll(apply_temperature(mean, temperature), kept["labels"])
    return found
