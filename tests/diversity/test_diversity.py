"""The diversity penalty: against loops, in both forms, in low precision, across its life."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import pickle
import warnings
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from tests.oracles import diversity as oracle
from torch import Tensor, nn

import sigmanens as sn
from sigmanens.diversity.penalty import Diversity, gap, log_softmax_sum
from sigmanens.errors import DiversityError, InputError, SigmaNensError
from sigmanens.training.loss import EnsembleLoss

TAUS = (0.02, 0.1, 0.5, 1.0, 5.0)


def base() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(4, 6),
        nn.BatchNorm1d(6),
        nn.ReLU(),
        nn.Linear(6, 5),
        nn.LayerNorm(5),
        nn.Linear(5, 3),
    )


def make(members: int = 4, **options: object) -> sn.SigmaEnsemble:
    return sn.convert(base(), members, **({"init": "normal"} | options))  # type: ignore[arg-type]


def logits_of(ensemble: sn.SigmaEnsemble) -> list[Tensor]:
    return [m.scale_logit for m in ensemble.sigma_norms().values()]


def value_of(scalar: Tensor) -> float:
    return float(scalar.detach())


def as_lists(ensemble: sn.SigmaEnsemble) -> list[list[list[float]]]:
    return [g.tolist() for g in logits_of(ensemble)]


# -- against the oracle --------------------------------------------------------------------------


@pytest.mark.parametrize("members", [2, 3, 4, 8])
@pytest.mark.parametrize("tau", TAUS)
def test_penalty_is_the_sum_over_layers_channels_and_members(members: int, tau: float) -> None:
    ensemble = make(members).double()
    got = Diversity(tau, 1e-2, layers="all")(ensemble)
    assert got.shape == ()
    expected = oracle.penalty(as_lists(ensemble), tau, 1e-2)
    assert value_of(got) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("tau", TAUS)
def test_gradient_is_the_formula(tau: float) -> None:
    ensemble = make().double()
    Diversity(tau, 1e-2, layers="all")(ensemble).backward()
    expected = oracle.penalty_gradient(as_lists(ensemble), tau, 1e-2)
    for gamma, rows in zip(logits_of(ensemble), expected, strict=True):
        torch.testing.assert_close(
            gamma.grad, torch.tensor(rows, dtype=torch.float64), rtol=1e-10, atol=1e-14
        )


@pytest.mark.parametrize("form", ["sum", "mean"])
@pytest.mark.parametrize("tau", TAUS)
def test_gradient_agrees_with_finite_differences(form: str, tau: float) -> None:
    ensemble = make(3).double()
    diversity = Diversity(tau, 0.7, layers="all", form=form)
    diversity(ensemble).backward()
    step = 1e-5
    for gamma in logits_of(ensemble):
        assert gamma.grad is not None
        for m, i in itertools.product(range(3), (0, 4)):
            with torch.no_grad():
                before = value_of(gamma[m, i])
                values = []
                for sign in (1, -1):
                    gamma[m, i] = before + sign * step
                    values.append(value_of(diversity(ensemble)))
                gamma[m, i] = before
            numeric = (values[0] - values[1]) / (2 * step)
            assert float(gamma.grad[m, i]) == pytest.approx(numeric, rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("tau", TAUS)
def test_closed_form_with_the_soft_maximum(tau: float) -> None:
    ensemble = make().double()
    members, layers = 4, as_lists(ensemble)
    gaps = oracle.gaps(layers, tau)
    closed = -sum(members * math.log(members) + members / tau * g for g in gaps)
    assert value_of(Diversity(tau, 1.0, layers="all")(ensemble)) == pytest.approx(closed, rel=1e-12)
    bounded = Diversity(tau, 1.0, layers="all", form="mean")(ensemble)
    assert value_of(bounded) == pytest.approx(-sum(gaps) / len(gaps), rel=1e-10, abs=1e-15)


def test_one_softmax_serves_all_layers() -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        softmaxes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            Count.softmaxes += "log_softmax" in str(func)
            return func(*args, **(kwargs or {}))

    blocks = [nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(6)]
    ensemble = sn.convert(nn.Sequential(*blocks), 3, head="shared")
    with Count():
        Diversity(layers="all")(ensemble)
    assert Count.softmaxes == 1


def test_a_norm_with_several_dimensions_counts_each_of_its_scales() -> None:
    ensemble = sn.convert(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm((2, 3))), 4, head="shared")
    diversity = Diversity(0.3, 1.0)
    gamma = logits_of(ensemble)[0].detach().double().flatten(1)
    assert value_of(diversity(ensemble)) == pytest.approx(
        oracle.penalty([gamma.tolist()], 0.3, 1.0), rel=1e-6
    )


def test_a_tied_norm_counts_once() -> None:
    norm = nn.LayerNorm(4)
    ensemble = sn.convert(
        nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 4), norm), 3, head="shared"
    )
    (gamma,) = logits_of(ensemble)
    assert value_of(Diversity(0.1, 1.0, layers="all")(ensemble)) == pytest.approx(
        oracle.penalty([gamma.tolist()], 0.1, 1.0), rel=1e-5
    )


def test_only_the_chosen_layers_count() -> None:
    ensemble = make().double()
    got = Diversity(0.1, 1.0, layers=["4"])(ensemble)
    assert value_of(got) == pytest.approx(
        oracle.penalty(as_lists(ensemble)[1:], 0.1, 1.0), rel=1e-12
    )
    got.backward()
    first, second = logits_of(ensemble)
    assert first.grad is None
    assert second.grad is not None


# -- the bounded form -------------------------------------------------------------


@pytest.mark.parametrize("tau", TAUS)
def test_the_forms_differ_by_a_constant_if_the_weights_match(tau: float) -> None:
    ensemble = make().double()
    lam, members, channels = 1e-2, 4, 6 + 5
    sums = Diversity(tau, lam, layers="all")
    means = Diversity(tau, lam * members * channels / tau, layers="all", form="mean")
    a, b = sums(ensemble), means(ensemble)
    constant = -lam * channels * members * math.log(members)
    assert value_of(a - b) == pytest.approx(constant, rel=1e-12)
    gradients = [torch.autograd.grad(loss, logits_of(ensemble)) for loss in (a, b)]
    for x, y in zip(*gradients, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-14)


def test_the_bounded_form_transfers_between_sizes() -> None:
    # The same scales repeated three times over: the mean stays, the sum is three times as large.
    small = sn.convert(nn.Sequential(nn.Linear(4, 5), nn.LayerNorm(5)), 4, head="shared")
    large = sn.convert(nn.Sequential(nn.Linear(4, 15), nn.LayerNorm(15)), 4, head="shared")
    with torch.no_grad():
        logits_of(large)[0].copy_(logits_of(small)[0].repeat(1, 3))
    mean, total = Diversity(0.1, 1.0, form="mean"), Diversity(0.1, 1.0)
    torch.testing.assert_close(mean(small), mean(large))
    torch.testing.assert_close(3 * total(small), total(large))


# -- properties ----------------------------------------------------------------------------------

scales = arrays(
    np.float64,
    st.tuples(st.integers(2, 6), st.integers(1, 5)),
    elements=st.floats(0, 1, allow_subnormal=False),
)
temperatures = st.floats(1e-3, 1e3)


@given(scales, temperatures)
def test_gap_is_at_least_0_and_below_1(s: np.ndarray, tau: float) -> None:
    for dtype, slack in ((torch.float64, 1e-15), (torch.float32, 2e-7)):
        value = gap(torch.from_numpy(s).to(dtype), tau)
        assert value.shape == (s.shape[1],)
        assert bool((value >= -slack).all())
        assert bool((value < 1).all())


@given(scales, temperatures)
def test_gap_equals_its_definition(s: np.ndarray, tau: float) -> None:
    got = gap(torch.from_numpy(s), tau).tolist()
    expected = [oracle.soft_maximum(c, tau) - sum(c) / len(c) for c in s.T.tolist()]
    assert got == pytest.approx(expected, abs=1e-15 + 4e-16 * max(tau, 1.0))


@given(scales, temperatures, st.randoms(use_true_random=False))
def test_penalty_does_not_depend_on_the_order_of_members_or_channels(
    s: np.ndarray, tau: float, random: object
) -> None:
    values = torch.from_numpy(s)
    rows, columns = list(range(s.shape[0])), list(range(s.shape[1]))
    random.shuffle(rows)  # type: ignore[attr-defined]
    random.shuffle(columns)  # type: ignore[attr-defined]
    shuffled = values[rows][:, columns]
    torch.testing.assert_close(log_softmax_sum(values, tau), log_softmax_sum(shuffled, tau))
    torch.testing.assert_close(gap(values, tau).mean(), gap(shuffled, tau).mean())


@given(scales, temperatures)
def test_penalty_is_highest_where_members_are_equal(s: np.ndarray, tau: float) -> None:
    values = torch.from_numpy(s)
    equal = torch.full_like(values, 0.5)
    top = -s.shape[1] * s.shape[0] * math.log(s.shape[0])
    assert float(log_softmax_sum(equal, tau)) == pytest.approx(top, rel=1e-12)
    assert value_of(log_softmax_sum(values, tau)) <= top + 1e-9


@given(scales, temperatures)
def test_descent_lifts_a_member_exactly_if_it_lies_above_the_soft_maximum(
    s: np.ndarray, tau: float
) -> None:
    values = torch.from_numpy(s).requires_grad_()
    (gradient,) = torch.autograd.grad(log_softmax_sum(values, tau), values)
    for i, channel in enumerate(s.T.tolist()):
        level = oracle.soft_maximum(channel, tau)
        for m, value in enumerate(channel):
            if abs(value - level) > 1e-6:
                assert bool(gradient[m, i] < 0) == (value > level)


@settings(max_examples=25)
@given(arrays(np.float64, (4, 3), elements=st.floats(-3, 3)), st.sampled_from(TAUS))
def test_a_step_down_the_gradient_widens_the_gap(gamma: np.ndarray, tau: float) -> None:
    start = torch.from_numpy(gamma).requires_grad_()
    loss = log_softmax_sum(torch.sigmoid(start), tau)
    (gradient,) = torch.autograd.grad(loss, start)
    after = start.detach() - 1e-4 * gradient / (1 + gradient.norm())
    assert float(log_softmax_sum(torch.sigmoid(after), tau)) <= float(loss.detach()) + 1e-12


# -- precision -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["sum", "mean"])
@pytest.mark.parametrize("tau", [1e-3, 1e3])
def test_extreme_temperatures_stay_finite(tau: float, form: str) -> None:
    ensemble = make()
    with torch.no_grad():
        for gamma in logits_of(ensemble):
            gamma.mul_(20)  # saturated: σ from 0 to 1
    loss = Diversity(tau, 1.0, layers="all", form=form)(ensemble)
    loss.backward()
    assert bool(torch.isfinite(loss))
    assert all(bool(torch.isfinite(g.grad).all()) for g in logits_of(ensemble))


def test_gap_keeps_its_digits_in_float32_at_high_temperature() -> None:
    # var(s) / (2 τ) ≈ 2e-5 is a difference of numbers around log 4 · τ ≈ 1386.
    s = torch.rand(4, 50)
    exact = gap(s.double(), 1e3)
    assert float(exact.mean()) < 1e-4
    torch.testing.assert_close(gap(s, 1e3).double(), exact, rtol=2e-2, atol=1e-7)


@pytest.mark.parametrize("form", ["sum", "mean"])
def test_autocast_leaves_the_penalty_in_float32(form: str) -> None:
    ensemble = make()
    diversity = Diversity(0.1, 1e-2, layers="all", form=form)
    expected = diversity(ensemble)
    with torch.autocast("cpu", torch.bfloat16):
        got = diversity(ensemble)
    assert got.dtype == torch.float32
    assert torch.equal(got, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_precision_ensemble_has_the_same_penalty(dtype: torch.dtype) -> None:
    ensemble = make()
    expected = value_of(Diversity(0.1, layers="all")(ensemble))
    ensemble.to(dtype)
    loss = Diversity(0.1, layers="all")(ensemble)
    assert loss.dtype == torch.float32
    assert value_of(loss) == expected
    loss.backward()
    assert all(g.grad is not None and g.grad.dtype == torch.float32 for g in logits_of(ensemble))


# -- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tau", [0, 0.0, -1.0, math.nan, math.inf, "0.1", True])
def test_a_temperature_that_is_none_is_refused(tau: object) -> None:
    with pytest.raises(DiversityError, match=r"tau \(τ\) is .*; expected a finite number > 0"):
        Diversity(tau=tau)  # type: ignore[arg-type]


@pytest.mark.parametrize("weight", [-1e-9, math.nan, math.inf, "1e-2", None, True])
def test_a_weight_that_is_none_is_refused(weight: object) -> None:
    with pytest.raises(DiversityError, match=r"weight \(λ\) is .*; expected a finite number ≥ 0"):
        Diversity(weight=weight)  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers() -> None:
    diversity = Diversity(np.float32(0.5), np.float64(0.25))
    assert (type(diversity.tau), diversity.tau) == (float, 0.5)
    assert (type(diversity.weight), diversity.weight) == (float, 0.25)


def test_an_unknown_form_is_refused() -> None:
    with pytest.raises(DiversityError, match="form is 'max'; expected 'sum' or 'mean'"):
        Diversity(form="max")


def test_one_member_has_no_diversity() -> None:
    with pytest.raises(DiversityError, match=r"one member.*members ≥ 2, or diversity=None"):
        Diversity()(make(1))


def test_linear_scales_have_no_penalty() -> None:
    with pytest.raises(DiversityError, match=r"'1' has scale='linear'.*diversity=None"):
        Diversity()(make(scale="linear"))


def test_layers_that_select_nothing_are_refused() -> None:
    with pytest.raises(DiversityError, match=r"selects no converted norm.*are 1, 4"):
        Diversity(layers="stage9")(make())


@pytest.mark.parametrize("thing", [None, base(), torch.zeros(2), "ensemble"])
def test_something_else_than_an_ensemble_is_named(thing: object) -> None:
    with pytest.raises(InputError, match="in the place of the ensemble"):
        Diversity()(thing)  # type: ignore[arg-type]


def test_errors_derive_from_one_base_and_the_built_in() -> None:
    assert issubclass(DiversityError, SigmaNensError)
    assert issubclass(DiversityError, ValueError)


def test_repr_shows_the_settings() -> None:
    assert repr(Diversity(0.25, 1e-3)) == (
        "Diversity(tau=0.25, weight=0.001, layers='auto', form='sum')"
    )


# -- the symmetric start -------------------------------------------------------------------------


def symmetric_ensemble(members: int = 3) -> sn.SigmaEnsemble:
    ensemble = sn.convert(base(), members, init="paper", head="copy")
    assert sn.diversity.symmetric(ensemble)
    return ensemble


def train(ensemble: sn.SigmaEnsemble, steps: int = 5) -> None:
    loss_fn = EnsembleLoss(diversity=Diversity(0.1, 1e-2, layers="all"))
    optimizer = torch.optim.SGD(sn.param_groups(ensemble, lr=0.05), momentum=0.9)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(16, 4, generator=generator)
    y = torch.randint(3, (16,), generator=generator)
    ensemble.train()
    for _ in range(steps):
        optimizer.zero_grad()
        loss_fn(ensemble(x), y, ensemble).backward()
        optimizer.step()


def test_a_symmetric_start_is_reported_and_stays_symmetric() -> None:
    ensemble = symmetric_ensemble()
    before = logits_of(ensemble)[0].detach().clone()
    with pytest.warns(sn.SigmaNensWarning, match="they are one model"):
        train(ensemble)
    assert not torch.equal(before, logits_of(ensemble)[0])  # it did train
    assert sn.diversity.symmetric(ensemble)
    assert sn.diversity.cosine(ensemble) == pytest.approx(1)
    probs = ensemble.predict(torch.randn(8, 4)).member_probs
    assert float((probs - probs[:1]).abs().max()) == 0


def test_the_penalty_has_no_gradient_at_a_symmetric_point() -> None:
    ensemble = symmetric_ensemble()
    with pytest.warns(sn.SigmaNensWarning):
        Diversity(0.1, 1.0, layers="all")(ensemble).backward()
    for gamma in logits_of(ensemble):
        torch.testing.assert_close(gamma.grad, torch.zeros_like(gamma), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {"init": "preserve", "head": "copy"},
        {"init": "preserve", "head": "shared"},
        {"init": "paper", "head": "fresh"},
        {"init": "normal", "head": "fresh"},
    ],
    ids=str,
)
def test_other_starts_are_not_symmetric_and_members_part(options: dict[str, str]) -> None:
    ensemble = sn.convert(base(), 3, **options)  # type: ignore[arg-type]
    assert not sn.diversity.symmetric(ensemble)
    train(ensemble)  # without a warning, which would be an error
    probs = ensemble.predict(torch.randn(8, 4)).member_probs
    for a, b in itertools.combinations(range(3), 2):
        assert float((probs[a] - probs[b]).abs().max()) > 1e-4


def test_the_warning_comes_once_per_ensemble_and_not_without_weight() -> None:
    ensemble = symmetric_ensemble()
    Diversity(weight=0.0, layers="all")(ensemble)
    diversity = Diversity(layers="all")
    with pytest.warns(sn.SigmaNensWarning) as caught:
        diversity(ensemble)
    diversity(ensemble)  # a second warning would be an error
    assert len(caught) == 1
    assert caught[0].filename == __file__  # points at the caller


# -- its life: several ensembles, copies, pickles, compilation -----------------------------------


def test_one_penalty_serves_several_ensembles() -> None:
    diversity = Diversity(0.1, 1.0, layers="all")
    ensembles = [make(2).double(), make(3).double()]
    for ensemble in [*ensembles, *ensembles]:
        assert value_of(diversity(ensemble)) == pytest.approx(
            oracle.penalty(as_lists(ensemble), 0.1, 1.0), rel=1e-12
        )


def test_the_penalty_keeps_neither_an_ensemble_nor_its_layers_alive() -> None:
    # So that nothing is left to be mistaken for a new ensemble at the same address.
    diversity = Diversity(layers="all")
    ensemble = make()
    diversity(ensemble)
    watched = weakref.ref(ensemble)
    layer = weakref.ref(next(iter(ensemble.sigma_norms().values())))
    del ensemble
    gc.collect()
    assert watched() is None
    assert layer() is None


def test_a_copied_ensemble_gets_gradients_of_its_own() -> None:
    loss_fn = EnsembleLoss(diversity=Diversity(0.1, 1.0, layers="all"))
    ensemble = make()
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    loss_fn(ensemble(x), y, ensemble)
    both = copy.deepcopy({"model": ensemble, "loss": loss_fn})
    other, other_loss = both["model"], both["loss"]
    assert isinstance(other_loss, EnsembleLoss)
    assert isinstance(other, sn.SigmaEnsemble)
    with torch.no_grad():
        for gamma in logits_of(other):
            gamma.mul_(2)
    for copied in (loss_fn, other_loss):
        assert copied.diversity is not None
        other.zero_grad()
        value = copied.diversity(other)
        value.backward()
        assert value_of(value) == pytest.approx(oracle.penalty(as_lists(other), 0.1, 1.0), rel=1e-5)
        assert all(float(g.grad.abs().sum()) > 0 for g in logits_of(other))
    assert all(g.grad is None for g in logits_of(ensemble))


def test_pickle_keeps_the_settings_and_drops_the_layers() -> None:
    diversity = Diversity(0.2, 0.3, layers="[14]", form="mean")
    ensemble = make()
    expected = value_of(diversity(ensemble))
    data = pickle.dumps(diversity)
    assert len(data) < 500
    again = pickle.loads(data)
    assert repr(again) == repr(diversity)
    assert value_of(again(ensemble)) == expected


def test_other_layers_and_replaced_layers_count_from_the_next_call_on() -> None:
    ensemble = make().double()
    diversity = Diversity(0.1, 1.0, layers="all")
    diversity(ensemble)
    diversity.layers = "^4$"
    assert value_of(diversity(ensemble)) == pytest.approx(
        oracle.penalty(as_lists(ensemble)[1:], 0.1, 1.0), rel=1e-12
    )
    ensemble.network[4] = copy.deepcopy(ensemble.network[4])  # as adapters do that wrap layers
    with torch.no_grad():
        ensemble.network[4].scale_logit.mul_(2)
    assert value_of(diversity(ensemble)) == pytest.approx(
        oracle.penalty(as_lists(ensemble)[1:], 0.1, 1.0), rel=1e-12
    )


def test_a_wrapped_ensemble_is_found() -> None:
    class Wrapper(nn.Module):  # as DistributedDataParallel wraps
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    ensemble = make()
    diversity = Diversity(layers="all")
    expected = diversity(ensemble)
    assert torch.equal(diversity(Wrapper(ensemble)), expected)  # type: ignore[arg-type]
    compiled = torch.compile(ensemble, backend="eager")
    assert torch.equal(diversity(compiled), expected)  # type: ignore[arg-type]
    assert diversity.chosen(compiled)[1] == ["1", "4"]  # type: ignore[arg-type]


@pytest.fixture
def dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("dynamo")
@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
@pytest.mark.parametrize("form", ["sum", "mean"])
def test_compiles_into_one_graph(form: str, warm: bool) -> None:
    ensemble = make()
    diversity = Diversity(0.1, 1.0, form=form)
    if warm:
        diversity(ensemble)
    compiled = torch.compile(lambda: diversity(ensemble), fullgraph=True, backend="aot_eager")
    got = compiled()
    torch.testing.assert_close(got, diversity(ensemble))
    gradients = torch.autograd.grad(got, logits_of(ensemble))
    expected = torch.autograd.grad(diversity(ensemble), logits_of(ensemble))
    for x, y in zip(gradients, expected, strict=True):
        torch.testing.assert_close(x, y)
    with torch.no_grad():
        logits_of(ensemble)[0].add_(torch.randn(4, 6))
    torch.testing.assert_close(compiled(), diversity(ensemble))  # scales are no constants
