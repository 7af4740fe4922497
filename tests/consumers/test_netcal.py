"""netcal's expected calibration error of our probabilities is ours."""

from __future__ import annotations

import pytest
import torch
from tests.consumers.conftest import Fitted

from sigmanens import evaluation


@pytest.mark.parametrize("bins", [10, 15])
@pytest.mark.parametrize("temperature", [0.4, 1.0, 2.5])
def test_ece_agrees(fitted: Fitted, bins: int, temperature: float) -> None:
    metrics = pytest.importorskip("netcal.metrics")
    pred = fitted.ensemble.predict(fitted.x, temperature=temperature)
    theirs = metrics.ECE(bins=bins).measure(pred.probs.double().numpy(), fitted.y.numpy())
    ours = evaluation.ece(pred.log_probs, fitted.y, bins=bins)
    assert ours > 0.01
    assert theirs == pytest.approx(ours, abs=1e-6)


def test_adaptive_ece_agrees_where_bins_hold_equally_many(fitted: Fitted) -> None:
    metrics = pytest.importorskip("netcal.metrics")
    log_probs, y = fitted.ensemble.predict(fitted.x[:500]).log_probs, fitted.y[:500]
    assert len(torch.unique(log_probs.amax(1))) == 500
    theirs = metrics.ECE(bins=10, equal_intervals=False).measure(
        log_probs.exp().double().numpy(), y.numpy()
    )
    assert theirs == pytest.approx(evaluation.adaptive_ece(log_probs, y, bins=10), abs=0.005)
