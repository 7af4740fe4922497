"""Train one network or ensemble on pictures in memory, with Lightning; interruptible, repeatable.

The order of the pictures and their augmentation depend on the seed and the epoch alone, so that a
training resumed at an epoch ends with the very weights of one that was not interrupted.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, TQDMProgressBar
from torch import Tensor, nn

from sigmanens.ensemble import SigmaEnsemble
from sigmanens.errors import DataError
from sigmanens.integrations.lightning import EnsembleModule
from sigmanens.lab.data import augment_flip_crop, batches
from sigmanens.lab.digits import Labelled
from sigmanens.objective import EnsembleLoss

__all__ = ["Recipe", "TrainingResult", "train_network"]


@dataclass
class Recipe:
    """How to train.

    Attributes:
        epochs: passes over the training pictures.
        batch_size: pictures in a step; every member sees all of them.
        optimizer: "sgd", "adam" or "adamw".
        lr: base learning rate.
        scale_lr_mult: factor on the rate of scales; None: 100 for batch norms, 10 for others.
        momentum: of SGD.
        nesterov: Nesterov momentum.
        weight_decay: on weights of convolutions and linear layers only.
        schedule: "onecycle", "cosine" or "constant".
        rise: share of the training in which the one-cycle rate rises.
        flip_crop: greatest shift in pixels of the random crop, which comes with random mirroring;
            0: no augmentation.
        precision: "32-true" or "bf16-mixed".
        channels_last: memory format of pictures and network.
    """

    epochs: int = 40
    batch_size: int = 128
    optimizer: str = "sgd"
    lr: float = 0.1
    scale_lr_mult: float | None = None
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 5e-4
    schedule: str = "onecycle"
    rise: float = 0.2
    flip_crop: int = 0
    precision: str = "32-true"
    channels_last: bool = False


@dataclass
class TrainingResult:
    """History of the epochs (see :class:`EnsembleModule`) and seconds spent training."""

    history: list[dict[str, float]]
    seconds: float


class _Epochs:
    """Batches of one epoch; Lightning iterates it once an epoch and the count is the epoch."""

    def __init__(self, data: Labelled, recipe: Recipe, seed: int) -> None:
        self.data, self.recipe, self.seed = data, recipe, seed
        self.epoch = 0

    def __len__(self) -> int:
        return -(-len(self.data.labels) // self.recipe.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        images, labels = self.data
        for x, y in batches(images, labels, self.recipe.batch_size, True, generator):
            if self.recipe.flip_crop:
                x = augment_flip_crop(x, self.recipe.flip_crop, generator)
            if self.recipe.channels_last:
                x = x.contiguous(memory_format=torch.channels_last)
            yield x, y


class _TellEpoch(Callback):
    """Tell the batches which epoch it is, before Lightning makes their iterator."""

    def __init__(self, epochs: _Epochs, advance: Callable[[], None] | None) -> None:
        self.epochs, self.advance = epochs, advance

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.epochs.epoch = trainer.current_epoch

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.advance is not None:
            self.advance()


def train_network(
    network: nn.Module,
    data: Labelled,
    recipe: Recipe,
    loss_fn: EnsembleLoss,
    *,
    seed: int = 0,
    folder: Path | None = None,
    bar: bool = False,
    advance: Callable[[], None] | None = None,
) -> TrainingResult:
    """Train in place.

    Args:
        network: maps x (B, C, H, W) to member logits (M, B, K).
        data: training pictures (N, C, H, W), normalised, and labels (N,).
        recipe: how.
        loss_fn: objective.
        seed: of the order and augmentation; everything random about the network itself is drawn
            before.
        folder: where the state after each epoch is kept; a training that was interrupted there is
            resumed. None: not kept.
        bar: show a progress bar.
        advance: called after each epoch.

    Raises:
        DataError: if there is no training picture, or NaN among them.
        NonFiniteError: if the loss becomes NaN or infinite.
    """
    if not len(data.labels):
        raise DataError("the training set is empty (0 pictures)")
    if not bool(torch.isfinite(data.images).all()):
        raise DataError("the training pictures hold NaN or infinite values")
    if recipe.channels_last:
        network.to(memory_format=torch.channels_last)
    module = EnsembleModule(
        network,
        loss_fn,
        lr=recipe.lr,
        weight_decay=recipe.weight_decay,
        scale_lr_mult=recipe.scale_lr_mult,
        optimizer=recipe.optimizer,
        momentum=recipe.momentum,
        nesterov=recipe.nesterov,
        schedule=recipe.schedule,
        rise=recipe.rise,
    )
    epochs = _Epochs(data, recipe, seed)
    callbacks: list[Callback] = [_TellEpoch(epochs, advance)]
    if bar:
        callbacks.append(TQDMProgressBar(refresh_rate=5))
    last = None
    if folder is not None:
        callbacks.append(ModelCheckpoint(dirpath=folder, filename="epoch", save_last="link"))
        found = folder / "last.ckpt"
        last = str(found) if found.exists() else None
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    network.train()
    begin = time.perf_counter()
    with warnings.catch_warnings():
        # Lightning cannot know that these batches come from memory, and asks for loader workers.
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")
        trainer = L.Trainer(
            max_epochs=recipe.epochs,
            accelerator="auto",
            devices=1,
            precision=recipe.precision,  # type: ignore[arg-type]
            logger=False,
            callbacks=callbacks,
            enable_checkpointing=folder is not None,
            enable_progress_bar=bar,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        trainer.fit(module, train_dataloaders=epochs, ckpt_path=last, **_trusted(last))
    network.eval()
    return TrainingResult(module.history, time.perf_counter() - begin)


def _trusted(checkpoint: str | None) -> dict[str, Any]:
    """Our own training state holds plain tensors and numbers only: load it as weights."""
    return {} if checkpoint is None else {"weights_only": True}


def parameters(network: nn.Module) -> int:
    """Number of parameters, frozen carriers and statistics (buffers) not counted."""
    return sum(p.numel() for p in network.parameters())


def members_of(network: nn.Module) -> int:
    """M of an ensemble or a rival."""
    return network.num_members if isinstance(network, SigmaEnsemble) else int(network.num_members)  # type: ignore[arg-type]
