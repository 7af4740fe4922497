"""Train an ensemble with Lightning: parameter groups, one-cycle rates, penalty and measures."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from sigmanens import measures
from sigmanens.ensemble import SigmaEnsemble
from sigmanens.errors import InputError
from sigmanens.objective import EnsembleLoss, param_groups
from sigmanens.prediction import logits_of

__all__ = ["OPTIMIZERS", "SCHEDULES", "EnsembleModule"]

OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("onecycle", "cosine", "constant")


class EnsembleModule(L.LightningModule):
    """Lightning module around anything that maps x to member logits (M, B, C).

    Batches are pairs ``(x, y)``. A :class:`SigmaEnsemble` with ``schedule="sequential"`` is trained
    one member at a time (:meth:`SigmaEnsemble.backward`), with the memory of one.

    Args:
        network: a SigmaEnsemble, or a rival with the same interface.
        loss_fn: an :class:`~sigmanens.EnsembleLoss`.
        lr: base learning rate.
        weight_decay: on weights only (see :func:`~sigmanens.param_groups`).
        scale_lr_mult: factor on the rate of scales.
        optimizer: "sgd" (with ``momentum``, ``nesterov``), "adam" or "adamw".
        schedule: "onecycle" over the whole training (rising for ``rise`` of it), "cosine" or
            "constant"; each parameter group keeps its own peak.
        transform: applied to every x before the network.

    Attributes:
        history: one dict per epoch: epoch, loss, task, penalty, lr (base rate of the last step)
            and, for a SigmaEnsemble, cosine, owners and saturation of the scales; kept in Lightning
            checkpoints.

    Raises:
        InputError: for an unknown optimizer or schedule, or a momentum or rise outside [0, 1).
    """

    def __init__(
        self,
        network: nn.Module,
        loss_fn: EnsembleLoss,
        *,
        lr: float,
        weight_decay: float = 0.0,
        scale_lr_mult: float | None = None,
        optimizer: str = "sgd",
        momentum: float = 0.9,
        nesterov: bool = True,
        schedule: str = "onecycle",
        rise: float = 0.2,
        transform: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        for key, value, known in (
            ("optimizer", optimizer, OPTIMIZERS),
            ("schedule", schedule, SCHEDULES),
        ):
            if value not in known:
                raise InputError(f"{key} is {value!r}; expected one of {', '.join(known)}")
        for key, share in (("momentum", momentum), ("rise", rise)):
            if not 0 <= share < 1:
                raise InputError(f"{key} is {share!r}; expected a number in [0, 1)")
        self.network = network
        self.loss_fn = loss_fn
        self.options = {"lr": lr, "weight_decay": weight_decay, "scale_lr_mult": scale_lr_mult}
        self.kind = optimizer
        self.momentum, self.nesterov = momentum, nesterov
        self.rates, self.rise = schedule, rise
        self.transform = transform
        self.history: list[dict[str, float]] = []
        self._sums: dict[str, float] = {}
        self._batches = 0
        self._rate = lr
        sequential = isinstance(network, SigmaEnsemble) and network.schedule == "sequential"
        self.automatic_optimization = not sequential

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.network(*args, **kwargs)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """One step on ``(x, y)``; the loss returned is the total."""
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise InputError(
                f"the data loader gave a {type(batch).__name__}; expected pairs (x, y) of inputs "
                "and labels"
            )
        x, y = batch
        if self.transform is not None:
            x = self.transform(x)
        group = self.trainer.optimizers[0].param_groups[0]
        self._rate = float(group["lr"]) / group["lr_mult"]
        ensemble = self.network if isinstance(self.network, SigmaEnsemble) else None
        if self.automatic_optimization:
            loss = self.loss_fn(logits_of(self.network(x)), y, ensemble)
        else:
            assert ensemble is not None
            optimizer = self.optimizers()
            assert isinstance(optimizer, L.pytorch.core.optimizer.LightningOptimizer)
            optimizer.zero_grad()
            loss = ensemble.backward(x, y, self.loss_fn, backward=self.manual_backward)
            optimizer.step()
            scheduler = self.lr_schedulers()
            if scheduler is not None:
                scheduler.step()  # type: ignore[union-attr]
        self._record(loss.detach())
        return loss

    def _record(self, loss: Tensor) -> None:
        values = {
            "loss": loss,
            "task": self.loss_fn.task_loss,
            "penalty": self.loss_fn.penalty_loss,
        }
        for key, value in values.items():
            if value is not None:
                self._sums[key] = self._sums.get(key, 0.0) + float(value)
        self._batches += 1
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=False)

    def on_train_epoch_end(self) -> None:
        entry: dict[str, float] = {"epoch": float(self.current_epoch + 1)}
        entry |= {k: v / max(self._batches, 1) for k, v in self._sums.items()}
        entry["lr"] = self._rate
        if isinstance(self.network, SigmaEnsemble) and self.network.num_members > 1:
            entry["cosine"] = measures.cosine(self.network, "auto")
            entry["owners"] = measures.owners(self.network)
            entry["saturation"] = measures.saturation(self.network)
            self.log("cosine", entry["cosine"], prog_bar=True)
        self.history.append(entry)
        self._sums, self._batches = {}, 0

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["sigmanens_history"] = self.history

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.history = list(checkpoint.get("sigmanens_history", []))

    def configure_optimizers(self) -> Any:
        """Optimizer over :func:`~sigmanens.param_groups`, and its rate schedule by step."""
        groups = param_groups(self.network, **self.options)  # type: ignore[arg-type]
        optimizer: torch.optim.Optimizer
        if self.kind == "sgd":
            optimizer = torch.optim.SGD(
                groups, momentum=self.momentum, nesterov=self.nesterov and self.momentum > 0
            )
        else:
            cls = torch.optim.Adam if self.kind == "adam" else torch.optim.AdamW
            optimizer = cls(groups)
        if self.rates == "constant":
            return optimizer
        total = self.trainer.estimated_stepping_batches
        if not math.isfinite(total):
            raise InputError(
                f"schedule={self.rates!r} needs to know how long the training is. Give the Trainer "
                "max_epochs or max_steps, or use schedule='constant'"
            )
        steps = max(int(total), 2)
        scheduler: torch.optim.lr_scheduler.LRScheduler
        if self.rates == "onecycle":
            # PyTorch divides by zero where the rise takes exactly one step.
            rise = self.rise * (1 - 1e-9) if math.isclose(self.rise * steps, 1) else self.rise
            scheduler = torch.optim.lr_scheduler.OneCycleLR(
                optimizer,
                max_lr=[g["lr"] for g in groups],
                total_steps=steps,
                pct_start=rise,
                cycle_momentum=False,
            )
        else:
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }
