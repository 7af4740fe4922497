"""Evaluation of predictive distributions: arrays in, numbers out, no model inside.

``log_probs`` (B, C) are natural-log probabilities of the averaged distribution,
``member_log_probs`` (M, B, C) those of the members, ``labels`` (B,) integers. OOD scores of member
logits are in :mod:`sigmanens.evaluation.ood`.
"""

from sigmanens.evaluation import calibration, diversity, intervals, metrics, ood, summary
from sigmanens.evaluation.calibration import (
    TEMPERATURE_BOUNDS,
    apply_temperature,
    calibrated_nll,
    fit_temperature,
)
from sigmanens.evaluation.diversity import (
    disagreement,
    jensen_gap,
    member_accuracy,
    member_nll,
    modulation,
    pairwise_kl,
)
from sigmanens.evaluation.intervals import Interval, bootstrap, ece_interval, paired_difference
from sigmanens.evaluation.metrics import (
    Reliability,
    RiskCoverage,
    accuracy,
    adaptive_ece,
    aurc,
    brier,
    classwise_ece,
    ece,
    ece_debiased,
    nll,
    reliability,
    risk_coverage,
    sharpness,
)
from sigmanens.evaluation.ood import aupr_in, aupr_out, auroc, fpr_at_tpr
from sigmanens.evaluation.summary import summarize

__all__ = [
    "TEMPERATURE_BOUNDS",
    "Interval",
    "Reliability",
    "RiskCoverage",
    "accuracy",
    "adaptive_ece",
    "apply_temperature",
    "aupr_in",
    "aupr_out",
    "aurc",
    "auroc",
    "bootstrap",
    "brier",
    "calibrated_nll",
    "calibration",
    "classwise_ece",
    "disagreement",
    "diversity",
    "ece",
    "ece_debiased",
    "ece_interval",
    "fit_temperature",
    "fpr_at_tpr",
    "intervals",
    "jensen_gap",
    "member_accuracy",
    "member_nll",
    "metrics",
    "modulation",
    "nll",
    "ood",
    "paired_difference",
    "pairwise_kl",
    "reliability",
    "risk_coverage",
    "sharpness",
    "summarize",
    "summary",
]
