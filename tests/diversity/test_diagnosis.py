"""What is wrong with the diversity of an ensemble: each finding, its numbers, and its absence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sigmanens as sn
from sigmanens.diversity import diagnosis
from sigmanens.diversity.diagnosis import Finding
from sigmanens.errors import InputError


def make(members: int = 4, dropout: float = 0.0, **options: Any) -> sn.SigmaEnsemble:
    base = nn.Sequential(
        nn.Linear(4, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(dropout), nn.Linear(12, 3)
    )
    return sn.convert(base, members, **({"init": "normal"} | options))


def kinds(findings: Sequence[Finding | None]) -> list[str]:
    return [f.kind for f in findings if f is not None]


def logits_of(seed: int = 0, members: int = 4, size: int = 50) -> Tensor:
    return torch.randn(members, size, 3, generator=torch.Generator().manual_seed(seed))


# -- one model -----------------------------------------------------------------------------------


def test_members_that_answer_alike_are_one_model() -> None:
    found = diagnosis.one_model(0.0005, 1e-5, 0.5, cosine=0.7, step=40)
    assert found is not None
    assert str(found).startswith("after 40 steps the members answer as one model: disagreement")
    assert "cosine of the scales 0.700" in str(found)
    assert diagnosis.one_model(0.0005, 1e-2, 0.5, cosine=0.995) is not None
    assert diagnosis.one_model(0.0005, 1e-2, 0.5, cosine=0.7) is None
    assert diagnosis.one_model(0.1, 1e-5, 0.5, cosine=0.7) is None


def test_members_below_the_noise_of_dropout_are_one_model() -> None:
    found = diagnosis.one_model(0.02, 0.1, 0.5, dropout=0.05)
    assert found is not None
    assert "disagreement 0.0200 against 0.0500" in str(found)
    assert diagnosis.one_model(0.06, 0.1, 0.5, dropout=0.05) is None


def test_the_noise_of_dropout_is_that_of_two_masks() -> None:
    x = torch.randn(200, 4)
    assert diagnosis.dropout_disagreement(make(), x) == 0.0
    ensemble = make(3, dropout=0.6)
    modes = [m.training for m in ensemble.modules()]
    state = torch.get_rng_state()
    got = diagnosis.dropout_disagreement(ensemble, x, seed=5)
    assert torch.equal(torch.get_rng_state(), state)
    assert [m.training for m in ensemble.modules()] == modes
    # by hand, with batch statistics left alone
    ensemble.eval()
    for module in ensemble.modules():
        if isinstance(module, nn.Dropout):
            module.train()
    torch.manual_seed(5)
    with torch.no_grad():
        a, b = ensemble(x).argmax(2), ensemble(x).argmax(2)
    differ = sum(bool(a[m, i] != b[m, i]) for m in range(3) for i in range(200))
    assert got == pytest.approx(differ / 600)
    assert got > 0.02


# -- frozen partition, weak members, flat dial ---------------------------------------------------


def test_a_partition_is_frozen_if_parted_and_saturated() -> None:
    found = diagnosis.frozen_partition(0.1, 0.8, step=7)
    assert found is not None
    assert "parted by step 7: cosine 0.10, 80% of them saturated" in str(found)
    assert diagnosis.frozen_partition(0.1, 0.4) is None
    assert diagnosis.frozen_partition(0.5, 0.8) is None


def test_members_are_weak_if_they_lose_more_than_averaging_gains() -> None:
    found = diagnosis.weak_members(0.9, 0.7, 0.6)
    assert found is not None
    assert "each loses 0.300 nats against one network" in str(found)
    assert "averaging gains 0.200" in str(found)
    assert diagnosis.weak_members(0.9, 0.5, 0.6) is None
    assert diagnosis.weak_members(0.9, 0.7, 0.7) is None


def test_nlls_are_those_of_the_average_and_of_each() -> None:
    logits, labels = logits_of().double(), torch.arange(50) % 3
    member, average = diagnosis.nlls(logits, labels)
    probs = logits.softmax(2)
    picked = probs[:, torch.arange(50), labels]
    assert member == pytest.approx(-float(picked.log().mean()))
    assert average == pytest.approx(-float(picked.mean(0).log().mean()))


def test_the_flat_parts_of_the_dial_are_named() -> None:
    for tau in (0.02, 10.0):
        found = diagnosis.flat_dial(tau, 4)
        assert found is not None
        assert f"tau={tau:g} lies where the dial is flat" in str(found)
        assert "take one between" in str(found)
    assert diagnosis.flat_dial(0.3, 4) is None
    two = diagnosis.flat_dial(0.3, 2)
    assert two is not None
    assert "every tau ends with one owner" in str(two)


# -- the pulls of penalty and task ---------------------------------------------------------------


@pytest.mark.parametrize("progress", [1.0, 0.25])
def test_pulls_are_the_gradients_of_penalty_and_task(progress: float) -> None:
    ensemble = make()
    diversity = sn.Diversity(0.2, sn.diversity.Ramp(0.1, length=1.0))
    diversity.progress = progress
    loss_fn = sn.EnsembleLoss(diversity=diversity)
    x, y = torch.randn(16, 4), torch.arange(16) % 3
    gamma = ensemble.sigma_norms()["1"].scale_logit
    (own,) = torch.autograd.grad(progress * sn.Diversity(0.2, 0.1)(ensemble), gamma)
    (task,) = torch.autograd.grad(loss_fn.task(ensemble(x), y), gamma)
    loss_fn(ensemble(x), y, ensemble).backward()
    expected = (float(own.norm()), float(task.norm()))
    assert diagnosis.pull_norms(ensemble, diversity) == pytest.approx(expected, rel=1e-4)
    graph = loss_fn.task(ensemble(x), y)
    assert diagnosis.pull_norms(ensemble, diversity, graph) == pytest.approx(expected, rel=1e-4)
    graph.backward()  # the graph is kept


def test_pulls_need_gradients_to_be_read() -> None:
    ensemble, diversity = make(), sn.Diversity()
    with pytest.raises(InputError, match="between backward and the optimizer's step"):
        diagnosis.pull_norms(ensemble, diversity)
    ensemble.requires_grad_(False)
    with pytest.raises(InputError, match="frozen"):
        diagnosis.pull_norms(ensemble, diversity)


def test_a_penalty_that_outweighs_the_task_is_told_with_the_weight_that_would_not() -> None:
    found = diagnosis.outweighed_task(2.0, 0.1, tau=0.1, weight=1e-2)
    assert found is not None
    assert "20 times as hard as the task" in str(found)
    assert "weight would be 0.0005" in str(found)
    assert diagnosis.outweighed_task(0.9, 0.1, tau=0.1, weight=1e-2) is None
    assert diagnosis.outweighed_task(2.0, 0.0, tau=0.1, weight=1e-2) is not None
    assert diagnosis.outweighed_task(0.0, 0.0, tau=0.1, weight=0.0) is None


# -- all of it -----------------------------------------------------------------------------------


def test_a_sound_ensemble_has_no_findings() -> None:
    labels = torch.arange(50) % 3
    found = sn.diversity.diagnose(
        make(), diversity=sn.Diversity(0.3), member_log_probs=logits_of(), labels=labels,
        single_nll=5.0, early=(0.8, 0.01), pulls=(1.0, 1.0),
    )  # fmt: skip
    assert found == []


def test_everything_that_is_wrong_is_found() -> None:
    labels = torch.arange(50) % 3
    alike = logits_of(members=1).expand(4, -1, -1)
    found = sn.diversity.diagnose(
        make(), diversity=sn.Diversity(0.02), member_log_probs=alike, labels=labels,
        single_nll=0.1, early=(0.1, 0.9), pulls=(100.0, 1.0),
    )  # fmt: skip
    assert kinds(found) == [
        "one model", "weak members", "frozen partition", "flat dial", "outweighed task"
    ]  # fmt: skip
    assert "disagreement 0.0000" in str(found[0])


def test_equal_members_are_found_without_predictions() -> None:
    ensemble = make(init="paper", head="copy")
    assert kinds(sn.diversity.diagnose(ensemble)) == ["one model"]
    assert sn.diversity.diagnose(make()) == []
    assert sn.diversity.diagnose(make(1)) == []


def test_a_tau_that_moves_is_not_called_flat() -> None:
    moving = sn.Diversity(lambda progress: 0.02 + progress)
    assert sn.diversity.diagnose(make(), diversity=moving) == []


def test_what_is_needed_together_is_asked_for() -> None:
    with pytest.raises(InputError, match="single_nll needs member_log_probs and labels"):
        sn.diversity.diagnose(make(), single_nll=0.5)
    with pytest.raises(InputError, match="pulls needs the penalty"):
        sn.diversity.diagnose(make(), pulls=(1.0, 1.0))
