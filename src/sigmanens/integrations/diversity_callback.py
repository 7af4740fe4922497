"""A Lightning callback that watches whether the members are, and stay, different models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from sigmanens.diversity import Diversity, diagnosis, measures
from sigmanens.diversity.diagnosis import Finding, dropout_disagreement, nlls, pull_norms
from sigmanens.ensemble.ensemble import SigmaEnsemble
from sigmanens.ensemble.inputs import call_arguments
from sigmanens.ensemble.prediction import Prediction, logits_of
from sigmanens.errors import InputError, SigmaNensWarning
from sigmanens.integrations.lightning import EnsembleModule
from sigmanens.passes.modes import evaluating
from sigmanens.training.loss import EnsembleLoss

__all__ = ["DiversityMonitor", "inputs_and_labels"]

_UNSURE = 0.1  # only below this disagreement is it compared with what dropout alone does


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
    """Log how different the members are, and warn when that goes wrong.

    In each of the first steps, and then every ``trainer.log_every_n_steps``, it logs "cosine",
    "owners" and "saturation" of the norms that the penalty acts on (without one, those of the
    paper's rule), and "tau" and "weight" if they change in training. On a validation batch it logs
    "disagreement" (fraction), "jensen_gap" and "modulation" (nats).

    The :class:`SigmaEnsemble` and the penalty (an attribute that is an :class:`EnsembleLoss` or a
    :class:`Diversity`) are found in the Lightning module by their types. Without an ensemble (a
    rival) the module itself is called with the inputs, has to return logits
    (M, B, C), and has no measures of scales; linear scales have no owners and no saturation, one
    member has no measure at all.

    It gives five warnings (:class:`SigmaNensWarning`), each once a training, by the thresholds of
    :mod:`sigmanens.diversity.diagnosis`:

    * *one model*, on the validation batch after ``first_steps``: the members answer alike, or
      differ less than one of them does from itself under dropout. Averaging gains nothing.
    * *frozen partition*, in the first steps: the scales are parted and saturated. The penalty, not
      the task, has shared out the channels.
    * *outweighed task*, over the first steps in which the penalty acts: it pulls at the scales ten
      times as hard as the task.
    * *flat dial*, at the start: τ lies where turning it changes little (for M ≥ 3).
    * *weak members*, at the end, if ``single_nll`` is given: members have lost more against one
      network than averaging gains.

    Args:
        batch: the validation batch, measured after each training epoch; by default the first batch
            of every validation, for which the Lightning module needs a ``validation_step``.
        first_steps: optimizer steps that count as the start.
        single_nll: NLL of one network, trained in the same way, on the validation batch, nats.
        unpack: ``batch -> (x, y)``, y class indices (B,); :func:`inputs_and_labels` by default.
        prefix: of the logged names.

    Attributes:
        history: every measurement as a dict, "step" among its keys; loggers get those of the scales
            at ``log_every_n_steps`` only.
        findings: what has been warned of, see :class:`sigmanens.diversity.diagnosis.Finding`.

    Raises:
        InputError: if ``first_steps`` is below 1.
    """

    def __init__(
        self,
        batch: Any = None,
        *,
        first_steps: int = 20,
        single_nll: float | None = None,
        unpack: Callable[[Any], tuple[Any, Tensor]] = inputs_and_labels,
        prefix: str = "diversity/",
    ) -> None:
        super().__init__()
        if isinstance(first_steps, bool) or not isinstance(first_steps, int) or first_steps < 1:
            raise InputError(f"first_steps is {first_steps!r}; expected an integer ≥ 1")
        self.first_steps = first_steps
        self.single_nll = single_nll
        self.batch = batch
        self.unpack = unpack
        self.prefix = prefix
        self.history: list[dict[str, float]] = []
        self.findings: list[Finding] = []
        self._pulls: list[tuple[float, float]] = []
        self._nlls: tuple[float, float] | None = None

    # -- hooks -----------------------------------------------------------------------------------

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self.findings, self._pulls, self._nlls = [], [], None

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        found = _scale_measures(pl_module)
        if found:
            self.history.append({"step": trainer.global_step, **found})
        ensemble, diversity = _ensemble(pl_module), _diversity(pl_module)
        # Two members end with one owner of each channel at any τ: there is nothing to warn of.
        if ensemble is None or ensemble.num_members < 3 or "owners" not in found:
            return
        if diversity is not None and not callable(diversity.tau):
            self._warn(diagnosis.flat_dial(diversity.tau, ensemble.num_members))

    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        if len(self._pulls) >= self.first_steps:
            return
        ensemble, diversity = _ensemble(pl_module), _diversity(pl_module)
        if ensemble is None or diversity is None or diversity.current()[1] == 0:
            return
        if all(m.scale_logit.grad is not None for m in ensemble.sigma_norms().values()):
            pulls = pull_norms(ensemble, diversity)
            if not all(map(math.isfinite, pulls)):  # an overflow of float16: the step is skipped
                return
            self._pulls.append(pulls)
            if len(self._pulls) == self.first_steps:
                self._judge_pulls(diversity)

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
        diversity = _diversity(pl_module)
        if diversity is not None and diversity.moves:
            found |= dict(zip(("tau", "weight"), diversity.current(), strict=True))
        self.history.append({"step": step, **found})
        pl_module.log_dict({self.prefix + k: v for k, v in found.items()}, batch_size=1)
        if step <= self.first_steps and "saturation" in found:
            cosine, saturation = found["cosine"], found["saturation"]
            self._warn(diagnosis.frozen_partition(cosine, saturation, step=step))

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

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        diversity = _diversity(pl_module)
        if diversity is not None and 0 < len(self._pulls) < self.first_steps:
            self._judge_pulls(diversity)
        if self.single_nll is not None and self._nlls is not None:
            self._warn(diagnosis.weak_members(*self._nlls, self.single_nll))

    # -- measurement and judgement ---------------------------------------------------------------

    def _measure(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any) -> None:
        x, labels = self.unpack(batch)
        if isinstance(pl_module, EnsembleModule) and pl_module.transform is not None:
            x = pl_module.transform(x)
        with evaluating(pl_module):
            logits = _member_logits(pl_module, x)
        if len(logits) < 2:
            return
        ensemble = _ensemble(pl_module)
        task = None if ensemble is None else ensemble.task
        prediction = Prediction.from_logits(logits.double(), task=task)
        if task == "multilabel":  # each label counts as a sample of two classes
            _, labels, logits = prediction.rows(labels)
        found = {
            "disagreement": measures.disagreement(logits),
            "jensen_gap": measures.jensen_gap(logits, labels),
            "modulation": float(prediction.modulation.mean()),
        }
        if self.single_nll is not None:
            self._nlls = nlls(logits, labels)
        step = trainer.global_step
        self.history.append({"step": step, **found})
        pl_module.log_dict(
            {self.prefix + k: v for k, v in found.items()},
            sync_dist=True,
            add_dataloader_idx=False,
            batch_size=len(labels),
        )
        if step < self.first_steps:
            return
        noise = 0.0
        if found["disagreement"] < _UNSURE and task != "multilabel":
            noise = dropout_disagreement(ensemble or pl_module, x)
        self._warn(
            diagnosis.one_model(
                found["disagreement"],
                found["modulation"],
                float(prediction.entropy.mean()),
                cosine=_scale_measures(pl_module).get("cosine", math.nan),
                dropout=noise,
                step=step,
            )
        )

    def _judge_pulls(self, diversity: Diversity) -> None:
        penalty, task = (sum(pulls) / len(pulls) for pulls in zip(*self._pulls, strict=True))
        tau, weight = diversity.current()
        self._warn(diagnosis.outweighed_task(penalty, task, tau=tau, weight=weight))

    def _warn(self, finding: Finding | None) -> None:
        if finding is not None and finding.kind not in {f.kind for f in self.findings}:
            self.findings.append(finding)
            rank_zero_warn(finding.message, category=SigmaNensWarning)


def _ensemble(module: nn.Module) -> SigmaEnsemble | None:
    return next((m for m in module.modules() if isinstance(m, SigmaEnsemble)), None)


def _diversity(module: nn.Module) -> Diversity | None:
    """The penalty that the module keeps, itself or in a loss, if it acts on its ensemble."""
    kept = [v for v in vars(module).values() if isinstance(v, (EnsembleLoss, Diversity))]
    found = (v.diversity if isinstance(v, EnsembleLoss) else v for v in kept)
    diversity = next((d for d in found if d is not None), None)
    ensemble = _ensemble(module)
    if diversity is None or not diversity.active or ensemble is None or ensemble.num_members < 2:
        return None
    return diversity


def _scale_measures(module: nn.Module) -> dict[str, float]:
    """Measures of the scales that are defined: none without an ensemble or for one member."""
    ensemble = _ensemble(module)
    if ensemble is None or ensemble.num_members < 2:
        return {}
    diversity = _diversity(module)
    layers = "auto" if diversity is None else diversity.layers
    found = {
        "cosine": measures.cosine(ensemble, layers),
        "owners": measures.owners(ensemble, layers),
        "saturation": measures.saturation(ensemble, layers),
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
