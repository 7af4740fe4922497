"""The uncertainty decomposition against brute force."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.networks import Outcome
from torch import Tensor

import sigmanens as sn
from sigmanens.ensemble.prediction import log_mean_exp, logits_of
from sigmanens.errors import InputError, NonFiniteError


def brute_force(logits: Tensor) -> dict[str, list]:
    """All quantities for (M, B, C) in loops over Python floats."""
    members = [[torch.softmax(row, 0).tolist() for row in m] for m in logits.double()]
    out: dict[str, list] = {"probs": [], "entropy": [], "expected_entropy": [], "modulation": []}

    def entropy(p: list[float]) -> float:
        return -sum(v * math.log(v) for v in p if v > 0)

    for b in range(logits.shape[1]):
        rows = [m[b] for m in members]
        mean = [sum(values) / len(rows) for values in zip(*rows, strict=True)]
        out["probs"].append(mean)
        out["entropy"].append(entropy(mean))
        out["expected_entropy"].append(sum(map(entropy, rows)) / len(rows))
        out["modulation"].append(
            sum(v * math.log(v / q) for p in rows for v, q in zip(p, mean, strict=True) if v > 0)
            / len(rows)
        )
    return out


@given(
    members=st.integers(1, 5),
    size=st.integers(1, 4),
    classes=st.integers(2, 6),
    spread=st.sampled_from([0.1, 1.0, 10.0, 100.0]),
    seed=st.integers(0, 10**6),
)
def test_decomposition_equals_brute_force(
    members: int, size: int, classes: int, spread: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(members, size, classes, generator=generator, dtype=torch.float64)
    p = sn.Prediction.from_logits(logits)
    for name, expected in brute_force(logits).items():
        torch.testing.assert_close(
            getattr(p, name), torch.tensor(expected, dtype=torch.float64), rtol=1e-9, atol=1e-12
        )
    assert (p.modulation >= 0).all()
    assert (p.expected_entropy >= 0).all()
    torch.testing.assert_close(p.entropy, p.expected_entropy + p.modulation)
    torch.testing.assert_close(p.member_probs, logits.softmax(-1))
    torch.testing.assert_close(p.probs.sum(-1), torch.ones(size, dtype=torch.float64))
    assert torch.equal(p.labels, p.probs.argmax(-1))
    torch.testing.assert_close(p.confidence, p.probs.amax(-1))


def test_two_confident_members_that_contradict_each_other_are_uncertain() -> None:
    logits = torch.tensor([[[100.0, -100.0]], [[-100.0, 100.0]]])
    p = sn.Prediction.from_logits(logits)
    assert p.entropy.item() == pytest.approx(math.log(2))
    assert p.expected_entropy.item() == pytest.approx(0, abs=1e-12)
    assert p.modulation.item() == pytest.approx(math.log(2))
    agreeing = sn.Prediction.from_logits(logits[:1].expand(2, 1, 2))
    assert agreeing.entropy.item() == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_extreme_logits_stay_finite_and_sum_to_one(dtype: torch.dtype) -> None:
    logits = torch.tensor(
        [[[1e4, -1e4, 0.0], [-1e4, -1e4, -1e4]], [[-1e4, 1e4, 0.0], [1e4, 1e4, 1e4]]], dtype=dtype
    )
    p = sn.Prediction.from_logits(logits)
    for name in ("log_probs", "entropy", "expected_entropy", "modulation"):
        assert torch.isfinite(getattr(p, name)).all(), name
        assert getattr(p, name).dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(p.probs.sum(-1), torch.ones_like(p.probs.sum(-1)))
    assert p.probs[0].tolist() == pytest.approx([0.5, 0.5, 0.0])
    # a class no member allows keeps its finite logarithm: no clamp to the smallest float
    assert float(p.log_probs[0, 2]) == pytest.approx(-1e4, rel=1e-3)


def test_one_member_has_no_modulation() -> None:
    p = sn.Prediction.from_logits(torch.randn(1, 50, 7) * 20)
    assert torch.equal(p.modulation, torch.zeros(50))
    assert torch.equal(p.entropy, p.expected_entropy)
    assert torch.equal(p.log_probs, p.member_log_probs[0])


def test_temperature_acts_on_the_averaged_distribution_only() -> None:
    logits = torch.randn(3, 5, 4)
    plain, warm = (sn.Prediction.from_logits(logits, t) for t in (1.0, 3.0))
    mean = logits.softmax(-1).mean(0)
    expected = mean ** (1 / 3) / (mean ** (1 / 3)).sum(-1, keepdim=True)
    torch.testing.assert_close(warm.probs, expected)
    assert warm.temperature == 3.0
    for name in ("member_log_probs", "entropy", "expected_entropy", "modulation"):
        assert torch.equal(getattr(warm, name), getattr(plain, name))


def test_positions_beyond_the_class_dimension_are_predicted_each() -> None:
    logits = torch.randn(3, 2, 5, 4, 6)
    p = sn.Prediction.from_logits(logits, 2.0)
    assert p.probs.shape == (2, 5, 4, 6)
    assert p.entropy.shape == p.labels.shape == p.confidence.shape == (2, 4, 6)
    one = sn.Prediction.from_logits(logits[..., 1, 3], 2.0)
    torch.testing.assert_close(p.probs[..., 1, 3], one.probs)
    torch.testing.assert_close(p.modulation[..., 1, 3], one.modulation)


def test_predictions_of_batches_are_joined() -> None:
    logits = torch.randn(3, 6, 4)
    whole = sn.Prediction.from_logits(logits, 2.0)
    joined = sn.Prediction.cat([sn.Prediction.from_logits(b, 2.0) for b in logits.split(4, 1)])
    for name in ("log_probs", "member_log_probs", "entropy", "expected_entropy", "modulation"):
        assert torch.equal(getattr(joined, name), getattr(whole, name))
    assert joined.temperature == 2.0


def test_log_mean_exp() -> None:
    x = torch.tensor([[-1e4, 0.0, -float("inf")], [-1e4, 1.0, 0.0]])
    expected = [-1e4, math.log((1 + math.e) / 2), -math.log(2)]
    assert log_mean_exp(x).tolist() == pytest.approx(expected)
    torch.testing.assert_close(log_mean_exp(x.T, dim=1), log_mean_exp(x))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_counted(value: float) -> None:
    logits = torch.randn(3, 5, 4)
    logits[0, 1, 2] = logits[2, 1, 0] = logits[1, 4, 0] = value
    with pytest.raises(NonFiniteError, match="2 of 5 samples have NaN or infinite logits"):
        sn.Prediction.from_logits(logits)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_temperatures_out_of_range_are_refused(temperature: float) -> None:
    with pytest.raises(InputError, match=r"temperature is .*; expected a positive number"):
        sn.Prediction.from_logits(torch.randn(2, 3, 4), temperature)


def test_shapes_without_members_are_refused() -> None:
    with pytest.raises(InputError, match=r"shape \(3, 4\); expected \(M, B, C, …\)"):
        sn.Prediction.from_logits(torch.randn(3, 4))


def test_logits_are_found_in_results() -> None:
    t = torch.randn(2, 3)
    for result in (t, (t, 1), [t], {"logits": t}, Outcome(t, t * 2)):
        assert logits_of(result) is t
    for result in ({"scores": t}, (), (1, t), None, "logits"):
        with pytest.raises(InputError, match="no logits were found"):
            logits_of(result)


def test_token_classifiers_have_their_classes_last():
    logits = torch.randn(3, 4, 5, 7)  # (M, B, T, C)
    got = sn.Prediction.from_logits(logits, class_dim=-1)
    want = sn.Prediction.from_logits(logits.movedim(-1, 2))
    assert got.probs.shape == (4, 7, 5)
    assert torch.equal(got.probs, want.probs)
    assert torch.equal(got.entropy, want.entropy)


@pytest.mark.parametrize("class_dim", [0, 3, -3])
def test_a_class_dimension_that_is_none_is_named(class_dim):
    with pytest.raises(sn.errors.InputError, match="class_dim"):
        sn.Prediction.from_logits(torch.randn(3, 4, 7), class_dim=class_dim)


def test_one_logit_is_refused_rather_than_certain():
    with pytest.raises(sn.errors.InputError, match="one class"):
        sn.Prediction.from_logits(torch.randn(3, 4, 1))


def test_segmentation_networks_call_their_logits_out():
    z = torch.randn(2, 3, 4, 4)
    assert logits_of({"out": z, "aux": z + 1}) is z
