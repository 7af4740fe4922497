"""Members that cannot change the answer are not asked."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.networks import Pictures, apart, dense, randomise
from torch import nn

import sigmanens as sn
from sigmanens.ensemble.adaptive import settled
from sigmanens.ensemble.prediction import Prediction
from sigmanens.errors import InputError


def confident(members: int = 4) -> sn.SigmaEnsemble:
    """Members that are sure of most of their answers."""
    ens = apart(sn.convert(randomise(Pictures(3)), members))
    with torch.no_grad():
        for heads in ens.member_heads().values():
            for head in heads.heads:
                head.weight.mul_(8)
    return ens


@given(
    members=st.integers(2, 8), classes=st.integers(2, 4), seed=st.integers(0, 10**6), k=st.data()
)
def test_no_answer_of_the_others_changes_a_settled_label(
    members: int, classes: int, seed: int, k: Any
) -> None:
    used = k.draw(st.integers(1, members))
    generator = torch.Generator().manual_seed(seed)
    probs = (4 * torch.randn(used, 50, classes, generator=generator)).softmax(2)
    mean = probs.mean(0)
    done = settled(mean, used, members)
    for other in range(classes):  # the worst that is left: all for one class
        worst = mean * used
        worst[:, other] += members - used
        assert torch.equal(worst.argmax(1)[done], mean.argmax(1)[done])
    assert bool(settled(mean, members, members).all()) == bool(
        (mean.topk(2, 1).values.diff(dim=1) < 0).all()
    )


def test_the_risk_is_the_bound_of_hoeffding_and_serfling() -> None:
    mean = torch.tensor([[0.8, 0.1, 0.1]])
    members = 32
    assert not settled(mean, 16, members, 1e-9)
    tight = 2 * 31 * math.exp(-16 * 0.7**2 / (2 * (1 - 15 / 32)))
    assert tight < 1
    assert settled(mean, 16, members, tight * 1.001)
    assert not settled(mean, 16, members, tight * 0.999)


@given(seed=st.integers(0, 1000))
def test_the_label_changes_no_more_often_than_the_risk(seed: int) -> None:
    """Members drawn without replacement from a fixed set, as the bound assumes."""
    generator = torch.Generator().manual_seed(seed)
    members, trials, risk = 16, 200, 0.2
    one = (2 * torch.randn(members, 3, generator=generator)).softmax(1)
    orders = torch.stack([torch.randperm(members, generator=generator) for _ in range(trials)])
    final = one.mean(0).argmax()
    wrong = torch.zeros(trials, dtype=torch.bool)
    stopped = torch.zeros(trials, dtype=torch.bool)
    for k in range(1, members + 1):
        mean = one[orders[:, :k]].mean(1)
        now = settled(mean, k, members, risk) & ~stopped
        wrong |= now & (mean.argmax(1) != final)
        stopped |= now
    assert wrong.float().mean() <= risk


@pytest.mark.parametrize("chunk", [None, 4])
def test_labels_are_those_of_all_members_and_fewer_are_asked(chunk: int | None) -> None:
    ens = confident()
    x = torch.randn(30, 1, 8, 8)
    rows: list[int] = []
    ens.network.conv2.register_forward_pre_hook(lambda m, a: rows.append(len(a[0])))
    whole, quick = ens.predict(x), ens.predict(x, adaptive=True, chunk=chunk)
    assert torch.equal(quick.labels, whole.labels)
    used = quick.members_used
    assert used is not None
    assert whole.members_used is None
    assert 3 == used.min() < used.max() == 4
    for i, k in enumerate(used.tolist()):
        alone = Prediction.from_logits(ens.predict(x, members=k).member_log_probs[:, i : i + 1])
        torch.testing.assert_close(quick.log_probs[i], alone.log_probs[0])
        torch.testing.assert_close(quick.modulation[i], alone.modulation[0], rtol=1e-4, atol=1e-6)
        assert bool(quick.member_log_probs[:k, i].isfinite().all())
        assert bool(quick.member_log_probs[k:, i].isnan().all())
        assert float((quick.probs[i] - whole.probs[i]).abs().max()) <= (4 - k) / 4 + 1e-6
    torch.testing.assert_close(quick.entropy, quick.expected_entropy + quick.modulation)


def test_samples_that_are_settled_are_not_computed_again() -> None:
    ens = confident()
    x = torch.randn(30, 1, 8, 8)
    ens.predict(x)
    rows: list[int] = []
    ens.network.conv2.register_forward_pre_hook(lambda m, a: rows.append(len(a[0])))
    used = ens.predict(x, adaptive=True).members_used
    assert used is not None
    assert rows == [30, 30, 30, int((used == 4).sum())]


def test_named_inputs_and_a_temperature() -> None:
    ens = apart(sn.convert(randomise(dense()), 4))
    x = torch.randn(9, 4)
    quick = ens.predict({"input": x}, adaptive=0.5, temperature=2.0)
    assert quick.temperature == 2.0
    assert quick.log_probs.shape == (9, 3)


@pytest.mark.parametrize("adaptive", [0.0, 1.0, -0.1, 1, 2, "yes", None])
def test_what_is_no_risk_is_refused(adaptive: Any) -> None:
    with pytest.raises(InputError, match="adaptive is"):
        confident().predict(torch.randn(2, 1, 8, 8), adaptive=adaptive)


def test_logits_per_pixel_are_refused() -> None:
    class Pixels(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm2d(3)
            self.head = nn.Conv2d(3, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(x))

    ens = sn.convert(Pixels(), 2, head="shared")
    with pytest.raises(InputError, match="one row of logits per sample"):
        ens.predict(torch.randn(2, 3, 4, 4), adaptive=True)
