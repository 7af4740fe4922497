"""All metrics of one run on one data set, from one predictive tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sigmanens.ensemble.prediction import log_mean_exp
from sigmanens.evaluation import diversity, metrics, risk
from sigmanens.evaluation.calibration import apply_temperature

_MEMBER_MEASURES: dict[str, Callable[[Tensor, Tensor], float]] = {
    "member_nll": diversity.member_nll,
    "member_accuracy": diversity.member_accuracy,
    "disagreement": lambda log_p, labels: diversity.disagreement(log_p),
    "pairwise_kl": lambda log_p, labels: diversity.pairwise_kl(log_p),
    "modulation": lambda log_p, labels: diversity.modulation(log_p),
    "jensen_gap": diversity.jensen_gap,
}
"""Means over samples of functions of the members' log-probabilities and the labels."""


def summarize(
    member_logits: Any,
    labels: Any,
    *,
    temperature: float | None = None,
    bins: int = metrics.DEFAULT_BINS,
) -> dict[str, Any]:
    """One row of ``metrics.json``: every metric from the same averaged distribution.

    The members' softmax outputs are averaged once, p̄ = (1/M) Σ_m softmax(z_m), and accuracy, NLL,
    ECE, Brier score and reliability all read that p̄. Members are normalised and averaged in slices
    of samples, so that the working memory stays bounded.

    Args:
        member_logits: logits or log-probabilities: (M, B, C).
        labels: (B,), integers.
        temperature: T fitted on held-out data
            (:func:`~sigmanens.evaluation.calibration.fit_temperature`), applied after averaging;
            None leaves ``nll_calibrated`` and ``ece_calibrated`` at None.
        bins: bins of every calibration error; of equal width, and of equal mass in
            ``adaptive_ece`` and ``ece_debiased``.

    Returns:
        ``n``, ``bins``, ``accuracy``, ``nll``, ``ece``, ``nll_calibrated``, ``ece_calibrated``,
        ``temperature``, ``brier``, ``member_nll``, ``member_accuracy``, ``disagreement``,
        ``pairwise_kl``, ``modulation``, ``jensen_gap``, ``adaptive_ece``, ``classwise_ece``,
        ``ece_debiased``, ``sharpness``, ``aurc``, ``eaurc``, ``reliability`` (a dict).
        NLLs, KL, modulation and Jensen gap in nats, the rest fractions. An NLL or a KL is inf where
        a label or a class has probability 0.

    Raises:
        InputError: wrong type or shape, empty, bad labels, temperature or bins.
        NonFiniteError: NaN, +inf, or a row of −inf only.
    """
    logits = diversity.as_member_logits(member_logits)
    target = metrics.as_labels(labels, logits)
    n = len(target)

    averaged = []
    member = dict.fromkeys(_MEMBER_MEASURES, 0.0)
    seen = 0
    for part in diversity.sample_slices(logits):
        log_p = torch.log_softmax(part, 2)
        part_labels = target[seen : seen + part.shape[1]]
        seen += len(part_labels)
        averaged.append(log_mean_exp(log_p))
        for name, measure in _MEMBER_MEASURES.items():
            member[name] += measure(log_p, part_labels) * (len(part_labels) / n)

    log_probs = torch.cat(averaged)
    tempered = None if temperature is None else apply_temperature(log_probs, temperature)
    return {
        "n": n,
        "bins": bins,
        "accuracy": metrics.accuracy(log_probs, target),
        "nll": metrics.nll(log_probs, target),
        "ece": metrics.ece(log_probs, target, bins),
        "nll_calibrated": None if tempered is None else metrics.nll(tempered, target),
        "ece_calibrated": None if tempered is None else metrics.ece(tempered, target, bins),
        "temperature": None if temperature is None else float(temperature),
        "brier": metrics.brier(log_probs, target),
        **member,
        "adaptive_ece": metrics.adaptive_ece(log_probs, target, bins),
        "classwise_ece": metrics.classwise_ece(log_probs, target, bins),
        "ece_debiased": metrics.ece_debiased(log_probs, target, bins),
        "sharpness": metrics.sharpness(log_probs),
        "aurc": risk.aurc(log_probs, target),
        "eaurc": risk.eaurc(log_probs, target),
        "reliability": metrics.reliability(log_probs, target, bins).to_dict(),
    }
