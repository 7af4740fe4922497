r"""What an ensemble predicts, and how uncertain it is and why.

With member probabilities :math:`p_m` and their mean :math:`\bar p` (natural logarithms, nats)

.. math:: \underbrace{H(\bar p)}_{\text{entropy}}
          = \underbrace{\tfrac1M {\textstyle\sum_m} H(p_m)}_{\text{expected entropy}}
          + \underbrace{\tfrac1M {\textstyle\sum_m} \mathrm{KL}(p_m \| \bar p)}_{\text{modulation}},

the modulation being the mutual information between the label and the member index: what the
members disagree about (arXiv 2607.23860). Each term is at least 0; one member has modulation 0.

In a multilabel task each of the C labels of a sample is a question of its own, with two answers:
:math:`p_m = \sigma(z_m)` that it is present, and :math:`1 - p_m`. The equation above holds for each
label; the figures of a sample are the sums over its labels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from sigmanens.errors import InputError, NonFiniteError

__all__ = ["Prediction", "check_predictable", "log_mean_exp", "logits_of"]


def log_mean_exp(x: Tensor, dim: int = 0) -> Tensor:
    r""":math:`\log \frac1M \sum_m e^{x_m}` of log-probabilities (M, …) in nats, along ``dim``."""
    return torch.logsumexp(x, dim) - math.log(x.shape[dim])


def logits_of(output: Any) -> Tensor:
    """Logits in a network's result: itself, its ``.logits`` or ``["logits"]``, or its first item.

    ``["out"]`` is what torchvision's segmentation networks call them.

    Raises:
        InputError: if the result holds no such tensor.
    """
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    if logits is None and isinstance(output, dict):
        logits = output.get("logits", output.get("out"))
    if logits is None and isinstance(output, (tuple, list)) and output:
        logits = output[0]
    if not isinstance(logits, Tensor):
        raise InputError(
            f"no logits were found in what the network returned, of type {type(output).__name__}; "
            "expected a tensor, an object or mapping with 'logits' (or 'out'), or a tuple starting "
            "with them"
        )
    return logits


def check_predictable(task: str | None, adaptive: bool = False) -> None:
    """Raise InputError for a regression, and under ``adaptive`` for a multilabel task."""
    if task == "regression":
        raise InputError(
            "the members were trained by a regression loss, so that their outputs are no logits "
            "and have no probabilities. Average ens(x) over dimension 0. If the outputs are logits "
            "all the same, say so: ens.task = 'multiclass' (or 'multilabel')"
        )
    if adaptive and task == "multilabel":
        raise InputError(
            "adaptive stopping asks for members until the most probable class is settled, which a "
            "multilabel task does not have. Use predict without adaptive"
        )


@dataclass(frozen=True)
class Prediction:
    """Prediction of an ensemble for B samples and C classes or labels.

    Under ``task="multiclass"`` one class of a sample is right, and probabilities sum to 1 over the
    classes. Under ``task="multilabel"`` each label is present or not: ``probs`` is the mean of the
    members' sigmoids, and entropies are sums over the labels of a sample.

    Attributes:
        log_probs: log of the averaged probabilities, temperature applied: (B, C, …), nats.
        member_log_probs: each member's own log-probabilities, untempered: (M, B, C, …), nats.
        entropy: entropy of the untempered average: (B, …), nats; = expected_entropy + modulation.
        expected_entropy: mean entropy of the members: (B, …), nats.
        modulation: mutual information of label and member: (B, …), nats, ≥ 0.
        temperature: T in ``softmax(log p̄ / T)``, or in ``sigmoid(logit(p̄) / T)``; 1 leaves the
            average as it is.
        members_used: members that each sample was shown to, (B,) int64; None for all.
        per_label: under multilabel, the same for each label by itself, with the classes absent and
            present: log_probs (B, 2, C, …), entropies (B, C, …); else None.
    """

    log_probs: Tensor
    member_log_probs: Tensor
    entropy: Tensor
    expected_entropy: Tensor
    modulation: Tensor
    temperature: float = 1.0
    members_used: Tensor | None = None
    per_label: Prediction | None = None

    @classmethod
    def from_logits(
        cls,
        logits: Tensor,
        temperature: float = 1.0,
        class_dim: int = 1,
        task: str | None = "multiclass",
    ) -> Prediction:
        """Decompose member logits (M, B, C, …).

        Args:
            logits, temperature: (M, B, C, …), or with the classes elsewhere; T of the prediction.
            class_dim: dimension of the classes in one member's logits: 1 for (B, C, …), -1 for
                token classifiers (B, T, C). In the prediction they always come second.
            task: "multiclass" (or None): softmax over the classes; "multilabel": a sigmoid for
                each label.

        Raises:
            InputError: if the shape has fewer than 3 dimensions, a multiclass task has one class
                only, the temperature is not positive, or the task is a regression.
            NonFiniteError: if a logit is NaN or infinite.
        """
        check_predictable(task)
        if logits.dim() < 3:
            raise InputError(
                f"member logits have shape {tuple(logits.shape)}; expected (M, B, C, …)"
            )
        if not 1 <= abs(class_dim) <= logits.dim() - 2:
            shape = tuple(logits.shape[1:])
            raise InputError(f"class_dim is {class_dim}; one member's logits have shape {shape}")
        logits = logits.movedim(class_dim if class_dim < 0 else class_dim + 1, 2)
        if not (temperature > 0 and math.isfinite(temperature)):
            raise InputError(f"temperature is {temperature}; expected a positive number")
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if not torch.compiler.is_compiling() and not torch.isfinite(logits).all():
            bad = (~torch.isfinite(logits)).flatten(2).any(2).any(0).sum()
            raise NonFiniteError(
                f"{int(bad)} of {logits.shape[1]} samples have NaN or infinite logits; look for "
                "NaN in the inputs or for scales that have diverged in training"
            )
        if task == "multilabel":
            outcomes = torch.stack([torch.zeros_like(logits), logits], 2)  # softmax: 1 - σ and σ
            return cls._of_labels(cls._of_classes(outcomes, temperature))
        if logits.shape[2] == 1:
            raise InputError(
                f"logits of shape {tuple(logits.shape)} have one class, whose probability is "
                "always 1. If the one logit is that of a sigmoid, say so: "
                "ens.task = 'multilabel', or convert(…, task='multilabel')"
            )
        return cls._of_classes(logits, temperature)

    @classmethod
    def _of_classes(cls, logits: Tensor, temperature: float) -> Prediction:
        member = torch.log_softmax(logits, dim=2)
        mean = log_mean_exp(member, dim=0)
        probs = member.exp()
        expected = -(probs * member).sum(2).mean(0)
        modulation = (probs * (member - mean)).sum(2).mean(0).clamp_min(0)
        log_probs = mean if temperature == 1.0 else torch.log_softmax(mean / temperature, dim=1)
        return cls(log_probs, member, expected + modulation, expected, modulation, temperature)

    @classmethod
    def _of_labels(cls, each: Prediction) -> Prediction:
        """The multilabel prediction of labels that are predicted each."""
        return cls(
            each.log_probs[:, 1],
            each.member_log_probs[:, :, 1],
            each.entropy.sum(1),
            each.expected_entropy.sum(1),
            each.modulation.sum(1),
            each.temperature,
            per_label=each,
        )

    @property
    def task(self) -> str:
        """ "multiclass" or "multilabel"."""
        return "multiclass" if self.per_label is None else "multilabel"

    @property
    def probs(self) -> Tensor:
        """Averaged probabilities, temperature applied: (B, C, …)."""
        return self.log_probs.exp()

    @property
    def member_probs(self) -> Tensor:
        """Each member's own probabilities: (M, B, C, …)."""
        return self.member_log_probs.exp()

    @property
    def logits(self) -> Tensor:
        """What ``softmax(·, 1)``, or under multilabel ``sigmoid``, turns into probs: (B, C, …)."""
        if self.per_label is None:
            return self.log_probs
        return self.log_probs - self.per_label.log_probs[:, 0]

    @property
    def labels(self) -> Tensor:
        """Most probable class: (B, …), int64; under multilabel ``probs > 0.5``: (B, C, …)."""
        if self.per_label is None:
            return self.log_probs.argmax(1)
        return (self.probs > 0.5).long()

    @property
    def confidence(self) -> Tensor:
        """Probability of what :attr:`labels` says: (B, …); under multilabel (B, C, …)."""
        if self.per_label is None:
            return self.log_probs.amax(1).exp()
        return self.per_label.confidence

    def rows(self, labels: Tensor, ignore_index: int = -100) -> tuple[Tensor, Tensor, Tensor]:
        """One row for each distribution, as :mod:`sigmanens.evaluation` takes them.

        Positions (pixels, tokens) count as samples. Under multilabel every label of a sample is a
        row of two classes, absent and present.

        Args:
            labels: class indices (B, …); under multilabel 0 or 1 for each label: (B, C, …).
            ignore_index: label of rows to leave out.

        Returns:
            log-probabilities, temperature applied, (N, C) or (N, 2), nats; labels (N,), int64; and
            the members' own log-probabilities (M, N, C) or (M, N, 2), nats.

        Raises:
            InputError: for labels of another shape, or that are no class indices, or not 0 and 1.
        """
        if self.per_label is not None:
            return self.per_label.rows(_absent_or_present(labels, ignore_index), ignore_index)
        if labels.shape != self.entropy.shape or labels.is_floating_point():
            raise InputError(
                f"labels are {labels.dtype} {tuple(labels.shape)}; expected class indices of shape "
                f"{tuple(self.entropy.shape)}, one for each averaged distribution"
            )
        target = labels.flatten()
        counted = target != ignore_index
        log_probs = self.log_probs.movedim(1, -1).flatten(0, -2)
        members = self.member_log_probs.movedim(2, -1).flatten(1, -2)
        return log_probs[counted], target[counted].long(), members[:, counted]

    @staticmethod
    def cat(parts: list[Prediction]) -> Prediction:
        """Join predictions of consecutive batches."""
        return parts[0]._merge(torch.cat, *parts[1:])

    def reordered(self, index: Tensor) -> Prediction:
        """The samples that ``index`` (B′,) names, in its order."""
        return self._merge(lambda tensors, dim: tensors[0][(slice(None),) * dim + (index,)])

    def _merge(
        self, join: Callable[[list[Tensor], int], Tensor], *others: Prediction
    ) -> Prediction:
        """Apply ``join(tensors, dimension of the samples)`` to each field of predictions alike."""
        values: dict[str, Any] = {}
        for name in (f.name for f in fields(self)):
            parts = [getattr(p, name) for p in (self, *others)]
            if isinstance(parts[0], Prediction):
                values[name] = parts[0]._merge(join, *parts[1:])
            elif isinstance(parts[0], Tensor):
                values[name] = join(parts, 1 if name == "member_log_probs" else 0)
            else:
                values[name] = parts[0]
        return Prediction(**values)


def _absent_or_present(labels: Tensor, ignore_index: int) -> Tensor:
    """Labels of 0 and 1, of any dtype, as int64."""
    whole = labels.long()
    known = (whole == 0) | (whole == 1) | (whole == ignore_index)
    if not bool((known & (whole == labels)).all()):
        raise InputError(
            f"labels of a multilabel task are {labels.dtype} from {float(labels.min()):g} to "
            f"{float(labels.max()):g}; expected 0 (absent) or 1 (present) for each label"
        )
    return whole
