"""How an ensemble runs its members: folded into the batch, one by one, or in groups.

The results are the same. Folding saves calls; one by one needs the memory of one member. What all
members share before their first own layer is computed once.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from sigmanens.conversion.build import Converted
from sigmanens.conversion.build import share as share_prefix
from sigmanens.ensemble.compiled import alone, can_be_alone, is_compiled, uncompiled
from sigmanens.ensemble.inputs import Inputs
from sigmanens.ensemble.passing import run_pass
from sigmanens.ensemble.prefix import Prefix, find_prefix
from sigmanens.ensemble.trial import Verdict, examine, has_onlookers
from sigmanens.errors import InputError, warn
from sigmanens.norms.kernels import is_eager
from sigmanens.norms.scales import is_sharded
from sigmanens.norms.synchronised import processes
from sigmanens.passes.sharing import ONCE, Recorded, Replaying
from sigmanens.passes.trees import join

PASS_BYTES = 8 * 2**20  # of the largest normalised activation, of members folded on a CPU


class Runner:
    """Runs the members of one ensemble; the report takes notes of what the first inputs show.

    ``divisible`` says whether the samples may be run in parts.
    """

    def __init__(self, converted: Converted) -> None:
        self.axis = converted.axis
        self.report = converted.report
        self._converted = converted
        self.divisible = True
        self._row_bytes = 0  # of the largest input of a norm, for one sample of one member
        self._examined: set[bool] = set()  # modes in which folding was compared
        self._prefix: Prefix | None = None
        self._prefix_sought = self.report.plan.prefix == () or self.axis.num_members == 1
        self._lock = threading.RLock()  # trials, and passes of compiled networks

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.RLock())

    @property
    def schedule(self) -> str | int:
        return self.report.plan.schedule

    @schedule.setter
    def schedule(self, schedule: str | int) -> None:
        self.report.plan = replace(self.report.plan, schedule=schedule)

    def run(self, network: nn.Module, inputs: Inputs, *, split: bool = False) -> Any:
        """Results of the chosen members, each tensor (k, B, …).

        Under ``split`` the inputs are k·b samples, of which each member sees its own share.

        Raises:
            InputError: if members may not be folded, but the schedule asks for it, or do not divide
                the rows.
        """
        self.find(network, inputs)
        prefix, mode, chosen = self._prefix, network.training, self.axis.chosen
        k = chosen.count
        size = share(inputs, k) if split else inputs.size
        group = self._members_per_pass(network, inputs, k, size)
        if torch.compiler.is_dynamo_compiling() and prefix and mode in prefix.changes and k > 1:
            if mode in prefix.between or self.schedule == "sequential":  # no graph runs it once
                return torch.compiler.disable(self.run)(network, inputs, split=split)
            group = k
        recorded = chosen.recorded
        if recorded is None and k > 1 and not (split and group >= k):
            recorded = self.record(network, inputs, group)
        if group >= k:
            return self._pass(network, inputs, chosen.start, chosen.stop, split, recorded)
        blocks, sizes = [], []
        for first in range(chosen.start, chosen.stop, group):
            last = min(first + group, chosen.stop)
            part, own = self.own(inputs), recorded
            if split:
                start, rows = (first - chosen.start) * size, (last - first) * size
                part, own = inputs.narrow(start, rows), recorded and recorded.narrow(start, rows)
            blocks.append(self._pass(network, part, first, last, split, own))
            sizes.append(last - first)
        return join(blocks, sizes)

    def own(self, inputs: Inputs) -> Inputs:
        """Inputs for one of several passes: copies, for the network may write to them."""
        return inputs.copied() if self.axis.num_members > 1 and runs_as_called() else inputs

    def _pass(
        self,
        network: nn.Module,
        inputs: Inputs,
        start: int,
        stop: int,
        split: bool,
        recorded: Recorded | None,
    ) -> Any:
        if recorded is not None:
            replayed = Replaying(recorded, 1 if split else stop - start)
            drawing = replayed if recorded.drawn else nullcontext()
            with self._as_written(network), drawing:
                return run_pass(
                    network, self.axis, inputs, start, stop, split=split, prefix=replayed
                )
        once = None if self._prefix is None or split or stop - start == 1 else ONCE
        if runs_as_called() and is_compiled(network):
            with self._compiled(network, start, stop):
                start, stop = self.axis.chosen.start, self.axis.chosen.stop
                args = network, self.axis, inputs, start, stop
                return run_pass(*args, split=split, pin=True, prefix=once)
        if not (torch.compiler.is_compiling() or is_sharded(network)):
            once = None
        return run_pass(network, self.axis, inputs, start, stop, split=split, prefix=once)

    @contextmanager
    def _compiled(self, network: nn.Module, start: int, stop: int) -> Iterator[None]:
        """Members ``start … stop-1`` of a compiled network, for one thread at a time."""
        with self._lock:
            held = self.axis.chosen.held
            every = stop - start == held or not can_be_alone(network, held)
            with (
                self.axis.choosing(pin=True, start=start, stop=stop)
                if every
                else alone(network, self.axis, start, stop)
            ):
                yield

    @contextmanager
    def choosing(
        self, module: nn.Module, start: int, stop: int, recorded: Recorded | None = None
    ) -> Iterator[None]:
        """Restrict the calls of the ensemble ``module`` in the block to members ``start … stop-1``.

        If it is compiled, other threads wait. ``recorded`` is what the shared prefix gives for the
        inputs of these calls.
        """
        if recorded is not None:
            with (
                self._as_written(module),
                self.axis.choosing(start=start, stop=stop, recorded=recorded),
            ):
                yield
        elif runs_as_called() and getattr(module, "_compiled_call_impl", None) is not None:
            with self._compiled(module.get_submodule("network"), start, stop):
                yield
        else:
            with self.axis.choosing(start=start, stop=stop, recorded=None):
                yield

    def _members_per_pass(self, network: nn.Module, inputs: Inputs, k: int, size: int) -> int:
        if k == 1 or self.schedule == "sequential":
            return 1
        if inputs.whole:
            self._fall_back(f"it is not known how {_described(inputs)} carries the batch")
            return 1
        if not runs_as_called():
            return self.schedule if isinstance(self.schedule, int) else k
        # A share of the rows is a batch of its own; folding was compared or is compared on it.
        known = network.training in self._examined
        if not known and not self.settle(network, inputs.narrow(0, size)):
            return 1
        if self.schedule == "sequential":
            return 1
        if isinstance(self.schedule, int):
            return self.schedule
        if self.schedule == "folded" or processes(None) > 1:
            return k
        few = members_per_pass(k, size, self._row_bytes, inputs.device)
        if few < k and (is_compiled(network) or has_onlookers(network)):
            return k  # one graph for all; and hooks see all members in one call
        return few

    def settle(self, network: nn.Module, inputs: Inputs, mode: bool | None = None) -> bool:
        """Whether members may be folded in this call, found out by a trial on a few samples.

        ``mode`` is that of training (True) or evaluation (False), or the one the network is in.

        Raises:
            InputError: if they may not, and the schedule asks for it.
        """
        mode = network.training if mode is None else mode
        with self._lock:
            if mode in self._examined:
                return True
            verdict = Verdict("")
            if inputs.device.type != "meta":
                with uncompiled():
                    verdict = examine(network, self.axis, inputs, mode)
            self._row_bytes = max(self._row_bytes, verdict.row_bytes)
            self.divisible &= verdict.divisible
            # Ranks of one job must run the same passes: there, the first batch has to do.
            several = processes(None) > 1
            if verdict.problem is not None or several:
                self._examined.add(mode)
            if verdict.problem and self.schedule not in ("auto", "sequential"):
                raise InputError(
                    f"schedule={self.schedule!r} folds members into the batch, which this network "
                    f"does not keep in place ({verdict.problem}). Use schedule='sequential' or "
                    "'auto', or name the batch dimension of each input with batch_dims"
                )
            if verdict.problem:
                reason = f"folding members into the batch changes results ({verdict.problem})"
                self._fall_back(reason)
                return False
            told = self.schedule != "auto" or several or self._examined != {mode}
            if verdict.problem == "" and not told:
                members = self.axis.num_members
                k = members_per_pass(members, inputs.size, self._row_bytes, inputs.device)
                self.report.notes.append(
                    f"schedule auto: {k} of {members} members in a pass at {inputs.size} samples "
                    f"({self._row_bytes:,} bytes enter the largest norm for each)"
                )
            return verdict.problem == "" or self.schedule != "auto" or several

    def _fall_back(self, reason: str) -> None:
        with self._lock:
            if self.schedule == "sequential":
                return
            self.schedule = "sequential"
            note = f"{reason}: running sequentially"
            self.report.notes.append(note)
        warn(note)

    def converted(self, network: nn.Module) -> Converted:
        """What conversion made, with this network."""
        return replace(self._converted, network=network)

    def find(self, network: nn.Module, inputs: Inputs) -> None:
        """Find what runs before the members part, on the first batch that can tell."""
        if self._prefix_sought or not runs_as_called() or inputs.device.type == "meta":
            return
        known, sharded = bool(self.report.plan.prefix), is_sharded(network)
        with self._lock:
            if self._prefix_sought or not (inputs.size or inputs.whole):
                return
            found: tuple[Prefix | None, str | None]
            if sharded or inputs.whole:
                why = "parameters are divided over ranks" if sharded else "inputs are no tensors"
                found = None, f"nothing is shared before the members part: {why}"
            else:
                folds = self.schedule != "sequential"
                with uncompiled():
                    found = find_prefix(network, self.axis, inputs, folds, known)
            prefix, note = found
            if note is None:
                return
            if prefix is None and known:
                raise InputError(f"this ensemble was made to share what runs first, but {note}")
            share_prefix(self.converted(network), prefix.modules if prefix else ())
            if prefix is not None:
                prefix.put_into(network, self.axis)
            self.report.notes += [note] if note else []
            self._prefix, self._prefix_sought = prefix, True

    def record(
        self, network: nn.Module, inputs: Inputs, group: int = 1, compiled: bool = False
    ) -> Recorded | None:
        """What the shared prefix gives for these inputs; None where passes run it themselves.

        ``group`` is the number of members in a pass. ``compiled`` says whether the ensemble is.

        Raises:
            InputError: if it has to run once, but parameters are divided over ranks, and members
                over passes.
        """
        prefix = self._prefix
        if prefix is None or torch.compiler.is_compiling():
            return None
        several = network.training in prefix.changes and group < self.axis.chosen.count
        if is_sharded(network):
            if several:
                raise InputError(
                    f"parameters are divided over ranks (FSDP), and members over passes, each of "
                    f"which would run what is one network, before '{prefix.end}'. Let all members "
                    "share a pass: schedule='folded', and a loss of ens(x) in place of backward()"
                )
            return None
        drawn = network.training in prefix.between
        if (compiled or is_compiled(network)) and not (several or drawn):
            return None
        with self._as_written(network):
            return prefix.record(network, self.axis, self.own(inputs))

    def _as_written(self, network: nn.Module) -> AbstractContextManager[Any]:
        """Run a network uncompiled, with a note, where its graph would run the prefix anew."""
        if not (runs_as_called() and is_compiled(network)):
            return nullcontext()
        note = "members in several passes share what runs first: those run uncompiled, as written"
        self.report.notes += [] if note in self.report.notes else [note]
        return uncompiled()


def members_per_pass(members: int, rows: int, row_bytes: int, device: torch.device) -> int:
    """Number of members in a pass under ``schedule="auto"``, a stated model: 1 to ``members``.

    Folded members save calls, but a pass that falls out of a CPU's cache waits for memory. So a
    pass takes as many as keep its largest normalised activation (``row_bytes`` for each of ``rows``
    samples) within :data:`PASS_BYTES`; on other devices, where calls are what costs, all of them.
    The number depends on shapes and device only, so that a seed fixes a training's numbers to the
    last bit, dropout included.
    """
    if device.type != "cpu" or row_bytes * rows == 0:
        return members
    return max(1, min(members, PASS_BYTES // (row_bytes * rows)))


def runs_as_called() -> bool:
    """Whether a call may look at its numbers: no compiler, tracer, transform or CUDA graph.

    There all members are folded, and nothing is shared between passes.
    """
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    return is_eager() and not capturing


def _described(inputs: Inputs) -> str:
    path, x = next(iter(inputs.whole.items()))
    return f"input '{path}', a {type(x).__module__}.{type(x).__qualname__},"


def share(inputs: Inputs, members: int) -> int:
    """Rows of each member when they divide a batch."""
    rows = inputs.size
    if inputs.whole:
        raise InputError(
            f"split=True cannot divide {_described(inputs)} among members; give tensors"
        )
    if rows % members or not rows:
        raise InputError(
            f"split=True got {rows} rows, which {members} members do not divide: member m sees its "
            f"own share. Give {members * (rows // members) or members} rows or use split=False"
        )
    return rows // members
