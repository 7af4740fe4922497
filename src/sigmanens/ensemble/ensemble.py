"""The ensemble: M members on one shared backbone, behind one ``nn.Module``.

``forward`` gives every result with the member axis first, ``(M, B, …)``, however the members were
run: *folded* (all at once, riding in the batch dimension), *sequential* (one at a time through the
shared weights: the same numbers with the memory of one) or in groups of k.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.fx import Proxy
from torch.nn.modules.batchnorm import _NormBase

from sigmanens.conversion.build import Converted
from sigmanens.conversion.config import ConversionConfig
from sigmanens.conversion.heads import MemberHeads
from sigmanens.conversion.plain import collapse, member
from sigmanens.ensemble.adaptive import check_risk, predict_adaptively
from sigmanens.ensemble.compiled import is_compiled
from sigmanens.ensemble.features import member_features
from sigmanens.ensemble.inputs import Inputs, call_arguments, resolve_batch_dims
from sigmanens.ensemble.prediction import Prediction, check_predictable, logits_of
from sigmanens.ensemble.prefix import Leaves
from sigmanens.ensemble.preserved import check_preserved
from sigmanens.ensemble.runner import Runner, share
from sigmanens.errors import ExportError, InputError, warn
from sigmanens.norms import RunningStatistics, SigmaNorm
from sigmanens.passes.context import MemberAxis
from sigmanens.passes.modes import evaluating, training
from sigmanens.passes.sharing import Recorded
from sigmanens.saving.checkpoint import Saved, check_values, load_into, save
from sigmanens.saving.checkpoint import load as load_checkpoint
from sigmanens.saving.source import Source


class Objective(Protocol):
    """What :meth:`SigmaEnsemble.backward` needs of a loss (:class:`sigmanens.EnsembleLoss`)."""

    task_loss: Tensor | None

    def task(self, logits: Tensor, y: Tensor) -> Tensor: ...

    def penalty(self, ensemble: Any) -> Tensor | None: ...

    def state_task(self, ensemble: Any) -> None: ...


class SigmaEnsemble(nn.Module):
    """M members that share a backbone; made by :func:`sigmanens.convert`.

    Calls from several threads do not see each other. Passes of a compiled ensemble wait for each
    other.

    Attributes:
        network: the converted network. Its layers refuse a call from outside; see :meth:`forward`.
        axis: the member axis that all its layers share.
        report: audit of the conversion.
        temperature: () float32, T applied to the averaged distribution by :meth:`predict`.
    """

    temperature: Tensor

    def __init__(self, converted: Converted) -> None:
        super().__init__()
        network = converted.network
        self.network = network
        self.axis = converted.axis
        self.report = converted.report
        self.base_fingerprint = converted.base_fingerprint
        self.structure = converted.structure
        self.training = network.training
        place = next(chain(network.parameters(), network.buffers()), None)
        device = None if place is None else place.device
        self.register_buffer("temperature", torch.ones((), device=device))
        self._runner = Runner(converted)
        self._dims = resolve_batch_dims(network, self.plan.batch_dims)
        self._hinted = False
        self._frozen = False

    def __deepcopy__(self, memo: dict[int, Any]) -> SigmaEnsemble:
        """A copy with a member axis of its own; a copied layer keeps that of its ensemble."""
        memo[id(self.axis)] = MemberAxis(self.num_members)
        twin: SigmaEnsemble = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__setstate__(copy.deepcopy(self.__reduce_ex__(2)[2], memo))
        return twin

    def forward(self, *args: Any, split: bool = False, **kwargs: Any) -> Any:
        """Results of all members.

        Args:
            args, kwargs: inputs of the base network. Every tensor with the batch in dimension 0
                (or where ``batch_dims`` says) is given to each member; other inputs are shared.
            split: the batch holds M·b rows and member m sees rows m·b … (m+1)·b - 1 only.

        Returns:
            what the base returns, each tensor (M, B, …), or (M, b, …) under ``split``.

        Raises:
            InputError: if no input has a batch dimension, the batch does not divide under
                ``split``, the network moves its batch dimension under schedule="folded", or it
                returns an object of an unknown class.
        """
        inputs = self._inputs(args, kwargs)
        with nullcontext() if torch.compiler.is_compiling() else training(self):
            return self._runner.run(self.network, inputs, split=split)

    def _inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Inputs:
        """Inputs of a call, with a hint where their batch dimension is a guess."""
        if isinstance(args, Proxy) or any(isinstance(x, Proxy) for x in (*args, *kwargs.values())):
            raise ExportError(
                "torch.fx.symbolic_trace cannot trace a SigmaEnsemble: its passes depend on the "
                "inputs, and a trace has none. Use sigmanens.export_program(ens, example), or "
                "trace one member: torch.fx.symbolic_trace(ens.member(0))"
            )
        inputs = Inputs.of(args, kwargs, self._dims)
        if inputs.guessed and not self._hinted and not torch.compiler.is_compiling():
            self._hinted = True
            first = inputs.guessed[0]
            warn(
                f"the batch dimension of input {', '.join(map(repr, inputs.guessed))} was guessed "
                f"for a batch of {inputs.size} (dimension 0 where it has that size, else shared by "
                f"all members). Say it with batch_dims={{{first!r}: 0}}, or None for an input "
                "without a batch"
            )
        return inputs

    @contextmanager
    def fixed(self) -> Iterator[SigmaEnsemble]:
        """Compute scales and shifts once for all predictions in the block.

        Parameters and statistics must not change within the block, which holds for evaluation
        without gradients in the thread that opens it::

            with ens.fixed():
                predictions = [ens.predict(x) for x in loader]
        """
        with self.axis.remembering():
            yield self

    @property
    def num_members(self) -> int:
        """M."""
        return self.axis.num_members

    @property
    def plan(self) -> ConversionConfig:
        """How it was built and is run; what a checkpoint stores."""
        return self.report.plan

    def restate(self, plan: ConversionConfig) -> None:
        """Go by another plan of the same network: other batch dimensions, task or schedule."""
        self.report.plan, self._dims = plan, resolve_batch_dims(self.network, plan.batch_dims)

    @property
    def schedule(self) -> str | int:
        """How members share passes: "auto", "folded", "sequential", or members per pass."""
        return self._runner.schedule

    @schedule.setter
    def schedule(self, schedule: str | int) -> None:
        self._runner.schedule = schedule

    @property
    def frozen_statistics(self) -> bool:
        """Whether batch statistics stay as they are in training (:meth:`freeze_statistics`)."""
        return self._frozen

    @property
    def base_config(self) -> Any:
        """The base's ``config`` (transformers) or ``pretrained_cfg`` (timm), or None."""
        found = getattr(self.network, "config", None)
        return getattr(self.network, "pretrained_cfg", None) if found is None else found

    @property
    def task(self) -> str | None:
        """What :meth:`predict` takes the outputs for; None is read as "multiclass".

        "multiclass": logits of classes of which one is right (softmax). "multilabel": logits of
        labels that are present or not (a sigmoid for each). "regression": no logits; ``predict``
        refuses. Stated in :func:`sigmanens.convert` or here, or learnt from the loss in training;
        saved in checkpoints and exports.
        """
        return self.plan.task

    @task.setter
    def task(self, task: str | None) -> None:
        self.report.plan = replace(self.plan, task=task)

    def sigma_norms(self) -> dict[str, SigmaNorm]:
        """The converted norms by dotted name within the network; tied ones once."""
        return {n: m for n, m in self.network.named_modules() if isinstance(m, SigmaNorm)}

    def member_heads(self) -> dict[str, MemberHeads]:
        """The heads by dotted name within the network."""
        return {n: m for n, m in self.network.named_modules() if isinstance(m, MemberHeads)}

    def freeze_statistics(self, frozen: bool = True) -> SigmaEnsemble:
        """Stop or resume the update of batch statistics, whatever ``.train()`` is called later."""
        self._frozen = frozen
        for module in self.network.modules():
            if isinstance(module, RunningStatistics) and module.running_mean is not None:
                module.freeze_statistics(frozen)
        return self.train(self.training) if self._plain_with_statistics() else self

    def train(self, mode: bool = True) -> SigmaEnsemble:
        """Set the mode of all submodules as the base's own ``train`` does.

        Plain norms with frozen statistics stay in evaluation mode, and so do shared ones where only
        members train; converted ones know by themselves that theirs are frozen.
        """
        super().train(mode)
        frozen = self._plain_with_statistics() if self._frozen else []
        for module in [*frozen, *(self.shared_norms() if self.plan.train == "members" else ())]:
            module.eval()
        return self

    def shared_norms(self) -> list[_NormBase]:
        """Plain norms with running statistics that are in no member's head."""
        own = {m for heads in self.member_heads().values() for m in heads.modules()}
        return [m for m in self._plain_with_statistics() if m not in own]

    def _plain_with_statistics(self) -> list[_NormBase]:
        """Norms in heads, or kept, that are no members' and keep running statistics."""
        norms = [m for m in self.network.modules() if isinstance(m, _NormBase)]
        return [m for m in norms if m.track_running_stats and not isinstance(m, RunningStatistics)]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        kept = self.temperature
        super()._apply(fn, recurse)
        self.temperature = kept.to(self.temperature.device)
        return self

    def check(self, example: Any, expected: Tensor | None = None) -> None:
        """Verify on an example that folding keeps members apart and the base's function is kept.

        ``expected`` are the base's logits on it in evaluation mode (B, …), or None not to compare.

        Raises:
            ConversionError: if a member does not reproduce them to 1e-3 of the largest logit, and
                rounding is not the cause; where it is, a warning and the report say so.
        """
        inputs = self._inputs(*call_arguments(example, self.network))
        for mode in (False, True):
            if self._runner.schedule != "sequential" and not inputs.whole:
                self._runner.settle(self.network, inputs, mode)
        with evaluating(self):
            ours = logits_of(self._runner.run(self.network, inputs.copied()))
        if expected is None:
            return
        if note := check_preserved(ours, expected, self, inputs):
            self.report.notes.append(note)
            warn(note)

    def backward(
        self,
        x: Any,
        y: Tensor,
        loss_fn: Objective,
        *,
        kwargs: Mapping[str, Any] | None = None,
        scale: float = 1.0,
        backward: Callable[[Tensor], Any] = Tensor.backward,
        split: bool = False,
    ) -> Tensor:
        """Accumulate the gradients of ``loss_fn(self(x), y, self)`` one member at a time.

        The same gradients and buffers as one folded pass, with the activations of one member in
        memory. The penalty is counted once. After ``ens.network.compile()`` one compiled graph
        serves all members.

        Args:
            x, kwargs: inputs, as for :meth:`predict`, and further keyword inputs of the network.
            y: labels (B,), soft labels or labels of 0 and 1 (B, C).
            loss_fn: an :class:`~sigmanens.EnsembleLoss`.
            scale: factor on the loss before each backward call (1 / accumulation steps).
            backward: what to call with a loss: ``accelerator.backward``,
                ``lambda l: scaler.scale(l).backward()``, Lightning's ``manual_backward``.
            split: x and y hold M·b rows, of which member m sees rows m·b … (m+1)·b - 1 only, as
                ``loss_fn(self(x, split=True), y, self, split=True)`` does.

        Returns:
            the total loss, unscaled and detached: ().

        Raises:
            InputError: under ``split``, if the members do not divide the rows. What the forward
                pass and the loss raise.
        """
        loss_fn.state_task(self)
        args, named = call_arguments(x, self.network)
        inputs = self._inputs(args, named | dict(kwargs or {}))
        chosen = self.axis.chosen
        k, total = chosen.count, None
        size = share(inputs, k) if split else 0
        if split and y.shape[0] != inputs.size:
            got = f"{inputs.size} rows and {y.shape[0]} labels"
            raise InputError(f"split=True got {got}; expected one label per row")
        with training(self):
            self._runner.find(self.network, inputs)
            leaves = Leaves(self._record(inputs, k))
            for i, m in enumerate(range(chosen.start, chosen.stop)):
                part, labels, recorded = inputs, y, leaves.recorded
                if split:
                    part, labels = inputs.narrow(i * size, size), y.narrow(0, i * size, size)
                    recorded = recorded and recorded.narrow(i * size, size)
                with self._runner.choosing(self, m, m + 1, recorded):
                    result = self._runner.own(part).call(self)
                    task = loss_fn.task(logits_of(result), labels) / k
                    backward(task * scale)
                total = task.detach() if total is None else total + task.detach()
            leaves.backward()
        assert total is not None
        loss_fn.task_loss = total
        loss_fn.state_task(self)  # again, for the labels may have said it
        penalty = loss_fn.penalty(self)
        if penalty is None:
            return total
        backward(penalty * scale)
        return total + penalty.detach()

    @torch.no_grad()
    def predict(
        self,
        x: Any,
        *,
        members: int | None = None,
        chunk: int | None = None,
        temperature: float | None = None,
        class_dim: int = 1,
        adaptive: bool | float = False,
    ) -> Prediction:
        """Predict in evaluation mode, without gradients; the mode found is restored.

        Args:
            x: a tensor, a tuple of positional or a mapping of keyword inputs, batch B.
            members: use the first k members only.
            chunk: at most this many rows (members × samples) in one pass: bounds memory.
            temperature: T of ``softmax(log p̄ / T)``, or of ``sigmoid(logit(p̄) / T)`` in a
                multilabel task; the stored one by default.
            class_dim: dimension of the classes in one member's logits; -1 for token classifiers.
            adaptive: ask members one at a time, and none for a sample that is settled: True where
                the label of all members is certain, a number in (0, 1) where it is but for that
                risk (see :mod:`sigmanens.ensemble.adaptive`).

        Returns:
            probabilities and their uncertainty, decomposed (:class:`~sigmanens.Prediction`).

        Raises:
            InputError: for members or chunk out of range, a :attr:`task` of regression, or
                ``adaptive`` in a multilabel task. NonFiniteError: for NaN logits.
        """
        check_predictable(self.task, adaptive is not False)
        k = self.num_members if members is None else members
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= self.num_members:
            raise InputError(f"members is {members!r}; expected 1 to {self.num_members}")
        if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
            raise InputError(f"chunk is {chunk!r}; expected a number of rows ≥ 1, or None")
        t = float(self.temperature) if temperature is None else temperature
        inputs = self._inputs(*call_arguments(x, self.network))
        if inputs.size == 0 and not inputs.whole:
            raise InputError("predict got an empty batch (0 samples)")
        risk = None if adaptive is False else check_risk(adaptive)
        with evaluating(self), self.axis.remembering():
            if risk is None and (chunk is None or chunk >= k * inputs.size):
                return Prediction.from_logits(self._logits(inputs, 0, k), t, class_dim, self.task)
            rows = inputs.size
            if not inputs.whole:
                self._runner.settle(self.network, inputs)
                rows = min(rows, chunk or rows) if self._runner.divisible else rows
            if risk is not None and (inputs.whole or not self._runner.divisible):
                raise InputError(
                    "adaptive stopping asks members for some of the samples, which this network "
                    "cannot run in parts; use adaptive=False"
                )
            group = max(1, (chunk or 1) // max(rows, 1))
            parts = []
            for first in range(0, max(inputs.size, 1), max(rows, 1)):
                part = inputs
                if rows < inputs.size:
                    part = inputs.narrow(first, min(rows, inputs.size - first))
                if risk is not None:
                    parts.append(predict_adaptively(self._logits, part, k, risk, t, class_dim))
                    continue
                shared = self._record(part, k, group)
                starts = range(0, k, group)
                blocks = [self._logits(part, m, min(m + group, k), shared) for m in starts]
                parts.append(Prediction.from_logits(torch.cat(blocks), t, class_dim, self.task))
            return Prediction.cat(parts)

    def _record(self, inputs: Inputs, members: int, group: int = 1) -> Recorded | None:
        """What these members share for passes of ``group`` members."""
        if members == 1:
            return None
        return self._runner.record(self.network, inputs, group, is_compiled(self))

    def _logits(
        self, inputs: Inputs, start: int, stop: int, recorded: Recorded | None = None
    ) -> Tensor:
        with self._runner.choosing(self, start, stop, recorded):
            return logits_of(self._runner.own(inputs).call(self))

    def features(self, x: Any, *, head_name: str | None = None) -> Tensor:
        """:func:`sigmanens.ensemble.features.member_features` of this ensemble: (M, B, D)."""
        return member_features(self, x, head_name=head_name)

    def save_pretrained(
        self, directory: str | Path, shared: str = "auto", factory: str | Source | None = None
    ) -> Path:
        """Save what the members add to the base.

        A checkpoint that holds all shared tensors can be loaded without the base if it was made by
        timm, transformers or torchvision, or a factory is named.

        Args:
            directory: made if missing. An older checkpoint there is replaced.
            shared: "auto" also saves shared tensors that training has changed since conversion,
                "never" raises if there are any, "always" saves all.
            factory: ``"package.module:function"`` that makes a network like the base, or a
                :class:`sigmanens.saving.source.Source` with keyword arguments; under "always".

        Returns:
            the path of the weights file; its size is what the members cost on disk.

        Raises:
            CheckpointError: if the network was rebuilt since conversion (layers added, removed,
                replaced, resized or parametrised), shared tensors changed under "never", the
                factory makes another network, writing fails, or parameters are divided over ranks.
                InputError: for an unknown ``shared``, or a factory without "always".
        """
        check_values(self)
        t = float(self.temperature)
        saved = Saved(self.plan, self.base_fingerprint, t, self.frozen_statistics)
        return save(self.network, saved, directory, shared, made=self.structure, factory=factory)

    def load_checkpoint(self, directory: str | Path) -> None:
        """Put a saved state into this ensemble, which was converted alike.

        Scales, shifts, statistics, heads, saved shared tensors, the temperature and whether
        statistics are frozen become those of the checkpoint. Mode, device, ``requires_grad`` and
        schedule stay. Optimizers keep working: every parameter remains the object it is.

        Raises:
            CheckpointError: as for :func:`sigmanens.load`; if the ensemble was converted otherwise;
                or if a shared tensor has changed since conversion that the checkpoint does not
                hold. The ensemble is then left as it was.
        """
        saved = load_into(self._runner.converted(self.network), directory)
        self.base_fingerprint.clear()
        self.base_fingerprint.update(saved.base_fingerprint)
        self._restore(saved)

    def _restore(self, saved: Saved) -> None:
        self.temperature.fill_(saved.temperature)
        self.task = saved.plan.task
        if saved.frozen_statistics != self.frozen_statistics:
            self.freeze_statistics(saved.frozen_statistics)

    def member(self, index: int) -> nn.Module:
        """A copy of one member: a network of the base's own class with plain norms and one head.

        Raises:
            InputError: unless ``index`` is 0 … M-1.
        """
        return member(self.network, index, self.num_members)

    def collapse(self) -> nn.Module:
        """One plain network with the members' scales, shifts, statistics and heads averaged.

        Its function is not the ensemble's average (docs/export.md). Running statistics become those
        of the members' mixture; ``torch.optim.swa_utils.update_bn`` estimates them anew.

        Raises:
            InputError: if the members' heads differ in structure.
        """
        return collapse(self.network, self.num_members)


def load(directory: str | Path, base: nn.Module | None = None) -> SigmaEnsemble:
    """Build the saved ensemble on a copy of its base network, or on a new one.

    Args:
        directory: folder written by :meth:`SigmaEnsemble.save_pretrained`, on any device.
        base: the unconverted network with the weights it had at conversion; the ensemble lands on
            its device and in its mode. None, for a checkpoint that holds all tensors and says how
            the network is made: the ensemble lands on the CPU and in evaluation mode. Nothing is
            downloaded. A factory is imported by its name, so load files of people you trust.

    Raises:
        CheckpointError: if files are missing, truncated or altered, the version is unknown, or the
            base is not the one the checkpoint was made on; without a base, if the checkpoint does
            not hold or cannot make it.
        MissingPackageError: if the library that makes the network is not there.
    """
    converted, saved = load_checkpoint(directory, base)
    ensemble = SigmaEnsemble(converted)
    ensemble._restore(saved)
    return ensemble


def as_ensemble(source: Any) -> SigmaEnsemble:
    """The ensemble itself, also from within DistributedDataParallel or ``torch.compile``.

    Raises:
        InputError: if there is none.
    """
    wrapped = (getattr(source, key, None) for key in ("module", "_orig_mod"))
    for inner in (source, *wrapped):
        if isinstance(inner, SigmaEnsemble):
            return inner
    raise InputError(
        f"got a {type(source).__name__} in the place of the ensemble; expected the SigmaEnsemble "
        "that sigmanens.convert returns"
    )
