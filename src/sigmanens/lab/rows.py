"""One row of ``metrics.json``: a network on held-out, test, corrupted and OOD pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sigmanens.diversity import measures
from sigmanens.ensemble.ensemble import SigmaEnsemble, as_ensemble
from sigmanens.ensemble.prediction import log_mean_exp
from sigmanens.errors import InputError, NonFiniteError
from sigmanens.evaluation import intervals, metrics, risk
from sigmanens.evaluation.calibration import apply_temperature, calibrated_nll, fit_temperature
from sigmanens.evaluation.summary import summarize
from sigmanens.lab.batched import by_batches
from sigmanens.lab.data import Pictures
from sigmanens.lab.digits import Labelled
from sigmanens.lab.ood_histograms import ood_histograms
from sigmanens.lab.ood_scores import MemberFeatures, OodScores

MemberLogits = Callable[[Pictures], Tensor]
"""From pictures (N, C, H, W) to the members' logits (M, N, K)."""

_BRIEF: dict[str, Callable[..., float]] = {
    "accuracy": metrics.accuracy,
    "nll": metrics.nll,
    "ece": metrics.ece,
}
_INTERVALS: dict[str, Callable[..., float]] = _BRIEF | {
    "brier": metrics.brier,
    "adaptive_ece": metrics.adaptive_ece,
    "classwise_ece": metrics.classwise_ece,
    "ece_debiased": metrics.ece_debiased,
    "aurc": risk.aurc,
    "eaurc": risk.eaurc,
}
"""Metrics of (log-probabilities, labels) that a row gives an interval of."""

COVERAGES = 20
MOST_CLASSES = 30  # of which all pairs are counted


@dataclass(frozen=True)
class EvaluationData:
    """What a network is measured on; pictures are normalised as the network expects them.

    Attributes:
        validation: for the temperature, and for every choice.
        test: for the reported numbers only.
        ood: pictures of other things, by name.
        corruption: the test pictures, corrupted, by name and severity 1 to 5.
    """

    validation: Labelled
    test: Labelled
    ood: Mapping[str, Pictures] = field(default_factory=dict)
    corruption: Mapping[str, Mapping[int, Tensor]] = field(default_factory=dict)


def member_logits(network: nn.Module, batch: int = 256, members: int | None = None) -> MemberLogits:
    """Evaluate a network batch by batch, in evaluation mode, without gradients.

    As :func:`~sigmanens.lab.batched.by_batches` does, texts by length.

    Args:
        network: maps x (B, C, H, W) to member logits (M, B, K).
        batch: pictures in a pass.
        members: run the first k members of a SigmaEnsemble only.

    Returns:
        a function of pictures (N, C, H, W), which raises NonFiniteError for NaN logits.

    Raises:
        InputError: if ``members`` is not 1 to M, the network is no SigmaEnsemble then, or the task
            of a SigmaEnsemble is not multiclass.
    """
    task = network.task if isinstance(network, SigmaEnsemble) else None
    if task not in (None, "multiclass"):
        raise InputError(f"the task of the ensemble is {task}; the lab measures multiclass ones")
    active: Callable[[], AbstractContextManager[Any]] = nullcontext
    if members is not None:
        ensemble = as_ensemble(network)
        if not 1 <= members <= ensemble.num_members:
            raise InputError(f"members is {members}; expected 1 to {ensemble.num_members}")
        active = partial(ensemble.axis.choosing, start=0, stop=members)

    @torch.no_grad()
    def run(images: Pictures) -> Tensor:
        network.eval()
        with active():
            logits = by_batches(network, network, images, batch)
        if not bool(torch.isfinite(logits).all()):
            raise NonFiniteError(
                "the network gives NaN or infinite logits: its training has diverged, or the "
                "pictures hold NaN"
            )
        return logits

    return run


def tempered(logits: MemberLogits, validation: Labelled) -> MemberLogits:
    """One network's logits divided by a temperature fitted on held-out data (arXiv 1706.04599).

    Raises:
        InputError: for an ensemble, whose temperature is applied to the averaged distribution.
    """
    held_out = logits(validation.images)
    if len(held_out) != 1:
        raise InputError(f"tempered got logits of {len(held_out)} members; expected one network")
    temperature = fit_temperature(torch.log_softmax(held_out[0], 1), validation.labels)

    def run(images: Pictures) -> Tensor:
        return logits(images) / temperature

    return run


def evaluate(
    logits: MemberLogits,
    data: EvaluationData,
    *,
    method: str,
    network: nn.Module | None = None,
    members: int,
    params: int,
    tau: float | None = None,
    weight: float | None = None,
    seed: int = 0,
    train_seconds: float | None = None,
    resamples: int = 500,
    features: MemberFeatures | None = None,
    train: Labelled | None = None,
    head: tuple[Tensor, Tensor] | None = None,
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Measure one network or ensemble.

    Args:
        logits: maps pictures to member logits (M, N, K).
        data: what to measure on.
        method: name in ``metrics.json``.
        network: where the scales are read from, if it is a SigmaEnsemble.
        members: M.
        params: number of parameters.
        tau, weight: of the penalty, None without one.
        seed: of the training.
        train_seconds: time the training took.
        resamples: of the bootstrap intervals.
        features: adds the OOD scores of features (:mod:`sigmanens.evaluation.feature_score`) to
            those of logits: ``mahalanobis``, ``relative_mahalanobis``, ``knn``, and ``vim`` given a
            head; pooled over members, the members' own AUROC as ``member_auroc`` in the detail.
        train: training pictures that those scores are fitted on.
        head: weight (M, K, D) and bias (M, K) (:func:`sigmanens.ensemble.features.head_weights`).

    Raises:
        InputError: if features come without train, or a feature score cannot be fitted.

    Returns:
        the row, and the tensors it was computed from: ``member_log_probs`` (M, N, K) and
        ``labels`` (N,) of test, ``validation_member_log_probs`` and ``validation_labels``.
    """
    held_out = torch.log_softmax(logits(data.validation.images), 2)
    averaged = log_mean_exp(held_out)
    temperature = fit_temperature(averaged, data.validation.labels)
    raw = logits(data.test.images)
    row: dict[str, Any] = {
        "method": method, "members": members, "tau": tau, "weight": weight, "seed": seed,
        "split": "test", "classes": raw.shape[2], "params": params, "train_seconds": train_seconds,
    }  # fmt: skip
    row |= summarize(raw, data.test.labels, temperature=temperature)
    validation = summarize(held_out, data.validation.labels, temperature=temperature)
    row["validation"] = {
        k: validation[k] for k in ("n", "accuracy", "nll", "ece", "nll_calibrated")
    }
    row |= _scales(network)
    mean = log_mean_exp(torch.log_softmax(raw, 2))
    calibrated = apply_temperature(mean, temperature)
    row["nll_calibrated_2fold"] = calibrated_nll(mean, data.test.labels)
    both, scaled = (mean, data.test.labels), (calibrated, data.test.labels)
    measured: dict[str, tuple[Any, ...]] = {
        **{name: (metric, *both) for name, metric in _INTERVALS.items()},
        "sharpness": (metrics.sharpness, mean),
        "nll_calibrated": (metrics.nll, *scaled),
        "ece_calibrated": (metrics.ece, *scaled),
    }
    found = {k: intervals.bootstrap(*v, resamples=resamples) for k, v in measured.items()}
    row["intervals"] = {name: [ends.low, ends.high] for name, ends in found.items()}
    row |= _selective(calibrated, data.test.labels)
    row["ood"], row["ood_detail"], row["ood_histograms"] = {}, {}, None
    if data.ood:
        scores = OodScores(logits, features, train, head)
        inside = scores(data.test.images, raw)
        outside = {name: scores(images) for name, images in data.ood.items()}
        for name, given in outside.items():
            row["ood"][name], row["ood_detail"][name] = scores.compare(inside, given)
        together = {name: given[0] for name, given in outside.items()}
        row["ood_histograms"] = ood_histograms(inside[0], together, row["ood"])
    row["corruption"] = {
        name: {str(s): _brief(logits(images), data.test.labels) for s, images in levels.items()}
        for name, levels in data.corruption.items()
    }
    kept = {
        "member_log_probs": torch.log_softmax(raw, 2),
        "labels": data.test.labels,
        "validation_member_log_probs": held_out,
        "validation_labels": data.validation.labels,
    }
    return row, kept


def _selective(log_probs: Tensor, labels: Tensor) -> dict[str, Any]:
    """The risk at twenty coverages, and how often each class is taken for each other one."""
    curve, classes = risk.risk_coverage(log_probs, labels), log_probs.shape[1]
    last = [max(round(len(labels) * share / COVERAGES) - 1, 0) for share in range(1, COVERAGES + 1)]
    pairs = labels * classes + log_probs.argmax(1)
    counts = torch.bincount(pairs, minlength=classes**2).view(classes, classes)
    return {
        "risk_coverage": {
            "coverage": [curve.coverage[i] for i in last], "risk": [curve.risk[i] for i in last]
        },
        "confusion": counts.tolist() if classes <= MOST_CLASSES else None,
    }  # fmt: skip


def _scales(network: nn.Module | None) -> dict[str, Any]:
    """Cosine of the members' scales and histograms of owners per channel, for members > 1."""
    found: dict[str, Any] = dict.fromkeys(("cosine", "owners", "owners_by_layer", "saturation"))
    if not isinstance(network, SigmaEnsemble) or network.num_members < 2:
        return found
    found["cosine"] = measures.cosine(network, "auto")
    norms = network.sigma_norms()
    if all(m.kind == "sigmoid" for m in norms.values()):
        size = network.num_members + 1

        def histogram(layers: Any) -> list[int]:
            counts = measures.owners_per_channel(network, layers)
            return torch.bincount(counts, minlength=size).tolist()

        found["owners"] = histogram("auto")
        found["owners_by_layer"] = {name: histogram([name]) for name in norms}
        found["saturation"] = measures.saturation(network)
    return found


def _brief(logits: Tensor, labels: Tensor) -> dict[str, float]:
    mean = log_mean_exp(torch.log_softmax(logits, 2))
    return {name: metric(mean, labels) for name, metric in _BRIEF.items()}
