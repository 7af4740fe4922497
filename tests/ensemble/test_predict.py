"""Predicting with an ensemble: modes, chunks, members, temperature."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.networks import Pictures, apart, dense, randomise

import sigmanens as sn
from sigmanens.errors import InputError, NonFiniteError


def close(a: Any, b: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def test_predict_restores_every_mode_and_makes_no_graph() -> None:
    ens = apart(sn.convert(randomise(Pictures(dropout=0.5)), 3)).train()
    ens.network.bn1.eval()
    ens.network.dropout.eval()
    modes = [m.training for m in ens.modules()]
    buffers = {k: v.clone() for k, v in ens.named_buffers()}
    x = torch.randn(4, 1, 8, 8, requires_grad=True)
    first, second = ens.predict(x), ens.predict(x)
    assert [m.training for m in ens.modules()] == modes
    assert not first.log_probs.requires_grad
    assert torch.equal(first.log_probs, second.log_probs)
    assert all(torch.equal(v, buffers[k]) for k, v in ens.named_buffers())
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        sn.convert(dense(), 2).train().predict(torch.randn(3, 9))
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("schedule", ["folded", "sequential", 2])
def test_chunked_prediction_is_equal_and_bounded(schedule: Any) -> None:
    ens = apart(sn.convert(randomise(Pictures()), 3, schedule=schedule))
    x = torch.randn(7, 1, 8, 8)
    whole = ens.predict(x)
    rows: list[int] = []
    ens.network.conv1.register_forward_pre_hook(lambda m, a: rows.append(len(a[0])))
    for chunk in (1, 2, 5, 7, 14, 20, 21, 1000):
        rows.clear()
        part = ens.predict(x, chunk=chunk)
        assert max(rows) <= chunk
        for name in ("log_probs", "member_log_probs", "entropy", "expected_entropy", "modulation"):
            close(getattr(part, name), getattr(whole, name), 1e-5)


def test_predicting_with_the_first_members_only() -> None:
    ens = apart(sn.convert(randomise(Pictures()), 4))
    x = torch.randn(3, 1, 8, 8)
    whole = ens.predict(x).member_probs
    for k in (1, 2, 4):
        part = ens.predict(x, members=k)
        close(part.member_probs, whole[:k])
        close(part.probs, whole[:k].mean(0))
        close(ens.predict(x, members=k, chunk=2).probs, part.probs)
    assert ens.axis.chosen.stop == 4


def test_temperature_is_applied_to_the_average_and_kept_in_float32() -> None:
    ens = apart(sn.convert(randomise(Pictures()), 3))
    x = torch.randn(3, 1, 8, 8)
    plain = ens.predict(x)
    expected = (plain.log_probs / 2.5).softmax(-1)
    close(ens.predict(x, temperature=2.5).probs, expected)
    ens.temperature.fill_(2.5)
    close(ens.predict(x).probs, expected)
    close(ens.predict(x).member_probs, plain.member_probs)
    close(ens.predict(x, temperature=1.0).probs, plain.probs)
    assert ens.bfloat16().temperature.dtype == torch.float32


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"members": 0}, InputError, "members is 0; expected 1 to 2"),
        ({"members": 3}, InputError, "members is 3; expected 1 to 2"),
        ({"members": True}, InputError, "members is True"),
        ({"chunk": 0}, InputError, "chunk is 0; expected a number of rows ≥ 1"),
        ({"chunk": 2.5}, InputError, "chunk is 2.5"),
        ({"temperature": 0.0}, InputError, "temperature is 0.0; expected a positive number"),
        ({"temperature": float("nan")}, InputError, "temperature is nan"),
        ({"x": torch.zeros(0, 4)}, InputError, "an empty batch"),
        ({"x": torch.full((3, 4), float("nan"))}, NonFiniteError, "3 of 3 samples have NaN"),
    ],
)
def test_wrong_requests_are_named(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    ens = sn.convert(dense(), 2)
    options = dict(options)
    with pytest.raises(error, match=message):
        ens.predict(options.pop("x", torch.randn(3, 4)), **options)
