"""Diversity measures against loops over pairs, and their limits."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.evaluation.draws import draw_logits, draw_members
from tests.oracles import metrics as oracle
from torch.utils._python_dispatch import TorchDispatchMode

from sigmanens import evaluation as ev
from sigmanens.diversity import measures
from sigmanens.ensemble.prediction import log_mean_exp

problems = st.builds(
    draw_members,
    samples=st.integers(1, 15),
    classes=st.integers(2, 5),
    members=st.integers(1, 5),
    scale=st.floats(0.1, 20.0),
    seed=st.integers(0, 10**6),
)


@given(problems)
@settings(max_examples=60)
def test_measures_equal_loops(problem) -> None:
    log_probs, labels = problem
    members, y = log_probs.exp().tolist(), labels.tolist()
    mean = oracle.mean_rows(members)
    assert ev.disagreement(log_probs) == pytest.approx(oracle.disagreement(members), abs=1e-12)
    assert ev.pairwise_kl(log_probs) == pytest.approx(
        oracle.pairwise_kl(members), rel=1e-9, abs=1e-9
    )
    information = [oracle.kl(m[b], row) for m in members for b, row in enumerate(mean)]
    assert ev.modulation(log_probs) == pytest.approx(
        sum(information) / len(information), rel=1e-9, abs=1e-9
    )
    nlls = [ev.nll(m, labels) for m in log_probs]
    assert ev.member_nll(log_probs, labels) == pytest.approx(sum(nlls) / len(nlls))
    right = [sum(hit for _, hit in oracle.top_labels(m, y)) / len(y) for m in members]
    assert ev.member_accuracy(log_probs, labels) == pytest.approx(sum(right) / len(right))
    gap = sum(nlls) / len(nlls) - ev.nll(log_mean_exp(log_probs), labels)
    assert ev.jensen_gap(log_probs, labels) == pytest.approx(gap, abs=1e-9)


@given(problems)
@settings(max_examples=40)
def test_ranges(problem) -> None:
    log_probs, labels = problem
    assert ev.jensen_gap(log_probs, labels) >= 0
    assert ev.pairwise_kl(log_probs) >= 0
    assert 0 <= ev.modulation(log_probs) <= math.log(len(log_probs)) + 1e-12
    assert 0 <= ev.disagreement(log_probs) <= 1


@given(problems, st.randoms(use_true_random=False))
@settings(max_examples=30)
def test_order_of_members_and_samples_does_not_matter(problem, random) -> None:
    log_probs, labels = problem
    members, samples = list(range(len(log_probs))), list(range(len(labels)))
    random.shuffle(members)
    random.shuffle(samples)
    shuffled = log_probs[members][:, samples], labels[samples]
    for measure in (ev.jensen_gap, ev.member_nll, ev.member_accuracy):
        assert measure(*shuffled) == pytest.approx(measure(*problem), rel=1e-9, abs=1e-12)
    for measure in (ev.disagreement, ev.pairwise_kl, ev.modulation):
        assert measure(shuffled[0]) == pytest.approx(measure(log_probs), rel=1e-9, abs=1e-12)


@pytest.mark.case("P4")
@pytest.mark.parametrize("members", [1, 3])
def test_one_member_and_equal_members_show_no_diversity(members: int) -> None:
    log_probs, labels = draw_members(40, 5, 1, seed=3)
    log_probs = log_probs.expand(members, -1, -1)
    tolerance = 0 if members == 1 else 1e-14
    assert ev.disagreement(log_probs) == 0
    for value in (ev.pairwise_kl(log_probs), ev.modulation(log_probs)):
        assert 0 <= value <= tolerance
    assert 0 <= ev.jensen_gap(log_probs, labels) <= tolerance
    assert ev.member_nll(log_probs, labels) == pytest.approx(ev.nll(log_probs[0], labels))
    assert ev.member_accuracy(log_probs, labels) == ev.accuracy(log_probs[0], labels)


def test_members_that_exclude_each_others_classes() -> None:
    certain = torch.tensor([[[0.0, -math.inf]], [[-math.inf, 0.0]]])
    labels = torch.tensor([0])
    assert ev.disagreement(certain) == 1
    assert ev.pairwise_kl(certain) == math.inf
    assert ev.modulation(certain) == pytest.approx(math.log(2))
    assert ev.member_nll(certain, labels) == math.inf
    assert ev.jensen_gap(certain, labels) == math.inf
    # Excluded by every member: no member is better than the average, and no NaN comes out.
    both = torch.tensor([[[0.0, -math.inf]], [[0.0, -math.inf]]])
    assert ev.pairwise_kl(both) == ev.modulation(both) == 0
    assert ev.jensen_gap(both, torch.tensor([1])) == 0


def test_disagreement_counts_pairs() -> None:
    # Three of four members name class 0: 3 of 6 pairs differ.
    log_probs = torch.tensor([[[0.9, 0.1]]] * 3 + [[[0.2, 0.8]]]).log()
    assert ev.disagreement(log_probs) == 0.5


class LargestTensor(TorchDispatchMode):
    """Records the bytes of the largest tensor that an operation makes; views cost nothing."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        storages = {x.untyped_storage().data_ptr() for x in args if isinstance(x, torch.Tensor)}
        if isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            if storage.data_ptr() not in storages:
                self.largest = max(self.largest, storage.nbytes())
        return result


@pytest.mark.case("P7")
@pytest.mark.parametrize("members", [2, 8])
def test_working_memory_does_not_grow_with_members(
    members: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Float32 input that, in float64 at once, would need four times the bound or more.
    monkeypatch.setattr(measures, "SLICE_ELEMENTS", 4096)
    logits = draw_logits(400, 20, members, seed=4).float()
    labels = torch.arange(400) % 20
    log_probs = torch.log_softmax(logits, 2)
    whole = members * 400 * 20
    assert whole >= 3 * 4096
    calls = [
        lambda: ev.pairwise_kl(log_probs),
        lambda: ev.modulation(log_probs),
        lambda: ev.ood.scores(logits)["energy"].sum().item(),
        lambda: ev.summarize(logits, labels)["pairwise_kl"],
    ]
    sliced = []
    for call in calls:
        with LargestTensor() as memory:
            sliced.append(call())
        # The averaged distribution (B, C) in float64 is the largest thing kept.
        assert memory.largest <= 400 * 20 * 8
    monkeypatch.setattr(measures, "SLICE_ELEMENTS", 10**9)
    assert [call() for call in calls] == pytest.approx(sliced, rel=1e-12)
