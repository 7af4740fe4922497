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
from lightning.pytorch.callbacks import Callback, Checkpoint
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn

from sigmanens.ensemble.ensemble import SigmaEnsemble
from sigmanens.ensemble.prediction import log_mean_exp
from sigmanens.errors import ConfigError, DataError, RunError
from sigmanens.evaluation import metrics
from sigmanens.evaluation.calibration import apply_temperature, fit_temperature
from sigmanens.integrations.lightning import EnsembleModule
from sigmanens.lab.backbones.tokens import length_order
from sigmanens.lab.config import Recipe
from sigmanens.lab.data import LazyPictures, augment_flip_crop, batches, take
from sigmanens.lab.digits import Labelled
from sigmanens.lab.rows import member_logits
from sigmanens.training.loss import EnsembleLoss


@dataclass
class TrainingResult:
    """What a training gave.

    Attributes:
        history: of the epochs, see :class:`EnsembleModule`; under ``keep: best`` with
            ``val_nll_calibrated``.
        seconds: spent training; those of all parts where it was interrupted.
    """

    history: list[dict[str, float]]
    seconds: float


def _least(recipe: Recipe, members: int) -> int:
    return members if recipe.member_batches == "share" else 1


def steps_of_epoch(examples: int, recipe: Recipe, members: int = 1) -> int:
    """Optimizer steps of an epoch.

    Args:
        examples: to train on.
        recipe: how.
        members: M of what may divide a batch; 1 for all else.
    """
    whole, rest = divmod(examples, recipe.batch_size)
    return whole + (rest >= _least(recipe, members) and not (recipe.drop_last and whole > 0))


_GROUPS = 4
"""Groups of texts of alike length, of which each batch holds one kind."""


class _Epochs:
    """Batches of one epoch; Lightning iterates it once an epoch."""

    def __init__(
        self,
        data: Labelled,
        recipe: Recipe,
        seed: int,
        members: int = 1,
        by_length: Tensor | None = None,
    ) -> None:
        self.data, self.recipe, self.seed = data, recipe, seed
        self.members = members
        self.epoch = 0
        size = recipe.batch_size
        each = size * -(-len(data.labels) // (size * _GROUPS))
        self.groups = () if by_length is None else by_length.split(each)

    @property
    def epoch_seed(self) -> int:
        """Seed of everything random in the current epoch."""
        return self.seed * 1_000_003 + self.epoch

    @property
    def drop_last(self) -> bool:
        """Whether there is a whole batch to keep when the last one is left out."""
        return self.recipe.drop_last and len(self.data.labels) >= self.recipe.batch_size

    @property
    def least(self) -> int:
        """Pictures that a batch holds at least."""
        return _least(self.recipe, self.members)

    def __len__(self) -> int:
        return steps_of_epoch(len(self.data.labels), self.recipe, self.members)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if self.recipe.member_batches == "own":
            orders = [self._order(m) for m in range(self.members)]
            for parts in zip(*orders, strict=True):
                x = torch.cat([x for x, _ in parts])
                yield _laid_out(x, self.recipe), torch.cat([y for _, y in parts])
            return
        for x, y in self._order(0):
            whole = len(y) - len(y) % self.least
            if whole:
                yield _laid_out(x[:whole], self.recipe), y[:whole]

    def _order(self, member: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches in one order, augmented; the first member's are those that all see together."""
        seed = self.epoch_seed + 1_000_000_007 * member
        generator = torch.Generator().manual_seed(seed)
        images, labels = self.data
        if isinstance(images, LazyPictures) and self.recipe.resized_crop:
            images = images.viewed(self.recipe.resized_crop, seed)
        size = self.recipe.batch_size
        turns = torch.Generator().manual_seed(self.epoch_seed)  # the same for all members
        for x, y in batches(images, labels, size, generator, self.drop_last, self.groups, turns):
            if self.recipe.flip_crop:
                x = augment_flip_crop(x, self.recipe.flip_crop, generator, self.recipe.border)
            yield x, y


class _Watched:
    """The validation examples that are looked at after each epoch, batch by batch."""

    def __init__(self, data: Labelled, recipe: Recipe) -> None:
        self.data, self.recipe = data, recipe

    def __len__(self) -> int:
        return -(-len(self.data.labels) // self.recipe.batch_size)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for x, y in batches(*self.data, self.recipe.batch_size):
            yield _laid_out(x, self.recipe), y


def _laid_out(x: Tensor, recipe: Recipe) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last) if recipe.channels_last else x


class _StartEpoch(Callback):
    """Tell the batches which epoch it is, before any is asked for, and seed dropout by it."""

    def __init__(self, epochs: _Epochs, advance: Callable[[], None]) -> None:
        self.epochs, self.advance = epochs, advance

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.epochs.epoch = trainer.current_epoch
        torch.manual_seed(self.epochs.epoch_seed)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
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


class _Kept(Callback):
    """Average the weights after each step; find the epoch that is best on validation examples."""

    def __init__(self, network: nn.Module, recipe: Recipe, validation: Labelled | None) -> None:
        self.validation = validation if recipe.keep == "best" else None
        self.network, self.average = network, None
        if recipe.averaging:
            self.average = AveragedModel(
                network, avg_fn=get_ema_avg_fn(recipe.averaging), use_buffers=True
            )
        self.scores: list[float] = []
        self.best: dict[str, Tensor] = {}

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.average is not None:
            self.average.to(pl_module.device)

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any, **__: Any) -> None:
        if self.average is not None:
            self.average.update_parameters(self.network)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.validation is None:
            return
        shown: nn.Module = self.network if self.average is None else self.average.module
        log_probs = log_mean_exp(
            member_logits(shown)(self.validation.images).double().log_softmax(-1)
        )
        labels = self.validation.labels
        scaled = apply_temperature(log_probs, fit_temperature(log_probs, labels))
        self.scores.append(metrics.nll(scaled, labels))
        if self.scores[-1] == min(self.scores):
            self.best = {k: v.clone() for k, v in shown.state_dict().items()}
        self.network.train()

    def finish(self) -> None:
        """Put the average, or the best epoch's weights, into the network."""
        if self.best:
            self.network.load_state_dict(self.best)
        elif self.average is not None:
            self.network.load_state_dict(self.average.module.state_dict())

    def state_dict(self) -> dict[str, Any]:
        averaged = {} if self.average is None else self.average.state_dict()
        return {"average": averaged, "scores": self.scores, "best": self.best}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if self.average is not None:
            self.average.load_state_dict(state_dict["average"])
        self.scores, self.best = state_dict["scores"], state_dict["best"]


def train_network(
    network: nn.Module,
    data: Labelled,
    recipe: Recipe,
    loss_fn: EnsembleLoss,
    *,
    seed: int = 0,
    watched: Labelled | None = None,
    validation: Labelled | None = None,
    folder: Path | None = None,
    advance: Callable[[], None] = lambda: None,
) -> TrainingResult:
    """Train in place.

    Args:
        network: maps x (B, C, H, W) to member logits (M, B, K).
        data: training pictures (N, C, H, W), normalised, and labels (N,).
        recipe: how.
        loss_fn: objective.
        seed: of the order, augmentation and dropout; everything random about the network itself is
            drawn before.
        watched: validation examples, like ``data``, whose scores and Jensen gap are put into the
            history after each epoch; they choose nothing. None: no such scores.
        validation: examples by which ``recipe.keep: best`` finds the epoch to keep.
        folder: where the state after each epoch is kept; a training that was interrupted there is
            resumed. None: not kept.
        advance: called after each epoch.

    Raises:
        ConfigError: for members' own batches of a network that gives all members the same, or
            ``keep: best`` without validation examples.
        DataError: if there is no training picture, or NaN among them.
        NonFiniteError: if the loss becomes NaN or infinite.
        RunError: if the state in ``folder`` cannot be written or read.
        KeyboardInterrupt: when interrupted; the state of the last finished epoch is kept.
    """
    if not len(data.labels):
        raise DataError("the training set is empty (0 pictures)")
    if isinstance(data.images, Tensor):  # others are decoded from 8 bits, so finite
        if recipe.resized_crop:
            raise ConfigError(
                f"recipe.resized_crop is {recipe.resized_crop}, but these pictures are in memory "
                "and have their final size: load them with data.lazy, or use flip_crop"
            )
        if not bool(torch.isfinite(data.images).all()):
            raise DataError("the training pictures hold NaN or infinite values")
    if recipe.channels_last:
        network.to(memory_format=torch.channels_last)
    split = recipe.member_batches != "same" and members_of(network) > 1
    if split and not isinstance(network, SigmaEnsemble):
        raise ConfigError(
            f"recipe.member_batches is {recipe.member_batches!r}, but {type(network).__name__} "
            "gives all members the same batch: use 'same'"
        )
    module = EnsembleModule(
        network,
        loss_fn,
        lr=recipe.lr,
        weight_decay=recipe.weight_decay,
        scale_lr_mult=recipe.scale_lr_mult,
        head_lr_mult=recipe.head_lr_mult,
        optimizer=recipe.optimizer,
        momentum=recipe.momentum,
        nesterov=recipe.nesterov,
        lr_schedule=recipe.lr_schedule,
        rise=recipe.rise,
        milestones=recipe.milestones,
        gamma=recipe.gamma,
        split=split,
    )
    if recipe.keep == "best" and validation is None:
        raise ConfigError("recipe.keep is 'best', which needs validation examples; use 'last'")
    lengths = length_order(network, data.images) if isinstance(data.images, Tensor) else None
    epochs = _Epochs(data, recipe, seed, members_of(network) if split else 1, lengths)
    kept = _Kept(network, recipe, validation)
    keep = _KeepState(folder)
    network.train()
    with _quiet(), _interruptible(), _own_random_state():
        trainer = L.Trainer(
            max_epochs=recipe.epochs,
            accelerator="auto",
            devices=1,
            precision=recipe.precision,  # type: ignore[arg-type]
            logger=False,
            callbacks=[_StartEpoch(epochs, advance), kept, keep],
            enable_checkpointing=True,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
        )
        shown = None if watched is None or not len(watched.labels) else _Watched(watched, recipe)
        trainer.fit(module, epochs, shown, ckpt_path=_found(keep.path))
    kept.finish()
    network.eval()
    for entry, score in zip(module.history, kept.scores, strict=False):
        entry["val_nll_calibrated"] = score
    return TrainingResult(module.history, keep.seconds)


def drawn(data: Labelled, count: int) -> Labelled | None:
    """A part of the examples to watch in training, always the same; None for no example."""
    order = torch.randperm(len(data.labels), generator=torch.Generator().manual_seed(0))
    index = order[:count].sort().values
    return Labelled(take(data.images, index), data.labels[index]) if len(index) else None


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
