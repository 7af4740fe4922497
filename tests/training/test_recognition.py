"""Which losses say what task they are for."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sigmanens.errors import InputError
from sigmanens.training.loss import EnsembleLoss
from sigmanens.training.recognition import task_of_loss


class Both(nn.Module):
    """A loss of the user's own that holds others."""

    def __init__(self, *losses: nn.Module) -> None:
        super().__init__()
        self.losses = nn.ModuleList(losses)

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        return torch.stack([loss(z, y) for loss in self.losses]).mean()


class Focal(nn.BCEWithLogitsLoss):
    """A subclass."""


@pytest.mark.parametrize(
    ("loss", "task"),
    [
        (F.cross_entropy, "multiclass"),
        (nn.CrossEntropyLoss(label_smoothing=0.1), "multiclass"),
        (nn.NLLLoss(), "multiclass"),
        (functools.partial(F.cross_entropy, label_smoothing=0.1), "multiclass"),
        (nn.BCEWithLogitsLoss(), "multilabel"),
        (F.binary_cross_entropy_with_logits, "multilabel"),
        (
            functools.partial(
                functools.partial(F.binary_cross_entropy_with_logits), pos_weight=torch.ones(2)
            ),
            "multilabel",
        ),
        (nn.BCEWithLogitsLoss().forward, "multilabel"),
        (nn.MultiLabelSoftMarginLoss(), "multilabel"),
        (Focal(), "multilabel"),
        (Both(nn.BCEWithLogitsLoss(), nn.MultiLabelSoftMarginLoss()), "multilabel"),
        (Both(nn.BCEWithLogitsLoss(), nn.CrossEntropyLoss()), None),
        (nn.MSELoss(), "regression"),
        (F.l1_loss, "regression"),
        (nn.HuberLoss(), "regression"),
        (nn.SmoothL1Loss(), "regression"),
        (nn.PoissonNLLLoss(), "regression"),
        (lambda z, y: F.cross_entropy(z, y), None),
        (nn.KLDivLoss(), None),
    ],
)
def test_losses_of_torch(loss: Any, task: str | None) -> None:
    assert task_of_loss(loss) == task


@pytest.mark.parametrize(
    ("name", "task"),
    [
        ("BinaryCrossEntropy", "multilabel"),
        ("AsymmetricLossMultiLabel", "multilabel"),
        ("AsymmetricLossSingleLabel", "multiclass"),
        ("LabelSmoothingCrossEntropy", "multiclass"),
        ("SoftTargetCrossEntropy", "multiclass"),
        ("JsdCrossEntropy", "multiclass"),
    ],
)
def test_losses_of_timm(name: str, task: str) -> None:
    assert task_of_loss(getattr(pytest.importorskip("timm.loss"), name)()) == task


def test_the_focal_loss_of_torchvision() -> None:
    focal = pytest.importorskip("torchvision.ops").sigmoid_focal_loss
    assert task_of_loss(functools.partial(focal, reduction="mean")) == "multilabel"


@pytest.mark.parametrize("loss", [nn.BCELoss(), F.binary_cross_entropy])
def test_losses_of_probabilities_are_refused(loss: Any) -> None:
    with pytest.raises(InputError, match=r"Take the sigmoid out .* nn\.BCEWithLogitsLoss"):
        EnsembleLoss(loss)
