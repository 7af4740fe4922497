"""What is wrong with the diversity of an ensemble, in words, with the numbers and the likely fix.

Plain functions of measurements, each of which gives a :class:`Finding` or None, and
:func:`diagnose`, which measures an ensemble and asks them all. The Lightning callback
``DiversityMonitor`` asks the same functions during training.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from sigmanens.diversity import measures, theory
from sigmanens.diversity.probes import nlls
from sigmanens.ensemble.ensemble import SigmaEnsemble, as_ensemble
from sigmanens.ensemble.prediction import Prediction
from sigmanens.errors import InputError

if TYPE_CHECKING:
    from sigmanens.diversity.penalty import Diversity

__all__ = [
    "Finding",
    "Limits",
    "diagnose",
    "flat_dial",
    "frozen_partition",
    "one_model",
    "outweighed_task",
    "weak_members",
]


@dataclass(frozen=True)
class Finding:
    """Something that is wrong.

    Attributes:
        kind: "one model", "frozen partition", "weak members", "flat dial" or "outweighed task".
        message: one sentence with the numbers, and what to try.
        numbers: the numbers by name.
    """

    kind: str
    message: str
    numbers: Mapping[str, float] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True)
class Limits:
    """When something counts as wrong.

    Attributes:
        disagreement: members that disagree on at most this fraction of samples may be one model;
            so may members that disagree less than one of them does with itself under dropout.
        relative_modulation: they are, if the modulation is at most this fraction of the entropy,
        same_cosine: or the cosine of their scales is above this.
        parted_cosine: the scales are parted if their cosine is below this,
        saturated: and frozen if more than this fraction lies within 0.02 of 0 or 1.
        outweighs: the penalty outweighs the task if it pulls at the scales this much harder.

    Raises:
        InputError: for a fraction or a cosine outside 0 … 1, or a factor below 1.
    """

    disagreement: float = 1e-3
    relative_modulation: float = 1e-3
    same_cosine: float = 0.99
    parted_cosine: float = 0.3
    saturated: float = 0.5
    outweighs: float = 10.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if name == "outweighs":
                if not value >= 1:
                    raise InputError(f"outweighs is {value!r}; expected a factor of at least 1")
            elif not 0 <= value <= 1:
                raise InputError(f"{name} is {value!r}; expected a number from 0 to 1")


_DEFAULT = Limits()

_SYMMETRIC = Finding(
    "one model",
    "all members have equal scales, shifts and heads: they are one model, and training keeps them "
    "so unless dropout or split batches part them. Convert with init='preserve' or head='fresh'",
    {"cosine": 1.0},
)


def one_model(
    disagreement: float,
    modulation: float,
    entropy: float,
    *,
    cosine: float = math.nan,
    dropout: float = 0.0,
    step: int | None = None,
    limits: Limits = _DEFAULT,
) -> Finding | None:
    """Whether members answer as one model.

    Args:
        disagreement: of the members' classes, a fraction.
        modulation: mutual information of label and member, nats.
        entropy: of the averaged prediction, nats.
        cosine: of the scales; NaN: not known.
        dropout: disagreement of a member with itself under dropout, a fraction.
        step: when, for the message.
        limits: thresholds.
    """
    when = "" if step is None else f"after {step} steps "
    numbers = {"disagreement": disagreement, "modulation": modulation, "entropy": entropy}
    scales = ""
    if not math.isnan(cosine):
        numbers["cosine"] = cosine
        scales = f", cosine of the scales {cosine:.3f}"
    advice = (
        "Averaging gains little so far. Train longer, or the scales faster (scale_lr_mult), raise "
        "the penalty's weight, or convert with head='fresh'"
    )
    alike = modulation <= limits.relative_modulation * entropy or cosine > limits.same_cosine
    if disagreement <= limits.disagreement and alike:
        return Finding(
            "one model",
            f"{when}the members answer as one model: disagreement {disagreement:.4f}, modulation "
            f"{modulation:.2g} of {entropy:.2g} nats{scales}. {advice}",
            numbers,
        )
    if disagreement < dropout:
        return Finding(
            "one model",
            f"{when}the members differ less than one of them does from itself under dropout: "
            f"disagreement {disagreement:.4f} against {dropout:.4f}{scales}. {advice}",
            numbers | {"dropout": dropout},
        )
    return None


def frozen_partition(
    cosine: float, saturation: float, *, step: int | None = None, limits: Limits = _DEFAULT
) -> Finding | None:
    """Whether the channels are shared out for good; asked early, before the task could decide.

    Args:
        cosine: of the regularised scales.
        saturation: fraction of them within 0.02 of 0 or 1.
        step: when, for the message.
        limits: thresholds.
    """
    if not (cosine < limits.parted_cosine and saturation > limits.saturated):
        return None
    when = "" if step is None else f" by step {step}"
    return Finding(
        "frozen partition",
        f"the scales were parted{when}: cosine {cosine:.2f}, {saturation:.0%} of them saturated, "
        "where they hardly move any more. The penalty decided this before the task could. Lower "
        "its weight or the rate of the scales (scale_lr_mult), raise tau, or delay it: "
        "Diversity(start=0.25, ramp=0.25)",
        {"cosine": cosine, "saturation": saturation},
    )


def weak_members(member_nll: float, ensemble_nll: float, single_nll: float) -> Finding | None:
    """Whether members have lost more than averaging gains.

    Args:
        member_nll: mean NLL of the members, nats.
        ensemble_nll: NLL of their average, nats.
        single_nll: NLL of one network trained in the same way, nats.
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
        {"lost": lost, "gained": gained, "member_nll": member_nll, "single_nll": single_nll},
    )


def flat_dial(tau: float, members: int) -> Finding | None:
    """Whether τ lies where the map from τ to owners is flat (:func:`flat_range`).

    The map is simulated at the first use of an M, which takes a second or two.
    """
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
        {"tau": tau, "slope": slope, "owners": owners},
    )


def outweighed_task(
    penalty: float, task: float, *, tau: float, weight: float, limits: Limits = _DEFAULT
) -> Finding | None:
    """Whether the penalty pulls at the scales much harder than the task does.

    Args:
        penalty: norm of the penalty's gradient with respect to the scale logits γ.
        task: norm of the task's gradient with respect to the same.
        tau: τ of the penalty.
        weight: λ or Λ.
        limits: thresholds.
    """
    if not penalty > limits.outweighs * task:
        return None
    ratio = penalty / task if task > 0 else math.inf
    return Finding(
        "outweighed task",
        f"the penalty pulls at the scales {ratio:.3g} times as hard as the task (gradient norms "
        f"{penalty:.2g} and {task:.2g} at tau={tau:g}, weight={weight:g}): it shares out the "
        f"channels by chance. To weigh as much as the task, weight would be {weight / ratio:.1g}; "
        "or raise tau, or delay the penalty with Diversity(start=…)",
        {"penalty": penalty, "task": task, "ratio": ratio},
    )


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
    limits: Limits = _DEFAULT,
) -> list[Finding]:
    """What is wrong with an ensemble's diversity; what is not given is not looked at.

    Args:
        ensemble: the ensemble.
        diversity: the penalty it is or was trained with.
        member_log_probs: log-probabilities or logits on held-out data (M, B, C), nats.
        labels: class indices of them (B,), int64.
        single_nll: NLL of one network trained in the same way on the same data, nats.
        dropout: :func:`sigmanens.diversity.probes.dropout_disagreement`.
        early: cosine and saturation of the scales in the first steps, or after the first epoch.
        pulls: :func:`sigmanens.diversity.probes.pull_norms` in training.
        limits: thresholds.

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
        found.append(_SYMMETRIC)
    elif member_log_probs is not None:
        prediction = Prediction.from_logits(member_log_probs.detach().double())
        found.append(
            one_model(
                measures.disagreement(member_log_probs),
                float(prediction.modulation.mean()),
                float(prediction.entropy.mean()),
                cosine=measures.cosine(ensemble, "auto" if diversity is None else diversity.layers),
                dropout=dropout,
                limits=limits,
            )
        )
    if single_nll is not None:
        assert member_log_probs is not None
        assert labels is not None
        found.append(weak_members(*nlls(member_log_probs, labels), single_nll))
    if early is not None:
        found.append(frozen_partition(*early, limits=limits))
    if diversity is not None and diversity.weight > 0:
        if diversity.feedback is None:
            diversity.set_tau(ensemble)
            found.append(flat_dial(diversity.tau, ensemble.num_members))
        if pulls is not None:
            tau, weight = diversity.tau, diversity.weight
            found.append(outweighed_task(*pulls, tau=tau, weight=weight, limits=limits))
    return [f for f in found if f is not None]
