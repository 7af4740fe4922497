"""Bad input: every public function refuses it by name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sigmanens import evaluation as ev
from sigmanens.errors import InputError, NonFiniteError, SigmaNensError

LOG_PROBS = torch.log_softmax(torch.randn(6, 3, generator=torch.Generator().manual_seed(0)), 1)
LABELS = torch.tensor([0, 1, 2, 0, 1, 2])
MEMBERS = torch.stack([LOG_PROBS, LOG_PROBS.roll(1, 0)])

Function = Callable[..., Any]
ON_AVERAGE: list[Function] = [
    ev.accuracy,
    ev.nll,
    ev.brier,
    ev.ece,
    ev.adaptive_ece,
    ev.classwise_ece,
    ev.ece_debiased,
    ev.reliability,
    ev.risk_coverage,
    ev.aurc,
    ev.eaurc,
    ev.fit_temperature,
    ev.calibrated_nll,
    ev.ece_interval,
]
ON_MEMBERS: list[Function] = [ev.jensen_gap, ev.member_nll, ev.member_accuracy]
WITHOUT_LABELS: list[Function] = [ev.disagreement, ev.pairwise_kl, ev.modulation]


@pytest.mark.parametrize("function", ON_AVERAGE)
@pytest.mark.parametrize(
    ("log_probs", "says"),
    [
        (LOG_PROBS.exp(), "sum to between"),
        (LOG_PROBS - 0.1, "sum to between"),
        (torch.full((6, 3), -math.inf), "sum to between 0 and 0"),
        (LOG_PROBS.long(), "dtype torch.int64; expected floating"),
        (MEMBERS, r"shape \(2, 6, 3\); expected \(B, C\)"),
        (LOG_PROBS[:0], "is empty"),
        (torch.zeros(6, 1), "one class"),
        (["a"], "list that torch cannot read"),
    ],
)
def test_distributions_are_checked(function: Function, log_probs: Tensor, says: str) -> None:
    with pytest.raises(InputError, match=says) as caught:
        function(log_probs, LABELS)
    assert isinstance(caught.value, SigmaNensError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("function", [*ON_AVERAGE, *ON_MEMBERS, ev.summarize])
@pytest.mark.parametrize(
    ("labels", "says"),
    [
        (LABELS.float(), "dtype torch.float32; expected class indices"),
        (LABELS > 0, "dtype torch.bool"),
        (LABELS[:5], r"shape \(5,\); expected \(6,\)"),
        (torch.nn.functional.one_hot(LABELS), r"shape \(6, 3\); expected \(6,\)"),
        (LABELS + 1, "run from 1 to 3; expected 0 to 2"),
        (LABELS - 100, "run from -100 to -98"),
    ],
)
def test_labels_are_checked(function: Function, labels: Tensor, says: str) -> None:
    predictions = LOG_PROBS if function in ON_AVERAGE else MEMBERS
    with pytest.raises(InputError, match=says):
        function(predictions, labels)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_nan_and_plus_infinity_are_refused_minus_infinity_is_not(value: float) -> None:
    bad, bad_members = LOG_PROBS.clone(), MEMBERS.clone()
    bad[1, 1] = bad_members[1, 1, 1] = value
    for function in ON_AVERAGE:
        with pytest.raises(InputError, match=r"NaN|sum to between"):
            function(bad, LABELS)
    for function in ON_MEMBERS:
        with pytest.raises(InputError, match=r"NaN|sum to between"):
            function(bad_members, LABELS)
    for function in [*WITHOUT_LABELS, ev.ood.scores]:
        with pytest.raises(InputError, match=r"NaN|sum to between|inf"):
            function(bad_members)
    with pytest.raises(NonFiniteError, match="member_logits"):
        ev.summarize(bad_members, LABELS)
    certain = torch.full((6, 3), -math.inf).scatter(1, LABELS[:, None], 0.0)
    for function in [*ON_AVERAGE, ev.sharpness]:
        function(*(certain, LABELS)[: 1 if function is ev.sharpness else 2])


@pytest.mark.parametrize("function", [*ON_MEMBERS, *WITHOUT_LABELS])
def test_members_are_checked(function: Function) -> None:
    rest = () if function in WITHOUT_LABELS else (LABELS,)
    with pytest.raises(InputError, match=r"expected \(M, B, C\)"):
        function(LOG_PROBS, *rest)
    with pytest.raises(InputError, match="rows of member_log_probs sum to between"):
        function(MEMBERS * 2, *rest)
    with pytest.raises(InputError, match="is empty"):
        function(MEMBERS[:0], *rest)


@pytest.mark.parametrize("function", [ev.ood.scores, lambda x: ev.summarize(x, LABELS)])
def test_member_logits_are_checked(function: Function) -> None:
    with pytest.raises(InputError, match=r"expected \(M, B, C\)"):
        function(LOG_PROBS)
    with pytest.raises(InputError, match="is empty"):
        function(MEMBERS[:, :0])
    excluded = MEMBERS.clone()
    excluded[0, 2] = -math.inf
    with pytest.raises(NonFiniteError, match="1 of 12 rows"):
        function(excluded)


@pytest.mark.parametrize("bins", [0, -1, 2.0, True])
def test_bins_are_checked(bins: Any) -> None:
    for function in (ev.ece, ev.adaptive_ece, ev.classwise_ece, ev.ece_debiased, ev.reliability):
        with pytest.raises(InputError, match="bins is"):
            function(LOG_PROBS, LABELS, bins)
    with pytest.raises(InputError, match="scheme is 'equal'"):
        ev.reliability(LOG_PROBS, LABELS, 5, "equal")  # type: ignore[arg-type]


@pytest.mark.parametrize("temperature", [0, -1.0, math.nan, math.inf])
def test_temperature_is_checked(temperature: float) -> None:
    with pytest.raises(InputError, match="temperature is"):
        ev.apply_temperature(LOG_PROBS, temperature)
    with pytest.raises(InputError, match="temperature is"):
        ev.summarize(MEMBERS, LABELS, temperature=temperature)


def test_half_precision_rounding_is_no_error_but_probabilities_are() -> None:
    uniform = torch.log_softmax(torch.zeros(4, 1000), 1)
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert ev.nll(uniform.to(dtype), torch.zeros(4).long()) == pytest.approx(
            math.log(1000), rel=0.01
        )
    with pytest.raises(InputError, match="sum to between"):
        ev.nll(uniform.exp().half(), torch.zeros(4).long())
