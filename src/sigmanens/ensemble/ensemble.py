"""The ensemble: M members on one shared backbone, behind one ``nn.Module``.

``forward`` gives every result with the member axis first, ``(M, B, …)``, however the members were
run: *folded* (all at once, riding in the batch dimension), *sequential* (one at a time through the
shared weights: the same numbers with the memory of one) or in groups of k.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from sigmanens.conversion.build import Converted
from sigmanens.conversion.heads import MemberHeads
from sigmanens.conversion.plain import collapse, member
from sigmanens.ensemble.adaptive import check_risk, predict_adaptively
from sigmanens.ensemble.inputs import (
    batch_size,
    call_arguments,
    find_batched,
    input_tree,
)
from sigmanens.ensemble.prediction import Prediction, logits_of
from sigmanens.ensemble.runner import MemberPasses
from sigmanens.ensemble.trial import (
    check_preserved,
    evaluating,
)
from sigmanens.errors import InputError, SigmaNensWarning
from sigmanens.norms import RunningStatistics, SigmaNorm
from sigmanens.passes.trees import narrow
from sigmanens.saving.checkpoint import Saved, load_into, save
from sigmanens.saving.checkpoint import load as load_checkpoint

__all__ = ["SigmaEnsemble", "as_ensemble", "load"]


class Objective(Protocol):
    """What :meth:`SigmaEnsemble.backward` needs of a loss (:class:`sigmanens.EnsembleLoss`)."""

    task_loss: Tensor | None

    def task(self, logits: Tensor, y: Tensor) -> Tensor:
        """Mean over members of their own losses: ()."""
        ...

    def penalty(self, ensemble: Any) -> Tensor | None:
        """The diversity penalty: (), or None."""
        ...


class SigmaEnsemble(MemberPasses):
    """M members that share a backbone; made by :func:`sigmanens.convert`.

    Attributes:
        network: the converted network.
        axis: which members are in the current pass.
        plan: how it was built; what a checkpoint stores.
        report: audit of the conversion.
        temperature: () float32, T applied to the averaged distribution by :meth:`predict`.
    """

    def __init__(self, converted: Converted) -> None:
        super().__init__(converted)
        self._frozen = False

    # -- what it is ------------------------------------------------------------------------------

    @property
    def frozen_statistics(self) -> bool:
        """Whether batch statistics stay as they are in training (:meth:`freeze_statistics`)."""
        return self._frozen

    @property
    def base_config(self) -> Any:
        """The base's ``config`` (transformers) or ``pretrained_cfg`` (timm), or None."""
        for key in ("config", "pretrained_cfg"):
            found = getattr(self.network, key, None)
            if found is not None:
                return found
        return None

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

        Plain norms with frozen statistics stay in evaluation mode; converted ones know by
        themselves that theirs are frozen.
        """
        super().train(mode)
        if self._frozen:
            for module in self._plain_with_statistics():
                module.eval()
        return self

    def _plain_with_statistics(self) -> list[nn.Module]:
        """Norms in heads, or kept, that are no members' and keep running statistics."""
        return [
            m
            for m in self.network.modules()
            if isinstance(m, _NormBase)
            and not isinstance(m, RunningStatistics)
            and m.track_running_stats
        ]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        kept = self.temperature
        super()._apply(fn, recurse)
        self.temperature = kept.to(self.temperature.device)
        return self

    def check(self, example: Any, expected: Tensor | None = None) -> None:
        """Verify on an example that folding keeps members apart and the base's function is kept.

        Args:
            example: a tensor, a tuple of positional or a mapping of keyword inputs.
            expected: the base's logits on it in evaluation mode (B, …), or None not to compare.

        Raises:
            ConversionError: if a member does not reproduce them to 1e-3 of the largest logit, and
                rounding is not the cause; where it is, a warning and the report say so.
        """
        args, kwargs = call_arguments(example)
        self._checked = False
        with evaluating(self):
            ours = logits_of(self(*args, **kwargs))
        if expected is None:
            return
        note = check_preserved(ours, expected, self, args, kwargs)
        if note:
            self.report.notes.append(note)
            warnings.warn(note, SigmaNensWarning, stacklevel=4)

    # -- training --------------------------------------------------------------------------------

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
            x: inputs, as for :meth:`predict`.
            y: labels (B,) or soft labels (B, C).
            loss_fn: an :class:`~sigmanens.EnsembleLoss`.
            kwargs: further keyword inputs of the network.
            scale: factor on the loss before each backward call (1 / accumulation steps).
            backward: what to call with a loss: ``accelerator.backward``,
                ``lambda l: scaler.scale(l).backward()``, Lightning's ``manual_backward``.
            split: x and y hold M·b rows, of which member m sees rows m·b … (m+1)·b - 1 only, as
                ``loss_fn(self(x, split=True), y, self, split=True)`` does (labels that are ignored
                count in the mean of their member here).

        Returns:
            the total loss, unscaled and detached: ().

        Raises:
            InputError: under ``split``, if the members do not divide the rows. What the forward
                pass and the loss raise.
        """
        args, named = call_arguments(x)
        named = named | dict(kwargs or {})
        total: Tensor | None = None
        k = self.axis.active
        shares = self._shares(args, named, y) if split else None
        prefix = nullcontext() if split else self._shared_prefix(args, named)
        with prefix as leaves:
            for i, m in enumerate(range(self.axis.start, self.axis.stop)):
                if shares is not None:
                    args, named, y = shares[i]
                with self._pass_of(m, m + 1):
                    task = loss_fn.task(logits_of(self(*args, **named)), y) / k
                    backward(task * scale)  # here, for activation checkpointing runs forward again
                total = task.detach() if total is None else total + task.detach()
            if leaves is not None:
                leaves.backward()
        assert total is not None
        loss_fn.task_loss = total
        penalty = loss_fn.penalty(self)
        if penalty is None:
            return total
        backward(penalty * scale)
        return total + penalty.detach()

    # -- prediction ------------------------------------------------------------------------------

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
            temperature: T of ``softmax(log p̄ / T)``; the stored one by default.
            class_dim: dimension of the classes in one member's logits; -1 for token classifiers.
            adaptive: ask members one at a time, and none for a sample that is settled: True where
                the label of all members is certain, a number in (0, 1) where it is but for that
                risk (see :mod:`sigmanens.ensemble.adaptive`).

        Returns:
            probabilities and their uncertainty, decomposed (:class:`~sigmanens.Prediction`).

        Raises:
            InputError: for members or chunk out of range. NonFiniteError: for NaN logits.
        """
        k = self.num_members if members is None else members
        if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= self.num_members:
            raise InputError(f"members is {members!r}; expected 1 to {self.num_members}")
        if chunk is not None and (not isinstance(chunk, int) or chunk < 1):
            raise InputError(f"chunk is {chunk!r}; expected a number of rows ≥ 1, or None")
        t = float(self.temperature) if temperature is None else temperature
        args, kwargs = call_arguments(x)
        tree = input_tree(args, kwargs)
        dims = self._dims
        size = batch_size(args, kwargs, dims)
        if size == 0:
            raise InputError("predict got an empty batch (0 samples)")
        risk = None if adaptive is False else check_risk(adaptive)
        with evaluating(self), self.axis.only(0, k), self.axis.remembering():
            if risk is not None:
                return self._predict_adaptively(tree, size, chunk, risk, t, class_dim)
            if chunk is None or chunk >= k * size:
                return Prediction.from_logits(self._logits(tree), t, class_dim)
            batched, _ = find_batched(tree, size, dims)
            rows = min(size, chunk)
            group = max(1, chunk // rows)
            parts = []
            for first in range(0, size, rows):
                part = narrow(tree, batched, first, min(rows, size - first))
                blocks = []
                for m in range(0, k, group):
                    with self._pass_of(m, min(m + group, k)):
                        blocks.append(self._logits(part))
                parts.append(Prediction.from_logits(torch.cat(blocks), t, class_dim))
            return Prediction.cat(parts)

    def _predict_adaptively(
        self,
        tree: dict[str, Any],
        size: int,
        chunk: int | None,
        risk: float,
        temperature: float,
        class_dim: int,
    ) -> Prediction:
        """Members one at a time, at most ``chunk`` samples at once."""
        k, dims = self.axis.active, self._dims
        batched, _ = find_batched(tree, size, dims)
        step = size if chunk is None else min(size, chunk)
        parts = []
        for first in range(0, size, step):
            rows = min(step, size - first)
            part = tree if rows == size else narrow(tree, batched, first, rows)
            parts.append(
                predict_adaptively(self, part, batched, rows, k, risk, temperature, class_dim)
            )
        return Prediction.cat(parts)

    # -- leaving ---------------------------------------------------------------------------------

    def save_pretrained(self, directory: str | Path, shared: str = "auto") -> Path:
        """Save what the members add to the base.

        Args:
            directory: folder to write into; made if missing. An older checkpoint there is replaced.
            shared: "auto" also saves shared tensors that training has changed since conversion,
                "never" raises if there are any, "always" saves all.

        Returns:
            the path of the weights file; its size is what the members cost on disk.

        Raises:
            CheckpointError: if shared tensors changed under "never", writing fails, or parameters
                are divided over ranks. InputError: for an unknown ``shared``.
        """
        saved = Saved(
            replace(self.plan, schedule=self.schedule),
            self.base_fingerprint,
            float(self.temperature),
            self.frozen_statistics,
        )
        return save(self.network, saved, directory, shared)

    def load_checkpoint(self, directory: str | Path) -> None:
        """Put a saved state into this ensemble, which was converted alike.

        Scales, shifts, statistics, heads, saved shared tensors, the temperature and whether
        statistics are frozen become those of the checkpoint. Mode, device, ``requires_grad`` and
        schedule stay. Optimizers keep working: every parameter remains the object it is.

        Args:
            directory: folder written by :meth:`save_pretrained`.

        Raises:
            CheckpointError: as for :func:`sigmanens.load`; if the ensemble was converted otherwise;
                or if a shared tensor has changed since conversion that the checkpoint does not
                hold. The ensemble is then left as it was.
        """
        saved = load_into(self.network, self.plan, self.base_fingerprint, directory)
        self.base_fingerprint = dict(saved.base_fingerprint)
        self._restore(saved)

    def _restore(self, saved: Saved) -> None:
        self.temperature.fill_(saved.temperature)
        if saved.frozen_statistics != self.frozen_statistics:
            self.freeze_statistics(saved.frozen_statistics)

    def member(self, index: int) -> nn.Module:
        """A copy of one member: a network of the base's own class with plain norms and one head.

        Raises:
            InputError: unless ``index`` is 0 … M-1.
        """
        return member(self.network, self.patches, index, self.num_members)

    def collapse(self) -> nn.Module:
        """One plain network with the members' scales, shifts, statistics and heads averaged.

        Its function is not the ensemble's average: docs/export.md has measurements of what it
        costs. Running statistics become those of the members' mixture. To estimate them anew call
        ``torch.optim.swa_utils.update_bn(loader, network)``.

        Raises:
            InputError: if the members' heads differ in structure.
        """
        return collapse(self.network, self.patches, self.num_members)


def load(directory: str | Path, base: nn.Module) -> SigmaEnsemble:
    """Build the saved ensemble on a copy of its base network.

    Args:
        directory: folder written by :meth:`SigmaEnsemble.save_pretrained`, on any device.
        base: the unconverted network with the weights it had at conversion; the ensemble lands on
            its device and in its mode.

    Raises:
        CheckpointError: if files are missing, truncated or altered, the version is unknown, or the
            base is not the one the checkpoint was made on.
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
    for inner in (
        source,
        getattr(source, "module", None),
        getattr(source, "_orig_mod", None),
    ):
        if isinstance(inner, SigmaEnsemble):
            return inner
    raise InputError(
        f"got a {type(source).__name__} in the place of the ensemble; expected the SigmaEnsemble "
        "that sigmanens.convert returns"
    )
