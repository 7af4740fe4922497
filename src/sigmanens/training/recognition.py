"""What task a loss is made for: classes that exclude each other, independent labels, or numbers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sigmanens.errors import InputError

_NAMES = {
    ("torch", "multiclass"): "CrossEntropyLoss NLLLoss MultiMarginLoss "
    "cross_entropy nll_loss multi_margin_loss",
    ("torch", "multilabel"): "BCEWithLogitsLoss MultiLabelSoftMarginLoss MultiLabelMarginLoss "
    "SoftMarginLoss binary_cross_entropy_with_logits multilabel_soft_margin_loss "
    "multilabel_margin_loss soft_margin_loss",
    ("torch", "regression"): "MSELoss L1Loss SmoothL1Loss HuberLoss PoissonNLLLoss "
    "mse_loss l1_loss smooth_l1_loss huber_loss poisson_nll_loss",
    ("torchvision", "multilabel"): "sigmoid_focal_loss",
    ("timm", "multilabel"): "BinaryCrossEntropy AsymmetricLossMultiLabel",
    ("timm", "multiclass"): "AsymmetricLossSingleLabel JsdCrossEntropy LabelSmoothingCrossEntropy "
    "SoftTargetCrossEntropy",
}
_TASKS = {(pkg, name): task for (pkg, task), names in _NAMES.items() for name in names.split()}
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
        return _task_of(loss)
    found = (next(filter(None, map(_task_of, type(m).__mro__)), None) for m in loss.modules())
    said = set(filter(None, found))
    return said.pop() if len(said) == 1 else None


def _task_of(named: Any) -> str | None:
    package = str(getattr(named, "__module__", "")).partition(".")[0]
    return _TASKS.get((package, getattr(named, "__name__", "")))


def labels_are_several(logits: Tensor, y: Tensor, class_dim: int = 1) -> bool:
    """Whether labels are 0 or 1 for each class, with other than one 1 for some sample.

    ``class_dim`` is the dimension of the classes in one member's logits (B, C, …) and in y.
    """
    if y.shape != logits.shape or torch.compiler.is_compiling():
        return False
    return bool(((y == 0) | (y == 1)).all()) and bool((y.sum(class_dim) != 1).any())
