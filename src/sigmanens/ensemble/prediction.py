r"""What an ensemble predicts, and how uncertain it is and why.

With member probabilities :math:`p_m` and their mean :math:`\bar p` (natural logarithms, nats)

.. math:: \underbrace{H(\bar p)}_{\text{entropy}}
          = \underbrace{\tfrac1M {\textstyle\sum_m} H(p_m)}_{\text{expected entropy}}
          + \underbrace{\tfrac1M {\textstyle\sum_m} \mathrm{KL}(p_m \| \bar p)}_{\text{modulation}},

the modulation being the mutual information between the label and the member index: what the
members disagree about (arXiv 2607.23860). Each term is at least 0; one member has modulation 0.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sigmanens.errors import InputError, NonFiniteError

__all__ = ["Prediction", "log_mean_exp", "logits_of"]


def log_mean_exp(x: Tensor, dim: int = 0) -> Tensor:
    r""":math:`\log \frac1M \sum_m e^{x_m}` along ``dim``, finite wherever it mathematically is.

    Args:
        x: log-probabilities (M, …) in nats.
        dim: the dimension to average over.
    """
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


@dataclass(frozen=True)
class Prediction:
    """Prediction of an ensemble for B samples and C classes.

    Attributes:
        log_probs: log of the averaged distribution, temperature applied: (B, C, …), nats.
        member_log_probs: each member's own log-probabilities, untempered: (M, B, C, …), nats.
        entropy: entropy of the untempered average: (B, …), nats; = expected_entropy + modulation.
        expected_entropy: mean entropy of the members: (B, …), nats.
        modulation: mutual information of label and member: (B, …), nats, ≥ 0.
        temperature: T in ``softmax(log p̄ / T)``; 1 leaves the average as it is.
        members_used: members that each sample was shown to, (B,) int64; None for all.
    """

    log_probs: Tensor
    member_log_probs: Tensor
    entropy: Tensor
    expected_entropy: Tensor
    modulation: Tensor
    temperature: float = 1.0
    members_used: Tensor | None = None

    @classmethod
    def from_logits(
        cls, logits: Tensor, temperature: float = 1.0, class_dim: int = 1
    ) -> Prediction:
        """Decompose member logits (M, B, C, …).

        Args:
            logits: (M, B, C, …), or with the classes elsewhere.
            temperature: T of ``softmax(log p̄ / T)``.
            class_dim: dimension of the classes in one member's logits: 1 for (B, C, …), -1 for
                token classifiers (B, T, C). In the prediction they always come second.

        Raises:
            InputError: if the shape has fewer than 3 dimensions, there is one class only, or the
                temperature is not positive.
            NonFiniteError: if a logit is NaN or infinite.
        """
        if logits.dim() < 3:
            raise InputError(
                f"member logits have shape {tuple(logits.shape)}; expected (M, B, C, …)"
            )
        if not 1 <= abs(class_dim) <= logits.dim() - 2:
            raise InputError(
                f"class_dim is {class_dim}; one member's logits have shape "
                f"{tuple(logits.shape[1:])}"
            )
        logits = logits.movedim(class_dim if class_dim < 0 else class_dim + 1, 2)
        if logits.shape[2] == 1:
            raise InputError(
                f"logits of shape {tuple(logits.shape)} have one class, whose probability is "
                "always 1; give a binary classifier two outputs, or stack (-z/2, z/2) of its one"
            )
        if not (temperature > 0 and math.isfinite(temperature)):
            raise InputError(f"temperature is {temperature}; expected a positive number")
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if not torch.compiler.is_compiling() and not torch.isfinite(logits).all():
            bad = (~torch.isfinite(logits)).flatten(2).any(2).any(0).sum()
            raise NonFiniteError(
                f"{int(bad)} of {logits.shape[1]} samples have NaN or infinite logits; look for "
                "NaN in the inputs or for scales that have diverged in training"
            )
        member = torch.log_softmax(logits, dim=2)
        mean = log_mean_exp(member, dim=0)
        probs = member.exp()
        expected = -(probs * member).sum(2).mean(0)
        modulation = (probs * (member - mean)).sum(2).mean(0).clamp_min(0)
        log_probs = mean if temperature == 1.0 else torch.log_softmax(mean / temperature, dim=1)
        return cls(log_probs, member, expected + modulation, expected, modulation, temperature)

    @property
    def probs(self) -> Tensor:
        """Averaged probabilities, temperature applied: (B, C, …)."""
        return self.log_probs.exp()

    @property
    def member_probs(self) -> Tensor:
        """Each member's own probabilities: (M, B, C, …)."""
        return self.member_log_probs.exp()

    @property
    def labels(self) -> Tensor:
        """Most probable class: (B, …), int64."""
        return self.log_probs.argmax(1)

    @property
    def confidence(self) -> Tensor:
        """Probability of the most probable class: (B, …)."""
        return self.log_probs.amax(1).exp()

    @staticmethod
    def cat(parts: list[Prediction]) -> Prediction:
        """Join predictions of consecutive batches."""
        used = [p.members_used for p in parts if p.members_used is not None]
        return Prediction(
            torch.cat([p.log_probs for p in parts]),
            torch.cat([p.member_log_probs for p in parts], 1),
            torch.cat([p.entropy for p in parts]),
            torch.cat([p.expected_entropy for p in parts]),
            torch.cat([p.modulation for p in parts]),
            parts[0].temperature,
            torch.cat(used) if used else None,
        )

    def reordered(self, index: Tensor) -> Prediction:
        """The samples that ``index`` (B′,) names, in its order."""
        used = self.members_used
        return Prediction(
            self.log_probs[index],
            self.member_log_probs[:, index],
            self.entropy[index],
            self.expected_entropy[index],
            self.modulation[index],
            self.temperature,
            None if used is None else used[index],
        )
