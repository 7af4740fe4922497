"""OOD: orientation and ties of the measures, meaning of the scores."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score
from tests.evaluation.draws import draw_logits
from tests.oracles import metrics as oracle

from sigmanens import evaluation as ev
from sigmanens.ensemble.prediction import Prediction
from sigmanens.errors import InputError, NonFiniteError

SCORES = [
    "max_softmax",
    "predictive_entropy",
    "expected_entropy",
    "modulation",
    "energy",
    "max_logit",
]

# Small integers, so that most pairs are tied.
score_sets = st.lists(st.integers(-3, 3).map(float), min_size=1, max_size=25)


@given(score_sets, score_sets)
def test_measures_equal_loops_and_scikit_learn_with_ties(inside, outside) -> None:
    a, b = torch.tensor(inside), torch.tensor(outside)
    target = [0] * len(inside) + [1] * len(outside)
    both = inside + outside
    negated = [-x for x in both]
    assert ev.auroc(a, b) == pytest.approx(oracle.auroc(inside, outside), abs=1e-14)
    assert ev.auroc(a, b) == pytest.approx(roc_auc_score(target, both), abs=1e-12)
    assert ev.aupr_out(a, b) == pytest.approx(average_precision_score(target, both), abs=1e-12)
    is_in = [1 - t for t in target]
    assert ev.aupr_in(a, b) == pytest.approx(average_precision_score(is_in, negated), abs=1e-12)
    for tpr in (0.05, 0.5, 0.95, 1.0):
        assert ev.fpr_at_tpr(a, b, tpr) == oracle.fpr_at_tpr(inside, outside, tpr)


@pytest.mark.case("P2")
@given(score_sets, score_sets)
def test_swapping_the_sets_gives_one_minus_auroc(inside, outside) -> None:
    a, b = torch.tensor(inside), torch.tensor(outside)
    assert ev.auroc(a, b) == pytest.approx(1 - ev.auroc(b, a), abs=1e-15)
    assert ev.aupr_in(a, b) == pytest.approx(ev.aupr_out(-b, -a), abs=1e-15)


@pytest.mark.case("P2")
def test_constant_scores_carry_no_information() -> None:
    inside, outside = torch.zeros(30), torch.zeros(10)
    assert ev.auroc(inside, outside) == 0.5
    assert ev.aupr_out(inside, outside) == 0.25
    assert ev.aupr_in(inside, outside) == 0.75
    assert ev.fpr_at_tpr(inside, outside) == 1


@pytest.mark.case("P2")
def test_ood_is_positive_and_high() -> None:
    # Not symmetric in the sets, so that an exchange shows.
    inside, outside = torch.tensor([0.0, 1.0, 2.0, 6.0]), torch.tensor([3.0, 4.0, 5.0, 7.0, 8.0])
    assert ev.auroc(inside, outside) == 17 / 20
    assert ev.fpr_at_tpr(inside, outside) == 0.25
    assert ev.fpr_at_tpr(inside, outside, 0.4) == 0
    perfect = torch.tensor([9.0, 10.0])
    assert ev.auroc(inside, perfect) == ev.aupr_out(inside, perfect) == 1
    assert ev.aupr_in(inside, perfect) == 1
    assert ev.fpr_at_tpr(inside, perfect) == 0


def test_rate_asked_for_is_not_lifted_by_rounding() -> None:
    # 0.07 * 100 = 7.000000000000001 in floating point.
    outside = torch.arange(100.0)
    inside = torch.tensor([92.5, 93.5])
    assert ev.fpr_at_tpr(inside, outside, 0.07) == 0.5
    assert ev.fpr_at_tpr(inside, outside, 0.08) == 1


def test_infinite_scores_have_an_order_and_nan_has_none() -> None:
    inside = torch.tensor([-math.inf, 0.0, math.inf])
    assert ev.auroc(inside, torch.tensor([math.inf])) == 2.5 / 3
    with pytest.raises(NonFiniteError, match="out_scores has 1 NaN"):
        ev.auroc(inside, torch.tensor([math.nan, 1.0]))
    with pytest.raises(InputError, match="in_scores is empty"):
        ev.auroc(torch.zeros(0), inside)
    with pytest.raises(InputError, match=r"in_scores has shape \(1, 3\); expected \(N\)"):
        ev.aupr_in(inside[None], inside)
    for tpr in (0, 1.01, math.nan):
        with pytest.raises(InputError, match="tpr is"):
            ev.fpr_at_tpr(inside, inside, tpr)


@given(
    st.builds(
        draw_logits,
        samples=st.integers(1, 12),
        classes=st.integers(2, 6),
        members=st.integers(1, 5),
        scale=st.floats(0.1, 20),
        seed=st.integers(0, 10**6),
    )
)
@settings(max_examples=50)
def test_scores_are_what_their_names_say(logits) -> None:
    found = ev.ood.scores(logits)
    assert list(found) == SCORES
    members = torch.softmax(logits, 2).tolist()
    mean = oracle.mean_rows(members)
    expected = {
        "max_softmax": [1 - max(row) for row in mean],
        "predictive_entropy": [oracle.entropy(row) for row in mean],
        "expected_entropy": [
            sum(oracle.entropy(m[b]) for m in members) / len(members) for b in range(len(mean))
        ],
        "modulation": [
            sum(oracle.kl(m[b], row) for m in members) / len(members) for b, row in enumerate(mean)
        ],
        "energy": (-logits.exp().sum(2).log().mean(0)).tolist(),
        "max_logit": (-logits.mean(0).max(1).values).tolist(),
    }
    for name, values in expected.items():
        assert found[name].tolist() == pytest.approx(values, abs=1e-10), name
    total = found["expected_entropy"] + found["modulation"]
    torch.testing.assert_close(total, found["predictive_entropy"], rtol=0, atol=1e-12)
    assert (found["modulation"] >= 0).all()


def test_decomposition_agrees_with_the_one_of_a_prediction() -> None:
    logits = draw_logits(50, 6, 4, seed=1)
    found, prediction = ev.ood.scores(logits), Prediction.from_logits(logits)
    torch.testing.assert_close(found["predictive_entropy"], prediction.entropy)
    torch.testing.assert_close(found["expected_entropy"], prediction.expected_entropy)
    torch.testing.assert_close(found["modulation"], prediction.modulation)


@pytest.mark.case("P3")
def test_confident_members_that_contradict_each_other_are_uncertain() -> None:
    logits = torch.tensor([[[100.0, -100.0, -100.0]], [[-100.0, 100.0, -100.0]]])
    found = ev.ood.scores(logits)
    assert found["predictive_entropy"].item() == pytest.approx(math.log(2), abs=1e-12)
    assert found["modulation"].item() == pytest.approx(math.log(2), abs=1e-12)
    assert found["expected_entropy"].item() == pytest.approx(0, abs=1e-12)
    assert found["max_softmax"].item() == pytest.approx(0.5, abs=1e-12)


@pytest.mark.case("P1")
def test_logit_scores_of_members_by_hand() -> None:
    logits = torch.tensor([[[3.0, 0.0]], [[1.0, 4.0]]])
    found = ev.ood.scores(logits)
    energies = [math.log(math.exp(3) + 1), math.log(math.exp(1) + math.exp(4))]
    assert found["energy"].item() == pytest.approx(-sum(energies) / 2)
    assert found["max_logit"].item() == pytest.approx(-2)
    # A common shift of the logits changes them and nothing else.
    shifted = ev.ood.scores(logits + 5)
    assert shifted["energy"].item() == pytest.approx(found["energy"].item() - 5)
    assert shifted["max_logit"].item() == pytest.approx(found["max_logit"].item() - 5)
    for name in SCORES[:4]:
        torch.testing.assert_close(shifted[name], found[name])


@pytest.mark.case("P2")
def test_every_score_rises_on_planted_ood() -> None:
    # Elsewhere logits are smaller and members agree less.
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(1, 400, 5, generator=generator)
    own = torch.randn(4, 400, 5, generator=generator)
    inside = ev.ood.scores(6 * common + 0.5 * own)
    outside = ev.ood.scores(1.5 * common.flip(1) + 1.5 * own.flip(1))
    for name in SCORES:
        assert ev.auroc(inside[name], outside[name]) > 0.7, name


@pytest.mark.case("P4")
def test_one_member_has_no_modulation() -> None:
    found = ev.ood.scores(draw_logits(20, 5, 1, seed=2))
    assert (found["modulation"] == 0).all()
    assert torch.equal(found["predictive_entropy"], found["expected_entropy"])


def test_very_confident_samples_keep_their_order() -> None:
    logits = torch.tensor([[[50.0, 0.0, 0.0], [60.0, 0.0, 0.0], [80.0, 0.0, 0.0]]])
    rest = ev.ood.scores(logits.double())["max_softmax"]
    expected = [2 * math.exp(-gap) for gap in (50, 60, 80)]
    assert rest.tolist() == pytest.approx(expected, rel=1e-9, abs=0)


@pytest.mark.case("P8")
def test_logits_of_ten_thousand_and_excluded_classes_stay_finite() -> None:
    logits = torch.tensor([[[1e4, -1e4, 0.0]], [[-1e4, 1e4, -math.inf]]])
    for name, value in ev.ood.scores(logits).items():
        assert math.isfinite(value.item()), name
