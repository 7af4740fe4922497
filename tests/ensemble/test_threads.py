"""Threads that share one ensemble: every answer is the one that the request gets alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests.networks import apart, randomise
from torch import Tensor, nn

import sigmanens as sn

THREADS, REQUESTS = 8, 500


class Small(nn.Module):
    """Norms of two kinds, and layers before the first converted one."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.lift = nn.Linear(4, 8), nn.Linear(8, 8)
        self.norm, self.body = nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.last, self.head = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.lift(torch.relu(self.stem(x))))
        return self.head(self.last(self.body(torch.relu(self.norm(x)))))


def make(schedule: str | int = "auto", layers: str = "all") -> sn.SigmaEnsemble:
    return apart(sn.convert(randomise(Small()), 4, schedule=schedule, layers=layers)).eval()


def together(answer: Callable[[Tensor, int], Tensor], requests: int = 100) -> None:
    """Compare answers given side by side with those given one after the other."""
    xs = [torch.randn(3 + i % 4, 4) for i in range(requests)]
    alone = [answer(x, i) for i, x in enumerate(xs)]
    with ThreadPoolExecutor(THREADS) as pool:
        got = list(pool.map(answer, xs, range(requests)))
    for ours, expected in zip(got, alone, strict=True):
        torch.testing.assert_close(ours, expected, equal_nan=True)
    torch.testing.assert_close(answer(xs[0], 0), alone[0], equal_nan=True)  # nothing is left behind


CALLS: dict[str, Callable[[sn.SigmaEnsemble, Tensor, int], Tensor]] = {
    "predict": lambda e, x, i: e.predict(x).probs,
    "call": lambda e, x, i: e(x).detach(),
    "chunk": lambda e, x, i: e.predict(x, chunk=3).probs,
    "some members": lambda e, x, i: e.predict(x, members=1 + i % 4).member_probs,
    "adaptive": lambda e, x, i: e.predict(x, adaptive=0.3).probs,
    "features": lambda e, x, i: e.features(x),
    "mixed": lambda e, x, i: (
        e.predict(x, members=2).probs if i % 3 else e.predict(x, chunk=2 + i % 5).probs
    ),
}


@pytest.mark.parametrize("schedule", ["auto", "folded", "sequential", 3])
@pytest.mark.parametrize("call", CALLS)
def test_answers_side_by_side_are_those_alone(call: str, schedule: str | int) -> None:
    ens = make(schedule)
    whole = schedule == "auto" and call in ("predict", "mixed")
    together(lambda x, i: CALLS[call](ens, x, i), REQUESTS if whole else 48)


@pytest.mark.parametrize("call", ["predict", "mixed", "features"])
def test_a_shared_prefix_is_replayed_to_its_own_call_only(call: str) -> None:
    ens = make(layers="last")
    ens(torch.randn(4, 4))
    assert ens._runner._prefix is not None
    together(lambda x, i: CALLS[call](ens, x, i))


def test_what_is_fixed_in_one_thread_is_right_in_all() -> None:
    ens = make()

    def answer(x: Tensor, i: int) -> Tensor:
        with ens.fixed():
            return torch.cat([ens.predict(x, members=1 + i % 4).probs, ens.predict(x).probs])

    together(answer)
    with ens.fixed():
        together(lambda x, i: ens.predict(x).probs)


@pytest.mark.parametrize("schedule", ["auto", "sequential"])
def test_an_ensemble_left_in_training_mode_predicts_and_trains_by_turns(
    schedule: str | int,
) -> None:
    ens = make(schedule).train()
    ens.freeze_statistics()  # so that the order of the calls does not matter
    statistics = {n: b.clone() for n, b in ens.named_buffers()}
    ens.network.drop = nn.Dropout(1.0)  # answers in training mode are those of the bias alone
    ens.network.last.register_forward_hook(lambda m, a, y: ens.network.drop(y))

    def answer(x: Tensor, i: int) -> Tensor:
        return ens.predict(x).probs if i % 3 else ens(x).detach()

    together(answer)
    assert ens.training
    assert ens.network.drop.training
    assert all(torch.equal(b, statistics[n]) for n, b in ens.named_buffers())


def test_gradients_side_by_side_add_up() -> None:
    ens = make().train()
    ens.freeze_statistics()
    loss_fn = sn.EnsembleLoss()
    xs, ys = torch.randn(60, 6, 4), torch.randint(3, (60, 6))

    def gradients(i: int) -> list[Tensor]:
        loss = loss_fn.task(ens(xs[i]), ys[i])
        return list(torch.autograd.grad(loss, [p for p in ens.parameters() if p.requires_grad]))

    alone = [gradients(i) for i in range(60)]
    with ThreadPoolExecutor(THREADS) as pool:
        for ours, expected in zip(pool.map(gradients, range(60)), alone, strict=True):
            torch.testing.assert_close(ours, expected)


def test_the_first_requests_wait_for_the_trial() -> None:
    x = torch.randn(5, 4)
    for _ in range(5):
        ens = make()
        with ThreadPoolExecutor(THREADS) as pool:
            got = list(pool.map(lambda _, e=ens: e.predict(x).probs, range(16)))
        for probs in got:
            torch.testing.assert_close(probs, ens.predict(x).probs)
        assert len([n for n in ens.report.notes if n.startswith("schedule")]) == 1


def test_tasks_of_an_event_loop_have_passes_of_their_own() -> None:
    ens = make()
    x = torch.randn(5, 4)

    async def ask(members: int) -> Tensor:
        with ens.axis.choosing(start=0, stop=members):
            await asyncio.sleep(0)  # another task runs here
            return ens(x).detach()

    async def ask_all() -> list[Tensor]:
        return await asyncio.gather(*(ask(1 + i % 4) for i in range(12)))

    whole = ens(x)
    for i, logits in enumerate(asyncio.run(ask_all())):
        torch.testing.assert_close(logits, whole[: 1 + i % 4])


def test_requests_to_a_compiled_ensemble_take_turns() -> None:
    ens = make()
    ens.network.compile(backend="eager", fullgraph=True)

    def answer(x: Any, i: int) -> Tensor:
        return ens.predict(x, members=2 + 2 * (i % 2)).probs

    together(answer, 40)
