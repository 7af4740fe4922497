"""The deep-ensemble equivalent: by hand, at the ends, and against a search along the curve."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.oracles import metrics as oracle

from sigmanens import evaluation as ev
from sigmanens.errors import InputError

CURVE = {1: 1.0, 2: 0.8, 4: 0.7, 8: 0.65}


@pytest.mark.parametrize(
    ("nll", "value", "relation", "text"),
    [
        (1.0, 1.0, "=", "1.0"),
        (0.9, 1.5, "=", "1.5"),
        (0.8, 2.0, "=", "2.0"),
        (0.75, 3.0, "=", "3.0"),
        (0.65, 8.0, "=", "8.0"),
        (1.01, 1.0, "<", "< 1.0"),
        (0.64, 8.0, ">", "> 8.0"),
    ],
)
def test_by_hand_and_beyond_what_was_measured(nll, value, relation, text) -> None:
    found = ev.deep_ensemble_equivalent(nll, CURVE)
    assert (found.value, found.relation) == (pytest.approx(value), relation)
    assert (found.low, found.high, found.smallest, found.largest) == (None, None, 1, 8)
    assert str(found) == text
    assert json.loads(json.dumps(found.to_dict()))["relation"] == relation


@given(
    st.lists(st.floats(0.1, 2), min_size=2, max_size=6, unique=True),
    st.floats(0.1, 2),
)
@settings(max_examples=60)
def test_equals_a_walk_along_the_curve(points, nll) -> None:
    curve = {k + 1: v for k, v in enumerate(points)}
    found = ev.deep_ensemble_equivalent(nll, curve)
    walked = oracle.first_not_above(points, nll)
    if nll > points[0]:
        assert (found.value, found.relation) == (1, "<")
    elif walked is None:
        assert (found.value, found.relation) == (len(points), ">")
    else:
        assert found.relation == "="
        assert found.value == pytest.approx(walked, abs=2e-3)


def test_the_order_of_the_curve_does_not_matter_and_its_first_crossing_counts() -> None:
    assert ev.deep_ensemble_equivalent(0.9, {4: 0.95, 1: 1.0, 2: 0.8}).value == 1.5


def test_seeds_give_an_interval() -> None:
    curve = {1: [0.99, 1.01], 2: [0.78, 0.82], 4: [0.69, 0.71]}
    found = ev.deep_ensemble_equivalent([0.74, 0.76], curve)
    assert found.value == pytest.approx(3)
    s2, s4 = math.sqrt(2 * 0.02**2 + 2 * 0.01**2), math.sqrt(4 * 0.01**2)
    left, right = 0.8 - s2, 0.7 - s4
    assert found.low == pytest.approx(2 + 2 * (left - 0.75) / (left - right))
    left, right = 0.8 + s2, 0.7 + s4
    assert found.high == pytest.approx(2 + 2 * (left - 0.75) / (left - right))
    assert str(found) == f"3.0 ({found.low:.1f} to {found.high:.1f})"
    of_one = ev.deep_ensemble_equivalent(0.75, curve)
    assert found.low < of_one.low < of_one.value < of_one.high < found.high
    vague = ev.deep_ensemble_equivalent([0.4, 1.0], curve)
    assert (vague.low, vague.high) == (1.0, 4.0)


@pytest.mark.parametrize(
    ("nll", "curve", "says"),
    [
        (0.5, {}, "the curve is empty"),
        (0.5, {0: 1.0}, "key 0"),
        (0.5, {1.5: 1.0}, "key 1.5"),
        (0.5, {1: math.inf}, "the curve at 1 is inf"),
        (math.nan, {1: 1.0}, "nll_calibrated is nan"),
        ([], {1: 1.0}, r"nll_calibrated is \[\]"),
    ],
)
def test_bad_curves_are_named(nll, curve, says) -> None:
    with pytest.raises(InputError, match=says):
        ev.deep_ensemble_equivalent(nll, curve)
