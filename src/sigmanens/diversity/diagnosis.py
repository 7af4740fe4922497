"""Diagnosis: what is wrong with an ensemble's diversity, with the numbers and the likely fix.

Each function judges some measurements, and returns a :class:`Finding` or None. :func:`diagnose`
calls them all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from sigmanens.diversity import measures, theory
from sigmanens.diversity.penalty import Diversity
from sigmanens.ensemble.ensemble import SigmaEnsemble, as_ensemble
from sigmanens.ensemble.inputs import call_arguments
from sigmanens.ensemble.prediction import Prediction, log_mean_exp, logits_of
from sigmanens.errors import InputError
from sigmanens.passes.modes import evaluating
from sigmanens.seeding import device_of, own_random_state, seed_device

# Thresholds.
DISAGREEMENT = 1e-3  # members that disagree on at most this fraction of samples may be one model
MODULATION = 1e-3  # they are, if the modulation is at most this fraction of the entropy,
SAME_COSINE = 0.99  # or the cosine of their scales is above this
PARTED_COSINE = 0.3  # the scales are parted if their cosine is below this,
SATURATED = 0.5  # and frozen if more than this fraction lies within 0.02 of 0 or 1
OUTWEIGHS = 10.0  # the penalty outweighs the task if its gradient is so many times as large


@dataclass(frozen=True)
class Finding:
    """Something that is wrong.

    Attributes:
        kind: "one model", "frozen partition", "weak members", "flat dial" or "outweighed task".
        message: the numbers, and what to try.
    """

    kind: str
    message: str

    def __str__(self) -> str:
        return self.message


def one_model(
    disagreement: float,
    modulation: float,
    entropy: float,
    *,
    cosine: float = math.nan,
    dropout: float = 0.0,
    step: int | None = None,
) -> Finding | None:
    """Find members that all give the same answers.

    Disagreements are fractions, ``dropout`` that of a member with itself under dropout. Modulation
    and entropy are in nats. The cosine is that of the scales, NaN if it is not known. ``step``, the
    training steps so far, goes into the message.
    """
    when = "" if step is None else f"after {step} steps "
    scales = "" if math.isnan(cosine) else f", cosine of the scales {cosine:.3f}"
    advice = (
        "Averaging gains little so far. Train longer, or the scales faster (scale_lr_mult), raise "
        "the penalty's weight, or convert with head='fresh'"
    )
    alike = modulation <= MODULATION * entropy or cosine > SAME_COSINE
    if disagreement <= DISAGREEMENT and alike:
        what = (
            f"the members answer as one model: disagreement {disagreement:.4f}, modulation "
            f"{modulation:.2g} of {entropy:.2g} nats"
        )
    elif disagreement < dropout:
        what = (
            "the members differ less than one of them does from itself under dropout: "
            f"disagreement {disagreement:.4f} against {dropout:.4f}"
        )
    else:
        return None
    return Finding("one model", f"{when}{what}{scales}. {advice}")


def frozen_partition(
    cosine: float, saturation: float, *, step: int | None = None
) -> Finding | None:
    """Find channels that the penalty has shared out before the task could. Ask in the first steps.

    Cosine and saturation are those of the regularised scales.
    """
    if not (cosine < PARTED_COSINE and saturation > SATURATED):
        return None
    when = "" if step is None else f" by step {step}"
    return Finding(
        "frozen partition",
        f"the scales were parted{when}: cosine {cosine:.2f}, {saturation:.0%} of them saturated, "
        "where they hardly move any more. The penalty decided this before the task could. Lower "
        "its weight or the rate of the scales (scale_lr_mult), raise tau, or delay it: "
        "Diversity(weight=Ramp(…, start=0.25, length=0.25))",
    )


def weak_members(member_nll: float, ensemble_nll: float, single_nll: float) -> Finding | None:
    """Find members that have lost more than averaging gains.

    NLLs in nats: mean of the members, of their average, of one network trained in the same way.
    """
    lost, gained = member_nll - single_nll, member_nll - ensemble_nll
    if not lost > gained:
        return None
    return Finding(
        "weak members",
        f"the members are too weak: each loses {lost:.3f} nats against one network (NLL "
        f"{member_nll:.3f} against {single_nll:.3f}), and averaging gains {gained:.3f}, so the "
        f"ensemble is behind at {ensemble_nll:.3f}. Train longer, new heads faster (head_lr_mult=M "
        "under SGD), or take fewer members, a higher tau or a lower weight, so that they share "
        "more channels",
    )


def flat_dial(tau: float, members: int) -> Finding | None:
    """Find a τ where turning τ changes little: outside ``flat_range``."""
    slope = theory.owners_per_doubling(tau, members)
    if slope >= theory.FLAT * members / 2:
        return None
    owners = theory.reached_owners(tau, members)
    steep = theory.flat_range(members)
    advice = (
        "With two members every tau ends with one owner of each channel: steer by the weight"
        if steep is None
        else f"To steer by tau, take one between {steep[0]:.2g} and {steep[1]:.2g}; here the "
        "weight decides"
    )
    return Finding(
        "flat dial",
        f"tau={tau:g} lies where the dial is flat: doubling it moves the owners that the penalty "
        f"alone reaches by {slope:.2f} of {owners:.2f} ({members} members). {advice}",
    )


def outweighed_task(penalty: float, task: float, *, tau: float, weight: float) -> Finding | None:
    """Find a penalty that pulls at the scales much harder than the task does.

    ``penalty`` and ``task`` are the norms of their gradients in γ, as of :func:`pull_norms`.
    """
    if not penalty > OUTWEIGHS * task:
        return None
    ratio = penalty / task if task > 0 else math.inf
    return Finding(
        "outweighed task",
        f"the penalty pulls at the scales {ratio:.3g} times as hard as the task (gradient norms "
        f"{penalty:.2g} and {task:.2g} at tau={tau:g}, weight={weight:g}): it shares out the "
        f"channels by chance. To weigh as much as the task, weight would be {weight / ratio:.1g}; "
        "or raise tau, or delay the penalty with Diversity(weight=Ramp(…))",
    )


def pull_norms(
    ensemble: SigmaEnsemble, diversity: Diversity, task: Tensor | None = None
) -> tuple[float, float]:
    """Norms of the penalty's and of the task's gradient with respect to the regularised γ.

    ``task`` is the task's loss (); its graph is kept. None: read the gradients that the scales hold
    between backward and the optimizer's step, which are those of task and penalty together.

    Raises:
        InputError: if the scales are frozen, or hold no gradients.
    """
    norms = as_ensemble(ensemble).sigma_norms()
    logits = [norms[name].scale_logit for name in diversity.chosen(ensemble)[1]]
    if any(not logit.requires_grad for logit in logits):
        raise InputError("the regularised scales are frozen: nothing pulls at them")
    with torch.enable_grad():
        own = torch.autograd.grad(diversity(ensemble), logits)
    if task is not None:
        others = torch.autograd.grad(task, logits, retain_graph=True, allow_unused=True)
        return _norm(own), _norm(t for t in others if t is not None)
    total = [logit.grad for logit in logits if logit.grad is not None]
    if len(total) < len(logits):
        raise InputError(
            "the scales hold no gradients; call this between backward and the optimizer's step"
        )
    return _norm(own), _norm(g - p for g, p in zip(total, own, strict=True))


def _norm(tensors: Iterable[Tensor]) -> float:
    squares = [t.detach().double().square().sum() for t in tensors]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def nlls(member_log_probs: Tensor, labels: Tensor) -> tuple[float, float]:
    """Mean NLL of the members, and NLL of their average, in nats.

    Arguments (M, B, C) and (B,), and errors as for :func:`sigmanens.diversity.jensen_gap`.
    """
    gain = measures.jensen_gap(member_log_probs, labels)
    log_p = torch.log_softmax(member_log_probs.detach().double(), 2)
    index = labels.to(log_p.device).view(1, -1, 1).expand(len(log_p), -1, 1)
    averaged = -float(log_mean_exp(log_p.gather(2, index)).mean())
    return averaged + gain, averaged


def dropout_disagreement(ensemble: nn.Module, x: Any, seed: int = 0) -> float:
    """Fraction of samples on which a member differs from itself under two masks of dropout.

    Mean over members; 0 without dropout layers. Modes and random states are put back. From x, a
    tensor, a tuple of positional or a mapping of keyword inputs, the ensemble makes logits
    (M, B, C).
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


def diagnose(
    ensemble: SigmaEnsemble,
    *,
    diversity: Diversity | None = None,
    member_log_probs: Tensor | None = None,
    labels: Tensor | None = None,
    single_nll: float | None = None,
    dropout: float = 0.0,
    early: tuple[float, float] | None = None,
    pulls: tuple[float, float] | None = None,
) -> list[Finding]:
    """Find what is wrong with an ensemble's diversity, from what you can give.

    Args:
        ensemble: the ensemble.
        diversity: the penalty of its training.
        member_log_probs: log-probabilities or logits on held-out data (M, B, C), nats.
        labels: class indices of them (B,), int64.
        single_nll: NLL of one network trained in the same way on the same data, nats.
        dropout: what :func:`dropout_disagreement` returned.
        early: cosine and saturation of the scales in the first steps, or after the first epoch.
        pulls: what :func:`pull_norms` returned in training.

    Returns:
        the findings; empty if nothing is wrong.

    Raises:
        InputError: if ``single_nll`` comes without predictions and labels, or ``pulls`` without the
            penalty. What the measures raise.
    """
    ensemble = as_ensemble(ensemble)
    if single_nll is not None and (member_log_probs is None or labels is None):
        raise InputError("single_nll needs member_log_probs and labels to be compared with")
    if pulls is not None and diversity is None:
        raise InputError("pulls needs the penalty they were measured with: diversity=…")
    if ensemble.num_members < 2:
        return []
    found: list[Finding | None] = []
    if measures.symmetric(ensemble):
        found.append(Finding("one model", measures.SYMMETRIC))
    elif member_log_probs is not None:
        prediction = Prediction.from_logits(member_log_probs.detach().double())
        uncertainties = [float(t.mean()) for t in (prediction.modulation, prediction.entropy)]
        cosine = measures.cosine(ensemble, "auto" if diversity is None else diversity.layers)
        differ = measures.disagreement(member_log_probs)
        found.append(one_model(differ, *uncertainties, cosine=cosine, dropout=dropout))
    if single_nll is not None and member_log_probs is not None and labels is not None:
        found.append(weak_members(*nlls(member_log_probs, labels), single_nll))
    if early is not None:
        found.append(frozen_partition(*early))
    if diversity is not None and diversity.active:
        if not callable(diversity.tau):
            found.append(flat_dial(diversity.tau, ensemble.num_members))
        if pulls is not None:
            tau, weight = diversity.current()
            found.append(outweighed_task(*pulls, tau=tau, weight=weight))
    return [f for f in found if f is not None]
