"""The ensemble: M members on one shared backbone, behind one ``nn.Module``.

``forward`` gives every result with the member axis first, ``(M, B, …)``, however the members were
run: *folded* (all at once, riding in the batch dimension), *sequential* (one at a time through the
shared weights: the same numbers with the memory of one) or in groups of k.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from sigmanens.errors import InputError, SigmaNensWarning
from sigmanens.heads import MemberHeads
from sigmanens.inputs import (
    batch_size,
    call_arguments,
    find_batched,
    input_tree,
    resolve_batch_dims,
    split_tree,
)
from sigmanens.members import MemberAxis, expand, join, narrow, unfold
from sigmanens.norms import RunningStatistics, SigmaNorm
from sigmanens.plan import Plan, check_schedule
from sigmanens.prediction import Prediction, logits_of
from sigmanens.prefix import Leaves, Prefix
from sigmanens.schedule import device_of, in_process_group, members_per_pass, runs_as_called
from sigmanens.verify import (
    check_preserved,
    evaluating,
    folding_problem,
    resized,
    shared_prefix,
)

if TYPE_CHECKING:
    from pathlib import Path

    from sigmanens.audit import ConversionReport
    from sigmanens.objective import EnsembleLoss

__all__ = ["SigmaEnsemble"]


class SigmaEnsemble(nn.Module):
    """M members that share a backbone; made by :func:`sigmanens.convert`.

    Attributes:
        network: the converted network.
        axis: which members are in the current pass.
        plan: how it was built; what a checkpoint stores.
        report: audit of the conversion.
        temperature: () float32, T applied to the averaged distribution by :meth:`predict`.
    """

    temperature: Tensor

    def __init__(
        self, network: nn.Module, axis: MemberAxis, plan: Plan, report: ConversionReport
    ) -> None:
        super().__init__()
        self.network = network
        self.axis = axis
        self.plan = plan
        self.report = report
        self._schedule: str | int = plan.schedule
        self.training = network.training
        self.register_buffer("temperature", torch.ones(()))
        self._dims = resolve_batch_dims(network, plan.batch_dims)
        self._checked = False
        self._prefix: Prefix | None = None
        self._prefix_sought = False
        self._recorded: list[Any] | None = None  # of the prefix, for passes that share it
        self._row_bytes = 0  # of the largest input of a norm, for one sample of one member
        self._hinted = False
        self._frozen = False
        self.patches: list[tuple[str, str, Any]] = []  # see convert._disable_fused_paths
        self.base_fingerprint: dict[str, int] = {}  # of the shared tensors at conversion

    # -- what it is ------------------------------------------------------------------------------

    @property
    def num_members(self) -> int:
        """M."""
        return self.axis.num_members

    @property
    def schedule(self) -> str | int:
        """How members share passes: "auto", "folded", "sequential", or members per pass."""
        return self._schedule

    @schedule.setter
    def schedule(self, schedule: str | int) -> None:
        check_schedule(schedule, self.num_members)
        self._schedule = self.report.schedule = schedule

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
            if isinstance(module, RunningStatistics):
                if module.track_running_stats:
                    module.freeze_statistics(frozen)
            elif _keeps_statistics(module):
                module.train(self.training and not frozen)
        return self

    def train(self, mode: bool = True) -> SigmaEnsemble:
        """Set the mode of all submodules; frozen norms stay in evaluation mode."""
        super().train(mode)
        if self._frozen:  # plain norms, in heads or kept; σNorms know it by themselves
            for module in self.network.modules():
                if _keeps_statistics(module):
                    module.eval()
        return self

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        kept = self.temperature
        super()._apply(fn, recurse)
        self.temperature = kept.to(self.temperature.device)
        return self

    # -- forward ---------------------------------------------------------------------------------

    def forward(self, *args: Any, split: bool = False, **kwargs: Any) -> Any:
        """Results of all active members.

        Args:
            args, kwargs: inputs of the base network. Every tensor with the batch in dimension 0
                (or where ``batch_dims`` says) is given to each member; other inputs are shared.
            split: the batch holds M·b rows and member m sees rows m·b … (m+1)·b - 1 only.

        Returns:
            what the base returns (tensor, tuple, mapping, dataclass, ModelOutput), each tensor
            (M, B, …), or (M, b, …) under ``split``.

        Raises:
            InputError: if no input has a batch dimension, the batch does not divide under
                ``split``, or the network moves its batch dimension under schedule="folded".
        """
        dims = self._dims
        tree = input_tree(args, kwargs)
        size = batch_size(args, kwargs, dims)
        batched, guessed = find_batched(tree, size, dims)
        if guessed and not self._hinted and not torch.compiler.is_compiling():
            self._hint(guessed, tree, size)
        k = self.axis.active
        if split:
            if size % k:
                raise InputError(
                    f"split=True got {size} rows, which {k} members do not divide: member m sees "
                    f"its own share. Give {k * (size // k) or k} rows or use split=False"
                )
            size //= k
        group = self._group(tree, batched, size)
        if torch.is_grad_enabled():
            self.axis.grouped = group < k
        recorded = self._recorded
        if recorded is None and k > 1 and not split:
            recorded = self._record(tree, batched, size)
        if group >= k:
            return self.run(tree, batched, size, split, recorded)
        start, stop = self.axis.start, self.axis.stop
        blocks, sizes = [], []
        for first in range(start, stop, group):
            last = min(first + group, stop)
            part = tree
            if split:
                part = narrow(tree, batched, (first - start) * size, (last - first) * size)
            with self.axis.only(first, last):
                blocks.append(self.run(part, batched, size, split, recorded))
            sizes.append(last - first)
        return join(blocks, sizes)

    def run(
        self,
        tree: dict[str, Any],
        batched: dict[str, int],
        size: int,
        split: bool,
        recorded: list[Any] | None = None,
    ) -> Any:
        """One pass of the active members through the shared weights, whatever the schedule.

        Args:
            tree: inputs by position or name.
            batched: batch dimension of each batched one.
            size: B.
            split: each member sees its share of the rows.
            recorded: results of the shared prefix, which is then not computed again.
        """
        k = self.axis.active
        folded = tree if split else expand(tree, batched, k)
        args, kwargs = split_tree(folded)
        if recorded is None or self._prefix is None:
            return unfold(self.network(*args, **kwargs), k, size)
        with self._prefix.replaying(recorded, k):
            return unfold(self.network(*args, **kwargs), k, size)

    def _group(self, tree: dict[str, Any], batched: dict[str, int], size: int) -> int:
        """Members per pass under the schedule; folding is verified on the first batch."""
        k = self.axis.active
        if self.schedule == "sequential" or k == 1:
            return 1
        if not self._checked and runs_as_called():
            self._verify(tree, batched, size)
        if self.schedule == "sequential":
            return 1
        if isinstance(self.schedule, int):
            return self.schedule
        if self.schedule == "folded" or not runs_as_called() or in_process_group():
            return k
        return members_per_pass(k, size, self._row_bytes, device_of(tree, self.temperature))

    def _verify(self, tree: dict[str, Any], batched: dict[str, int], size: int) -> None:
        """Fall back to one member at a time, or refuse, if folding changes the results."""
        problem, self._row_bytes = folding_problem(self, tree, batched)
        # Ranks of one job must run the same passes: there, the first batch has to do.
        self._checked = problem is not None or in_process_group()
        if not problem:
            if problem is not None and self.schedule == "auto" and not in_process_group():
                k = members_per_pass(
                    self.num_members, size, self._row_bytes, device_of(tree, self.temperature)
                )
                self.report.notes.append(
                    f"schedule auto: {k} of {self.num_members} members in a pass at {size} samples "
                    f"({self._row_bytes:,} bytes enter the largest norm for each)"
                )
            return
        if self.schedule != "auto":
            raise InputError(
                f"schedule={self.schedule!r} folds members into the batch, which this network does "
                f"not keep in place ({problem}). Use schedule='sequential' or 'auto', or name the "
                "batch dimension of each input with batch_dims"
            )
        self.schedule = "sequential"
        note = f"folding members into the batch changes results ({problem}): running sequentially"
        self.report.notes.append(note)
        warnings.warn(note, SigmaNensWarning, stacklevel=6)

    def _record(self, tree: dict[str, Any], batched: dict[str, int], size: int) -> list[Any] | None:
        """Results of the shared prefix for these inputs, or None where it is not to be used."""
        if not runs_as_called() or not batched or not size:
            return None
        if not self._prefix_sought:
            self._prefix, note = shared_prefix(self, tree, batched)
            self._prefix_sought = note is not None
            if note:
                self.report.notes.append(note)
        prefix = self._prefix
        if prefix is None or not prefix.is_worth_it(self._row_bytes * size) or not prefix.alike():
            return None
        if self.training and prefix.is_random(self.network, resized(tree, batched, 2)):
            return None
        recorded = prefix.record(self.network, tree)
        if recorded is None:
            self._prefix = None
            note = "the path before the first converted norm has changed: nothing is shared"
            self.report.notes.append(note)
            warnings.warn(note, SigmaNensWarning, stacklevel=4)
        return recorded

    def _hint(self, guessed: list[str], tree: dict[str, Any], size: int) -> None:
        self._hinted = True
        names = ", ".join(repr(g) for g in guessed)
        warnings.warn(
            f"the batch dimension of input {names} was guessed for a batch of {size} (dimension 0 "
            "where it has that size, else shared by all members). Say it with "
            f"batch_dims={{{guessed[0]!r}: 0}}, or None for an input without a batch",
            SigmaNensWarning,
            stacklevel=5,
        )

    def check(self, example: Any, expected: Tensor | None = None) -> None:
        """Verify on an example that folding keeps members apart and the base's function is kept.

        Args:
            example: a tensor, a tuple of positional or a mapping of keyword inputs.
            expected: the base's logits on it in evaluation mode (B, …), or None not to compare.

        Raises:
            ConversionError: if a member does not reproduce them to 1e-3 of the largest logit.
        """
        args, kwargs = call_arguments(example)
        self._checked = False
        with evaluating(self):
            ours = logits_of(self(*args, **kwargs))
        if expected is not None:
            check_preserved(ours, expected, self.report.model)

    # -- training --------------------------------------------------------------------------------

    def backward(
        self,
        x: Any,
        y: Tensor,
        loss_fn: EnsembleLoss,
        *,
        kwargs: Mapping[str, Any] | None = None,
        scale: float = 1.0,
        backward: Callable[[Tensor], Any] = Tensor.backward,
    ) -> Tensor:
        """Accumulate the gradients of ``loss_fn(self(x), y, self)`` one member at a time.

        The same gradients and buffers as one folded pass, with the activations of one member in
        memory. The penalty is counted once.

        Args:
            x: inputs, as for :meth:`predict`.
            y: labels (B,) or soft labels (B, C).
            loss_fn: an :class:`~sigmanens.EnsembleLoss`.
            kwargs: further keyword inputs of the network.
            scale: factor on the loss before each backward call (1 / accumulation steps).
            backward: what to call with a loss: ``accelerator.backward``,
                ``lambda l: scaler.scale(l).backward()``, Lightning's ``manual_backward``.

        Returns:
            the total loss, unscaled and detached: ().
        """
        args, named = call_arguments(x)
        named = named | dict(kwargs or {})
        total: Tensor | None = None
        k = self.axis.active
        with self._shared_prefix(args, named) as leaves:
            for m in range(self.axis.start, self.axis.stop):
                with self.axis.only(m, m + 1):
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

    @contextmanager
    def _shared_prefix(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[Leaves | None]:
        """Compute the shared prefix once for the members' passes in the block."""
        recorded = None
        if self.axis.active > 1:
            tree = input_tree(args, kwargs)
            size = batch_size(args, kwargs, self._dims)
            batched, _ = find_batched(tree, size, self._dims)
            recorded = self._record(tree, batched, size)
        leaves = None if recorded is None else Leaves(recorded)
        self._recorded = None if leaves is None else leaves.results
        try:
            yield leaves
        finally:
            self._recorded = None

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
    ) -> Prediction:
        """Predict in evaluation mode, without gradients; the mode found is restored.

        Args:
            x: a tensor, a tuple of positional or a mapping of keyword inputs, batch B.
            members: use the first k members only.
            chunk: at most this many rows (members × samples) in one pass: bounds memory.
            temperature: T of ``softmax(log p̄ / T)``; the stored one by default.
            class_dim: dimension of the classes in one member's logits; -1 for token classifiers.

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
        with evaluating(self), self.axis.only(0, k), self.axis.remembering():
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
                    with self.axis.only(m, min(m + group, k)):
                        blocks.append(self._logits(part))
                parts.append(Prediction.from_logits(torch.cat(blocks), t, class_dim))
            return Prediction.cat(parts)

    @contextmanager
    def fixed(self) -> Iterator[SigmaEnsemble]:
        """Compute scales and shifts once for all predictions in the block.

        In evaluation mode without gradients, layers then remember the scale and shift of each
        member, into which a batch norm's statistics are folded. Parameters and statistics must not
        change within the block::

            with ens.fixed():
                predictions = [ens.predict(x) for x in loader]
        """
        with self.axis.remembering():
            yield self

    def _logits(self, tree: dict[str, Any]) -> Tensor:
        args, kwargs = split_tree(tree)
        return logits_of(self(*args, **kwargs))

    # -- leaving ---------------------------------------------------------------------------------

    def save_pretrained(self, directory: str | Path, shared: str = "auto") -> Path:
        """Save what the members add; see :func:`sigmanens.checkpoint.save_pretrained`."""
        from sigmanens.checkpoint import save_pretrained

        return save_pretrained(self, directory, shared=shared)

    def member(self, index: int) -> nn.Module:
        """Member ``index`` as a plain network; see :func:`sigmanens.export.member`."""
        from sigmanens.export import member

        return member(self, index)

    def collapse(self) -> nn.Module:
        """One plain network with the members averaged; see :func:`sigmanens.export.collapse`."""
        from sigmanens.export import collapse

        return collapse(self)


def _keeps_statistics(module: nn.Module) -> bool:
    """Whether a plain norm of torch's keeps running statistics."""
    return isinstance(module, _NormBase) and bool(module.track_running_stats)
