r"""The training objective and the parameter groups that go with it.

.. math:: L = \frac1M \sum_m \mathrm{mean}_b\, \ell(f_m(x_b), y_b) + L_\mathrm{div}

Each member is trained on its own loss, never on the loss of the averaged prediction, under which
members would collude (arXiv 2607.23860).
"""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from sigmanens.diversity import Diversity
from sigmanens.ensemble import SigmaEnsemble
from sigmanens.errors import InputError, NonFiniteError, SigmaNensWarning
from sigmanens.norms import SigmaNorm, _RunningStatistics
from sigmanens.rules import is_norm

__all__ = ["EnsembleLoss", "check_optimizer", "param_groups"]


class EnsembleLoss:
    """Mean of the members' own losses plus the diversity penalty.

    Args:
        loss: ``loss(logits, target)`` → (), mean over samples; cross-entropy by default. One that
            takes ``ignore_index`` is given it.
        diversity: the penalty, or None.
        class_dim: dimension of the classes in one member's logits (B, C, …).
        ignore_index: label of samples that do not count.

    Attributes:
        task_loss: last mean of the members' losses, detached: ().
        penalty_loss: last penalty, detached: (), or None.
    """

    def __init__(
        self,
        loss: Callable[..., Tensor] = F.cross_entropy,
        diversity: Diversity | None = None,
        class_dim: int = 1,
        ignore_index: int = -100,
    ) -> None:
        if diversity is not None and not callable(diversity):
            raise InputError(f"diversity is {diversity!r}; expected a Diversity or None")
        self.loss = loss
        self.diversity = diversity
        self.class_dim = class_dim
        self.ignore_index = ignore_index
        self._takes_ignore = _accepts(loss, "ignore_index")
        self.task_loss: Tensor | None = None
        self.penalty_loss: Tensor | None = None

    def __call__(self, logits: Tensor, y: Tensor, ensemble: SigmaEnsemble | None = None) -> Tensor:
        """Total loss: ().

        Args:
            logits: (M, B, C, …), as the ensemble returns them.
            y: labels (B, …), int64, or soft labels (B, C, …); the same for all members. After
                ``forward(split=True)`` the (M·b, …) labels of the whole batch.
            ensemble: needed for the penalty.

        Raises:
            InputError: for logits or labels of the wrong shape, dtype or range, or a penalty
                without its ensemble.
            NonFiniteError: if the loss is NaN or infinite.
        """
        task = self.task(logits, y)
        self.task_loss = task.detach()
        if self.diversity is not None and ensemble is None:
            raise InputError(
                "this loss has a diversity penalty, which needs the ensemble: "
                "loss_fn(logits, y, ensemble)"
            )
        penalty = None if ensemble is None else self.penalty(ensemble)
        return task if penalty is None else task + penalty

    def task(self, logits: Tensor, y: Tensor) -> Tensor:
        """Mean over members and samples of the members' own losses: ()."""
        if not isinstance(logits, Tensor) or logits.dim() < 3 or not logits.is_floating_point():
            got = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise InputError(
                f"logits are {got}; expected a float tensor (M, B, C, …) as the ensemble returns "
                "(for a model output, pass its .logits)"
            )
        members, size = logits.shape[:2]
        if not isinstance(y, Tensor) or y.dim() == 0:
            raise InputError(f"labels are {y!r}; expected a tensor (B,) or (B, C)")
        if size == 0:
            raise InputError("the batch is empty (0 samples): its loss is undefined")
        self._check_labels(logits, y)
        if y.shape[0] == size:
            target = y.unsqueeze(0).expand(members, *y.shape).flatten(0, 1)
        else:
            target = y
        folded = logits.flatten(0, 1)
        if self.class_dim != 1:
            folded = folded.movedim(self.class_dim, 1)
        extra = {"ignore_index": self.ignore_index} if self._takes_ignore and not _soft(y) else {}
        loss = self.loss(folded, target, **extra)
        if not torch.compiler.is_compiling() and not bool(torch.isfinite(loss.detach()).all()):
            finite = "finite" if bool(torch.isfinite(logits).all()) else "NaN or infinite"
            raise NonFiniteError(
                f"the loss is {float(loss.detach().mean())} (logits are {finite}). Look for NaN in "
                "inputs or labels, a learning rate that is too high, or a batch in which every "
                f"label is ignore_index={self.ignore_index}"
            )
        return loss

    def penalty(self, ensemble: SigmaEnsemble) -> Tensor | None:
        """The diversity penalty: (), or None without one."""
        if self.diversity is None or self.diversity.weight == 0:
            self.penalty_loss = None
            return None
        penalty = self.diversity(ensemble)
        self.penalty_loss = penalty.detach()
        return penalty

    def _check_labels(self, logits: Tensor, y: Tensor) -> None:
        members, size = logits.shape[:2]
        classes = logits.shape[self.class_dim + 1]
        if y.shape[0] not in (size, members * size):
            raise InputError(
                f"labels have {y.shape[0]} rows; expected {size}, as many as samples in the logits "
                f"{tuple(logits.shape)} (never repeat labels for the members)"
            )
        if _soft(y):
            if y.dim() < 2 or y.shape[1] != classes:
                raise InputError(
                    f"labels are {y.dtype} of shape {tuple(y.shape)}; expected int64 class indices "
                    f"(B,), or soft labels (B, {classes}). For class indices: y.long()"
                )
            return
        if y.dtype == torch.bool or y.is_complex():
            raise InputError(f"labels are {y.dtype}; expected int64 class indices: y.long()")
        if y.dtype != torch.int64 and self.loss is F.cross_entropy:
            raise InputError(f"labels are {y.dtype}; expected int64 class indices: y.long()")
        if y.device.type == "cpu" and not torch.compiler.is_compiling():
            real = y[y != self.ignore_index]
            if real.numel() and (int(real.min()) < 0 or int(real.max()) >= classes):
                raise InputError(
                    f"labels range from {int(real.min())} to {int(real.max())}; expected 0 to "
                    f"{classes - 1} for the {classes} classes of the head"
                )


def _soft(y: Tensor) -> bool:
    return y.is_floating_point()


def _accepts(fn: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return False


def param_groups(
    ensemble: nn.Module,
    lr: float,
    weight_decay: float = 0.0,
    scale_lr_mult: float | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: scales fast and never decayed, other norms and biases undecayed.

    Scale parameters of batch norms get ``lr × 100``, those of other norms ``lr × 10``
    (arXiv 2607.23860, 2512.20420). A one-cycle scheduler needs the rates told:
    ``OneCycleLR(optimizer, max_lr=[g["lr"] for g in groups], …)``.

    Args:
        ensemble: an ensemble, or any network (then there are no scale groups).
        lr: base learning rate > 0.
        weight_decay: for weights of linear, convolution and embedding layers.
        scale_lr_mult: one factor for all scale parameters.

    Returns:
        groups with "params", "lr", "weight_decay" and "name"; empty ones are left out.

    Raises:
        InputError: for a rate, decay or factor out of range, or if nothing requires a gradient.
    """
    for key, value, zero in (("lr", lr, False), ("weight_decay", weight_decay, True)):
        if not (value > 0 or (zero and value == 0)) or not math.isfinite(value):
            raise InputError(f"{key} is {value}; expected a finite number {'≥' if zero else '>'} 0")
    if scale_lr_mult is not None and not (scale_lr_mult >= 0 and math.isfinite(scale_lr_mult)):
        raise InputError(f"scale_lr_mult is {scale_lr_mult}; expected a finite number ≥ 0")
    names = ("decay", "no_decay", "scales_batch_norm", "scales")
    sets: dict[str, list[nn.Parameter]] = {n: [] for n in names}
    seen: set[int] = set()
    for module in ensemble.modules():
        for key, p in module.named_parameters(recurse=False):
            if not p.requires_grad or id(p) in seen:
                continue
            seen.add(id(p))
            if isinstance(module, SigmaNorm) and p is module.logit:
                batch = isinstance(module, _RunningStatistics)
                sets["scales_batch_norm" if batch else "scales"].append(p)
            elif p.dim() < 2 or _undecayed(module) or key == "bias":
                sets["no_decay"].append(p)
            else:
                sets["decay"].append(p)
    if not seen:
        raise InputError("no parameter requires a gradient: there is nothing to train")
    rates = {
        "decay": lr,
        "no_decay": lr,
        "scales_batch_norm": lr * (100.0 if scale_lr_mult is None else scale_lr_mult),
        "scales": lr * (10.0 if scale_lr_mult is None else scale_lr_mult),
    }
    return [
        {
            "params": sets[n],
            "lr": rates[n],
            "weight_decay": weight_decay if n == "decay" else 0.0,
            "name": n,
        }
        for n in names
        if sets[n]
    ]


def _undecayed(module: nn.Module) -> bool:
    return isinstance(module, (SigmaNorm, _NormBase, nn.LayerNorm, nn.GroupNorm)) or is_norm(module)


def check_optimizer(ensemble: SigmaEnsemble, optimizer: torch.optim.Optimizer) -> list[str]:
    """Problems with how an optimizer treats the scales; each is also issued as a warning.

    Looks for scale parameters that are decayed, that are missing, and for learning rates that have
    become equal although the groups were made to differ (a scheduler given one ``max_lr``).
    """
    scales: dict[int, str] = {}
    for name, layer in ensemble.sigma_norms().items():
        if layer.logit.requires_grad:
            scales[id(layer.logit)] = name
    problems: list[str] = []
    found: set[int] = set()
    rates: dict[bool, set[float]] = {True: set(), False: set()}
    for group in optimizer.param_groups:
        mine = [p for p in _of(group["params"]) if id(p) in scales]
        others = len(_of(group["params"])) - len(mine)
        found.update(id(p) for p in mine)
        if mine and group.get("weight_decay", 0.0):
            problems.append(
                f"weight decay {group['weight_decay']} reaches the scales of {len(mine)} σNorm "
                f"layers (first: '{scales[id(mine[0])]}'): it pulls every σ(γ) to ½. Build the "
                "optimizer from sigmanens.param_groups"
            )
        if mine:
            rates[True].add(float(group["lr"]))
        if others:
            rates[False].add(float(group["lr"]))
    missing = [n for i, n in scales.items() if i not in found]
    if missing:
        problems.append(
            f"{len(missing)} σNorm layers have trainable scales that are not in the optimizer "
            f"(first: '{missing[0]}')"
        )
    if rates[True] and rates[True] & rates[False]:
        shared = sorted(rates[True] & rates[False])
        problems.append(
            f"scales and weights have the same learning rate {shared[0]:g}: a scheduler given one "
            "max_lr sets all groups to it. Use max_lr=[g['lr'] for g in groups]"
        )
    for problem in problems:
        warnings.warn(problem, SigmaNensWarning, stacklevel=2)
    return problems


def _of(params: Iterable[Tensor] | Tensor) -> list[Tensor]:
    return [params] if isinstance(params, Tensor) else list(params)
