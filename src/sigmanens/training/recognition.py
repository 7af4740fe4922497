"""What task a loss is made for: classes that exclude each other, independent labels, or numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sigmanens.errors import InputError

__all__ = ["labels_are_several", "task_of_loss"]

_FUNCTIONS: dict[Callable[..., Any], str] = {
    F.cross_entropy: "multiclass",
    F.nll_loss: "multiclass",
    F.multi_margin_loss: "multiclass",
    F.binary_cross_entropy_with_logits: "multilabel",
    F.multilabel_soft_margin_loss: "multilabel",
    F.multilabel_margin_loss: "multilabel",
    F.soft_margin_loss: "multilabel",
    F.mse_loss: "regression",
    F.l1_loss: "regression",
    F.smooth_l1_loss: "regression",
    F.huber_loss: "regression",
    F.poisson_nll_loss: "regression",
}

_MODULES: dict[type[nn.Module], str] = {
    nn.CrossEntropyLoss: "multiclass",
    nn.NLLLoss: "multiclass",
    nn.MultiMarginLoss: "multiclass",
    nn.BCEWithLogitsLoss: "multilabel",
    nn.MultiLabelSoftMarginLoss: "multilabel",
    nn.MultiLabelMarginLoss: "multilabel",
    nn.SoftMarginLoss: "multilabel",
    nn.MSELoss: "regression",
    nn.L1Loss: "regression",
    nn.SmoothL1Loss: "regression",
    nn.HuberLoss: "regression",
    nn.PoissonNLLLoss: "regression",
}

_ELSEWHERE: dict[tuple[str, str], str] = {
    ("torchvision", "sigmoid_focal_loss"): "multilabel",
    ("timm", "BinaryCrossEntropy"): "multilabel",
    ("timm", "AsymmetricLossMultiLabel"): "multilabel",
    ("timm", "AsymmetricLossSingleLabel"): "multiclass",
    ("timm", "JsdCrossEntropy"): "multiclass",
    ("timm", "LabelSmoothingCrossEntropy"): "multiclass",
    ("timm", "SoftTargetCrossEntropy"): "multiclass",
}
"""By package and name of the class or function, so that the package need not be installed."""


def task_of_loss(loss: Callable[..., Any]) -> str | None:
    """The task, "multiclass", "multilabel" or "regression", or None where the loss does not say.

    Looks into partials, bound methods and modules that hold one of the losses it knows. A lambda or
    a function of the user's own does not say.

    Raises:
        InputError: for a loss of probabilities (``nn.BCELoss``), which members do not return.
    """
    while isinstance(loss, functools.partial):
        loss = loss.func
    owner = getattr(loss, "__self__", None)
    if isinstance(owner, nn.Module):
        loss = owner
    if isinstance(loss, nn.BCELoss) or loss is F.binary_cross_entropy:
        raise InputError(
            "the loss is a binary cross-entropy of probabilities; members are to return logits, "
            "from which predict computes the probabilities. Take the sigmoid out of the network "
            "and use nn.BCEWithLogitsLoss"
        )
    if not isinstance(loss, nn.Module):
        return _FUNCTIONS.get(loss) or _elsewhere(loss)
    said = {task for m in loss.modules() if (task := _of_module(m)) is not None}
    return said.pop() if len(said) == 1 else None


def _of_module(module: nn.Module) -> str | None:
    known = next((task for kind, task in _MODULES.items() if isinstance(module, kind)), None)
    return known or _elsewhere(type(module))


def _elsewhere(named: Any) -> str | None:
    package = str(getattr(named, "__module__", "")).partition(".")[0]
    return _ELSEWHERE.get((package, getattr(named, "__name__", "")))


def labels_are_several(logits: Tensor, y: Tensor, class_dim: int = 1) -> bool:
    """Whether labels are 0 or 1 for each class, with other than one 1 for some sample.

    Args:
        logits: of one member: (B, C, …), or with the classes elsewhere.
        y: labels as they are given to the loss.
        class_dim: dimension of the classes in both.
    """
    if y.shape != logits.shape or torch.compiler.is_compiling():
        return False
    return bool(((y == 0) | (y == 1)).all()) and bool((y.sum(class_dim) != 1).any())
