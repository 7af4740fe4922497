"""Where the dial stands: τ by owners, delayed and ramped penalties, their steps and their state."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import sigmanens as sn
from sigmanens.diversity import theory
from sigmanens.diversity.dial import Dial
from sigmanens.diversity.ramp import Ramp
from sigmanens.errors import DiversityError


def make(members: int = 4, channels: int = 40) -> sn.SigmaEnsemble:
    base = nn.Sequential(nn.Linear(4, channels), nn.BatchNorm1d(channels), nn.Linear(channels, 3))
    return sn.convert(base, members, init="normal")


def gamma_of(ensemble: sn.SigmaEnsemble) -> Tensor:
    return ensemble.sigma_norms()["1"].scale_logit


def train(
    ensemble: sn.SigmaEnsemble,
    diversity: sn.Diversity,
    steps: int,
    optimizer: torch.optim.Optimizer | None = None,
    lr: float = 0.01,
) -> list[float]:
    """The penalty alone, step by step; its values."""
    if optimizer is None:
        optimizer = torch.optim.SGD([gamma_of(ensemble)], lr, momentum=0.9)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = diversity(ensemble)
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


# -- owners --------------------------------------------------------------------------------------


def test_owners_set_tau_by_the_map_for_the_members_of_the_ensemble() -> None:
    diversity = sn.Diversity(owners=1.5)
    assert repr(diversity) == "Diversity(owners=1.5, weight=0.01, layers='auto', form='sum')"
    with pytest.raises(DiversityError, match=r"owners=1.5 sets τ by the number of members"):
        _ = diversity.tau
    ensemble = make(4)
    got = diversity(ensemble)
    expected = sn.diversity.tau_for_owners(1.5, 4)
    assert diversity.tau == expected
    assert repr(diversity).startswith(f"Diversity(owners=1.5, tau={expected:g}, weight=0.01")
    assert torch.equal(got, sn.Diversity(expected)(ensemble))
    diversity(ensemble)
    (note,) = [n for n in ensemble.report.notes if "owners" in n]
    assert note == f"diversity: owners=1.5 with 4 members sets tau={expected:.3g}"
    assert note in str(ensemble.report)
    # another number of members, another τ
    diversity(make(3))
    assert diversity.tau == sn.diversity.tau_for_owners(1.5, 3) != expected


def test_the_owners_asked_for_are_the_owners_reached() -> None:
    ensemble = make(4, channels=1000)
    train(ensemble, sn.Diversity(owners=1.5), 800, lr=10.0)
    assert sn.diversity.owners(ensemble) == pytest.approx(1.5, abs=0.08)


def test_owners_out_of_reach_name_the_range() -> None:
    with pytest.raises(DiversityError, match=r"owners=3.0 is out of reach for 4 members: .* 1\.0"):
        sn.Diversity(owners=3.0)(make())
    for owners in (0, -1, float("nan"), float("inf"), "2", True):
        with pytest.raises(DiversityError, match=r"owners is .*; expected a finite number > 0"):
            sn.Diversity(owners=owners)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"tau": 0.1, "owners": 1.5}, "tau and owners"),
        ({"tau": 0.1, "target_cosine": 0.5}, "tau and target_cosine"),
        ({"owners": 1.5, "target_cosine": 0.5}, "owners and target_cosine"),
        ({"target_cosine": 0.5, "target_disagreement": 0.1}, "target_cosine and target_dis"),
        ({"tau": 0.1, "owners": 1.5, "target_cosine": 0.5, "moves": "weight"}, "tau and owners"),
    ],
)
def test_settings_that_exclude_each_other_are_named(given: dict[str, Any], names: str) -> None:
    with pytest.raises(DiversityError, match=f"{names}.* are given, each of which sets τ"):
        sn.Diversity(**given)


def test_tau_can_be_set_by_hand_only_where_nothing_else_sets_it() -> None:
    diversity = sn.Diversity(0.1)
    diversity.tau, diversity.weight = 0.5, 2
    assert repr(diversity).startswith("Diversity(tau=0.5, weight=2,")
    with pytest.raises(DiversityError, match="expected a finite number > 0"):
        diversity.tau = 0.0
    with pytest.raises(DiversityError, match="expected a finite number ≥ 0"):
        diversity.weight = -1.0
    for other in (sn.Diversity(owners=1.5), sn.Diversity(target_cosine=0.5)):
        with pytest.raises(DiversityError, match="set by owners or by a target"):
            other.tau = 0.5
    with pytest.raises(DiversityError, match="belongs to the loop"):
        sn.Diversity(target_cosine=0.5).weight = 1.0


# -- start and ramp ------------------------------------------------------------------------------

steps_or_shares = st.integers(0, 50) | st.integers(0, 100).map(lambda percent: percent / 100)


def oracle_strength(step: int, start: float, ramp: float) -> float:
    if step < start:
        return 0.0
    return 1.0 if step >= start + ramp else (step - start) / ramp


@settings(max_examples=60)
@given(steps_or_shares, steps_or_shares, st.integers(1, 60))
def test_strength_is_0_then_rises_in_a_line_to_1(
    start: int | float, ramp: int | float, total: int
) -> None:
    found = [Ramp(start, ramp).strength(t, total) for t in range(130)]
    a = start if isinstance(start, int) else start * total
    b = ramp if isinstance(ramp, int) else ramp * total
    first = 1.0 if start == 0 and ramp == 0 else 0.0
    assert found[0] == first
    assert found[1:] == pytest.approx([oracle_strength(t, a, b) for t in range(1, 130)], abs=1e-9)
    assert found == sorted(found)
    assert found[-1] == 1.0


@pytest.mark.parametrize("value", [-1, 1.5, -0.1, float("nan"), "3", None, True])
@pytest.mark.parametrize("name", ["start", "ramp"])
def test_other_starts_and_ramps_are_refused(name: str, value: object) -> None:
    with pytest.raises(DiversityError, match=f"{name} is .*; expected steps as an int ≥ 0"):
        sn.Diversity(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("total", [0, -5, 2.5, "9", True])
def test_other_lengths_are_refused(total: object) -> None:
    with pytest.raises(DiversityError, match=r"total_steps is .*; expected the optimizer steps"):
        sn.Diversity(total_steps=total)  # type: ignore[arg-type]


def test_the_penalty_is_scaled_by_the_strength_of_its_step() -> None:
    ensemble = make()
    plain = sn.Diversity(0.1, 0.3)
    ramped = sn.Diversity(0.1, 0.3, start=0.25, ramp=2, total_steps=8)
    for step, strength in enumerate([0, 0, 0, 0.5, 1, 1, 1]):
        assert (ramped.step, ramped.strength) == (step, strength)
        got = ramped(ensemble)
        assert ramped.applied == strength
        torch.testing.assert_close(got, strength * plain(ensemble))
        (gradient,) = torch.autograd.grad(got, gamma_of(ensemble))
        (full,) = torch.autograd.grad(plain(ensemble), gamma_of(ensemble))
        torch.testing.assert_close(gradient, strength * full)
    torch.testing.assert_close(ramped.full(ensemble), plain(ensemble))
    assert ramped.step == 7


def test_a_share_needs_the_length_after_the_first_step() -> None:
    diversity, ensemble = sn.Diversity(start=0.5), make()
    assert float(diversity(ensemble).detach()) == 0
    with pytest.raises(DiversityError, match=r"start=0.5 is a share .* set diversity.total_steps"):
        diversity(ensemble)
    diversity.total_steps = 4
    diversity(ensemble)
    assert (diversity.step, diversity.strength) == (2, 1.0)


def test_only_steps_of_training_count() -> None:
    diversity, ensemble = sn.Diversity(start=3), make()
    with torch.no_grad():
        diversity(ensemble)
    ensemble.eval()
    diversity(ensemble)
    assert diversity.step == 0
    ensemble.train()
    diversity(ensemble)
    assert diversity.step == 1
    plain = sn.Diversity()
    plain(ensemble)
    assert plain.step == 0, "a dial that stands still counts nothing"


def test_backward_member_by_member_counts_one_step() -> None:
    ensemble = make(3)
    loss_fn = sn.EnsembleLoss(diversity=sn.Diversity(ramp=4))
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    ensemble.backward(x, y, loss_fn)
    ensemble.backward(x, y, loss_fn)
    assert loss_fn.diversity is not None
    assert loss_fn.diversity.step == 2
    assert loss_fn.diversity.applied == 0.25


def test_a_trainer_may_say_the_step() -> None:
    diversity, ensemble = sn.Diversity(0.1, 1.0, start=2), make()
    values = []
    for batch in range(8):  # two batches accumulate to one step
        diversity.step = batch // 2
        values.append(float(diversity(ensemble).detach()))
    assert values[:4] == [0.0] * 4
    assert all(v != 0 for v in values[4:])


# -- one training at a time ----------------------------------------------------------------------


def test_another_ensemble_starts_from_the_beginning() -> None:
    diversity = sn.Diversity(start=2)
    trial, ensemble = make(), make()
    diversity(trial)
    diversity(trial)
    diversity(ensemble)
    assert diversity.step == 1
    with pytest.raises(DiversityError, match="two ensembles take turns"):
        diversity(trial)
    diversity.reset()
    diversity(trial)
    assert diversity.step == 1


@pytest.mark.parametrize(
    "options",
    [{"start": 3, "ramp": 4}, {"target_cosine": 0.4}, {"target_cosine": 0.5, "moves": "weight"}],
    ids=str,
)
def test_a_resumed_training_ends_with_the_very_scales(options: dict[str, Any]) -> None:
    whole, start = make(), None
    start = copy.deepcopy(whole)
    one = sn.Diversity(**options)
    train(whole, one, 30, lr=1.0)

    first = sn.Diversity(**options)
    optimizer = torch.optim.SGD([gamma_of(start)], 1.0, momentum=0.9)
    train(start, first, 12, optimizer)
    file = io.BytesIO()
    torch.save([start.state_dict(), optimizer.state_dict(), first.state_dict()], file)
    file.seek(0)
    weights, momenta, dial = torch.load(file, weights_only=True)  # plain numbers and lists

    again, second = make(), sn.Diversity(**options)
    second(make())  # a trial before the state is loaded
    again.load_state_dict(weights)
    optimizer = torch.optim.SGD([gamma_of(again)], 1.0, momentum=0.9)
    optimizer.load_state_dict(momenta)
    second.load_state_dict(dial)
    train(again, second, 18, optimizer)
    assert torch.equal(gamma_of(again), gamma_of(whole))
    assert (second.step, second.tau, second.weight) == (one.step, one.tau, one.weight)
    assert second.path == one.path


def test_a_pickled_dial_goes_on() -> None:
    diversity, ensemble = sn.Diversity(target_cosine=0.4), make()
    train(ensemble, diversity, 5)
    for other in (pickle.loads(pickle.dumps(diversity)), copy.deepcopy(diversity)):
        assert isinstance(other, Dial)
        assert (other.step, other.path, repr(other)) == (5, diversity.path, repr(diversity))
        train(ensemble, other, 1)
        assert other.step == 6


def test_the_state_of_another_kind_is_refused() -> None:
    fixed, steered = sn.Diversity(start=3), sn.Diversity(target_cosine=0.4)
    with pytest.raises(DiversityError, match="with a target; this one has none"):
        fixed.load_state_dict(steered.state_dict())
    with pytest.raises(DiversityError, match="without a target; this one has one"):
        steered.load_state_dict(fixed.state_dict())
    other = sn.Diversity(target_cosine=0.4, moves="weight")
    with pytest.raises(DiversityError, match="on the cosine that moves tau; this one"):
        other.load_state_dict(steered.state_dict())


def test_the_other_form_keeps_owners_and_ramp() -> None:
    ensemble = make()
    sums = sn.Diversity(owners=1.5, ramp=4)
    means = sums.converted(ensemble, "mean")
    assert (means.owners, means.ramp, means.tau) == (1.5, Ramp(0, 4), sums.tau)
    a, b = (torch.autograd.grad(d.full(ensemble), gamma_of(ensemble))[0] for d in (sums, means))
    torch.testing.assert_close(a, b)
    with pytest.raises(DiversityError, match="what ties the two forms together"):
        sn.Diversity(target_cosine=0.5).converted(ensemble, "mean")


def test_a_moving_dial_is_not_compiled_by_mistake() -> None:
    ensemble, diversity = make(), sn.Diversity(ramp=4)
    torch._dynamo.reset()
    compiled = torch.compile(lambda: diversity(ensemble), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="changes from step to step"):
        compiled()
    torch._dynamo.reset()


def test_the_length_of_a_training_is_told_anew_unless_the_user_has_said_it() -> None:
    diversity = sn.Diversity(tau=0.5, start=0.5)
    diversity.tell_total(4)
    diversity.tell_total(40)
    assert diversity.total_steps == 40
    diversity.total_steps = 8
    diversity.tell_total(40)
    assert diversity.total_steps == 8
    assert sn.Diversity(tau=0.5, start=0.5, total_steps=8).total_steps == 8
    with pytest.raises(DiversityError, match="total_steps is 0"):
        diversity.total_steps = 0


def test_other_layers_count_from_the_next_call_on() -> None:
    base = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 6), nn.BatchNorm1d(6))
    ensemble = sn.convert(base, 2, init="normal", head="shared")
    diversity = sn.Diversity(layers="all")
    assert diversity.channels(ensemble) == 14
    diversity.layers = "^3$"
    assert diversity.channels(ensemble) == 6
    assert pickle.loads(pickle.dumps(diversity)).layers == "^3$"


def test_the_map_is_the_same_whatever_the_default_device_is() -> None:
    expected = sn.diversity.reached_cosine(0.5, 3)
    theory._reached.cache_clear()
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16):
        assert sn.diversity.reached_cosine(0.5, 3) == expected
