"""Temperature scaling: optimum against a fine search, data without one, calibrated NLL."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar
from tests.evaluation.draws import draw

from sigmanens import evaluation as ev
from sigmanens.errors import InputError, SigmaNensWarning
from sigmanens.evaluation.calibration import search_temperature

problems = st.builds(
    draw,
    samples=st.integers(1, 60),
    classes=st.integers(2, 6),
    scale=st.floats(0.05, 30.0),
    seed=st.integers(0, 10**6),
    temperature=st.floats(0.1, 10.0),
)


def nll_at(log_probs: torch.Tensor, labels: torch.Tensor, temperature: float) -> float:
    return ev.nll(ev.apply_temperature(log_probs, temperature), labels)


@given(problems)
@settings(max_examples=60)
def test_no_other_temperature_is_better_on_the_fitting_data(problem) -> None:
    fitted, why = search_temperature(*problem)
    if why:
        # No minimum: the NLL only falls towards the temperature named.
        steps = [1e-3, 1e-2, 0.1, 1.0] if "falls as T goes to 0" in why else [1e6, 1e4, 100.0, 1.0]
        nlls = [nll_at(*problem, t) for t in steps]
        assert fitted == 1
        assert all(a <= b + 1e-12 for a, b in itertools.pairwise(nlls))
        return
    best = nll_at(*problem, fitted)
    for factor in (1e-3, 0.5, 0.9, 0.999, 1.001, 1.1, 2.0, 1e3):
        assert best <= nll_at(*problem, fitted * factor) + 1e-12
    assert best <= nll_at(*problem, 1.0) + 1e-12


def test_a_weight_counts_as_so_many_samples() -> None:
    generator = torch.Generator().manual_seed(0)
    log_p = torch.log_softmax(2 * torch.randn(60, 4, generator=generator), 1)
    labels = torch.randint(4, (60,), generator=generator)
    labels[:40] = log_p[:40].argmax(1)
    times = torch.arange(60) % 3 + 1
    rows = torch.arange(60).repeat_interleave(times)
    expected = ev.fit_temperature(log_p[rows], labels[rows])
    assert ev.fit_temperature(log_p, labels, times) == pytest.approx(expected)
    assert ev.fit_temperature(log_p, labels) != pytest.approx(expected, rel=1e-3)
    with pytest.raises(InputError, match=r"weights have shape \(60,\), 20 of them not above 0"):
        ev.fit_temperature(log_p, labels, (times - 1).float())


@given(problems, st.floats(0.02, 50.0))
@settings(max_examples=40)
def test_most_probable_class_and_normalisation_survive(problem, temperature) -> None:
    log_probs, _ = problem
    tempered = ev.apply_temperature(log_probs, temperature)
    assert torch.equal(tempered.argmax(1), log_probs.argmax(1))
    torch.testing.assert_close(
        tempered.exp().sum(1), torch.ones(len(log_probs), dtype=torch.float64)
    )


@pytest.mark.parametrize("planted", [0.25, 0.5, 1.0, 2.0, 8.0])
def test_planted_temperature_is_recovered(planted: float) -> None:
    log_probs, labels = draw(20_000, 5, seed=1, temperature=1 / planted)
    assert ev.fit_temperature(log_probs, labels) == pytest.approx(planted, rel=0.03)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1.0, 100.0, 1e4])
@pytest.mark.parametrize("flipped", [0.1, 0.5])
def test_optimum_agrees_with_an_independent_search(
    scale: float, flipped: float, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(300, 6, generator=generator, dtype=torch.float64)
    labels = torch.distributions.Categorical(logits=3 * logits).sample()
    noise = torch.rand(300, generator=generator) < flipped
    labels = torch.where(noise, torch.randint(5, (300,), generator=generator), labels)  # never 5
    log_probs = (scale * logits).to(dtype).log_softmax(1)

    def objective(theta: float) -> float:
        return F.cross_entropy(log_probs.double() / math.exp(theta), labels).item()

    places = [(low, low + 8) for low in range(-24, 24, 6)]
    found = min(
        (
            minimize_scalar(objective, bounds=b, method="bounded", options={"xatol": 1e-10})
            for b in places
        ),
        key=lambda result: result.fun,
    )
    fitted = ev.fit_temperature(log_probs, labels)
    assert fitted == pytest.approx(math.exp(found.x), rel=1e-4)
    assert nll_at(log_probs, labels, fitted) == pytest.approx(found.fun, abs=1e-9)


def test_cosine_logits_have_an_optimum_below_a_hundredth() -> None:
    generator = torch.Generator().manual_seed(0)
    features, classes = 256, 20
    prototypes = F.normalize(torch.randn(classes, features, generator=generator), dim=1)
    labels = torch.randint(classes, (600,), generator=generator)
    noise = torch.randn(600, features, generator=generator) / features**0.5
    cosines = F.normalize(0.2 * prototypes[labels] + noise, dim=1) @ prototypes.T
    log_probs = (cosines / 10).log_softmax(1)
    fitted = ev.fit_temperature(log_probs, labels)
    assert 1e-4 < fitted < 5e-3
    assert nll_at(log_probs, labels, fitted) < nll_at(log_probs, labels, 0.01) - 0.1


def test_logits_of_ten_thousand_with_errors_have_an_optimum() -> None:
    logits = torch.zeros(10, 3, dtype=torch.float64)
    logits[:, 0] = 1e4
    labels = torch.tensor([0] * 8 + [1, 2])
    fitted = ev.fit_temperature(torch.log_softmax(logits, 1), labels)
    # softmax(1e4/T, 0, 0) = 0.8: T = 1e4 / log(8)
    assert fitted == pytest.approx(1e4 / math.log(8), rel=1e-9)


@pytest.mark.parametrize(
    ("log_probs", "labels", "why"),
    [
        (torch.tensor([[0.6, 0.4], [0.3, 0.7]]).log(), [0, 1], "every sample is classified right"),
        (torch.tensor([[0.0, -math.inf], [0.0, -800.0]]), [0, 0], "every sample is classified"),
        (torch.tensor([[0.4, 0.4, 0.2], [0.5, 0.3, 0.2]]).log(), [1, 0], "every sample is"),
        (torch.tensor([[0.6, 0.4], [0.3, 0.7]]).log(), [1, 0], "no more probable than by chance"),
        (torch.tensor([[-30.0, 0.0]]).log_softmax(1), [0], "a training that has diverged"),
    ],
)
def test_data_without_an_optimum_leave_the_temperature_at_1_and_say_why(
    log_probs: torch.Tensor, labels: list[int], why: str
) -> None:
    with pytest.warns(SigmaNensWarning, match=f"set no temperature, which stays at 1.*{why}"):
        assert ev.fit_temperature(log_probs, torch.tensor(labels)) == 1


def test_a_lead_by_rounding_is_none() -> None:
    # In float32 the two classes differ by rounding alone; T = 1e-7 would be no calibration.
    log_probs = torch.tensor([[3.0, 0.1, 0.0], [1.0, 1.0 + 2e-7, 0.0]]).log_softmax(1)
    assert log_probs[1, 1] > log_probs[1, 0]
    with pytest.warns(SigmaNensWarning, match="every sample is classified right"):
        assert ev.fit_temperature(log_probs, torch.tensor([0, 0])) == 1


def test_uniform_and_one_hot_predictions_leave_the_temperature_at_1() -> None:
    uniform = torch.full((5, 4), 0.25).log()
    assert ev.fit_temperature(uniform, torch.tensor([0, 1, 2, 3, 0])) == 1
    one_hot = torch.tensor([[0.0, -math.inf], [-math.inf, 0.0]])
    assert ev.fit_temperature(one_hot, torch.tensor([0, 1])) == 1


def test_excluded_classes_do_not_disturb_the_fit() -> None:
    log_probs, labels = draw(500, 3, seed=3, temperature=0.5)
    widened = torch.cat([log_probs, torch.full((500, 1), -math.inf)], 1)
    assert ev.fit_temperature(widened, labels) == pytest.approx(
        ev.fit_temperature(log_probs, labels), rel=1e-9
    )
    assert ev.apply_temperature(widened, 2.0)[:, 3].eq(-math.inf).all()


def test_label_of_probability_zero_is_refused_by_the_fit_and_infinite_in_the_score() -> None:
    log_probs = torch.tensor([[0.0, -math.inf], [-0.7, -0.7]]).log_softmax(1)
    with pytest.raises(InputError, match="1 of 2 labels have probability 0"):
        ev.fit_temperature(log_probs, torch.tensor([1, 0]))
    assert ev.calibrated_nll(log_probs, torch.tensor([1, 0])) == math.inf


def test_calibrated_nll_undoes_over_confidence() -> None:
    log_probs, labels = draw(4000, 5, seed=4)
    sharpened = torch.log_softmax(log_probs / 0.3, 1)
    truth = ev.nll(log_probs, labels)
    assert ev.nll(sharpened, labels) > truth + 0.5
    assert ev.calibrated_nll(sharpened, labels) == pytest.approx(truth, abs=2e-3)
    # T comes from other samples, so the score cannot be better than T fitted on all of them.
    best = nll_at(sharpened, labels, ev.fit_temperature(sharpened, labels))
    assert ev.calibrated_nll(sharpened, labels) > best


def test_calibrated_nll_fits_on_the_other_folds_only() -> None:
    log_probs, labels = draw(7, 3, seed=5, temperature=0.5)
    # Leave-one-out has a single split, whatever the order.
    expected = 0.0
    for i in range(7):
        rest = [j for j in range(7) if j != i]
        temperature = ev.fit_temperature(log_probs[rest], labels[rest])
        expected += nll_at(log_probs[[i]], labels[[i]], temperature) / 7
    assert ev.calibrated_nll(log_probs, labels, folds=7, repeats=1) == pytest.approx(expected)


def test_calibrated_nll_repeats_unless_given_a_generator() -> None:
    torch.manual_seed(0)
    log_probs, labels = draw(101, 4, seed=6, temperature=0.5)
    state = torch.get_rng_state()
    first = ev.calibrated_nll(log_probs, labels)
    assert ev.calibrated_nll(log_probs, labels) == first
    assert torch.equal(torch.get_rng_state(), state)
    other = ev.calibrated_nll(log_probs, labels, generator=torch.Generator().manual_seed(1))
    assert other != first
    assert other == pytest.approx(first, abs=0.05)


@pytest.mark.parametrize(("folds", "repeats"), [(1, 5), (5, 5), (2, 0)])
def test_splits_are_checked(folds: int, repeats: int) -> None:
    log_probs, labels = draw(4, 3)
    with pytest.raises(InputError, match=r"folds is|repeats is"):
        ev.calibrated_nll(log_probs, labels, folds, repeats)
