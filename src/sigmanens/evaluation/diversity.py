"""How much members differ: measures of their predictions, (M, B, C) log-probabilities in.

Every measure is a mean over samples, computed in slices of samples so that the working memory
does not grow with M, B or C; it is 0 for one member, and for members that are all equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from sigmanens.diversity import measures
from sigmanens.ensemble.prediction import log_mean_exp
from sigmanens.errors import NonFiniteError
from sigmanens.evaluation.metrics import as_floats, as_labels, check_rows_sum_to_one


def as_member_log_probs(member_log_probs: Any) -> Tensor:
    """``member_log_probs`` (M, B, C), in its own dtype, checked to hold distributions.

    Raises:
        InputError: wrong type or shape, empty, NaN, or rows that do not sum to 1.
    """
    tensor = as_floats(member_log_probs, "member_log_probs", "MBC")
    for part in sample_slices(tensor):
        check_rows_sum_to_one(part, "member_log_probs", tensor.dtype)
    return tensor


def as_member_logits(member_logits: Any) -> Tensor:
    """``member_logits`` (M, B, C), in its own dtype; −inf marks a class that is excluded.

    Raises:
        InputError: wrong type or shape, or empty.
        NonFiniteError: NaN, +inf, or a row that excludes every class.
    """
    tensor = as_floats(member_logits, "member_logits", "MBC")
    bad = int((~torch.isfinite(tensor.amax(2))).sum())
    if bad:
        raise NonFiniteError(
            f"{bad} of {tensor.shape[0] * tensor.shape[1]} rows of member_logits hold +inf, or "
            "−inf in every class; expected a finite largest logit in each"
        )
    return tensor


def sample_slices(members: Tensor) -> Iterator[Tensor]:
    """Consecutive slices (M, b, C) of a tensor (M, B, C), in float64, of bounded size."""
    size = max(1, measures.SLICE_ELEMENTS // (members.shape[0] * members.shape[2]))
    for part in members.split(size, dim=1):
        yield part.double()


def disagreement(member_log_probs: Any) -> float:
    """Fraction of samples on which two members name different classes, mean over member pairs.

    Args:
        member_log_probs: (M, B, C), nats.
    """
    return measures.disagreement(as_member_log_probs(member_log_probs))


def pairwise_kl(member_log_probs: Any) -> float:
    """Mean KL(p_a ‖ p_b) in nats over ordered member pairs a ≠ b and samples.

    Infinite where a member excludes a class that another one does not.

    Args:
        member_log_probs: (M, B, C), nats.
    """
    return measures.pairwise_kl(as_member_log_probs(member_log_probs))


def modulation(member_log_probs: Any) -> float:
    """Mean mutual information of label and member, (1/M) Σ_m KL(p_m ‖ p̄), in nats.

    Args:
        member_log_probs: (M, B, C), nats.
    """
    return _mean(sample_modulation, member_log_probs)


def sample_modulation(log_p: Tensor) -> Tensor:
    """(1/M) Σ_m KL(p_m ‖ p̄) of float64 log-probabilities (M, B, C): (B,), nats, in [0, log M]."""
    return _weighted_log_ratio(log_p, log_mean_exp(log_p)).mean(0).clamp_min(0)


def jensen_gap(member_log_probs: Any, labels: Any) -> float:
    """Mean member NLL minus the NLL of the averaged distribution, in nats; ≥ 0.

    What averaging gains. A sample whose label has probability 0 in every member counts as 0; in
    some members only, the gap is infinite.

    Args:
        member_log_probs: (M, B, C), nats.
        labels: (B,), integers.
    """
    log_p = as_member_log_probs(member_log_probs)
    return measures.jensen_gap(log_p, as_labels(labels, log_p))


def member_nll(member_log_probs: Any, labels: Any) -> float:
    """NLL of a member, mean over members and samples, in nats.

    Args:
        member_log_probs: (M, B, C), nats.
        labels: (B,), integers.
    """
    return 0 - _label_log_probs(member_log_probs, labels).mean().item()


def member_accuracy(member_log_probs: Any, labels: Any) -> float:
    """Accuracy of a member, mean over members and samples.

    Args:
        member_log_probs: (M, B, C), nats.
        labels: (B,), integers.
    """
    log_p = as_member_log_probs(member_log_probs)
    return (log_p.argmax(2) == as_labels(labels, log_p)).double().mean().item()


def _mean(per_sample: Callable[[Tensor], Tensor], member_log_probs: Any) -> float:
    parts = sample_slices(as_member_log_probs(member_log_probs))
    return torch.cat([per_sample(part) for part in parts]).mean().item()


def _label_log_probs(member_log_probs: Any, labels: Any) -> Tensor:
    """Each member's log-probability of the label: (M, B), float64."""
    log_p = as_member_log_probs(member_log_probs)
    index = as_labels(labels, log_p)[None, :, None].expand(len(log_p), -1, 1)
    return log_p.gather(2, index).squeeze(2).double()


def _weighted_log_ratio(log_p: Tensor, reference: Tensor) -> Tensor:
    """Σ_c p_c (log p_c − reference_c), classes of probability 0 left out: (M, B)."""
    probs = log_p.exp()
    return (probs * (log_p - reference)).where(probs > 0, 0.0).sum(2)
