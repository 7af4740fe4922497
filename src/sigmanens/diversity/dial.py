"""Where the dial of the penalty stands at each step of a training: τ, λ and how they move."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any
from weakref import WeakSet, ref

import torch
from torch import Tensor

from sigmanens.diversity.feedback import Feedback, Point
from sigmanens.diversity.measures import cosine
from sigmanens.diversity.ramp import Ramp, check_total
from sigmanens.diversity.theory import check_temperature, is_number, tau_for_owners
from sigmanens.ensemble.ensemble import SigmaEnsemble
from sigmanens.errors import DiversityError
from sigmanens.norms import SigmaNorm

__all__ = ["DEFAULT_TAU", "Dial"]

DEFAULT_TAU = 0.1
_MOST_VOTES = 255  # kept, should no penalty ever ask for them


class Dial:
    """τ, λ and the step; the arguments are those of :class:`sigmanens.Diversity`.

    Attributes:
        step: optimizer steps seen so far; only counted while :attr:`moving`.
        applied: strength in the last step, 0 … 1.
        total_steps: optimizer steps of the whole training, or None if they are not known.
        owners: wanted owners per channel, or None.
        ramp: when the penalty acts.
        feedback: the closed loop, or None.
    """

    def __init__(
        self,
        tau: float | None,
        weight: float,
        *,
        owners: float | None = None,
        start: int | float = 0,
        ramp: int | float = 0,
        total_steps: int | None = None,
        target_cosine: float | None = None,
        target_disagreement: float | None = None,
        moves: str = "tau",
    ) -> None:
        wanted = {"cosine": target_cosine, "disagreement": target_disagreement}
        targets = {name: value for name, value in wanted.items() if value is not None}
        _check_exclusive(tau, owners, targets, moves)
        self._tau = DEFAULT_TAU if tau is None else _temperature(tau)
        self._weight = _weight(weight)
        self.owners = owners
        self._members = 0  # for which ``owners`` has set τ
        self.ramp = Ramp(start, ramp)
        self.total_steps = total_steps
        self.step = 0
        self.applied = 1.0
        self._acted: int | None = None  # the step in which the loop acted last
        self.feedback: Feedback | None = None
        for measure, value in targets.items():
            self.feedback = Feedback(measure, value, moves, self._tau, self._weight)
        self._votes: list[Tensor] = []  # classes that members chose, (m, B, …) each, newest last
        self._trained: ref[SigmaEnsemble] | None = None
        self._left: WeakSet[SigmaEnsemble] = WeakSet()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_trained": None, "_left": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _trained=None, _left=WeakSet())

    # -- where it stands -------------------------------------------------------------------------

    @property
    def tau(self) -> float:
        """τ now.

        Raises:
            DiversityError: if ``owners`` is given and no ensemble has been seen yet; if it is set
                by hand beside ``owners`` or a target.
        """
        if self.owners is not None and not self._members:
            raise DiversityError(
                f"owners={self.owners:g} sets τ by the number of members, at the first use of an "
                "ensemble. For a given M: sigmanens.diversity.tau_for_owners(owners, members)"
            )
        return self._tau if self.feedback is None else self.feedback.setting[0]

    @tau.setter
    def tau(self, tau: float) -> None:
        if self.owners is not None or self.feedback is not None:
            raise DiversityError("τ is set by owners or by a target here, not by hand")
        self._tau = _temperature(tau)

    @property
    def weight(self) -> float:
        """λ (or Λ) now, without the factor of ``start`` and ``ramp``."""
        return self._weight if self.feedback is None else self.feedback.setting[1]

    @weight.setter
    def weight(self, weight: float) -> None:
        if self.feedback is not None:
            raise DiversityError("λ belongs to the loop of a target here; make a new Diversity")
        self._weight = _weight(weight)

    @property
    def total_steps(self) -> int | None:
        """Optimizer steps of the whole training, of which ``start`` and ``ramp`` may be shares."""
        return self._total

    @total_steps.setter
    def total_steps(self, total_steps: int | None) -> None:
        self._total, self._was_told = check_total(total_steps), False

    def tell_total(self, total_steps: int) -> None:
        """Set ``total_steps`` unless the user has: for what runs the training, each time anew."""
        if self._total is None or self._was_told:
            self._total, self._was_told = check_total(total_steps), True

    @property
    def strength(self) -> float:
        """Factor on the weight by ``start`` and ``ramp``: 0 … 1."""
        return self.ramp.strength(self.step, self.total_steps)

    @property
    def moving(self) -> bool:
        """Whether the penalty changes from step to step."""
        return self.feedback is not None or bool(self.ramp)

    @property
    def path(self) -> list[Point]:
        """(step, τ, λ, measured) so far; empty without a target."""
        return [] if self.feedback is None else list(self.feedback.path)

    # -- training --------------------------------------------------------------------------------

    def observe(self, logits: Tensor) -> None:
        """Show the members' predictions on a batch to a loop with ``target_disagreement``.

        To be called before the penalty of each step, with the logits of all members or member by
        member; of several batches the last one counts. Without such a target, or while gradients
        are off, it does nothing.

        Args:
            logits: (M, B, C, …), or (m, B, C, …) of some of the members.
        """
        wanted = self.feedback is not None and self.feedback.measure == "disagreement"
        if wanted and torch.is_grad_enabled():
            self._votes = [*self._votes[-_MOST_VOTES:], logits.detach().argmax(2)]

    def begin_step(self, ensemble: SigmaEnsemble, layers: Sequence[SigmaNorm]) -> None:
        """Let the loop act, before the penalty of this step; once in a step of several batches."""
        self._follow(ensemble)
        if self.feedback is not None and self.strength > 0 and self.step != self._acted:
            self.feedback.update(self.step, self._measured(layers))
            self._acted = self.step

    def end_step(self, strength: float) -> None:
        """Count this step, in which the penalty had this strength."""
        self.applied = strength
        self.step += 1
        self._votes = []

    def set_tau(self, ensemble: SigmaEnsemble) -> None:
        """Set τ by ``owners``, once for each number of members; noted in the ensemble's report."""
        members = ensemble.num_members
        if self.owners is None or members == self._members:
            return
        if torch.compiler.is_compiling():
            raise DiversityError(
                f"owners={self.owners:g} sets τ by a simulation at the first use; call the penalty "
                "once before compiling"
            )
        self._tau, self._members = tau_for_owners(self.owners, members), members
        note = f"diversity: owners={self.owners:g} with {members} members sets tau={self._tau:.3g}"
        if note not in ensemble.report.notes:
            ensemble.report.notes.append(note)

    def _follow(self, ensemble: SigmaEnsemble) -> None:
        """Start again with another ensemble; refuse to go to and fro between two."""
        before = None if self._trained is None else self._trained()
        if before is ensemble:
            return
        if ensemble in self._left:
            raise DiversityError(
                "a penalty with start, ramp or a target belongs to one training, but two ensembles "
                "take turns with it. Make a Diversity for each, or call reset() between trainings"
            )
        if self._trained is not None:
            self._restart()
        if before is not None:
            self._left.add(before)
        self._trained = ref(ensemble)

    def _measured(self, layers: Sequence[SigmaNorm]) -> float:
        """What the target is compared with."""
        assert self.feedback is not None
        if self.feedback.measure == "cosine":
            return cosine(layers)
        members = layers[0].axis.num_members
        votes: list[Tensor] = []
        for vote in reversed(self._votes):
            if sum(map(len, votes)) < members:
                votes.insert(0, vote)
        if sum(map(len, votes)) != members or len({v.shape[1:] for v in votes}) != 1:
            raise DiversityError(
                f"target_disagreement needs the classes that all {members} members chose on one "
                f"batch; since the last step it was shown {[tuple(v.shape) for v in self._votes]}. "
                "Call diversity.observe(logits) with the members' logits (M, B, C) before each "
                "penalty"
            )
        return _vote_disagreement(torch.cat(votes))

    # -- state -----------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What training has changed, in plain numbers and lists: for a checkpoint."""
        state: dict[str, Any] = {"step": self.step}
        if self.feedback is not None:
            state["feedback"] = self.feedback.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where :meth:`state_dict` was taken, with the next ensemble that trains.

        Raises:
            DiversityError: if the state is of another kind of penalty.
        """
        if ("feedback" in state) != (self.feedback is not None):
            has = "feedback" in state
            raise DiversityError(
                f"the state is of a penalty {'with' if has else 'without'} a target; this one has "
                f"{'none' if has else 'one'}"
            )
        if self.feedback is not None:
            self.feedback.load_state_dict(state["feedback"])
        self.step = int(state["step"])
        self._trained, self._votes, self._acted = None, [], None

    def reset(self) -> None:
        """Back to the start, for another training."""
        self._restart()
        self._trained, self._votes, self._left = None, [], WeakSet()

    def _restart(self) -> None:
        self.step, self.applied, self._acted = 0, 1.0, None
        if self.feedback is not None:
            self.feedback.reset()

    def settings(self) -> str:
        """The settings that are not the default, as they would be given."""
        given = {"start": self.ramp.start, "ramp": self.ramp.ramp}
        words = [f", {name}={value!r}" for name, value in given.items() if value]
        if self.feedback is not None:
            target, moves = self.feedback.target, self.feedback.moves
            words.append(f", target_{self.feedback.measure}={target:g}, moves={moves!r}")
        return "".join(words)


def _temperature(tau: float) -> float:
    check_temperature(tau)
    return float(tau)


def _weight(weight: float) -> float:
    if not is_number(weight) or not 0 <= weight < math.inf:
        raise DiversityError(f"weight (λ) is {weight!r}; expected a finite number ≥ 0")
    return float(weight)


def _check_exclusive(
    tau: float | None, owners: float | None, targets: Mapping[str, float], moves: str
) -> None:
    given = {"tau": tau, "owners": owners}
    given |= {f"target_{name}": value for name, value in targets.items()}
    names = [name for name, value in given.items() if value is not None]
    both = {"tau", "owners"} <= set(names) or len(targets) == 2
    if both or (targets and moves == "tau" and len(names) > 1):
        raise DiversityError(
            f"{' and '.join(names)} are given, each of which sets τ. Give one of them"
            + (", or let the target move λ: moves='weight'" if len(targets) == 1 else "")
        )
    if owners is not None and (not is_number(owners) or not 0 < owners < math.inf):
        raise DiversityError(f"owners is {owners!r}; expected a finite number > 0")


def _vote_disagreement(votes: Tensor) -> float:
    """Fraction of samples on which two members differ, mean over pairs and ranks: votes (M, B, …).

    One row of counts for each member instead of M² comparisons at once.
    """
    members = len(votes)
    differ = torch.stack([(votes[m + 1 :] != votes[m]).sum() for m in range(members - 1)]).sum()
    pairs = differ.new_tensor(members * (members - 1) // 2 * votes[0].numel())
    counts = torch.stack([differ, pairs])
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.all_reduce(counts)
    return float(counts[0] / counts[1])
