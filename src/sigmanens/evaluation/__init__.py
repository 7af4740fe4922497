"""Evaluation of predictive distributions: arrays in, numbers out, no model inside.

``log_probs`` (B, C) are natural-log probabilities of the averaged distribution,
``member_log_probs`` (M, B, C) those of the members, ``labels`` (B,) integers. OOD scores of member
logits are in :mod:`sigmanens.evaluation.ood`, those of features in
:mod:`sigmanens.evaluation.feature_score`.
"""

from sigmanens.evaluation import (
    abstention,
    calibration,
    comparison,
    diversity,
    equivalent,
    feature_score,
    intervals,
    inversion,
    mahalanobis,
    metrics,
    neighbours,
    ood,
    resampling,
    risk,
    summary,
    vim,
)
from sigmanens.evaluation.abstention import Abstention, fit_abstention
from sigmanens.evaluation.calibration import (
    apply_temperature,
    calibrated_nll,
    fit_temperature,
)
from sigmanens.evaluation.comparison import Difference, holm, seed_difference
from sigmanens.evaluation.diversity import (
    disagreement,
    jensen_gap,
    member_accuracy,
    member_nll,
    modulation,
    pairwise_kl,
)
from sigmanens.evaluation.equivalent import Equivalent, deep_ensemble_equivalent
from sigmanens.evaluation.feature_score import FeatureScore
from sigmanens.evaluation.intervals import Interval, bootstrap, ece_interval, paired_difference
from sigmanens.evaluation.mahalanobis import Mahalanobis, RelativeMahalanobis
from sigmanens.evaluation.metrics import (
    Reliability,
    accuracy,
    adaptive_ece,
    brier,
    classwise_ece,
    ece,
    ece_debiased,
    nll,
    reliability,
    sharpness,
)
from sigmanens.evaluation.neighbours import KNN
from sigmanens.evaluation.ood import aupr_in, aupr_out, auroc, fpr_at_tpr
from sigmanens.evaluation.risk import RiskCoverage, aurc, eaurc, risk_coverage
from sigmanens.evaluation.summary import summarize
from sigmanens.evaluation.vim import ViM

__all__ = [
    "KNN",
    "Abstention",
    "Difference",
    "Equivalent",
    "FeatureScore",
    "Interval",
    "Mahalanobis",
    "RelativeMahalanobis",
    "Reliability",
    "RiskCoverage",
    "ViM",
    "abstention",
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
    "comparison",
    "deep_ensemble_equivalent",
    "disagreement",
    "diversity",
    "eaurc",
    "ece",
    "ece_debiased",
    "ece_interval",
    "equivalent",
    "feature_score",
    "fit_abstention",
    "fit_temperature",
    "fpr_at_tpr",
    "holm",
    "intervals",
    "inversion",
    "jensen_gap",
    "mahalanobis",
    "member_accuracy",
    "member_nll",
    "metrics",
    "modulation",
    "neighbours",
    "nll",
    "ood",
    "paired_difference",
    "pairwise_kl",
    "reliability",
    "resampling",
    "risk",
    "risk_coverage",
    "seed_difference",
    "sharpness",
    "summarize",
    "summary",
    "vim",
]
