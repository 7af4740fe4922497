"""The closed loop: it reaches what can be reached, says what cannot, and tells its path."""

from __future__ import annotations

import itertools
import math
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import sigmanens as sn
from sigmanens.diversity.dial import _vote_disagreement
from sigmanens.diversity.feedback import GAIN, TAU_RANGE, Feedback
from sigmanens.errors import DiversityError, SigmaNensWarning


def make(members: int = 4, channels: int = 300) -> sn.SigmaEnsemble:
    base = nn.Sequential(nn.Linear(4, channels), nn.BatchNorm1d(channels), nn.Linear(channels, 3))
    generator = torch.Generator().manual_seed(0)
    return sn.convert(base, members, init="normal", generator=generator)


def gamma_of(ensemble: sn.SigmaEnsemble) -> Tensor:
    return ensemble.sigma_norms()["1"].scale_logit


def steer(diversity: sn.Diversity, steps: int, lr: float, pull: float = 0.0) -> sn.SigmaEnsemble:
    """SGD on the penalty, and a task that pulls γ back to where it was with strength ``pull``."""
    ensemble = make()
    gamma = gamma_of(ensemble)
    start = gamma.detach().clone()
    optimizer = torch.optim.SGD([gamma], lr, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        (diversity(ensemble) + pull / 2 * (gamma - start).square().sum()).backward()
        optimizer.step()
    return ensemble


@settings(max_examples=6, deadline=None)
@given(
    st.sampled_from(["tau", "weight"]),
    st.floats(0.35, 0.75),
    st.sampled_from([10.0, 1.0, 0.3]),
)
def test_the_penalty_alone_reaches_a_target_whatever_the_rate(
    moves: str, target: float, lr: float
) -> None:
    diversity = sn.Diversity(target_cosine=target, moves=moves)
    ensemble = steer(diversity, 450, lr)
    assert sn.diversity.cosine(ensemble) == pytest.approx(target, abs=0.05)
    # The penalty cannot bring members together again, so the approach must not overshoot.
    assert min(p[3] for p in diversity.path) > target - 0.05


@pytest.mark.parametrize("moves", ["tau", "weight"])
def test_against_a_task_the_target_is_held_by_a_setting_within_the_bounds(moves: str) -> None:
    diversity = sn.Diversity(target_cosine=0.4, moves=moves)
    ensemble = steer(diversity, 500, 1.0, pull=1e-3)
    assert sn.diversity.cosine(ensemble) == pytest.approx(0.4, abs=0.01)
    late = [p[3] for p in diversity.path[-100:]]
    assert max(late) - min(late) < 0.01
    if moves == "tau":
        assert TAU_RANGE[0] < diversity.tau < TAU_RANGE[1]
        assert diversity.weight == 1e-2
    else:
        assert 1e-6 < diversity.weight < 1e-2
        assert diversity.tau == 0.1


def test_a_target_out_of_reach_ends_at_the_strong_bound_and_says_so_once() -> None:
    diversity = sn.Diversity(target_cosine=0.01, weight=1e-3)
    with pytest.warns(SigmaNensWarning) as record:
        ensemble = steer(diversity, 900, 1.0, pull=2e-3)
    (said,) = record
    assert "target_cosine=0.01 is not reached: tau has been at its bound" in str(said.message)
    assert "tau=0.02" in str(said.message)
    assert "raise the weight" in str(said.message)
    assert diversity.tau == TAU_RANGE[0]
    assert sn.diversity.cosine(ensemble) > 0.1


def test_a_target_above_the_start_ends_at_the_weak_bound_and_says_so() -> None:
    diversity = sn.Diversity(target_cosine=0.97, moves="weight")
    with pytest.warns(SigmaNensWarning, match="it cannot make members more alike") as record:
        ensemble = steer(diversity, 300, 1.0)
    assert len(record) == 1
    assert diversity.weight == pytest.approx(1e-2 * 1e-4)
    assert sn.diversity.cosine(ensemble) < 0.9


def test_the_path_tells_step_tau_weight_and_what_was_measured() -> None:
    diversity = sn.Diversity(target_cosine=0.5, weight=0.02)
    ensemble = make()
    before = sn.diversity.cosine(ensemble)
    diversity(ensemble)
    ((step, tau, weight, measured),) = diversity.path
    assert (step, weight) == (0, 0.02)
    assert measured == before
    # the first step is the greatest one, from the weakest setting on
    change = math.log(TAU_RANGE[1] / tau)
    assert 0.9 * GAIN < change <= GAIN
    assert diversity.tau == tau
    assert "target_cosine=0.5, moves='tau'" in repr(diversity)
    assert sn.Diversity(0.3).path == []


@settings(max_examples=30)
@given(
    st.sampled_from(["cosine", "disagreement"]),
    st.sampled_from(["tau", "weight"]),
    st.lists(st.floats(0, 1), min_size=1, max_size=60),
)
def test_a_setting_moves_by_the_gain_at_most_and_stays_within_its_bounds(
    measure: str, moves: str, values: list[float]
) -> None:
    loop = Feedback(measure, 0.3, moves, 0.1, 1e-2)
    for step, value in enumerate(values):
        before = loop.value
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SigmaNensWarning)
            loop.update(step, value)
        assert abs(math.log(loop.value / before)) <= GAIN + 1e-9
        assert loop.bounds[0] <= loop.value <= loop.bounds[1]
    assert len(loop.path) == len(values)


@pytest.mark.parametrize("measure", ["cosine", "disagreement"])
@pytest.mark.parametrize("moves", ["tau", "weight"])
def test_too_little_diversity_strengthens_the_penalty(measure: str, moves: str) -> None:
    alike, different = (0.9, 0.1) if measure == "cosine" else (0.0, 0.6)
    for measured, stronger in ((alike, True), (different, False)):
        loop = Feedback(measure, 0.3, moves, 0.1, 1e-2)
        loop.value = math.sqrt(loop.bounds[0] * loop.bounds[1])
        before = loop.value
        loop.update(0, measured)
        assert ((loop.value < before) == (moves == "tau")) == stronger


def test_a_long_path_is_thinned_evenly() -> None:
    loop = Feedback("cosine", 0.3, "tau", 0.1, 1e-2)
    for step in range(9000):
        loop.update(step, 0.3)
    steps = [p[0] for p in loop.path]
    assert 1000 <= len(steps) <= 2001
    assert steps == list(range(0, 9000, loop.stride))


@pytest.mark.parametrize("target", [0, 1, -0.1, 1.5, math.nan, "0.5", True])
def test_targets_out_of_range_are_refused(target: object) -> None:
    for name in ("cosine", "disagreement"):
        with pytest.raises(DiversityError, match=f"target_{name} is .*strictly between 0 and 1"):
            sn.Diversity(**{f"target_{name}": target})  # type: ignore[arg-type]


def test_a_loop_needs_something_to_move() -> None:
    with pytest.raises(DiversityError, match="moves is 'lr'; expected 'tau' or 'weight'"):
        sn.Diversity(target_cosine=0.5, moves="lr")
    with pytest.raises(DiversityError, match="needs a penalty to move, but weight is 0"):
        sn.Diversity(target_cosine=0.5, weight=0.0)


# -- disagreement --------------------------------------------------------------------------------


@given(st.integers(2, 5), st.integers(1, 6), st.integers(0, 999))
def test_disagreement_of_votes_is_that_of_the_logits(members: int, size: int, seed: int) -> None:
    logits = torch.randn(members, size, 3, generator=torch.Generator().manual_seed(seed))
    votes = logits.argmax(2)
    pairs = list(itertools.combinations(range(members), 2))
    differ = sum(int(votes[a, i] != votes[b, i]) for a, b in pairs for i in range(size))
    assert _vote_disagreement(votes) == pytest.approx(differ / (len(pairs) * size))
    assert _vote_disagreement(votes) == pytest.approx(sn.diversity.disagreement(logits))


def test_it_has_to_be_shown_what_the_members_predict() -> None:
    diversity, ensemble = sn.Diversity(target_disagreement=0.2), make()
    with pytest.raises(DiversityError, match=r"was shown \[\]. Call diversity.observe\(logits\)"):
        diversity(ensemble)
    logits = torch.randn(4, 50, 3)
    diversity.observe(logits)
    diversity(ensemble)
    assert diversity.path[-1][3] == pytest.approx(sn.diversity.disagreement(logits))
    with pytest.raises(DiversityError, match=r"was shown \[\]"):
        diversity(ensemble)  # not twice with the same
    diversity.observe(logits[:3])
    with pytest.raises(DiversityError, match=r"all 4 members chose .* was shown \[\(3, 50\)\]"):
        diversity(ensemble)
    diversity.observe(logits[3:, :20])
    with pytest.raises(DiversityError, match=r"was shown \[\(3, 50\), \(1, 20\)\]"):
        diversity(ensemble)


def test_of_several_batches_the_last_counts() -> None:
    ensemble = make()
    logits, others = torch.randn(2, 4, 50, 3)
    for one_by_one in (False, True):
        diversity = sn.Diversity(target_disagreement=0.2)
        for batch in (others, logits):
            parts = [batch[m : m + 1] for m in range(4)] if one_by_one else [batch]
            for part in parts:
                diversity.observe(part)
        diversity(ensemble)
        ((_, _, _, measured),) = diversity.path
        assert measured == pytest.approx(sn.diversity.disagreement(logits))


def test_predictions_that_nobody_asks_for_are_not_hoarded() -> None:
    diversity = sn.Diversity(target_disagreement=0.2)
    for _ in range(400):
        diversity.observe(torch.zeros(1, 1, 2))
    assert len(diversity._votes) == 256


def test_predictions_are_kept_only_where_they_are_needed() -> None:
    logits = torch.randn(4, 5, 3)
    plain, steered = sn.Diversity(), sn.Diversity(target_disagreement=0.2)
    plain.observe(logits)
    with torch.no_grad():
        steered.observe(logits)
    assert plain._votes == steered._votes == []


@pytest.mark.parametrize("moves", ["tau", "weight"])
def test_a_disagreement_is_reached_in_training(moves: str) -> None:
    """On a task that parts the members by 0.04 without a penalty, by 0.58 under a strong one."""
    base = nn.Sequential(
        nn.Linear(8, 12), nn.BatchNorm1d(12), nn.ReLU(),
        nn.Linear(12, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 3),
    )  # fmt: skip
    ensemble = sn.convert(base, 4, init="normal", generator=torch.Generator().manual_seed(0))
    diversity = sn.Diversity(target_disagreement=0.3, moves=moves, layers="all")
    loss_fn = sn.EnsembleLoss(diversity=diversity)
    optimizer = torch.optim.SGD(sn.param_groups(ensemble, 0.02, scale_lr_mult=30.0), momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    seen = []
    for _ in range(450):
        x = torch.randn(64, 8, generator=generator)
        y = (x[:, :3] * x[:, 3:6]).argmax(1)
        optimizer.zero_grad()
        logits = ensemble(x)
        diversity.observe(logits)
        loss_fn(logits, y, ensemble).backward()
        optimizer.step()
        seen.append(sn.diversity.disagreement(logits))
    assert sum(seen[-150:]) / 150 == pytest.approx(0.3, abs=0.05)


def test_batches_of_one_step_move_the_setting_once() -> None:
    """Accumulated gradients: the scales stand still between the batches of a step."""
    ensemble = make()
    several = sn.Diversity(target_cosine=0.5)
    for step in range(3):
        for _ in range(4):
            several.step = step
            several(ensemble)
    once = sn.Diversity(target_cosine=0.5)
    for _ in range(3):
        once(ensemble)
    assert several.path == once.path
    assert len(once.path) == 3
    resumed = sn.Diversity(target_cosine=0.5)
    resumed.load_state_dict(several.state_dict())
    resumed(ensemble)
    assert len(resumed.path) == 4
