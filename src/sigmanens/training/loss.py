r"""The training objective.

.. math:: L = \frac1M \sum_m \ell\bigl(f_m(x), y\bigr) + L_\mathrm{div}

Each member is trained on its own loss, never on that of the averaged prediction, under which
members would collude (arXiv 2607.23860). The loss is called once for each member, on the rows that
it saw. Its value is the same however the members were run.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sigmanens.diversity import Diversity
from sigmanens.diversity.measures import described
from sigmanens.ensemble.ensemble import SigmaEnsemble
from sigmanens.errors import InputError, NonFiniteError, SigmaNensWarning, warn
from sigmanens.training.recognition import labels_are_several, task_of_loss


class EnsembleLoss:
    """Mean of the members' own losses plus the diversity penalty.

    Args:
        loss: ``loss(logits, target)`` → (), mean over samples, of one member's logits (B, C, …);
            cross-entropy by default. One that takes ``ignore_index`` is given it, for class
            indices. ``nn.BCEWithLogitsLoss()`` and its kin make the ensemble's task multilabel,
            ``nn.MSELoss()`` and its kin regression.
        diversity: the penalty, or None.
        class_dim: dimension of the classes in one member's logits (B, C, …).
        ignore_index: label of samples that do not count.

    Attributes:
        task_loss: last mean of the members' losses, detached: (); None before the first call.
        penalty_loss: last penalty, detached: (), or None without one.
        stated_task: what the loss is made for: "multiclass", "multilabel" or "regression"; None
            where it does not say.

    Raises:
        InputError: for a loss that is no mean over samples, one of probabilities, one with an
            ``ignore_index`` of its own that differs, or a ``diversity`` that is none.
    """

    def __init__(
        self,
        loss: Callable[..., Tensor] = F.cross_entropy,
        diversity: Diversity | None = None,
        class_dim: int = 1,
        ignore_index: int = -100,
    ) -> None:
        if isinstance(loss, Diversity):
            raise InputError(
                "the first argument of EnsembleLoss is the members' loss, and got the penalty: "
                "EnsembleLoss(diversity=Diversity(…))"
            )
        if not callable(loss):
            raise InputError(f"loss is {loss!r}; expected a function (logits, target) -> ()")
        if diversity is not None and not isinstance(diversity, Diversity):
            raise InputError(f"diversity is {diversity!r}; expected a Diversity or None")
        given = getattr(loss, "__dict__", {})
        if isinstance(loss, functools.partial):
            given = loss.keywords
        if given.get("reduction", "mean") != "mean":
            raise InputError(
                f"the loss has reduction={given['reduction']!r}; expected 'mean': the members' "
                "losses are averaged over samples"
            )
        if given.get("ignore_index", ignore_index) != ignore_index:
            raise InputError(
                f"the loss has ignore_index={given['ignore_index']}, EnsembleLoss {ignore_index}; "
                "give both the same"
            )
        self.stated_task = task_of_loss(loss)
        self._told = False  # an ensemble got the task, or the user heard that none did
        self._several = False  # labels were seen of which several can be present
        self.loss, self.diversity = loss, diversity
        self.class_dim, self.ignore_index = class_dim, ignore_index
        self._takes_ignore = "ignore_index" not in given and _accepts(loss, "ignore_index")
        plain = getattr(loss, "func", loss)
        self._cross_entropy = plain is F.cross_entropy or isinstance(loss, nn.CrossEntropyLoss)
        binary = F.binary_cross_entropy_with_logits
        self._binary = plain is binary or isinstance(loss, nn.BCEWithLogitsLoss)
        self.task_loss: Tensor | None = None
        self.penalty_loss: Tensor | None = None

    def __call__(
        self,
        logits: Tensor,
        y: Tensor,
        ensemble: SigmaEnsemble | None = None,
        *,
        split: bool = False,
    ) -> Tensor:
        """Total loss: ().

        Args:
            logits: (M, B, C, …), as the ensemble returns them.
            y: class indices (B, …), int64, soft labels or labels of 0 and 1 (B, C, …), float; the
                same for all members.
            ensemble: needed for the penalty, and to learn the task from the loss.
            split: logits are (M, b, C, …) of ``forward(split=True)`` and y has the M·b rows of the
                whole batch, of which member m counts rows m·b … (m+1)·b - 1.

        Raises:
            InputError: for logits or labels of the wrong shape, dtype or range, a penalty without
                its ensemble, or an ensemble of another task.
            NonFiniteError: if the loss is NaN or infinite.
        """
        if ensemble is None and self.diversity is not None and self.diversity.active:
            raise InputError(
                "this loss has a diversity penalty, which needs the ensemble: "
                "loss_fn(logits, y, ensemble)"
            )
        if ensemble is not None:
            self.state_task(ensemble)
        elif self.stated_task in ("multilabel", "regression") and not self._told:
            self._told = True
            warnings.warn(
                f"the loss is for a {self.stated_task} task, but no ensemble was given that could "
                "learn it, so that predict takes a softmax. Give it: loss_fn(logits, y, ensemble), "
                "or state the task: convert(…, task=…)",
                SigmaNensWarning,
                stacklevel=2,
            )
        task = self.task(logits, y, split=split)
        self.task_loss = task.detach()
        if ensemble is not None:
            self.state_task(ensemble)  # again, for the labels may have said it
        penalty = None if ensemble is None else self.penalty(ensemble)
        return task if penalty is None else task + penalty

    def task(self, logits: Tensor, y: Tensor, *, split: bool = False) -> Tensor:
        """Mean over the members of their own losses: (); arguments as above."""
        if not isinstance(logits, Tensor) or logits.dim() < 3 or not logits.is_floating_point():
            raise InputError(
                f"logits are {described(logits)}; expected a float tensor (M, B, C, …) as the "
                "ensemble returns (for a model output, pass its .logits; one logit per sample is "
                "(B, 1))"
            )
        members, size = logits.shape[:2]
        if size == 0:
            raise InputError("the batch is empty (0 samples): its loss is undefined")
        class_dim = self._class_dim(logits)
        soft = isinstance(y, Tensor) and y.is_floating_point()
        self._check_labels(logits, y, soft, class_dim, members * size if split else size)
        extra = {"ignore_index": self.ignore_index} if self._takes_ignore and not soft else {}
        labels = y.split(size) if split else [y] * members
        if self.stated_task is None and not self._several:
            self._several = labels_are_several(logits[0], labels[0], class_dim)
        parts: list[Tensor] = []
        for own, target in zip(logits.unbind(0), labels, strict=True):
            if class_dim != 1:
                own = own.movedim(class_dim, 1)
                target = target.movedim(class_dim, 1) if y.dim() == own.dim() else target
            loss = self.loss(own, target, **extra)
            if not isinstance(loss, Tensor) or loss.dim() != 0:
                raise InputError(
                    f"the loss function returned {described(loss)}; expected a scalar tensor, the "
                    "mean over samples (reduction='mean')"
                )
            parts.append(loss / members)
        # As SigmaEnsemble.backward adds them up, member by member: the same to the last bit.
        total = sum(parts[1:], parts[0])
        self._check_finite(total, logits)
        return total

    def state_task(self, ensemble: nn.Module) -> None:
        """Tell an ensemble the task that this loss is made for, unless it knows.

        Where the loss does not say, labels (B, C) of 0 and 1 that it has got, with other than one 1
        in a row, say multilabel; a warning tells so. Anything but a SigmaEnsemble is left alone.

        Raises:
            InputError: if the task of the ensemble contradicts the loss.
        """
        self._told = True
        inner = getattr(ensemble, "module", getattr(ensemble, "_orig_mod", ensemble))
        if not isinstance(inner, SigmaEnsemble):
            return
        said, known = self.stated_task, inner.task
        why = f"the loss is {_name(self.loss)}"
        if said is None and known is None and self._several:
            said, why = "multilabel", "labels are 0 and 1 with several, or none, in a row"
            warn(
                f"the task is taken to be multilabel: {why}. Say it with "
                "convert(…, task='multilabel'), or task='multiclass' if that is wrong"
            )
        # No word means multiclass already; and a stated task explains a loss of numbers, such as
        # the squared error of one-hot labels.
        if said in (None, known) or (said, known) == ("multiclass", None):
            return
        if known in ("multiclass", "multilabel"):
            if said == "regression":
                return
            raise InputError(
                f"the task of this ensemble is {known}, but {why}, which is for a {said} task. "
                f"Convert with task='{said}' (or set ens.task), or use a {known} loss. To train "
                "with this loss all the same, call it in a function of your own: "
                "EnsembleLoss(lambda z, y: loss(z, y))"
            )
        inner.task = said
        inner.report.notes.append(f"task {said}: {why}")

    def penalty(self, ensemble: SigmaEnsemble) -> Tensor | None:
        """The diversity penalty: (), or None without one or with weight 0."""
        if self.diversity is None or not self.diversity.active:
            self.penalty_loss = None
            return None
        penalty = self.diversity(ensemble)
        self.penalty_loss = penalty.detach()
        return penalty

    def _class_dim(self, logits: Tensor) -> int:
        """Dimension of the classes in one member's logits, counted from the front."""
        last = logits.dim() - 2
        class_dim = self.class_dim + last + 1 if self.class_dim < 0 else self.class_dim
        if not 1 <= class_dim <= last:
            raise InputError(
                f"class_dim is {self.class_dim}; one member's logits are "
                f"{tuple(logits.shape[1:])}, whose classes may be in dimension 1 to {last}"
            )
        return class_dim

    def _check_labels(
        self, logits: Tensor, y: Tensor, soft: bool, class_dim: int, rows: int
    ) -> None:
        if not isinstance(y, Tensor) or y.dim() == 0:
            raise InputError(f"labels are {described(y)}; expected a tensor (B,) or (B, C)")
        if y.shape[0] != rows:
            hint = ""
            if y.shape[0] == logits.shape[0] * logits.shape[1]:
                hint = (
                    ": one label per sample, never repeated for the members (after "
                    "forward(split=True): loss_fn(…, split=True))"
                )
            shape = tuple(logits.shape)
            raise InputError(
                f"labels have {y.shape[0]} rows; expected {rows} for logits {shape}{hint}"
            )
        shape = (rows, *logits.shape[2:])
        if self._binary and (not soft or y.shape != shape):
            raise InputError(
                f"labels are {described(y)}; expected 0 or 1 for each label as a float tensor "
                f"{shape} for logits {tuple(logits.shape)}: y.float(), or y.float().unsqueeze(-1) "
                "for one logit per sample"
            )
        if not self._cross_entropy:
            return
        classes = shape[class_dim]
        indices = shape[:class_dim] + shape[class_dim + 1 :]
        if y.dtype != torch.int64 and not soft:
            raise InputError(f"labels are {y.dtype}; expected int64 class indices: y.long()")
        if y.shape != (shape if soft else indices):
            hint = ""
            if soft and y.shape == indices:
                hint = ". For class indices: y.long()"
            elif y.shape == shape:
                hint = ". For one-hot labels: y.float()"
            elif y.dim() == len(indices) + 1 and y.shape[-1] == 1:
                hint = ". For a trailing dimension of 1: y.squeeze(-1)"
            raise InputError(
                f"labels are {described(y)}; expected int64 class indices {indices} or soft "
                f"labels {shape} for logits {tuple(logits.shape)}{hint}"
            )
        if y.device.type == "cpu" and not torch.compiler.is_compiling():
            self._check_range(y, soft, classes)

    def _check_range(self, y: Tensor, soft: bool, classes: int) -> None:
        if soft:
            if bool((y < 0).any()):
                raise InputError(
                    f"soft labels go down to {float(y.min()):g}; expected probabilities ≥ 0"
                )
            return
        real = y[y != self.ignore_index]
        if real.numel() and (int(real.min()) < 0 or int(real.max()) >= classes):
            raise InputError(
                f"labels range from {int(real.min())} to {int(real.max())}; expected 0 to "
                f"{classes - 1} for the {classes} classes of the head (or ignore_index="
                f"{self.ignore_index})"
            )

    def _check_finite(self, loss: Tensor, logits: Tensor) -> None:
        if torch.compiler.is_compiling() or bool(torch.isfinite(loss.detach())):
            return
        if bool(torch.isfinite(logits.detach()).all()):
            cause = (
                "though all logits are finite. Look for NaN in soft labels, or a member all of "
                f"whose labels are ignore_index={self.ignore_index}"
            )
        else:
            bad = ~torch.isfinite(logits.detach()).flatten(1)
            which = [i for i, row in enumerate(bad) if bool(row.any())]
            cause = (
                f"with NaN or infinite logits in members {which}. Look for NaN in the inputs, a "
                "learning rate that is too high, or an overflow in half precision"
            )
        raise NonFiniteError(f"the loss is {float(loss.detach())}, {cause}")


def _name(loss: Callable[..., Any]) -> str:
    while isinstance(loss, functools.partial):
        loss = loss.func
    return str(getattr(loss, "__name__", type(loss).__name__))


def _accepts(fn: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return False
