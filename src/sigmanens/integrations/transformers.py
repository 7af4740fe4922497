"""Train, evaluate and save an ensemble with the Trainer of Hugging Face transformers.

Give :class:`EnsembleTrainer` what :func:`sigmanens.convert` made of a sequence or image classifier;
everything else is used as with ``transformers.Trainer``.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Trainer

from sigmanens.diversity import diagnosis, measures
from sigmanens.ensemble.ensemble import SigmaEnsemble
from sigmanens.ensemble.prediction import Prediction
from sigmanens.errors import InputError, warn
from sigmanens.integrations.classification import EnsembleForClassification, EnsembleOutput
from sigmanens.integrations.hub import save_folder
from sigmanens.saving.checkpoint import is_checkpoint
from sigmanens.training.groups import check_optimizer, param_groups
from sigmanens.training.loss import EnsembleLoss

__all__ = ["EnsembleForClassification", "EnsembleOutput", "EnsembleTrainer"]

FIRST_STEPS = 20  # of a training, in which nobody judges how different the members are


class EnsembleTrainer(Trainer):
    """``transformers.Trainer`` for an ensemble.

    The optimizer that ``args`` names gets :func:`sigmanens.param_groups`; label smoothing acts on
    every member's loss; the training log has the parts of the loss and the diversity of the scales.
    A checkpoint holds the whole network, as any Trainer's, unless ``small_checkpoints`` is set;
    :meth:`save_model` writes the small folder that :func:`sigmanens.load` reads.
    ``evaluate`` and ``predict`` warn once (:class:`SigmaNensWarning`) if the members answer as one
    model, by the thresholds of :func:`sigmanens.diversity.diagnosis.one_model`.

    Args:
        model: the ensemble; or None with ``model_init``, which then returns one.
        args, kwargs: as for ``transformers.Trainer``.
        loss_fn: without a penalty by default, cross-entropy or, if the ensemble's task is
            multilabel (``problem_type="multi_label_classification"``), binary cross-entropy.
        scale_lr_mult: factor on the rate of the scales (see :func:`sigmanens.param_groups`).
        head_lr_mult: factor on the rate of the members' own heads.
        collect: fields of :class:`EnsembleOutput` that ``evaluate`` and ``predict`` keep. One gives
            an array, as ``compute_metrics`` expects of any classifier; several a tuple of arrays
            in the order of the fields.
        small_checkpoints: save in checkpoints what ``save_model`` does: what the members add, and
            of the rest what training has changed. To resume, the base must then have the very
            weights it had, fresh layers (a pooler, say) included.

    Raises:
        InputError: for a model that is no ensemble, an unknown field, several GPUs in one process,
            ``compute_loss_func``, or an optimizer that makes its own parameter groups.
    """

    def __init__(
        self,
        model: SigmaEnsemble | None = None,
        *args: Any,
        loss_fn: EnsembleLoss | None = None,
        scale_lr_mult: float | None = None,
        head_lr_mult: float | None = None,
        collect: Sequence[str] = ("logits",),
        small_checkpoints: bool = False,
        **kwargs: Any,
    ) -> None:
        known = [f.name for f in fields(EnsembleOutput) if f.name != "loss"]
        odd = [name for name in collect if name not in known]
        if isinstance(collect, str) or odd or not collect:
            raise InputError(f"collect is {collect!r}; expected some of {', '.join(known)}")
        self._given_loss = loss_fn
        self.scale_lr_mult, self.head_lr_mult = scale_lr_mult, head_lr_mult
        self.small_checkpoints = small_checkpoints
        self.dropped = [name for name in known if name not in collect]
        adapted = None if model is None else self._adapted(model)
        super().__init__(adapted, *args, **kwargs)
        if getattr(self, "compute_loss_func", None) is not None:
            raise InputError(
                "compute_loss_func would see the averaged prediction, on which members collude; "
                "use loss_fn=EnsembleLoss(loss=…), which every member gets"
            )
        if self.args.n_gpu > 1:
            raise InputError(
                f"{self.args.n_gpu} GPUs in one process: nn.DataParallel copies the ensemble in a "
                "way that loses track of its members. Start one process per GPU (torchrun or "
                "accelerate launch), or show one GPU with CUDA_VISIBLE_DEVICES"
            )
        if self.label_smoother is not None:
            self._smooth_labels()
        self._check_rates = self.optimizer is not None
        self._said_one_model = False

    @property
    def ensemble(self) -> SigmaEnsemble:
        """The ensemble that is trained."""
        found: SigmaEnsemble = self.accelerator.unwrap_model(self.model).ensemble
        return found

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """The ensemble of ``model_init``, adapted."""
        made: Any = super().call_model_init(trial)
        return self._adapted(made)

    def _adapted(self, ensemble: SigmaEnsemble) -> EnsembleForClassification:
        adapted = EnsembleForClassification(ensemble, self._given_loss)
        self.loss_fn = adapted.loss_fn
        return adapted

    def _smooth_labels(self) -> None:
        """Smooth in the members' losses; the Trainer would do it in the loss of the average."""
        if self.loss_fn.loss is not F.cross_entropy:
            raise InputError(
                "label_smoothing_factor is for cross-entropy; put the smoothing into your own "
                "EnsembleLoss(loss=…) and leave the factor at 0"
            )
        self.loss_fn = EnsembleLoss(
            functools.partial(F.cross_entropy, label_smoothing=self.args.label_smoothing_factor),
            self.loss_fn.diversity,
            self.loss_fn.class_dim,
            self.loss_fn.ignore_index,
        )
        self._given_loss = self.loss_fn
        self.label_smoother = None
        self.accelerator.unwrap_model(self.model).loss_fn = self.loss_fn

    # -- optimizer -------------------------------------------------------------------------------

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """The optimizer that ``args`` names, over :func:`sigmanens.param_groups`."""
        if self.optimizer is not None:
            return self.optimizer
        target: Any = self.model if model is None else model
        given = getattr(self, "optimizer_cls_and_kwargs", None)
        cls: Any
        cls, options = given or self.get_optimizer_cls_and_kwargs(self.args, target)
        own = [key for key in ("params", "model", "optimizer_dict") if key in options]
        if own or not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
            raise InputError(
                f"the optimizer {getattr(cls, '__name__', cls)} makes its own parameter groups, in "
                "which scales would be decayed and slow. Choose another, or give optimizers=(…, "
                "None) with one made from sigmanens.param_groups"
            )
        rate = options.get("lr") or self.args.learning_rate
        groups = param_groups(
            target, rate, self.args.weight_decay, self.scale_lr_mult, self.head_lr_mult
        )
        optimizer: torch.optim.Optimizer = cls(groups, **(options | {"lr": rate}))
        self.optimizer = optimizer
        return optimizer

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> Any:
        """The scheduler that ``args`` names; warns when a given optimizer slights the scales."""
        scheduler = super().create_scheduler(num_training_steps, optimizer)
        if self._check_rates and self.optimizer is not None:
            check_optimizer(self.ensemble, self.optimizer)
            self._check_rates = False
        return scheduler

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """As the Trainer's; tells the penalty how far the training has come."""
        diversity, total = self.loss_fn.diversity, self.state.max_steps
        if diversity is not None and total > 0:
            diversity.progress = min(1.0, self.state.global_step / total)
        return super().training_step(*args, **kwargs)

    # -- inputs and outputs ----------------------------------------------------------------------

    def _set_signature_columns_if_needed(self) -> None:
        """Keep the columns that the base network takes, and labels."""
        if self._signature_columns is None:
            network = self.ensemble.network
            if hasattr(network, "get_base_model"):  # PEFT
                network = network.get_base_model()  # type: ignore[operator]
            names = list(inspect.signature(network.forward).parameters)
            columns: Any = [*names, *{"label", "label_ids", *self.label_names}]
            self._signature_columns = columns

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """As the Trainer's; keeps the fields in ``collect`` unless ``ignore_keys`` is given."""
        ignored = self.dropped if ignore_keys is None else ignore_keys
        return super().prediction_step(model, inputs, prediction_loss_only, ignored)

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """As the Trainer's; warns once if the members answer as one model."""
        totals: list[Tensor] = []

        def add(module: nn.Module, inputs: Any, output: EnsembleOutput) -> None:
            assert output.member_logits is not None
            totals.append(_differences(output.member_logits, self.ensemble.task))

        early = self.is_in_train and self.state.global_step < FIRST_STEPS
        if early or self._said_one_model or self.ensemble.num_members < 2:
            return super().evaluation_loop(*args, **kwargs)
        adapted: nn.Module = self.accelerator.unwrap_model(self.model)
        handle = adapted.register_forward_hook(add)
        try:
            found = super().evaluation_loop(*args, **kwargs)
        finally:
            handle.remove()
        if totals:
            self._judge(torch.stack(totals).sum(0))
        return found

    def _judge(self, totals: Tensor) -> None:
        """Warn of members that answered alike in all batches of all processes."""
        n, *sums = self.accelerator.reduce(totals, "sum").tolist()
        disagreement, modulation, entropy = (total / n for total in sums)
        cosine = measures.cosine(self.ensemble, "all")
        finding = diagnosis.one_model(disagreement, modulation, entropy, cosine=cosine)
        self._said_one_model = finding is not None
        if finding is not None and self.is_world_process_zero():
            warn(finding.message)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log; to training losses, add the last batch's parts and the diversity of the scales."""
        if "loss" in logs and self.loss_fn.task_loss is not None:
            logs["task_loss"] = float(self.loss_fn.task_loss)
            if self.loss_fn.penalty_loss is not None:
                logs["penalty"] = float(self.loss_fn.penalty_loss)
            if self.ensemble.num_members > 1:
                diversity = self.loss_fn.diversity
                layers = "auto" if diversity is None else diversity.layers
                logs["cosine"] = measures.cosine(self.ensemble, layers)
        super().log(logs, *args, **kwargs)

    # -- saving ----------------------------------------------------------------------------------

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save what :func:`sigmanens.load` needs on top of the base, with a model card.

        The metrics of the last evaluation go into the card. Checkpoints, which the Trainer saves
        by the same method, hold the whole network.
        """
        if _internal_call and output_dir is not None:
            super().save_model(output_dir, _internal_call)
            return
        folder = Path(output_dir or str(self.args.output_dir))
        if self.args.should_save:
            last = [entry for entry in self.state.log_history if "eval_loss" in entry][-1:]
            save_folder(
                self.ensemble,
                folder,
                processor=self.processing_class,
                loss_fn=self.loss_fn,
                metrics=_without_timings(last[0]) if last else None,
            )
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        assert self.model is not None
        if self.small_checkpoints and state_dict is None:  # else a sharded network was gathered
            if not self.args.should_save:
                return
            folder = Path(output_dir or str(self.args.output_dir))
            self.ensemble.save_pretrained(folder)
            if self.processing_class is not None:
                self.processing_class.save_pretrained(folder)
            torch.save(self.args, folder / "training_args.bin")
            return
        state = self.model.state_dict() if state_dict is None else state_dict
        super()._save(output_dir, _untied(state))

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        if is_checkpoint(resume_from_checkpoint):
            self.ensemble.load_checkpoint(resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if best is not None and is_checkpoint(best):
            self.ensemble.load_checkpoint(best)
        else:
            super()._load_best_model()


def _differences(member_logits: Tensor, task: str | None) -> Tensor:
    """Samples, and the sums over them of disagreement, modulation and entropy: (4,), float32.

    Args:
        member_logits: as an EnsembleOutput has them, (B, M, C).
        task: of the ensemble; under multilabel each label is a decision of its own.
    """
    found = Prediction.from_logits(member_logits.transpose(0, 1).float(), task=task)
    found = found.per_label or found
    n = len(member_logits)
    parts = (
        measures.disagreement(found.member_log_probs), found.modulation.mean(),
        found.entropy.mean(),
    )  # fmt: skip
    return torch.tensor([n, *(n * float(part) for part in parts)], device=member_logits.device)


def _untied(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state dict in which no two tensors share memory, which safetensors refuses to write."""
    seen: set[int] = set()
    result = {}
    for name, value in state.items():
        where = value.untyped_storage().data_ptr()
        result[name] = value.clone() if where in seen else value
        seen.add(where)
    return result


def _without_timings(entry: dict[str, Any]) -> dict[str, float]:
    """Metrics of a log entry of an evaluation, without their prefix and the speed of it."""
    named = {k.removeprefix("eval_"): v for k, v in entry.items() if k.startswith("eval_")}
    return {
        k: v
        for k, v in named.items()
        if isinstance(v, (int, float)) and not k.endswith(("runtime", "_per_second", "_time"))
    }
