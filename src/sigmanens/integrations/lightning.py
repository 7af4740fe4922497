"""Train an ensemble with Lightning: parameter groups, one-cycle rates, penalty and measures."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn

from sigmanens.diversity import measures
from sigmanens.ensemble.ensemble import SigmaEnsemble
from sigmanens.ensemble.inputs import call_arguments
from sigmanens.ensemble.prediction import logits_of
from sigmanens.errors import InputError
from sigmanens.integrations.scores import Scores
from sigmanens.training.groups import param_groups
from sigmanens.training.loss import EnsembleLoss

__all__ = ["LR_SCHEDULES", "OPTIMIZERS", "EnsembleModule"]

OPTIMIZERS = ("sgd", "adam", "adamw")
LR_SCHEDULES = ("onecycle", "cosine", "multistep", "constant")


class EnsembleModule(L.LightningModule):
    """Lightning module around anything that maps x to member logits (M, B, C).

    Batches are pairs ``(x, y)``. ``trainer.predict`` also takes x alone, and returns member logits.
    A :class:`SigmaEnsemble` with ``schedule="sequential"`` is trained one member at a time
    (:meth:`SigmaEnsemble.backward`), with the memory of one. Lightning then refuses
    ``accumulate_grad_batches`` and ``gradient_clip_val``; other schedules take both.

    Lightning's learning-rate finder searches the base rate: every group keeps its multiple of it.

    Validation logs ``val_nll``, ``val_accuracy``, ``val_ece`` and ``val_jensen_gap`` of the
    averaged distribution (:class:`~sigmanens.integrations.scores.Scores`), for ``ModelCheckpoint``
    and ``EarlyStopping`` to monitor; testing the same under ``test_``. The second of several data
    loaders has ``val_nll_1`` and so on.

    Args:
        network: a SigmaEnsemble, or a rival with the same interface.
        loss_fn: an :class:`~sigmanens.EnsembleLoss`.
        lr: base learning rate.
        weight_decay: on weights only (see :func:`~sigmanens.param_groups`).
        scale_lr_mult: factor on the rate of scales.
        head_lr_mult: factor on the rate of the members' own heads.
        optimizer: "sgd" (with ``momentum``, ``nesterov``), "adam" or "adamw".
        lr_schedule: "onecycle" over the whole training (rising for ``rise`` of it), "cosine",
            "multistep" (times ``gamma`` after each epoch of ``milestones``) or "constant"; each
            parameter group keeps its own peak.
        transform: applied to every x before the network, in validation, testing and prediction too.
        split: a training batch holds M·b rows, of which each member of a SigmaEnsemble sees its own
            b (:meth:`SigmaEnsemble.forward`).

    Attributes:
        lr: the base learning rate. What is set before a training starts is what trains.
        history: one dict per epoch: epoch, loss, task, penalty, lr (base rate of the last step)
            and, for a SigmaEnsemble, cosine, owners and saturation of the scales that the penalty
            acts on (without one, those of the paper's rule); what validation logged in this epoch.
            Kept in Lightning checkpoints.

    Raises:
        InputError: for an unknown optimizer or lr_schedule, a momentum or rise outside [0, 1),
            "multistep" without milestones, ``split`` of anything but a SigmaEnsemble, or a loss
            that is not for the ensemble's task.
    """

    def __init__(
        self,
        network: nn.Module,
        loss_fn: EnsembleLoss,
        *,
        lr: float,
        weight_decay: float = 0.0,
        scale_lr_mult: float | None = None,
        head_lr_mult: float | None = None,
        optimizer: str = "sgd",
        momentum: float = 0.9,
        nesterov: bool = True,
        lr_schedule: str = "onecycle",
        rise: float = 0.2,
        milestones: Sequence[int] = (),
        gamma: float = 0.1,
        transform: Callable[[Tensor], Tensor] | None = None,
        split: bool = False,
    ) -> None:
        super().__init__()
        for key, value, known in (
            ("optimizer", optimizer, OPTIMIZERS),
            ("lr_schedule", lr_schedule, LR_SCHEDULES),
        ):
            if value not in known:
                raise InputError(f"{key} is {value!r}; expected one of {', '.join(known)}")
        for key, share in (("momentum", momentum), ("rise", rise)):
            if not 0 <= share < 1:
                raise InputError(f"{key} is {share!r}; expected a number in [0, 1)")
        if lr_schedule == "multistep" and (not milestones or min(milestones) < 1 or not gamma > 0):
            raise InputError(
                f"lr_schedule 'multistep' got milestones {list(milestones)} and gamma {gamma!r}; "
                "expected at least one epoch ≥ 1, and a factor > 0"
            )
        if split and not isinstance(network, SigmaEnsemble):
            raise InputError(
                f"split=True got a {type(network).__name__}; only a SigmaEnsemble gives each "
                "member its own rows"
            )
        self.network = network
        self.split = split
        self.loss_fn = loss_fn
        loss_fn.state_task(network)
        self.options = {
            "lr": lr, "weight_decay": weight_decay, "scale_lr_mult": scale_lr_mult,
            "head_lr_mult": head_lr_mult,
        }  # fmt: skip
        self.kind = optimizer
        self.momentum, self.nesterov = momentum, nesterov
        self.lr_schedule, self.rise = lr_schedule, rise
        self.milestones, self.gamma = tuple(milestones), gamma
        self.transform = transform
        self.history: list[dict[str, float]] = []
        self._sums: dict[str, float] = {}
        self._batches = 0
        self._rate = self._configured = lr
        self._scores: dict[int, Scores] = {}
        self._validated: dict[str, float] = {}
        sequential = isinstance(network, SigmaEnsemble) and network.schedule == "sequential"
        self.automatic_optimization = not sequential

    @property
    def lr(self) -> float:
        """The base learning rate."""
        rate = self.options["lr"]
        assert rate is not None
        return rate

    @lr.setter
    def lr(self, rate: float) -> None:
        self.options["lr"] = rate

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.network(*args, **kwargs)

    def on_fit_start(self) -> None:
        """Make the optimizer and its schedule anew if a callback has changed ``lr`` meanwhile."""
        if self._configured != self.lr:
            self.trainer.strategy.setup_optimizers(self.trainer)

    def on_train_start(self) -> None:
        """Begin to average the losses of an epoch."""
        self._sums, self._batches = {}, 0  # without the batches of a rate finder

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Tell the penalty how far the training has come."""
        diversity, total = self.loss_fn.diversity, self.trainer.estimated_stepping_batches
        if diversity is not None and math.isfinite(total):
            diversity.progress = min(1.0, self.trainer.global_step / total)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """One step on ``(x, y)``; the loss returned is the total."""
        x, y = self._pair(batch)
        group = self.trainer.optimizers[0].param_groups[0]
        self._rate = float(group["lr"]) / group["lr_mult"]
        ensemble = self.network if isinstance(self.network, SigmaEnsemble) else None
        if self.automatic_optimization:
            given = {"split": True} if self.split else {}
            logits = self._logits(x, **given)
            loss = self.loss_fn(logits, y, ensemble, split=self.split)
        else:
            assert ensemble is not None
            optimizer = self.optimizers()
            assert isinstance(optimizer, L.pytorch.core.optimizer.LightningOptimizer)
            optimizer.zero_grad()
            loss = ensemble.backward(
                x, y, self.loss_fn, backward=self.manual_backward, split=self.split
            )
            optimizer.step()
            scheduler = self.lr_schedulers()
            if scheduler is not None:
                scheduler.step()  # type: ignore[union-attr]
        self._record(loss.detach())
        return loss

    def _pair(self, batch: Any) -> tuple[Tensor, Tensor]:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise InputError(
                f"the data loader gave a {type(batch).__name__}; expected pairs (x, y) of inputs "
                "and labels"
            )
        x, y = batch
        return self._transformed(x), y

    def _transformed(self, x: Any) -> Any:
        return x if self.transform is None else self.transform(x)

    def _logits(self, x: Any, **options: Any) -> Tensor:
        """Member logits (M, B, C) of a tensor, a tuple of positional or a mapping of inputs."""
        inner = getattr(self.network, "network", self.network)  # of an ensemble, or a rival
        args, kwargs = call_arguments(x, inner)
        return logits_of(self.network(*args, **kwargs, **options))

    def validation_step(
        self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Add ``(x, y)`` to the scores of its data loader.

        y: class indices (B, …); labels of 0 and 1 (B, C, …) in a multilabel task.
        """
        x, y = self._pair(batch)
        if dataloader_idx not in self._scores:
            self._scores[dataloader_idx] = Scores(self.loss_fn.class_dim, self.loss_fn.ignore_index)
        ensemble = self.network if isinstance(self.network, SigmaEnsemble) else None
        temperature = 1.0 if ensemble is None else float(ensemble.temperature)
        task = self.loss_fn.stated_task if ensemble is None else ensemble.task
        self._scores[dataloader_idx].update(self._logits(x), y, temperature, task)

    def test_step(
        self, batch: tuple[Tensor, Tensor], batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """As :meth:`validation_step`."""
        self.validation_step(batch, batch_idx, dataloader_idx)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        """Member logits (M, B, C) of a batch ``(x, y)``, ``(x,)`` or x, transformed as in training.

        Raises:
            InputError: for a tuple or list of another length.
        """
        if not isinstance(batch, (tuple, list)):
            return self._logits(self._transformed(batch))
        if len(batch) not in (1, 2):
            raise InputError(
                f"the data loader gave a {type(batch).__name__} of {len(batch)}; expected pairs "
                "(x, y), or x alone. Put several inputs into one mapping, or into a tuple as x"
            )
        return self._logits(self._transformed(batch[0]))

    def on_validation_epoch_start(self) -> None:
        self._scores = {}

    def on_test_epoch_start(self) -> None:
        self._scores = {}

    def on_validation_epoch_end(self) -> None:
        found = self._log_scores("val")
        if not self.trainer.sanity_checking:
            self._validated = found

    def on_test_epoch_end(self) -> None:
        self._log_scores("test")

    def _log_scores(self, stage: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for index, scores in self._scores.items():
            end = f"_{index}" if index else ""
            values = scores.compute(self._add_up)
            found |= {f"{stage}_{key}{end}": value for key, value in values.items()}
        self._scores = {}
        for name, value in found.items():  # equal in all processes
            self.log(name, value, prog_bar=name.endswith("_nll"), sync_dist=True)
        return found

    def _add_up(self, sums: Tensor) -> Tensor:
        if self.trainer.world_size == 1:
            return sums
        total = self.trainer.strategy.reduce(sums.to(self.device), reduce_op="sum")
        assert isinstance(total, Tensor)
        return total

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
            diversity = self.loss_fn.diversity
            layers = "auto" if diversity is None else diversity.layers
            entry["cosine"] = measures.cosine(self.network, layers)
            entry["owners"] = measures.owners(self.network, layers)
            entry["saturation"] = measures.saturation(self.network, layers)
            self.log("cosine", entry["cosine"], prog_bar=True)
        self.history.append(entry | self._validated)
        self._validated = {}
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
            on_cpu = all(p.device.type == "cpu" for g in groups for p in g["params"])
            optimizer = cls(groups, fused=on_cpu or None)  # one loop over all parameters
        optimizer.register_step_pre_hook(_keep_multiples)
        self._configured = self.lr
        if self.lr_schedule == "constant":
            return optimizer
        total = self.trainer.estimated_stepping_batches
        if not math.isfinite(total):
            raise InputError(
                f"lr_schedule={self.lr_schedule!r} needs to know how long the training is. Give "
                "the Trainer max_epochs or max_steps, or use lr_schedule='constant'"
            )
        steps = max(int(total), 2)
        scheduler: torch.optim.lr_scheduler.LRScheduler
        if self.lr_schedule == "onecycle":
            # PyTorch divides by zero where the rise takes exactly one step.
            rise = self.rise * (1 - 1e-9) if math.isclose(self.rise * steps, 1) else self.rise
            scheduler = torch.optim.lr_scheduler.OneCycleLR(
                optimizer,
                max_lr=[g["lr"] for g in groups],
                total_steps=steps,
                pct_start=rise,
                cycle_momentum=False,
            )
        elif self.lr_schedule == "multistep":
            epochs = self.trainer.max_epochs
            if not epochs or epochs < 1:
                raise InputError(
                    "lr_schedule='multistep' counts epochs, but the Trainer has no max_epochs"
                )
            places = [m * steps // epochs for m in self.milestones]
            scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, places, self.gamma)
        else:
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
        }


def _keep_multiples(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Take one rate for all groups, as a rate finder sets it, for the base rate."""
    groups = optimizer.param_groups
    if len({g["lr"] for g in groups}) == 1:
        for group in groups:
            group["lr"] *= group["lr_mult"]
