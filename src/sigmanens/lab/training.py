"""Train one network or ensemble on pictures in memory, with Lightning; interruptible, repeatable.

The order of the pictures, their augmentation and dropout depend on the seed and the epoch alone, so
that a training resumed at an epoch ends with the very weights of one that was not interrupted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint, TQDMProgressBar
from torch import Tensor, nn

from sigmanens.errors import DataError, RunError
from sigmanens.integrations.lightning import EnsembleModule
from sigmanens.lab.config import Recipe
from sigmanens.lab.data import augment_flip_crop, batches
from sigmanens.lab.digits import Labelled
from sigmanens.objective import EnsembleLoss

__all__ = ["Recipe", "TrainingResult", "members_of", "parameters", "train_network"]


@dataclass
class TrainingResult:
    """History of the epochs (see :class:`EnsembleModule`) and seconds spent training.

    The seconds of a training that was interrupted are those of all its parts.
    """

    history: list[dict[str, float]]
    seconds: float


class _Epochs:
    """Batches of one epoch; Lightning iterates it once an epoch."""

    def __init__(self, data: Labelled, recipe: Recipe, seed: int) -> None:
        self.data, self.recipe, self.seed = data, recipe, seed
        self.epoch = 0

    @property
    def epoch_seed(self) -> int:
        """Seed of everything random in the current epoch."""
        return self.seed * 1_000_003 + self.epoch

    @property
    def drop_last(self) -> bool:
        """Whether there is a whole batch to keep when the last one is left out."""
        return self.recipe.drop_last and len(self.data.labels) >= self.recipe.batch_size

    def __len__(self) -> int:
        whole, rest = divmod(len(self.data.labels), self.recipe.batch_size)
        return whole + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(self.epoch_seed)
        images, labels = self.data
        size = self.recipe.batch_size
        for x, y in batches(images, labels, size, True, generator, self.drop_last):
            if self.recipe.flip_crop:
                x = augment_flip_crop(x, self.recipe.flip_crop, generator, self.recipe.border)
            if self.recipe.channels_last:
                x = x.contiguous(memory_format=torch.channels_last)
            yield x, y


class _StartEpoch(Callback):
    """Tell the batches which epoch it is, before any is asked for, and seed dropout by it."""

    def __init__(self, epochs: _Epochs, advance: Callable[[], None] | None, lines: bool) -> None:
        self.epochs, self.advance, self.lines = epochs, advance, lines

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.epochs.epoch = trainer.current_epoch
        torch.manual_seed(self.epochs.epoch_seed)
        if self.lines:
            print(f"epoch {trainer.current_epoch + 1} of {trainer.max_epochs}", flush=True)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.advance is not None:
            self.advance()


class _KeepState(Checkpoint):
    """After each epoch, replace the training state in one step; also keep the time spent so far."""

    def __init__(self, folder: Path | None) -> None:
        self.path = None if folder is None else folder / "last.ckpt"
        self.begin = time.perf_counter()
        self.before = 0.0

    @property
    def seconds(self) -> float:
        return self.before + time.perf_counter() - self.begin

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.path is None:
            return
        part = self.path.with_name(".part.ckpt")
        try:
            trainer.save_checkpoint(part)
            os.replace(part, self.path)
        except OSError as e:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise RunError(
                f"could not keep the training state in {self.path.parent}: {e.strerror or e}. The "
                "state of the epoch before is unchanged: free space and resume"
            ) from e

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self.seconds}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.before = float(state_dict["seconds"])


def train_network(
    network: nn.Module,
    data: Labelled,
    recipe: Recipe,
    loss_fn: EnsembleLoss,
    *,
    seed: int = 0,
    folder: Path | None = None,
    bar: bool = False,
    lines: bool = False,
    advance: Callable[[], None] | None = None,
) -> TrainingResult:
    """Train in place.

    Args:
        network: maps x (B, C, H, W) to member logits (M, B, K).
        data: training pictures (N, C, H, W), normalised, and labels (N,).
        recipe: how.
        loss_fn: objective.
        seed: of the order, augmentation and dropout; everything random about the network itself is
            drawn before.
        folder: where the state after each epoch is kept; a training that was interrupted there is
            resumed. None: not kept.
        bar: show a progress bar.
        lines: print a line for each epoch.
        advance: called after each epoch.

    Raises:
        DataError: if there is no training picture, or NaN among them.
        NonFiniteError: if the loss becomes NaN or infinite.
        RunError: if the state in ``folder`` cannot be written or read.
        KeyboardInterrupt: when interrupted; the state of the last finished epoch is kept.
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
        milestones=recipe.milestones,
        gamma=recipe.gamma,
    )
    epochs = _Epochs(data, recipe, seed)
    keep = _KeepState(folder)
    callbacks: list[Callback] = [_StartEpoch(epochs, advance, lines), keep]
    if bar:
        callbacks.append(TQDMProgressBar(refresh_rate=5))
    network.train()
    with _quiet(), _interruptible(), _own_random_state():
        trainer = L.Trainer(
            max_epochs=recipe.epochs,
            accelerator="auto",
            devices=1,
            precision=recipe.precision,  # type: ignore[arg-type]
            logger=False,
            callbacks=callbacks,
            enable_checkpointing=True,
            enable_progress_bar=bar,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        trainer.fit(module, train_dataloaders=epochs, ckpt_path=_found(keep.path))
    network.eval()
    return TrainingResult(module.history, keep.seconds)


def _found(path: Path | None) -> Path | None:
    """The kept state, if there is one; it is plain tensors and numbers, and read as such."""
    if path is None or not path.exists():
        return None
    try:
        torch.load(path, map_location="cpu", weights_only=True)
    except Exception as e:  # a damaged pickle may raise anything
        raise RunError(
            f"the training state {path} cannot be read: it was truncated or altered. Remove it to "
            "train from the start"
        ) from e
    return path


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep Lightning's advice, which is for people who write the training, from the user."""
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.WARNING)
    try:
        with warnings.catch_warnings():
            # Lightning cannot know that these batches come from memory: it asks for loader workers.
            warnings.filterwarnings("ignore", message=".*does not have many workers.*")
            warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")
            # Runs are measured after training, not in it.
            warnings.filterwarnings("ignore", message=".*but have no `val_dataloader`.*")
            # Lightning 2.6 calls what PyTorch 2.14 deprecates.
            warnings.filterwarnings("ignore", message=".*LeafSpec.*", category=FutureWarning)
            yield
    finally:
        log.setLevel(level)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let Ctrl-C through, of which Lightning makes an exit from Python with status 1."""
    try:
        yield
    except SystemExit as e:
        if not isinstance(e.__context__, KeyboardInterrupt):
            raise
        raise KeyboardInterrupt from e


@contextlib.contextmanager
def _own_random_state() -> Iterator[None]:
    """Leave PyTorch's generators as they were found."""
    with torch.random.fork_rng(devices=[0] if torch.cuda.is_available() else []):
        yield


def parameters(network: nn.Module) -> int:
    """Number of parameters, frozen carriers and statistics (buffers) not counted."""
    return sum(p.numel() for p in network.parameters())


def members_of(network: nn.Module) -> int:
    """M of an ensemble or a rival."""
    return int(network.num_members)  # type: ignore[arg-type]
