"""How an ensemble runs its members: folded into the batch, one by one, or in groups.

The results are the same. Folding saves calls; one by one needs the memory of one member. What all
members share before their first own layer is computed once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from sigmanens.conversion.audit import ConversionReport
from sigmanens.ensemble.compiled import alone, can_be_alone, is_compiled, uncompiled
from sigmanens.ensemble.inputs import Inputs
from sigmanens.ensemble.passing import run_pass
from sigmanens.ensemble.prefix import Leaves, Prefix, find_prefix
from sigmanens.ensemble.schedule import in_process_group, members_per_pass, runs_as_called
from sigmanens.ensemble.trial import Verdict, examine, has_onlookers
from sigmanens.errors import InputError, warn
from sigmanens.norms.scales import is_sharded
from sigmanens.passes.context import MemberAxis
from sigmanens.passes.trees import join

__all__ = ["Runner", "share"]


class Runner:
    """Runs the members of one ensemble.

    Args:
        axis: the member axis of the network.
        report: takes notes of what is found out on the first inputs.
        schedule: "auto", "folded", "sequential", or members per pass.

    Attributes:
        divisible: whether the samples may be run in parts.
    """

    def __init__(self, axis: MemberAxis, report: ConversionReport, schedule: str | int) -> None:
        self.axis = axis
        self.report = report
        self._schedule = schedule
        self.divisible = True
        self._writes = False  # whether the network writes to its inputs
        self._clean: set[bool] = set()  # modes in which it was seen not to
        self._row_bytes = 0  # of the largest input of a norm, for one sample of one member
        self._examined: set[bool] = set()  # modes in which folding was compared
        self._prefix: Prefix | None = None
        self._prefix_sought = False
        self._lock = threading.RLock()  # trials, and passes of compiled networks

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.RLock())

    @property
    def schedule(self) -> str | int:
        """How members share passes: "auto", "folded", "sequential", or members per pass."""
        return self._schedule

    @schedule.setter
    def schedule(self, schedule: str | int) -> None:
        self.report.plan = replace(self.report.plan, schedule=schedule)
        self._schedule = schedule

    # -- passes ----------------------------------------------------------------------------------

    def run(
        self,
        network: nn.Module,
        inputs: Inputs,
        *,
        split: bool = False,
    ) -> Any:
        """Results of the chosen members, each tensor (k, B, …).

        Args:
            network: the converted network.
            inputs: B samples, or k·b samples under ``split``.
            split: each member sees its own share of the samples.

        Raises:
            InputError: if members may not be folded, but the schedule asks for it.
        """
        chosen = self.axis.chosen
        k = chosen.stop - chosen.start
        group = self._members_per_pass(network, inputs, k, split)
        recorded = chosen.recorded
        if recorded is None and k > 1 and not split:
            recorded = self.record(network, inputs)
        if group >= k:
            return self._pass(network, inputs, chosen.start, chosen.stop, split, recorded)
        blocks, sizes = [], []
        for first in range(chosen.start, chosen.stop, group):
            last = min(first + group, chosen.stop)
            if split:
                size = inputs.size // k
                part = inputs.narrow((first - chosen.start) * size, (last - first) * size)
            else:
                part = self.own(network, inputs)
            blocks.append(self._pass(network, part, first, last, split, recorded))
            sizes.append(last - first)
            copied = part is not inputs and not split and runs_as_called()
            if copied and not part.equals(inputs):
                self._writes = True
        if not self._writes and runs_as_called():
            self._clean.add(network.training)
        return join(blocks, sizes)

    def own(self, network: nn.Module, inputs: Inputs) -> Inputs:
        """Inputs for one of several passes: copies, unless the network is known to only read."""
        if self.axis.num_members == 1 or not runs_as_called():
            return inputs
        reads = network.training in self._clean and not self._writes and not inputs.whole
        return inputs if reads else inputs.copied()

    def _pass(
        self,
        network: nn.Module,
        inputs: Inputs,
        start: int,
        stop: int,
        split: bool,
        recorded: list[Any] | None,
    ) -> Any:
        if runs_as_called() and is_compiled(network):
            with self._lock, self._alone(network, start, stop):
                chosen = self.axis.chosen
                return run_pass(
                    network, self.axis, inputs, chosen.start, chosen.stop, split=split, pin=True
                )
        prefix = None
        if recorded is not None and self._prefix is not None:
            prefix = self._prefix.replaying(recorded, stop - start)
        return run_pass(network, self.axis, inputs, start, stop, split=split, prefix=prefix)

    def _alone(self, network: nn.Module, start: int, stop: int) -> AbstractContextManager[Any]:
        chosen = self.axis.chosen
        every = stop - start == chosen.held
        if not every and can_be_alone(network, chosen.held):
            return alone(network, self.axis, start, stop)
        return self.axis.choosing(pin=True, start=start, stop=stop)

    def choosing(
        self, module: nn.Module, start: int, stop: int, recorded: list[Any] | None = None
    ) -> AbstractContextManager[Any]:
        """Restrict the calls in the block to members ``start … stop-1``.

        Args:
            module: what is called: the ensemble. If it is compiled, other threads wait.
            start, stop: the members.
            recorded: results of the shared prefix for the inputs of these calls.
        """
        if runs_as_called() and getattr(module, "_compiled_call_impl", None) is not None:
            return self._compiled_choice(module.get_submodule("network"), start, stop)
        return self.axis.choosing(start=start, stop=stop, recorded=recorded)

    @contextmanager
    def _compiled_choice(self, network: nn.Module, start: int, stop: int) -> Iterator[None]:
        with self._lock, self._alone(network, start, stop):
            yield

    # -- how many members in a pass --------------------------------------------------------------

    def _members_per_pass(self, network: nn.Module, inputs: Inputs, k: int, split: bool) -> int:
        if k == 1 or self._schedule == "sequential":
            return 1
        if inputs.whole:
            if split:
                raise InputError(
                    f"split=True cannot divide {_described(inputs)} among members; give tensors"
                )
            self._fall_back(f"it is not known how {_described(inputs)} carries the batch")
            return 1
        if not runs_as_called():
            return self._schedule if isinstance(self._schedule, int) else k
        # A share of the rows is a batch of its own; folding was compared or is compared on it.
        part = inputs.narrow(0, inputs.size // k) if split else inputs
        if network.training not in self._examined and not self.settle(network, part):
            return 1
        if self._schedule == "sequential":
            return 1
        if isinstance(self._schedule, int):
            return self._schedule
        if self._schedule == "folded" or in_process_group():
            return k
        size = inputs.size // k if split else inputs.size
        few = members_per_pass(k, size, self._row_bytes, inputs.device(torch.empty(0)))
        if few < k and (is_compiled(network) or has_onlookers(network)):
            return k  # one graph for all; and hooks see all members in one call
        return few

    def settle(self, network: nn.Module, inputs: Inputs) -> bool:
        """Find out by a trial whether members may be folded, in the mode that the network is in.

        Returns:
            whether they may be in this call.

        Raises:
            InputError: if they may not, and the schedule asks for it.
        """
        mode = network.training
        with self._lock:
            if mode in self._examined:
                return True
            verdict = Verdict("")
            if inputs.device(torch.empty(0)).type != "meta":
                with uncompiled():
                    verdict = examine(network, self.axis, inputs)
            self._row_bytes = max(self._row_bytes, verdict.row_bytes)
            self._writes |= verdict.writes
            if verdict.problem is not None and not self._writes:
                self._clean.add(mode)
            self.divisible &= verdict.divisible
            if verdict.problem is not None or in_process_group():
                # Ranks of one job must run the same passes: there, the first batch has to do.
                self._examined.add(mode)
            if verdict.problem:
                self._refuse_or_fall_back(verdict.problem)
                return False
            if verdict.problem == "":
                self._note_group(inputs)
            return verdict.problem == "" or self._schedule != "auto" or in_process_group()

    def _note_group(self, inputs: Inputs) -> None:
        if self._schedule != "auto" or in_process_group() or len(self._examined) > 1:
            return
        members = self.axis.num_members
        device = inputs.device(torch.empty(0))
        k = members_per_pass(members, inputs.size, self._row_bytes, device)
        self.report.notes.append(
            f"schedule auto: {k} of {members} members in a pass at {inputs.size} samples "
            f"({self._row_bytes:,} bytes enter the largest norm for each)"
        )

    def _refuse_or_fall_back(self, problem: str) -> None:
        if self._schedule == "sequential":
            return
        if self._schedule != "auto":
            raise InputError(
                f"schedule={self._schedule!r} folds members into the batch, which this network "
                f"does not keep in place ({problem}). Use schedule='sequential' or 'auto', or name "
                "the batch dimension of each input with batch_dims"
            )
        self._fall_back(f"folding members into the batch changes results ({problem})")

    def _fall_back(self, reason: str) -> None:
        with self._lock:
            if self._schedule == "sequential":
                return
            self.schedule = "sequential"
            note = f"{reason}: running sequentially"
            self.report.notes.append(note)
        warn(note)

    # -- the shared prefix -----------------------------------------------------------------------

    def record(self, network: nn.Module, inputs: Inputs) -> list[Any] | None:
        """Results of the shared prefix for these inputs, or None where it is not to be used."""
        if not runs_as_called() or not inputs.batched or not inputs.size:
            return None
        if self._prefix is None and self._prefix_sought:
            return None
        if is_compiled(network) or is_sharded(network):  # no part of such a pass is left out
            return None
        with self._lock:
            if not self._prefix_sought:
                folds = self._schedule != "sequential"
                self._prefix, note = find_prefix(network, self.axis, inputs, folds)
                self._prefix_sought = note is not None
                if note:
                    self.report.notes.append(note)
        prefix, chosen = self._prefix, self.axis.chosen
        if prefix is None or not prefix.is_worth_it(self._row_bytes * inputs.size):
            return None
        if not prefix.alike(chosen.start, chosen.stop):
            return None
        if network.training and prefix.draws_between:
            return None
        recorded = prefix.record(network, self.axis, self.own(network, inputs))
        if recorded is None:
            self._prefix = None
            note = "the path before the first converted norm has changed: nothing is shared"
            self.report.notes.append(note)
            warn(note)
        return recorded

    def leaves(self, network: nn.Module, inputs: Inputs) -> Leaves | None:
        """The recorded prefix, cut from its graph, for members that run backward one at a time."""
        chosen = self.axis.chosen
        if chosen.stop - chosen.start == 1:
            return None
        recorded = self.record(network, inputs)
        return None if recorded is None else Leaves(recorded)


def _described(inputs: Inputs) -> str:
    path, x = next(iter(inputs.whole.items()))
    return f"input '{path}', a {type(x).__module__}.{type(x).__qualname__},"


def share(rows: int, members: int) -> int:
    """Rows of each member when they divide a batch."""
    if rows % members or not rows:
        raise InputError(
            f"split=True got {rows} rows, which {members} members do not divide: member m sees its "
            f"own share. Give {members * (rows // members) or members} rows or use split=False"
        )
    return rows // members
