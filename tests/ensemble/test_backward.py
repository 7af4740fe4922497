"""Gradients one member at a time: those of the folded pass."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.networks import Pictures, Words, apart, randomise
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sigmanens as sn
from sigmanens.errors import InputError

IDS = torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(3))


def close(a: Any, b: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def grads(ens: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in ens.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("network", ["conv", "words"])
@pytest.mark.parametrize("soft", [False, True], ids=["hard", "soft"])
@pytest.mark.parametrize("penalised", [False, True])
def test_member_by_member_backward_equals_the_folded_one(
    network: str, soft: bool, penalised: bool
) -> None:
    base = randomise(Pictures(3) if network == "conv" else Words())
    x: Any = torch.randn(6, 1, 8, 8) if network == "conv" else IDS.repeat(2, 1)[:6]
    y = torch.randint(3, (6,))
    target = torch.rand(6, 3).softmax(-1) if soft else y
    diversity = sn.Diversity(tau=0.3, weight=0.1) if penalised else None
    folded = apart(sn.convert(base, 3)).train()
    single = copy.deepcopy(folded)
    losses = (
        sn.EnsembleLoss(diversity=diversity),
        sn.EnsembleLoss(diversity=copy.deepcopy(diversity)),
    )
    expected = losses[0](folded(x), target, folded)
    expected.backward()
    got = single.backward(x, target, losses[1])
    close(got, expected.detach())
    assert not got.requires_grad
    close(losses[1].task_loss, losses[0].task_loss)
    if penalised:
        close(losses[1].penalty_loss, losses[0].penalty_loss)
    ours, theirs = grads(single), grads(folded)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        close(ours[name], gradient, 1e-4)
    for name, buffer in folded.named_buffers():
        close(dict(single.named_buffers())[name], buffer)


def test_backward_takes_scale_keywords_and_a_backward_of_ones_own() -> None:
    base = randomise(Words())
    folded = apart(sn.convert(base, 2))
    single = copy.deepcopy(folded)
    mask = torch.ones(4, 5)
    mask[0, 2:] = 0
    y = torch.tensor([0, 1, 2, 0])
    loss_fn = sn.EnsembleLoss(diversity=sn.Diversity(tau=0.5, weight=0.01))
    (loss_fn(folded(IDS, mask), y, folded) * 0.25).backward()
    calls: list[Tensor] = []

    def backward(loss: Tensor) -> None:
        calls.append(loss.detach())
        loss.backward()

    loss = single.backward(IDS, y, loss_fn, kwargs={"mask": mask}, scale=0.25, backward=backward)
    assert len(calls) == 3  # two members, and the penalty once
    close(sum(calls), loss * 0.25)
    for name, gradient in grads(folded).items():
        close(grads(single)[name], gradient, 1e-4)
    again = single.backward({"ids": IDS, "mask": mask}, y, loss_fn)
    close(again, loss)
    for name, gradient in grads(folded).items():
        close(grads(single)[name], gradient * 5, 1e-4)


def test_backward_holds_the_activations_of_one_member() -> None:
    ens = sn.convert(randomise(Pictures()), 4)
    rows: list[int] = []
    ens.network.conv2.register_forward_pre_hook(lambda m, a: rows.append(len(a[0])))
    ens.backward(torch.randn(5, 1, 8, 8), torch.randint(10, (5,)), sn.EnsembleLoss())
    assert rows == [5, 5, 5, 5]


class Checkpointed(nn.Module):
    """Runs its norm again in the backward pass rather than keep its activations."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 3)
        self.reentrant = reentrant
        self.active = True

    def block(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(x))

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        if not self.active:
            return self.head(self.block(h))
        return self.head(checkpoint(self.block, h, use_reentrant=self.reentrant))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch, no_grad
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_works_folded_and_member_by_member(reentrant: bool) -> None:
    checkpointed = apart(sn.convert(randomise(Checkpointed(reentrant)), 3))
    plain = copy.deepcopy(checkpointed)
    plain.network.active = False
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    loss = sn.EnsembleLoss()
    loss(plain(x), y).backward()
    for run in (
        lambda: checkpointed.backward(x, y, loss),
        lambda: loss(checkpointed(x), y).backward(),
    ):
        checkpointed.zero_grad()
        run()
        for name, gradient in grads(plain).items():
            close(grads(checkpointed)[name], gradient)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # torch, no_grad
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("schedule", ["sequential", 2])
def test_activation_checkpointing_knows_the_pass_that_the_gradients_come_from(
    schedule: Any, reentrant: bool
) -> None:
    checkpointed = apart(sn.convert(randomise(Checkpointed(reentrant)), 3, schedule=schedule))
    plain = copy.deepcopy(checkpointed)
    plain.network.active = False
    xs, y = torch.randn(2, 6, 4), torch.randint(3, (6,))
    loss_fn = sn.EnsembleLoss()
    # Two calls before one backward pass, and calls of others in between.
    (loss_fn(plain(xs[0]), y) + 2 * loss_fn(plain(xs[1]), y)).backward()
    first = loss_fn(checkpointed(xs[0]), y)
    total = first + 2 * loss_fn(checkpointed(xs[1]), y)
    checkpointed.predict(xs[0], members=2)
    apart(sn.convert(randomise(Checkpointed(reentrant)), 2)).predict(xs[0])
    total.backward()
    for name, gradient in grads(plain).items():
        close(grads(checkpointed)[name], gradient)


@pytest.mark.parametrize("penalised", [False, True])
def test_members_with_rows_of_their_own_have_the_gradients_of_the_folded_pass(
    penalised: bool,
) -> None:
    x, y = torch.randn(6, 1, 8, 8), torch.randint(3, (6,))
    diversity = sn.Diversity(tau=0.3, weight=0.1) if penalised else None
    folded = apart(sn.convert(randomise(Pictures(3)), 3)).train()
    single = copy.deepcopy(folded)
    loss_fn = sn.EnsembleLoss(diversity=diversity)
    expected = loss_fn(folded(x, split=True), y, folded, split=True)
    expected.backward()
    got = single.backward(x, y, loss_fn, split=True)
    close(got, expected.detach())
    ours, theirs = grads(single), grads(folded)
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        close(ours[name], gradient, 1e-4)
    for name, buffer in folded.named_buffers():
        close(dict(single.named_buffers())[name], buffer)


def test_backward_with_rows_that_do_not_split_is_an_error() -> None:
    ens = sn.convert(randomise(Pictures(3)), 3)
    with pytest.raises(InputError, match="7 rows, which 3 members do not divide"):
        ens.backward(torch.randn(7, 1, 8, 8), torch.zeros(7).long(), sn.EnsembleLoss(), split=True)
    with pytest.raises(InputError, match="6 rows and 2 labels"):
        ens.backward(torch.randn(6, 1, 8, 8), torch.zeros(2).long(), sn.EnsembleLoss(), split=True)
