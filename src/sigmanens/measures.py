"""How different the members are: measured on their scales, or on their predictions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sigmanens.audit import LayerSelector
from sigmanens.ensemble import SigmaEnsemble
from sigmanens.norms import SigmaNorm
from sigmanens.selection import select

__all__ = [
    "cosine",
    "disagreement",
    "jensen_gap",
    "owners",
    "owners_per_channel",
    "pairwise_kl",
    "saturation",
    "symmetric",
]


def _norms(source: SigmaEnsemble | Sequence[SigmaNorm], layers: LayerSelector) -> list[SigmaNorm]:
    if not isinstance(source, SigmaEnsemble):
        return list(source)
    norms = source.sigma_norms()
    return [norms[n] for n in select(source.network, norms, layers)[1]]


def cosine(source: SigmaEnsemble | Sequence[SigmaNorm], layers: LayerSelector = "all") -> float:
    """Mean over layers and member pairs of cos(σ(γ_a), σ(γ_b)), in [0, 1] (arXiv 2607.23860).

    1 means that the members scale alike; independent γ ~ N(0, 1) gives about 0.85. NaN for M = 1.

    Args:
        source: an ensemble, or σNorm layers.
        layers: which layers of an ensemble, as in :class:`Diversity`; every converted norm by default.
    """
    values = []
    for layer in _norms(source, layers):
        values.append(_mean_cosine(layer.gates().detach().flatten(1)))
    return float(torch.stack(values).mean())


def _mean_cosine(s: Tensor) -> Tensor:
    members = s.shape[0]
    if members < 2:
        return s.new_tensor(float("nan"))
    unit = torch.nn.functional.normalize(s, dim=1)
    similarity = unit @ unit.T
    a, b = torch.triu_indices(members, members, 1, device=s.device)
    return similarity[a, b].mean()


def owners_per_channel(
    source: SigmaEnsemble | Sequence[SigmaNorm], layers: LayerSelector = "auto"
) -> Tensor:
    """Number of members with σ(γ) > ½ for each channel of the regularised norms: (N,), int64."""
    chosen = _norms(source, layers)
    return torch.cat([(m.gates().detach().flatten(1) > 0.5).sum(0) for m in chosen])


def owners(source: SigmaEnsemble | Sequence[SigmaNorm], layers: LayerSelector = "auto") -> float:
    """Mean number of members that own a channel, 0 … M (see :func:`owners_per_channel`)."""
    return float(owners_per_channel(source, layers).double().mean())


def saturation(
    source: SigmaEnsemble | Sequence[SigmaNorm], layers: LayerSelector = "auto", margin: float = 0.02
) -> float:
    """Fraction of scales within ``margin`` of 0 or 1, where the sigmoid hardly lets them move."""
    s = torch.cat([m.gates().detach().flatten() for m in _norms(source, layers)])
    return float(((s < margin) | (s > 1 - margin)).double().mean())


def symmetric(source: SigmaEnsemble | Sequence[SigmaNorm]) -> bool:
    """Whether all members have equal scales (and, for an ensemble, equal shifts and heads).

    Such an ensemble is one network M times over: task and penalty give every member the same
    gradient, so that training keeps it so (a symmetric fixed point).
    """
    if isinstance(source, SigmaEnsemble):
        if source.num_members == 1:
            return False
        tensors = [m.logit for m in source.sigma_norms().values()]
        tensors += [
            m.shift for m in source.sigma_norms().values() if isinstance(m.shift, torch.nn.Parameter)
        ]
        for heads in source.member_heads().values():
            first = list(heads.heads[0].parameters())
            for other in list(heads.heads)[1:]:
                pairs = zip(first, other.parameters(), strict=True)
                if any(not torch.equal(p, q) for p, q in pairs):
                    return False
    else:
        tensors = [m.logit for m in source]
    return all(bool((t == t[:1]).all()) for t in tensors)


# -- measures on predictions -------------------------------------------------------------------------


def _pairs(members: int) -> list[tuple[int, int]]:
    return [(a, b) for a in range(members) for b in range(a + 1, members)]


def disagreement(member_log_probs: Tensor) -> float:
    """Fraction of samples on which two members name different classes, mean over pairs; 0 for M = 1.

    Args:
        member_log_probs: log-probabilities or logits (M, B, C, …).
    """
    labels = member_log_probs.argmax(2)
    values = [(labels[a] != labels[b]).double().mean() for a, b in _pairs(labels.shape[0])]
    return float(torch.stack(values).mean()) if values else 0.0


def pairwise_kl(member_log_probs: Tensor) -> float:
    """Mean over ordered pairs of members and samples of KL(p_a ‖ p_b), nats; 0 for M = 1.

    Args:
        member_log_probs: log-probabilities (M, B, C, …), nats.
    """
    log_p = torch.log_softmax(member_log_probs.double(), 2)
    values = []
    for a, b in _pairs(log_p.shape[0]):
        difference = log_p[a] - log_p[b]
        values.append(((log_p[a].exp() - log_p[b].exp()) * difference).sum(1).mean() / 2)
    return float(torch.stack(values).mean()) if values else 0.0


def jensen_gap(member_log_probs: Tensor, labels: Tensor) -> float:
    """Mean NLL of the members minus NLL of their average, nats, ≥ 0 (arXiv 2607.23860).

    Args:
        member_log_probs: log-probabilities (M, B, C), nats.
        labels: (B,), int64.
    """
    log_p = torch.log_softmax(member_log_probs.double(), 2)
    picked = log_p.gather(2, labels.view(1, -1, 1).expand(log_p.shape[0], -1, 1)).squeeze(2)
    mean = torch.logsumexp(picked, 0) - torch.log(picked.new_tensor(float(log_p.shape[0])))
    return float((mean - picked.mean(0)).mean().clamp_min(0))
