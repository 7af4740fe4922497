"""Measures of how different the members are: on their scales, and on their predictions."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from sigmanens.conversion.blocks import select
from sigmanens.conversion.config import LayerSelector
from sigmanens.diversity.theory import mean_cosine
from sigmanens.ensemble.ensemble import SigmaEnsemble, as_ensemble
from sigmanens.ensemble.prediction import log_mean_exp
from sigmanens.errors import DiversityError, InputError, NonFiniteError
from sigmanens.norms import SigmaNorm

SYMMETRIC = (
    "all members have equal scales, shifts and heads: they are one model. Task and penalty give "
    "each of them the same gradient, and they stay so unless dropout or split batches part them. "
    "Convert with init='preserve' or head='fresh'"
)

SLICE_ELEMENTS = 2**22  # float64 values of one slice of samples at most (32 MiB)


def _norms(ensemble: SigmaEnsemble, layers: LayerSelector) -> list[SigmaNorm]:
    ensemble = as_ensemble(ensemble)
    norms = ensemble.sigma_norms()
    return [norms[n] for n in select(ensemble.network, norms, layers)[1]]


def _gates(ensemble: SigmaEnsemble, layers: LayerSelector) -> Tensor | None:
    """σ(γ) of all channels of the layers, (M, N), detached; None for linear scales."""
    norms = _norms(ensemble, layers)
    if any(m.kind != "sigmoid" for m in norms):
        return None
    return torch.cat([m.gates().detach().flatten(1) for m in norms], 1)


def cosine(ensemble: SigmaEnsemble, layers: LayerSelector = "all") -> float:
    """Mean over layers and member pairs of cos(σ(γ_a), σ(γ_b)), in [0, 1] (arXiv 2607.23860).

    1 means that all members have the same scales. Independent γ ~ N(0, 1) give about 0.85. NaN for
    M = 1. Linear scales are taken as they are, and their cosine may be negative. ``layers`` are as
    in :class:`Diversity`; all converted norms by default.
    """
    values = []
    for norm in _norms(ensemble, layers):
        values.append(float(mean_cosine(norm.gates().detach().flatten(1).double())))
    return sum(values) / len(values)


def owners_per_channel(ensemble: SigmaEnsemble, layers: LayerSelector = "auto") -> Tensor:
    """Number of members with σ(γ) > ½ for each channel of the norms: (N,), int64.

    ``layers`` are as in :class:`Diversity`; those of the paper's rule by default.

    Raises:
        DiversityError: for linear scales, for which owners are not defined.
    """
    gates = _gates(ensemble, layers)
    if gates is None:
        raise DiversityError(
            "owners are defined for sigmoid scales; this ensemble has scale='linear'. Use cosine, "
            "or the measures of predictions"
        )
    return (gates > 0.5).sum(0)


def owners(ensemble: SigmaEnsemble, layers: LayerSelector = "auto") -> float:
    """Mean of :func:`owners_per_channel`, 0 … M; NaN for linear scales."""
    gates = _gates(ensemble, layers)
    return math.nan if gates is None else float((gates > 0.5).sum(0).double().mean())


def saturation(
    ensemble: SigmaEnsemble, layers: LayerSelector = "auto", margin: float = 0.02
) -> float:
    """Fraction of scales closer than ``margin`` to 0 or 1, where the sigmoid has hardly a gradient.

    NaN for linear scales. Arguments as for :func:`owners_per_channel`.
    """
    s = _gates(ensemble, layers)
    return math.nan if s is None else float(((s < margin) | (s > 1 - margin)).double().mean())


def symmetric(ensemble: SigmaEnsemble) -> bool:
    """Whether all members have equal scales, shifts and heads.

    Task and penalty give equal members the same gradient. They stay equal in training, unless
    dropout or ``forward(split=True)`` parts them. One member alone is not symmetric.
    """
    ensemble = as_ensemble(ensemble)
    norms = ensemble.sigma_norms().values()
    tensors: list[Tensor] = [m.logit for m in norms]
    tensors += [m.shift for m in norms if isinstance(m.shift, nn.Parameter)]
    if ensemble.num_members < 2 or not all(bool((t == t[:1]).all()) for t in tensors):
        return False
    heads = [h.heads for h in ensemble.member_heads().values()]
    alike = [same for each in heads for same in zip(*(h.parameters() for h in each), strict=True)]
    return all(torch.equal(same[0], other) for same in alike for other in same[1:])


def disagreement(member_log_probs: Tensor) -> float:
    """Fraction of samples that two members classify differently, mean over pairs; 0 for M = 1.

    Args:
        member_log_probs: log-probabilities or logits (M, B, C, …), nats.

    Raises:
        InputError: for a tensor of another shape, or an empty one.
        NonFiniteError: for NaN.
    """

    def per_sample(z: Tensor) -> Tensor:
        best = z.argmax(2)
        differ = (best.unsqueeze(0) != best.unsqueeze(1)).sum((0, 1)).double()
        return differ / max(1, len(best) * (len(best) - 1))

    return _mean(per_sample, member_log_probs)


def pairwise_kl(member_log_probs: Tensor) -> float:
    """Mean over ordered pairs of members and samples of KL(p_a ‖ p_b), nats; 0 for M = 1.

    Infinite if one member gives a class probability 0, and another does not. Argument and errors as
    for :func:`disagreement`.
    """

    def per_sample(z: Tensor) -> Tensor:
        log_p = torch.log_softmax(z, 2)
        # Σ_{a≠b} KL(p_a ‖ p_b) = M Σ_a Σ_c p_ac (log p_ac - mean_b log p_bc)
        p = log_p.exp()
        terms = (p * (log_p - log_p.mean(0))).where(p > 0, 0.0)
        return terms.sum((0, 2)).clamp_min(0) / max(1, len(p) - 1)

    return _mean(per_sample, member_log_probs)


def jensen_gap(member_log_probs: Tensor, labels: Tensor) -> float:
    """Mean NLL of the members minus NLL of their average, nats, ≥ 0 (arXiv 2607.23860).

    This is what averaging gains. A sample counts as infinite if some members give its label
    probability 0, and as 0 if all do.

    Args:
        member_log_probs: log-probabilities or logits (M, B, C, …), nats.
        labels: class indices (B, …), int64.

    Raises:
        InputError: for tensors of other shapes, empty ones, or labels out of range.
        NonFiniteError: for NaN.
    """
    _check_members(member_log_probs)
    classes = member_log_probs.shape[2]
    expected = (member_log_probs.shape[1], *member_log_probs.shape[3:])
    if not isinstance(labels, Tensor) or labels.shape != expected or labels.dtype != torch.int64:
        raise InputError(
            f"labels are {described(labels)}; expected int64 class indices of shape {expected}"
        )
    low, high = (int(bound) for bound in labels.aminmax())
    if low < 0 or high >= classes:
        raise InputError(f"labels range from {low} to {high}; expected 0 to {classes - 1}")
    index = labels.to(member_log_probs.device).unsqueeze(1)

    def per_sample(z: Tensor, index: Tensor) -> Tensor:
        log_p = torch.log_softmax(z, 2)
        picked = log_p.gather(2, index.expand(len(z), *index.shape)).squeeze(2)
        averaged = log_mean_exp(picked)
        gap = (averaged - picked.mean(0)).clamp_min(0)
        return gap.where(averaged > -torch.inf, 0.0)

    return _mean(per_sample, member_log_probs, index)


def _check_members(member_log_probs: Tensor) -> None:
    fits = isinstance(member_log_probs, Tensor) and member_log_probs.is_floating_point()
    if not fits or member_log_probs.dim() < 3 or member_log_probs.numel() == 0:
        raise InputError(
            f"member predictions are {described(member_log_probs)}; expected a float "
            "tensor (M, B, C, …) with no dimension of size 0, as in Prediction.member_log_probs"
        )


def described(x: object) -> str:
    return f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"


def _mean(per_sample: Callable[..., Tensor], member_log_probs: Tensor, *aligned: Tensor) -> float:
    """Mean over samples of a measure. It gets float64 logits (M, b, C, …), slice by slice."""
    _check_members(member_log_probs)
    size = max(1, SLICE_ELEMENTS * member_log_probs.shape[1] // member_log_probs.numel())
    parts = []
    for first in range(0, member_log_probs.shape[1], size):
        z = member_log_probs.detach()[:, first : first + size].double()
        if not bool(torch.isfinite(z.amax(2)).all()):
            raise NonFiniteError(
                "member predictions hold NaN, +inf, or -inf in every class of a sample; expected "
                "log-probabilities or logits"
            )
        parts.append(per_sample(z, *(t[first : first + size] for t in aligned)).flatten())
    return float(torch.cat(parts).mean())
