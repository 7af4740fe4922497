"""The threshold below which nothing is answered: its value, and that its promise is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("scipy")

from scipy.stats import beta, binom
from tests.oracles import abstention as oracle

from sigmanens.errors import InputError
from sigmanens.evaluation import fit_abstention
from sigmanens.evaluation.abstention import binomial_cdf, upper_bound


def drawn(n: int, wrong: Callable[[Tensor], Tensor], seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Confidences (n,), uniform, whether each is right, and other confidences (n,)."""
    generator = torch.Generator().manual_seed(seed)
    confidence, other, chance = torch.rand(3, n, generator=generator, dtype=torch.float64)
    return confidence, chance >= wrong(confidence), other


def test_probabilities_and_bounds_are_those_of_scipy() -> None:
    k, n = torch.tensor([0, 3, 7, 0, 5000]), torch.tensor([10, 40, 7, 0, 100_000])
    p = torch.tensor([0.1, 0.05, 0.9, 0.3, 0.05], dtype=torch.float64)
    expected = binom.cdf(k.numpy(), n.numpy(), p.numpy())
    np.testing.assert_allclose(binomial_cdf(k, n, p).numpy(), expected, rtol=1e-7)
    alpha = torch.full((5,), 0.0125, dtype=torch.float64)
    bounds = upper_bound(k, n, alpha).numpy()
    np.testing.assert_allclose(bounds[[2, 3]], 1)
    for i in (0, 1, 4):
        assert bounds[i] == pytest.approx(beta.ppf(1 - 0.0125, k[i] + 1, n[i] - k[i]), rel=1e-7)


def test_by_hand() -> None:
    """The 50 surer of 100 samples are right: 0.9^25 is above δ/4 = 0.0125, 0.9^50 below it."""
    confidence = torch.arange(100, 0, -1) / 100
    rule = fit_abstention(confidence, confidence > 0.5, 0.1, confidence)
    # 50 right opens at 0.0125; with one wrong, P(Binomial(51, 0.1) ≤ 1) = 0.0309 is above it.
    assert (rule.threshold, rule.answered, rule.errors, rule.n) == (pytest.approx(0.51), 50, 0, 100)
    assert rule.abstains(torch.tensor([0.5, 0.51, 0.9])).tolist() == [True, False, False]
    assert rule.lowest_risk == pytest.approx(1 - 0.0125 ** (1 / 50), rel=1e-9)
    assert "at least 0.51: with confidence 0.95 at most 0.1 of these" in str(rule)
    none = fit_abstention(confidence, confidence > 0.5, 0.08, confidence)
    assert none.threshold is None
    assert none.abstains(torch.tensor([1.0])).all()
    assert "the lowest risk that they can promise is 0.084" in str(none)  # 0.08391, rounded up
    assert fit_abstention(confidence, confidence > 0.5, 0.084, confidence).threshold is not None


@pytest.mark.parametrize("n", [7, 60, 1000])
@pytest.mark.parametrize("risk", [0.02, 0.1, 0.4])
def test_against_the_slow_version(n: int, risk: float) -> None:
    for seed, sharpness in enumerate((0.05, 0.3, 1.0)):
        confidence, correct, others = drawn(n, lambda c: sharpness * (1 - c), seed)  # noqa: B023
        confidence = (50 * confidence).round() / 50  # some are equal
        rule = fit_abstention(confidence, correct, risk, others)
        given = (confidence.tolist(), correct.tolist(), risk, others.tolist(), 0.05)
        threshold, lowest = oracle.threshold(*given)
        assert rule.threshold == threshold
        assert rule.lowest_risk == pytest.approx(lowest, rel=1e-7)
        at_least = confidence >= (2 if threshold is None else threshold)
        assert (rule.answered, rule.errors) == (at_least.sum(), (at_least & ~correct).sum())


def level(c: Tensor) -> Tensor:
    """Errors as often everywhere, a little too often: every answer breaks the promise."""
    return torch.full_like(c, 0.101)


def uneven(c: Tensor) -> Tensor:
    """The surest tenth errs often, the next 40 % never, the others in half of the cases."""
    return torch.where(c > 0.9, 0.2, torch.where(c > 0.5, 0.0, 0.5))


def true_risk(wrong: Callable[[Tensor], Tensor], threshold: float) -> float:
    fine = torch.linspace(threshold, 1, 100_001, dtype=torch.float64)
    return wrong(fine).mean().item()


@pytest.mark.parametrize("wrong", [level, uneven])
def test_the_promise_is_kept(wrong: Callable[[Tensor], Tensor]) -> None:
    """Over draws of the labelled samples, the true risk is above 0.1 with a chance of δ at most."""
    delta, draws = 0.2, 120
    rules = [fit_abstention(c, ok, 0.1, o, delta) for c, ok, o in
             (drawn(400, wrong, seed) for seed in range(draws))]  # fmt: skip
    answering = [rule.threshold for rule in rules if rule.threshold is not None]
    broken = sum(true_risk(wrong, threshold) > 0.1 for threshold in answering)
    assert broken / draws <= delta + 3 * (delta * (1 - delta) / draws) ** 0.5
    lowest = [rule.lowest_risk for rule in rules]
    if wrong is level:
        assert broken == len(answering) > 0  # it is no empty promise
        assert sum(bound < 0.101 for bound in lowest) / draws <= delta + 0.1
    else:
        assert len(answering) > 0.6 * draws
        assert sum(threshold < 0.6 for threshold in answering) > 0.4 * draws


def test_a_greater_risk_never_answers_less() -> None:
    confidence, correct, others = drawn(300, lambda c: 0.4 * (1 - c), 3)
    answered = [
        fit_abstention(confidence, correct, risk, others).answered
        for risk in (0.01, 0.05, 0.1, 0.2, 0.5)
    ]
    assert answered == sorted(answered)
    assert answered[0] == 0 < 290 < answered[-1]


def test_what_is_refused() -> None:
    sample = torch.tensor([0.9, 0.8]), torch.tensor([True, False])
    for change, said in (
        ({"risk": 0.0}, "risk is 0.0; expected a number between 0 and 1"),
        ({"delta": 1.0}, "delta is 1.0"),
        ({"correct": torch.tensor([True])}, r"correct has shape \(1,\); expected \(2,\)"),
        ({"confidence": torch.tensor([0.9, float("nan")])}, "confidence has 1 NaN"),
        ({"others": torch.tensor([])}, "others is empty"),
    ):
        given = {"confidence": sample[0], "correct": sample[1], "risk": 0.1, "others": sample[0]}
        with pytest.raises(InputError, match=said):
            fit_abstention(**given | change)
    rule = fit_abstention(*sample, 0.1, sample[0])
    assert replace(rule, threshold=0.85).abstains(sample[0]).tolist() == [False, True]
