"""Detection of samples from elsewhere (out of distribution, OOD): scores and their quality.

Convention everywhere: **OOD is the positive class and a higher score means more OOD.** Swapping
the two sets therefore gives 1 − AUROC, and a score that does not depend on the input gives 0.5.
Ties are counted exactly. Scores may be infinite, since only their order counts, but not NaN.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from sigmanens.ensemble.prediction import log_mean_exp
from sigmanens.errors import InputError
from sigmanens.evaluation.diversity import as_member_logits, sample_modulation, sample_slices
from sigmanens.evaluation.metrics import as_floats


def auroc(in_scores: Any, out_scores: Any) -> float:
    """P(out > in) + ½ P(out = in) over all pairs: the area under the ROC curve.

    Args:
        in_scores: scores of in-distribution samples (the negatives): (N,).
        out_scores: scores of OOD samples (the positives): (K,).
    """
    inside, outside = _scores(in_scores, "in_scores"), _scores(out_scores, "out_scores")
    below = torch.searchsorted(inside, outside)
    up_to = torch.searchsorted(inside, outside, right=True)
    return int((below + up_to).sum()) / (2 * len(inside) * len(outside))


def aupr_out(in_scores: Any, out_scores: Any) -> float:
    """Average precision with OOD as the positive class: Σ_k (R_k − R_{k−1}) P_k.

    The step-wise sum over distinct thresholds "score ≥ t", not the trapezoid, which is too
    optimistic. A score without information gives the share of OOD samples, K/(N + K).

    Args:
        in_scores: (N,), higher = more OOD.
        out_scores: (K,), higher = more OOD.
    """
    return _average_precision(_scores(in_scores, "in_scores"), _scores(out_scores, "out_scores"))


def aupr_in(in_scores: Any, out_scores: Any) -> float:
    """Average precision with in-distribution as the positive class, by the negated scores.

    Args:
        in_scores: (N,), higher = more OOD.
        out_scores: (K,), higher = more OOD.
    """
    inside, outside = _scores(in_scores, "in_scores"), _scores(out_scores, "out_scores")
    return _average_precision(-outside.flip(0), -inside.flip(0))


def fpr_at_tpr(in_scores: Any, out_scores: Any, tpr: float = 0.95) -> float:
    """Fraction of in-distribution samples flagged by the threshold that flags ``tpr`` of the OOD.

    The threshold t is the highest at which at least ``tpr`` of the OOD samples have score ≥ t.
    Much of the literature takes in-distribution as positive instead: that number is
    ``fpr_at_tpr(-out_scores, -in_scores)``.

    Args:
        in_scores: (N,), higher = more OOD.
        out_scores: (K,), higher = more OOD.
        tpr: wanted true positive rate, in (0, 1].
    """
    inside, outside = _scores(in_scores, "in_scores"), _scores(out_scores, "out_scores")
    if not 0 < tpr <= 1:
        raise InputError(f"tpr is {tpr}; expected a fraction above 0 and up to 1")
    # The margin keeps a product such as 0.07 * 100 = 7.000000000000001 from asking for one more.
    flagged = max(1, math.ceil(tpr * len(outside) - 1e-9))
    threshold = outside[len(outside) - flagged]
    return (inside >= threshold).double().mean().item()


def scores(member_logits: Any) -> dict[str, Tensor]:
    """Scores of each sample from the members' logits z_m, higher = more OOD, each (B,) float64.

    With p_m = softmax(z_m) and p̄ = mean_m p_m, nats:

    * ``max_softmax``: 1 − max_c p̄_c (arXiv 1610.02136)
    * ``predictive_entropy``: H(p̄) = expected entropy + modulation
    * ``expected_entropy``: mean_m H(p_m), the doubt that the members share
    * ``modulation``: mean_m KL(p_m ‖ p̄), what they disagree about
    * ``energy``: − mean_m logsumexp_c z_mc (arXiv 2010.03759)
    * ``max_logit``: − max_c mean_m z_mc (arXiv 1911.11132)

    The last two need logits: log-probabilities carry no energy (it would be 0 for every sample).

    Args:
        member_logits: (M, B, C); −inf marks a class that is excluded.

    Raises:
        InputError: wrong type or shape, or empty.
        NonFiniteError: NaN, +inf, or a row that excludes every class.
    """
    slices = sample_slices(as_member_logits(member_logits))
    parts = [_slice_scores(part) for part in slices]
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _slice_scores(logits: Tensor) -> dict[str, Tensor]:
    evidence = torch.logsumexp(logits, 2, keepdim=True)
    member = logits - evidence
    averaged = log_mean_exp(member)
    mean_probs = averaged.exp()
    # The sum of the other classes: 1 − max would round to 0 for all very confident samples.
    others = mean_probs.scatter(1, averaged.argmax(1, keepdim=True), 0.0).sum(1)
    return {
        "max_softmax": others,
        "predictive_entropy": _entropy(averaged),
        "expected_entropy": _entropy(member).mean(0),
        "modulation": sample_modulation(member),
        "energy": -evidence.squeeze(2).mean(0),
        "max_logit": -logits.mean(0).amax(1),
    }


def _entropy(log_p: Tensor) -> Tensor:
    probs = log_p.exp()
    return -(probs * log_p).where(probs > 0, 0.0).sum(-1)


def _scores(values: Any, name: str) -> Tensor:
    """Scores in ascending order, float64, on the CPU."""
    return as_floats(values, name, "N").double().cpu().sort().values


def _average_precision(negative: Tensor, positive: Tensor) -> float:
    thresholds, hits = torch.unique_consecutive(positive, return_counts=True)
    true = len(positive) - torch.searchsorted(positive, thresholds)
    false = len(negative) - torch.searchsorted(negative, thresholds)
    precision = true.double() / (true + false)
    return (hits * precision).sum().item() / len(positive)
