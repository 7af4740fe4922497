"""τ and λ as functions of the training's progress, in every kind of loop."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import sigmanens as sn
from sigmanens.diversity import Diversity, Ramp
from sigmanens.errors import DiversityError


def make(members: int = 3) -> sn.SigmaEnsemble:
    base = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)
    )
    return sn.convert(base, members, init="normal")


def gradients(loss: Tensor, ensemble: sn.SigmaEnsemble) -> list[Tensor]:
    return list(torch.autograd.grad(loss, [m.scale_logit for m in ensemble.sigma_norms().values()]))


# -- the ramp ------------------------------------------------------------------------------------


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_a_ramp_is_zero_then_a_line_then_its_value(p: float, start: float, length: float) -> None:
    found = Ramp(0.3, start, length)(p)
    if p < start:
        assert found == 0
    elif p >= start + length + 1e-9:
        assert found == pytest.approx(0.3)
    elif p < start + length - 1e-9:
        assert found == pytest.approx(0.3 * (p - start) / length)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"value": "1"}, "value of the ramp is '1'; expected a number"),
        ({"value": True}, "value of the ramp is True"),
        ({"value": 1.0, "start": -0.1}, "start of the ramp is -0.1; expected a share"),
        ({"value": 1.0, "start": 100}, "start of the ramp is 100; .* steps / total steps"),
        ({"value": 1.0, "length": 1.5}, "length of the ramp is 1.5"),
        ({"value": 1.0, "length": None}, "length of the ramp is None"),
    ],
)
def test_a_ramp_of_other_values_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(DiversityError, match=said):
        Ramp(**options)


# -- the penalty ---------------------------------------------------------------------------------

DIALS = {
    "weight": (0.2, Ramp(0.3, 0.25, 0.5)),
    "tau": (lambda p: 2.0 * 0.02**p, 0.3),  # from 2 to 0.04: past the 0.1 where the formula changes
    "both": (lambda p: 0.1 + p, lambda p: np.float32(0.5 - 0.5 * p)),
}


@pytest.mark.parametrize("form", ["sum", "mean"])
@pytest.mark.parametrize("name", DIALS)
def test_it_is_the_penalty_of_the_numbers_at_the_progress(name: str, form: str) -> None:
    ensemble = make()
    tau, weight = DIALS[name]
    moving = Diversity(tau, weight, layers="all", form=form)
    assert moving.moves
    for p in np.linspace(0, 1, 9):
        moving.progress = p
        numbers = [float(v(p)) if callable(v) else v for v in (tau, weight)]
        assert moving.current() == pytest.approx(numbers)
        plain = Diversity(*numbers, layers="all", form=form)
        got, expected = moving(ensemble), plain(ensemble)
        assert got.dtype == expected.dtype == torch.float32
        torch.testing.assert_close(got, expected)
        for a, b in zip(gradients(got, ensemble), gradients(expected, ensemble), strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("name", DIALS)
def test_a_loop_that_never_says_the_progress_is_told(name: str) -> None:
    tau, weight = DIALS[name]
    diversity, ensemble = Diversity(tau, weight), make()
    message = r"function of the training's progress, which nothing has set.*diversity\.progress ="
    with pytest.raises(DiversityError, match=message):
        diversity(ensemble)
    with pytest.raises(DiversityError, match=message):
        diversity.current()
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    with pytest.raises(DiversityError, match=message):
        sn.EnsembleLoss(diversity=diversity)(ensemble(x), y, ensemble)
    with pytest.raises(DiversityError, match=message):
        ensemble.backward(x, y, sn.EnsembleLoss(diversity=diversity))


def test_numbers_need_no_progress_and_ignore_it() -> None:
    diversity, ensemble = Diversity(0.2, 0.3), make()
    expected = diversity(ensemble)
    for progress in (0, 0.5, 1, None):
        diversity.progress = progress
        assert torch.equal(diversity(ensemble), expected)
    assert not diversity.moves


@pytest.mark.parametrize("progress", [-0.1, 1.01, 7, float("nan"), "0.5", True])
def test_a_progress_outside_its_range_is_refused(progress: object) -> None:
    with pytest.raises(DiversityError, match=r"progress is .*; expected a number from 0 to 1"):
        Diversity().progress = progress  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tau": Ramp(0.5, start=0.5)}, r"tau \(τ\) at progress 0.25 is 0.0; expected .* > 0"),
        ({"tau": lambda p: None}, r"tau \(τ\) at progress 0.25 is None"),
        ({"weight": lambda p: -1}, r"weight \(λ\) at progress 0.25 is -1; expected .* ≥ 0"),
        ({"weight": lambda p: float("inf")}, "at progress 0.25 is inf"),
    ],
)
def test_a_function_that_leaves_the_range_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(DiversityError, match=said):
        Diversity(**options).progress = 0.25


def test_settings_may_be_changed_by_hand_between_steps() -> None:
    diversity, ensemble = Diversity(0.1, 1.0), make()
    diversity.tau, diversity.weight = 0.5, 2
    torch.testing.assert_close(diversity(ensemble), Diversity(0.5, 2.0)(ensemble))
    diversity.progress = 0.5
    diversity.weight = Ramp(1.0, length=1.0)
    torch.testing.assert_close(diversity(ensemble), Diversity(0.5, 0.5)(ensemble))
    with pytest.raises(DiversityError, match="expected a finite number > 0"):
        diversity.tau = 0.0
    with pytest.raises(DiversityError, match="expected a finite number ≥ 0"):
        diversity.weight = -1.0


def test_a_weight_that_is_zero_for_now_is_a_penalty_of_zero() -> None:
    ensemble, loss_fn = make(), sn.EnsembleLoss(diversity=Diversity(weight=Ramp(1.0, start=0.5)))
    assert loss_fn.diversity is not None
    loss_fn.diversity.progress = 0.0
    x, y = torch.randn(8, 4), torch.arange(8) % 3
    loss = loss_fn(ensemble(x), y, ensemble)
    assert float(loss.detach()) == float(loss_fn.task_loss)  # type: ignore[arg-type]
    assert float(loss_fn.penalty_loss) == 0  # type: ignore[arg-type]


def test_copies_and_pickles_go_on_with_their_progress() -> None:
    diversity, ensemble = Diversity(weight=Ramp(1.0, length=1.0)), make()
    diversity.progress = 0.5
    for other in (pickle.loads(pickle.dumps(diversity)), copy.deepcopy(diversity)):
        assert torch.equal(other(ensemble), diversity(ensemble))
        other.progress = 1.0
        torch.testing.assert_close(other(ensemble), 2 * diversity(ensemble))


@pytest.fixture
def dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("form", ["sum", "mean"])
def test_a_compiled_graph_follows_the_progress(form: str) -> None:
    ensemble = make()
    diversity = Diversity(lambda p: 2.0 * 0.02**p, Ramp(0.3, 0.1, 0.5), layers="all", form=form)
    graphs = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda: diversity(ensemble), backend=backend, fullgraph=True)
    for step in range(20):
        diversity.progress = step / 20
        got, expected = compiled(), diversity(ensemble)
        torch.testing.assert_close(got, expected)
        for a, b in zip(gradients(got, ensemble), gradients(expected, ensemble), strict=True):
            torch.testing.assert_close(a, b)
    assert len(graphs) <= 2  # one of the first step, which chooses the layers
