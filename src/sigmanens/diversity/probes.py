"""What a diagnosis needs beside the measures: pulls at the scales, the noise of dropout, NLLs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from sigmanens.diversity import measures
from sigmanens.ensemble.ensemble import SigmaEnsemble, as_ensemble
from sigmanens.ensemble.inputs import call_arguments
from sigmanens.ensemble.prediction import log_mean_exp, logits_of
from sigmanens.errors import InputError
from sigmanens.passes.modes import evaluating
from sigmanens.seeding import device_of, own_random_state, seed_device

if TYPE_CHECKING:
    from sigmanens.diversity.penalty import Diversity

__all__ = ["dropout_disagreement", "nlls", "pull_norms"]


def pull_norms(
    ensemble: SigmaEnsemble, diversity: Diversity, task: Tensor | None = None
) -> tuple[float, float]:
    """Norms of the penalty's and of the task's gradient with respect to the regularised γ.

    Args:
        ensemble: the ensemble.
        diversity: the penalty, as strong as its last call in training was.
        task: the task's loss with its graph, (), which is kept. None: the gradients that the
            logits hold now are those of task and penalty together, as before an optimizer step.

    Raises:
        InputError: if the scales are frozen, or there are no gradients to read.
    """
    norms = as_ensemble(ensemble).sigma_norms()
    logits = [norms[name].scale_logit for name in diversity.chosen(ensemble)[1]]
    if any(not logit.requires_grad for logit in logits):
        raise InputError("the regularised scales are frozen: nothing pulls at them")
    with torch.enable_grad():
        own = torch.autograd.grad(diversity.applied * diversity.full(ensemble), logits)
    if task is not None:
        others = torch.autograd.grad(task, logits, retain_graph=True, allow_unused=True)
        return _norm(own), _norm(t for t in others if t is not None)
    total = [logit.grad for logit in logits]
    if any(g is None for g in total):
        raise InputError(
            "the scales hold no gradients; call this between backward and the optimizer's step"
        )
    return _norm(own), _norm(g - p for g, p in zip(total, own, strict=True) if g is not None)


def _norm(tensors: Iterable[Tensor]) -> float:
    squares = [t.detach().double().square().sum() for t in tensors]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def nlls(member_log_probs: Tensor, labels: Tensor) -> tuple[float, float]:
    """Mean NLL of the members, and NLL of their average, in nats.

    Args:
        member_log_probs: log-probabilities or logits (M, B, C), nats.
        labels: class indices (B,), int64.

    Raises:
        InputError, NonFiniteError: as :func:`sigmanens.diversity.penalty.jensen_gap`.
    """
    gain = measures.jensen_gap(member_log_probs, labels)
    log_p = torch.log_softmax(member_log_probs.detach().double(), 2)
    index = labels.to(log_p.device).view(1, -1, 1).expand(len(log_p), -1, 1)
    averaged = -float(log_mean_exp(log_p.gather(2, index)).mean())
    return averaged + gain, averaged


def dropout_disagreement(ensemble: nn.Module, x: Any, seed: int = 0) -> float:
    """Fraction of samples on which a member differs from itself under two masks of dropout.

    Mean over members; 0 without dropout layers. The modes and random states found are restored.

    Args:
        ensemble: maps inputs to member logits (M, B, C).
        x: a tensor, a tuple of positional or a mapping of keyword inputs.
        seed: of the masks.
    """
    layers = [m for m in ensemble.modules() if isinstance(m, _DropoutNd) and m.p > 0]
    if not layers:
        return 0.0
    args, kwargs = call_arguments(x)
    device = device_of(ensemble)
    with evaluating(ensemble), own_random_state(device):
        seed_device(device, seed)
        for layer in layers:
            layer.train()
        first, second = (logits_of(ensemble(*args, **kwargs)).argmax(2) for _ in range(2))
        return float((first != second).double().mean())
