"""A Lightning callback that watches whether the members are, and stay, different models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from sigmanens import measures
from sigmanens.ensemble import SigmaEnsemble
from sigmanens.errors import InputError, SigmaNensWarning
from sigmanens.inputs import call_arguments
from sigmanens.prediction import Prediction, logits_of
from sigmanens.verify import evaluating

__all__ = ["DiversityMonitor", "inputs_and_labels"]


def inputs_and_labels(batch: Any) -> tuple[Any, Tensor]:
    """Inputs and labels of a batch: a pair ``(x, y)``, or a mapping with ``labels``.

    Raises:
        InputError: for any other batch.
    """
    if isinstance(batch, Mapping) and "labels" in batch:
        return {k: v for k, v in batch.items() if k != "labels"}, batch["labels"]
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        return batch[0], batch[1]
    raise InputError(
        f"a batch is a {type(batch).__name__}; expected a pair (x, y) or a mapping with 'labels'. "
        "For another kind give DiversityMonitor(unpack=…), a function batch -> (x, y)"
    )


class DiversityMonitor(Callback):
    """Log how different the members are; warn when they are one model or were parted too early.

    On scales, at every one of the first steps and then every ``trainer.log_every_n_steps``:
    "cosine", "owners" and "saturation" of the norms that the paper's rule regularises. On a
    validation batch: "disagreement" (fraction), "jensen_gap" and "modulation" (nats). The
    :class:`SigmaEnsemble` is found in the Lightning module by its type. Without one (a rival) the
    module itself is called with the inputs, has to return logits (M, B, C), and has no measures of
    scales; linear scales have no owners and no saturation, one member has no measure at all.

    Two :class:`SigmaNensWarning`, each once a training:

    * *one model*: after ``first_steps`` steps the members disagree on at most ``disagreement`` of
      the batch, and either the modulation is at most ``relative_modulation`` of the entropy or the
      cosine of the scales is above ``same_cosine``. Then averaging gains nothing.
    * *frozen partition*: within the first ``first_steps`` steps the cosine falls below
      ``parted_cosine`` while more than ``saturated`` of the scales lie within 0.02 of 0 or 1,
      where the sigmoid hardly moves: the penalty, not the task, has shared out the channels. From
      γ ~ N(0, 1) the cosine is 0.85 and about 0.0001 of the scales are saturated.

    Args:
        batch: the validation batch, measured after each training epoch; by default the first batch
            of every validation, for which the Lightning module needs a ``validation_step``.
        first_steps: optimizer steps that count as the start.
        disagreement, relative_modulation, same_cosine: thresholds of the first warning.
        parted_cosine, saturated: thresholds of the second.
        unpack: ``batch -> (x, y)``, y class indices (B,); :func:`inputs_and_labels` by default.
        prefix: of the logged names.

    Attributes:
        history: every measurement as a dict, "step" among its keys; loggers get those of the scales
            at ``log_every_n_steps`` only.

    Raises:
        InputError: if ``first_steps`` is below 1 or a threshold is not in 0 … 1.
    """

    def __init__(
        self,
        batch: Any = None,
        *,
        first_steps: int = 20,
        disagreement: float = 1e-3,
        relative_modulation: float = 1e-3,
        same_cosine: float = 0.99,
        parted_cosine: float = 0.3,
        saturated: float = 0.5,
        unpack: Callable[[Any], tuple[Any, Tensor]] = inputs_and_labels,
        prefix: str = "diversity/",
    ) -> None:
        super().__init__()
        if isinstance(first_steps, bool) or not isinstance(first_steps, int) or first_steps < 1:
            raise InputError(f"first_steps is {first_steps!r}; expected an integer ≥ 1")
        self.first_steps = first_steps
        self.limits = {
            "disagreement": disagreement,
            "relative_modulation": relative_modulation,
            "same_cosine": same_cosine,
            "parted_cosine": parted_cosine,
            "saturated": saturated,
        }
        for name, value in self.limits.items():
            if not 0 <= value <= 1:
                raise InputError(f"{name} is {value!r}; expected a number from 0 to 1")
        self.batch = batch
        self.unpack = unpack
        self.prefix = prefix
        self.history: list[dict[str, float]] = []
        self._warned: set[str] = set()

    # -- hooks -----------------------------------------------------------------------------------

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._warned.clear()

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        found = _scale_measures(pl_module)
        if found:
            self.history.append({"step": trainer.global_step, **found})

    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        step = trainer.global_step
        every = getattr(trainer, "log_every_n_steps", 0)
        if step > self.first_steps and not (every and step % every == 0):
            return
        found = _scale_measures(pl_module)
        if not found:
            return
        self.history.append({"step": step, **found})
        pl_module.log_dict({self.prefix + k: v for k, v in found.items()}, batch_size=1)
        if step <= self.first_steps:
            self._judge_partition(found, step)

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.batch is not None:
            batch = trainer.strategy.batch_to_device(self.batch, pl_module.device)
            self._measure(trainer, pl_module, batch)

    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self.batch is None and not (batch_idx or dataloader_idx):
            self._measure(trainer, pl_module, batch)

    # -- measurement and judgement ---------------------------------------------------------------

    def _measure(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any) -> None:
        x, labels = self.unpack(batch)
        with evaluating(pl_module):
            logits = _member_logits(pl_module, x)
        if len(logits) < 2:
            return
        prediction = Prediction.from_logits(logits.double())
        found = {
            "disagreement": measures.disagreement(logits),
            "jensen_gap": measures.jensen_gap(logits, labels),
            "modulation": float(prediction.modulation.mean()),
        }
        self.history.append({"step": trainer.global_step, **found})
        pl_module.log_dict(
            {self.prefix + k: v for k, v in found.items()},
            sync_dist=True,
            add_dataloader_idx=False,
            batch_size=len(labels),
        )
        if trainer.global_step >= self.first_steps:
            cosine = _scale_measures(pl_module).get("cosine", math.nan)
            self._judge_members(
                found, cosine, float(prediction.entropy.mean()), trainer.global_step
            )

    def _judge_partition(self, found: Mapping[str, float], step: int) -> None:
        parted = found["cosine"] < self.limits["parted_cosine"]
        frozen = found.get("saturation", math.nan) > self.limits["saturated"]
        if parted and frozen:
            self._warn(
                "frozen partition",
                f"the scales were parted by step {step}: cosine {found['cosine']:.2f}, "
                f"{found['saturation']:.0%} of them saturated, where they hardly move any more. "
                "The penalty decided this before the task could. Lower its weight or the rate of "
                "the scales (scale_lr_mult), or raise tau",
            )

    def _judge_members(
        self, found: Mapping[str, float], cosine: float, entropy: float, step: int
    ) -> None:
        limits, modulation = self.limits, found["modulation"]
        alike = modulation <= limits["relative_modulation"] * entropy
        alike = alike or cosine > limits["same_cosine"]
        if found["disagreement"] <= limits["disagreement"] and alike:
            scales = "" if math.isnan(cosine) else f", cosine of the scales {cosine:.3f}"
            self._warn(
                "one model",
                f"after {step} steps the members answer as one model on the validation batch: "
                f"disagreement {found['disagreement']:.4f}, modulation {modulation:.2g} of "
                f"{entropy:.2g} nats{scales}. Averaging gains nothing so far. Train longer, or the "
                "scales faster (scale_lr_mult), raise the penalty's weight, or convert with "
                "head='fresh'",
            )

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            rank_zero_warn(message, category=SigmaNensWarning)


def _ensemble(module: nn.Module) -> SigmaEnsemble | None:
    return next((m for m in module.modules() if isinstance(m, SigmaEnsemble)), None)


def _scale_measures(module: nn.Module) -> dict[str, float]:
    """Measures of the scales that are defined: none without an ensemble or for one member."""
    ensemble = _ensemble(module)
    if ensemble is None or ensemble.num_members < 2:
        return {}
    found = {
        "cosine": measures.cosine(ensemble, "auto"),
        "owners": measures.owners(ensemble),
        "saturation": measures.saturation(ensemble),
    }
    return {name: value for name, value in found.items() if not math.isnan(value)}


def _member_logits(module: L.LightningModule, x: Any) -> Tensor:
    """Logits (M, B, C) of the ensemble in the module, or of the module itself."""
    network = _ensemble(module) or module
    args, kwargs = call_arguments(x)
    logits = logits_of(network(*args, **kwargs))
    if logits.dim() != 3:
        raise InputError(
            f"{type(network).__name__} returned logits {tuple(logits.shape)}; DiversityMonitor "
            "needs member logits (M, B, C)"
        )
    return logits
