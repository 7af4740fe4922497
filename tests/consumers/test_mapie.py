"""MAPIE makes prediction sets of our probabilities that cover as promised."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from sigmanens.integrations.estimator import SigmaEnsembleClassifier

CONFIDENCE = 0.8


@pytest.fixture(scope="module")
def parts() -> list[np.ndarray]:
    x, y = load_digits(return_X_y=True)
    x = x + 8 * np.random.default_rng(0).standard_normal(x.shape)
    train, rest, y_train, y_rest = train_test_split(x, y, train_size=500, random_state=0)
    fit, test, y_fit, y_test = train_test_split(rest, y_rest, train_size=600, random_state=0)
    return [train, y_train, fit, y_fit, test, y_test]


@pytest.mark.parametrize("score", ["lac", "aps"])
def test_sets_cover(parts: list[np.ndarray], score: str) -> None:
    mapie = pytest.importorskip("mapie.classification")
    train, y_train, fit, y_fit, test, y_test = parts
    model = SigmaEnsembleClassifier(members=3, epochs=8, random_state=0).fit(train, y_train)
    assert model.score(test, y_test) < 0.95  # so a set of one class would not do
    conformal = mapie.SplitConformalClassifier(
        model, confidence_level=CONFIDENCE, conformity_score=score, prefit=True, random_state=0
    )
    _, sets = conformal.conformalize(fit, y_fit).predict_set(test)
    sets = sets[:, :, 0]
    covered = sets[np.arange(len(y_test)), y_test].mean()
    # Exact in expectation; three standard deviations of both finite samples.
    slack = 3 * np.sqrt(CONFIDENCE * (1 - CONFIDENCE) * (1 / len(y_fit) + 1 / len(y_test)))
    assert CONFIDENCE - slack < covered < CONFIDENCE + slack + (0.1 if score == "aps" else 0)
    assert sets.sum(1).mean() < 5
