"""How M members share passes through one network, whatever is asked of them.

``forward`` gives every result with the member axis first, ``(M, B, …)``, however the members were
run: *folded* (all at once, riding in the batch dimension), *sequential* (one at a time through the
shared weights: the same numbers with the memory of one) or in groups of k. What all members share
before their first own layer is computed once.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sigmanens.conversion.build import Converted
from sigmanens.conversion.config import check_schedule
from sigmanens.ensemble.compiled import alone, can_be_alone, is_compiled, uncompiled
from sigmanens.ensemble.inputs import (
    batch_size,
    find_batched,
    input_tree,
    resolve_batch_dims,
    split_tree,
)
from sigmanens.ensemble.prediction import logits_of
from sigmanens.ensemble.prefix import Leaves, Prefix
from sigmanens.ensemble.schedule import (
    device_of,
    in_process_group,
    members_per_pass,
    runs_as_called,
)
from sigmanens.ensemble.trial import folding_problem, resized, shared_prefix
from sigmanens.errors import InputError, SigmaNensWarning
from sigmanens.norms.scales import is_sharded
from sigmanens.passes.trees import expand, join, narrow, unfold

if TYPE_CHECKING:
    from typing_extensions import Self


__all__ = ["MemberPasses"]


class MemberPasses(nn.Module):
    """Base of :class:`~sigmanens.SigmaEnsemble`: the passes of its members.

    Attributes:
        network: the converted network.
        axis: which members are in the current pass.
        plan: how it was built; what a checkpoint stores.
        report: audit of the conversion.
        temperature: () float32, T applied to the averaged distribution in predictions.
    """

    temperature: Tensor

    def __init__(self, converted: Converted) -> None:
        super().__init__()
        network, plan = converted.network, converted.plan
        self.network = network
        self.axis = converted.axis
        self.plan = plan
        self.report = converted.report
        self.patches = converted.patches
        self.base_fingerprint = converted.base_fingerprint
        self._schedule: str | int = plan.schedule
        self.training = network.training
        place = next(chain(network.parameters(), network.buffers()), None)
        device = None if place is None else place.device
        self.register_buffer("temperature", torch.ones((), device=device))
        self._dims = resolve_batch_dims(network, plan.batch_dims)
        self._checked = False
        self._prefix: Prefix | None = None
        self._prefix_sought = False
        self._recorded: list[Any] | None = None  # of the prefix, for passes that share it
        self._row_bytes = 0  # of the largest input of a norm, for one sample of one member
        self._hinted = False

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
            size = _share(size, k)
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
            with self._pass_of(first, last):
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

    def _shares(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], y: Tensor
    ) -> list[tuple[tuple[Any, ...], dict[str, Any], Tensor]]:
        """Positional and keyword inputs and labels of each active member's share of the rows."""
        tree = input_tree(args, kwargs)
        rows, k = batch_size(args, kwargs, self._dims), self.axis.active
        size = _share(rows, k)
        if y.shape[0] != rows:
            raise InputError(
                f"split=True got {rows} rows and {y.shape[0]} labels; expected one label per row"
            )
        batched, _ = find_batched(tree, rows, self._dims)
        parts = (narrow(tree, batched, i * size, size) for i in range(k))
        labels = y.split(size)
        given = [split_tree(part) for part in parts]
        return [(tuple(a), named, labels[i]) for i, (a, named) in enumerate(given)]

    def _pass_of(self, start: int, stop: int) -> AbstractContextManager[None]:
        """Restrict passes to some members; a compiled network holds no others meanwhile."""
        if runs_as_called() and is_compiled(self) and can_be_alone(self.network, self.axis):
            return alone(self.network, self.axis, start, stop)
        return self.axis.only(start, stop)

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
        few = members_per_pass(k, size, self._row_bytes, device_of(tree, self.temperature))
        return k if few < k and is_compiled(self) else few

    def _verify(self, tree: dict[str, Any], batched: dict[str, int], size: int) -> None:
        """Fall back to one member at a time, or refuse, if folding changes the results."""
        with uncompiled():
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
            if self._runs_whole():
                return None
            self._prefix, note = shared_prefix(self, tree, batched)
            self._prefix_sought = note is not None
            if note:
                self.report.notes.append(note)
        prefix = self._prefix
        if prefix is None or not prefix.is_worth_it(self._row_bytes * size) or not prefix.alike():
            return None
        if self._runs_whole():
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

    def _runs_whole(self) -> bool:
        """Whether no part of a pass is left out: it is compiled, or parameters are divided."""
        return is_compiled(self) or is_sharded(self.network)

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

    @contextmanager
    def fixed(self) -> Iterator[Self]:
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


def _share(rows: int, members: int) -> int:
    """Rows of each member when they divide a batch."""
    if rows % members or not rows:
        raise InputError(
            f"split=True got {rows} rows, which {members} members do not divide: member m sees its "
            f"own share. Give {members * (rows // members) or members} rows or use split=False"
        )
    return rows // members
