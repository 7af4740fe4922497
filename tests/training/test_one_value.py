"""The loss has one value: the mean over members of the user's loss on that member's own rows.

However the members were run, and whatever the loss looks at: a batch as a whole, weights, noise.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.networks import Pictures, apart, dense
from torch import Tensor, nn

import sigmanens as sn
from sigmanens.errors import NonFiniteError

M, B, C = 3, 12, 3
Loss = Callable[..., Tensor]
HARD = torch.tensor([0, 0, 0, 0, 1, 2, 2, 2, 0, 2, 1, 1])
SEVERAL = torch.tensor([[0, 0, 1], [1, 1, 0], [0, 0, 0], [1, 1, 1]]).repeat(3, 1).float()
WEIGHTS = torch.tensor([0.1, 1.0, 10.0])


def dice(logits: Tensor, y: Tensor) -> Tensor:
    """Over the whole batch, as segmentation libraries have it."""
    p, t = logits.softmax(1), F.one_hot(y, C).to(logits.dtype)
    return (1 - 2 * (p * t).sum(0) / (p + t).sum(0)).mean()


def jsd(logits: Tensor, y: Tensor) -> Tensor:
    """AugMix: the batch is two parts, of which the first is clean."""
    parts = logits.chunk(2)
    probs = [p.softmax(1) for p in parts]
    mean = torch.stack(probs).mean(0).log()
    apart = sum(F.kl_div(mean, p, reduction="batchmean") for p in probs)
    return F.cross_entropy(parts[0], y[: len(parts[0])]) + 4 * apart


def focal(logits: Tensor, y: Tensor) -> Tensor:
    loss = F.cross_entropy(logits, y, reduction="none")
    return ((1 - (-loss).exp()) ** 2 * loss).mean()


def weighted_rows(logits: Tensor, y: Tensor) -> Tensor:
    """A weight for each sample of the batch, normalised over it."""
    weights = torch.arange(1.0, len(y) + 1)
    return (weights * F.cross_entropy(logits, y, reduction="none")).sum() / weights.sum()


class Noisy(nn.Module):
    """Draws label noise from a stream of its own: the order of calls decides."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, logits: Tensor, y: Tensor) -> Tensor:
        flipped = torch.rand(len(y), generator=self.generator) < 0.3
        return F.cross_entropy(logits, torch.where(flipped, (y + 1) % C, y))


def by_hand(loss: Loss, z: Tensor, y: Tensor, split: bool = False) -> Tensor:
    """One member after the other."""
    labels = y.chunk(len(z)) if split else [y] * len(z)
    total = torch.zeros(())
    for own, target in zip(z, labels, strict=True):
        total = total + loss(own, target) / len(z)
    return total


LOSSES: dict[str, tuple[Callable[[], Loss], Tensor]] = {
    "cross-entropy": (lambda: F.cross_entropy, HARD),
    "class weights": (lambda: functools.partial(F.cross_entropy, weight=WEIGHTS), HARD),
    "smoothed, weighted": (lambda: nn.CrossEntropyLoss(WEIGHTS, label_smoothing=0.2), HARD),
    "ignored labels": (lambda: F.cross_entropy, HARD.where(HARD != 1, torch.tensor(-100))),
    "soft labels": (lambda: nn.CrossEntropyLoss(WEIGHTS), SEVERAL.add(0.1).softmax(1)),
    "dice": (lambda: dice, HARD),
    "two parts": (lambda: jsd, HARD),
    "focal": (lambda: focal, HARD),
    "weighted rows": (lambda: weighted_rows, HARD),
    "noise": (Noisy, HARD),
    "several labels": (lambda: nn.BCEWithLogitsLoss(pos_weight=WEIGHTS), SEVERAL),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("split", [False, True])
def test_the_value_is_that_of_separate_members_to_the_last_bit(name: str, split: bool) -> None:
    make, y = LOSSES[name]
    z = torch.randn(M, B // M if split else B, C)
    mine, other = (z.clone().requires_grad_() for _ in range(2))
    got = sn.EnsembleLoss(make()).task(mine, y, split=split)
    want = by_hand(make(), other, y, split)
    assert torch.equal(got, want)
    got.backward()
    want.backward()
    assert mine.grad is not None
    torch.testing.assert_close(mine.grad, other.grad, rtol=0, atol=0)


def pictures() -> tuple[nn.Module, Tensor]:
    return Pictures(C), torch.randn(B, 1, 8, 8)


def table(batch_norm: bool = True) -> tuple[nn.Module, Tensor]:
    return dense(batch_norm, classes=C), torch.randn(B, 4)


@pytest.mark.parametrize("network", [pictures, table, lambda: table(False)])
@pytest.mark.parametrize("schedule", ["folded", "sequential", 2])
@pytest.mark.parametrize("name", ["class weights", "dice", "two parts", "noise", "several labels"])
def test_every_way_to_train_has_the_same_value_and_gradient(
    name: str, schedule: str | int, network: Callable[[], tuple[nn.Module, Tensor]]
) -> None:
    make, y = LOSSES[name]
    base, x = network()
    ens = apart(sn.convert(base, M, init="normal", schedule=schedule)).train()
    for split in (False, True):
        results: list[tuple[Tensor, dict[str, Tensor]]] = []
        for memberwise in (False, True):
            loss_fn = sn.EnsembleLoss(make(), sn.Diversity(0.1, 0.01))
            ens.zero_grad()
            if memberwise:
                value = ens.backward(x, y, loss_fn, split=split)
            else:
                value = loss_fn(ens(x, split=split), y, ens, split=split)
                value.backward()
            grads = {n: p.grad.clone() for n, p in ens.named_parameters() if p.grad is not None}
            results.append((value.detach(), grads))
        (whole, gradients), (single, others) = results
        if schedule == "sequential":  # else a pass for several members may round otherwise
            assert torch.equal(whole, single)
        torch.testing.assert_close(whole, single)
        for key, gradient in gradients.items():
            torch.testing.assert_close(others[key], gradient, rtol=1e-3, atol=1e-5)


def test_the_jsd_of_timm_is_taken_of_each_members_own_parts() -> None:
    loss = pytest.importorskip("timm.loss").JsdCrossEntropy(num_splits=3, smoothing=0.1)
    z, y = torch.randn(M, B, C), HARD[:4].repeat(3)
    assert torch.equal(sn.EnsembleLoss(loss)(z, y), by_hand(loss, z, y))


@pytest.mark.parametrize("schedule", ["folded", "sequential"])
def test_a_loss_is_called_once_for_each_member_in_order(schedule: str) -> None:
    calls: list[tuple[Tensor, Tensor]] = []

    def spy(logits: Tensor, y: Tensor) -> Tensor:
        calls.append((logits.detach().clone(), y))
        return F.cross_entropy(logits, y)

    base, x = table()
    ens = apart(sn.convert(base, M, init="normal", schedule=schedule)).eval()
    loss_fn = sn.EnsembleLoss(spy)
    z = ens(x).detach()
    loss_fn(z, HARD, ens)
    ens.backward(x, HARD, loss_fn)
    assert len(calls) == 2 * M
    for m, (logits, y) in enumerate(calls):
        torch.testing.assert_close(logits, z[m % M])
        assert torch.equal(y, HARD)
    calls.clear()
    loss_fn(z[:, :4], HARD, split=True)
    assert [y.tolist() for _, y in calls] == [part.tolist() for part in HARD.chunk(M)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast_both_ways_agree(dtype: torch.dtype) -> None:
    base, x = table(False)
    ens = apart(sn.convert(base, M, init="normal", schedule="sequential")).train()
    loss_fn = sn.EnsembleLoss(functools.partial(F.cross_entropy, weight=WEIGHTS))
    with torch.autocast("cpu", dtype):
        whole = loss_fn(ens(x), HARD, ens)
        single = ens.backward(x, HARD, loss_fn)
    assert whole.dtype == torch.float32
    assert torch.equal(whole.detach(), single)


def test_a_member_whose_share_has_no_label_is_named() -> None:
    y = HARD.clone()
    y[4:8] = -100
    with pytest.raises(NonFiniteError, match="a member all of whose labels are ignore_index=-100"):
        sn.EnsembleLoss()(torch.randn(M, 4, C), y, split=True)
