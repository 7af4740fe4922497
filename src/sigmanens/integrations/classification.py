"""An ensemble as a classifier of Hugging Face transformers: inputs by name, a ModelOutput back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from sigmanens.ensemble.ensemble import SigmaEnsemble
from sigmanens.ensemble.prediction import Prediction, logits_of
from sigmanens.errors import InputError
from sigmanens.training.loss import EnsembleLoss

__all__ = ["EnsembleForClassification", "EnsembleOutput"]


@dataclass
class EnsembleOutput(ModelOutput):
    """What the ensemble says about B samples of C classes.

    Every tensor has the samples first, as whatever gathers and joins batches takes for granted;
    elsewhere in this library members come first.

    Attributes:
        loss: (), in training the members' mean loss plus the penalty, in evaluation without it.
        logits: log of the averaged probabilities, or under multilabel the averaged logits, whose
            sigmoid is the averaged probability; temperature applied: (B, C), nats.
        member_logits: each member's logits: (B, M, C).
        entropy: of the untempered average: (B,), nats; = expected_entropy + modulation.
        expected_entropy: mean entropy of the members: (B,), nats.
        modulation: mutual information of label and member: (B,), nats.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    member_logits: Tensor | None = None
    entropy: Tensor | None = None
    expected_entropy: Tensor | None = None
    modulation: Tensor | None = None


class EnsembleForClassification(nn.Module):
    """An ensemble that takes inputs by name, labels among them, and gives an EnsembleOutput.

    Args:
        ensemble: of a network with one row of logits per sample.
        loss_fn: without a penalty by default, cross-entropy or, if the ensemble's task is
            multilabel (``problem_type="multi_label_classification"``), binary cross-entropy.

    Raises:
        InputError: if the base is configured for regression, or the loss is not for its task.
    """

    accepts_loss_kwargs = True  # the Trainer may pass num_items_in_batch

    def __init__(self, ensemble: SigmaEnsemble, loss_fn: EnsembleLoss | None = None) -> None:
        super().__init__()
        if not isinstance(ensemble, SigmaEnsemble):
            raise InputError(
                f"got a {type(ensemble).__name__} in the place of the ensemble; expected the "
                "SigmaEnsemble that sigmanens.ensemble.convert returns"
            )
        config = getattr(ensemble.network, "config", None)
        if config is not None:
            self.config = config
        if ensemble.task == "regression":
            raise InputError(
                "the task of the ensemble is regression (problem_type of its base, or the loss); "
                "expected classes or labels, whose probabilities can be averaged"
            )
        self.main_input_name = getattr(ensemble.network, "main_input_name", "input_ids")
        self.ensemble = ensemble
        if loss_fn is None:
            several = ensemble.task == "multilabel"
            loss_fn = EnsembleLoss(
                F.binary_cross_entropy_with_logits if several else F.cross_entropy
            )
        self.loss_fn = loss_fn
        loss_fn.state_task(ensemble)

    def forward(
        self,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | int | None = None,
        **inputs: Any,
    ) -> EnsembleOutput:
        """Run all members.

        Args:
            labels: class indices (B,), int64, or soft labels (B, C); in a multilabel task 0 or 1
                for each label (B, C), float.
            num_items_in_batch: labels in all batches of one optimizer step. The loss is then this
                batch's share, so that accumulated gradients are those of one large batch, the
                penalty counted once.
            inputs: the base's own inputs.

        Raises:
            InputError: in training without labels, or if logits are not one row per sample.
        """
        if labels is None and self.training and torch.is_grad_enabled():
            raise InputError(
                "training needs labels here: members learn from their own losses, never from that "
                "of the average. Label smoothing and compute_loss_func of a plain Trainer take the "
                "labels away; use EnsembleTrainer, or EnsembleLoss(loss=…)"
            )
        logits = logits_of(self.ensemble(**inputs))
        if logits.dim() != 3:
            raise InputError(
                f"member logits have shape {tuple(logits.shape)}; expected (M, B, C), one row per "
                "sample. For labels per token or pixel, call the ensemble and EnsembleLoss yourself"
            )
        loss = None
        if labels is not None and self.training:
            loss = self.loss_fn(logits, labels, self.ensemble)
        elif labels is not None:
            loss = self.loss_fn.task(logits, labels)
        if loss is not None and num_items_in_batch is not None:
            loss = loss * (labels.ne(-100).sum() / num_items_in_batch)  # type: ignore[union-attr]
        # With labels the loss alone has gradients: nobody trains on the average by accident.
        prediction = Prediction.from_logits(
            logits if labels is None else logits.detach(),
            float(self.ensemble.temperature),
            task=self.ensemble.task,
        )
        return EnsembleOutput(
            loss=loss,
            logits=prediction.logits,
            member_logits=logits.detach().transpose(0, 1).contiguous(),
            entropy=prediction.entropy,
            expected_entropy=prediction.expected_entropy,
            modulation=prediction.modulation,
        )

    def get_input_embeddings(self) -> nn.Module:
        """The base's, which all members share: NEFTune adds its noise to what they give.

        Raises:
            InputError: if the base does not say where they are.
        """
        network: Any = self.ensemble.network
        if not hasattr(network, "get_input_embeddings"):
            raise InputError(
                f"neftune_noise_alpha adds noise to embeddings, but this {type(network).__name__} "
                "has no get_input_embeddings(). Leave the option out"
            )
        found: nn.Module = network.get_input_embeddings()
        return found

    def gradient_checkpointing_enable(self, **options: Any) -> None:
        """As for the base; the Trainer of transformers 4 asks for it by this name."""
        self.ensemble.network.gradient_checkpointing_enable(**options)  # type: ignore[operator]

    def activation_checkpointing_enable(self, **options: Any) -> None:
        """As for the base; the Trainer of transformers 5 asks for it by this name."""
        self.ensemble.network.activation_checkpointing_enable(**options)  # type: ignore[operator]
