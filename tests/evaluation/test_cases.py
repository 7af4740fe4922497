"""Faults in prediction and evaluation that users of comparable tools reported (P1 … P9).

A test that stands for a row carries ``@pytest.mark.case("P3")``; those that need no file of their
own are here: each goes from a network to the number that its user reads.
"""

from __future__ import annotations

import ast
import math
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.evaluation.draws import draw, draw_logits
from tests.networks import Pictures, apart, randomise
from tests.oracles import metrics as oracle
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import sigmanens as sn
from sigmanens import evaluation as ev
from sigmanens.diversity import measures
from sigmanens.ensemble.prediction import Prediction

ROWS = {
    "P1": "OOD scores of logits are defined over members",
    "P2": "OOD is positive: swapped sets, constant scores, planted OOD",
    "P3": "scores are named for what they are; two certain members that contradict each other",
    "P4": "one member is the single model",
    "P5": "a confidence of exactly 0 or 1 lies in a bin",
    "P6": "calibration errors say bins, scheme and n, with an interval and a debiased estimate",
    "P7": "memory is bounded whatever the members and classes",
    "P8": "one predictive tensor feeds every number",
    "P9": "corrupted sets in their published layout; severities in order",
}

X = torch.randn(12, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def marked() -> Iterator[str]:
    for path in Path(__file__).parent.glob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for decorator in getattr(node, "decorator_list", []):
                if ast.unparse(decorator).startswith("pytest.mark.case("):
                    yield from (ast.literal_eval(row) for row in decorator.args)


def test_every_row_has_a_test() -> None:
    assert set(marked()) == set(ROWS)


def ensemble(members: int) -> sn.SigmaEnsemble:
    return apart(sn.convert(Pictures().eval(), members, init="normal"))


@pytest.mark.case("P1")
def test_energy_and_max_logit_of_a_networks_members() -> None:
    logits = ensemble(3).eval()(X).detach()
    found = ev.ood.scores(logits)
    for b in range(len(X)):
        of_member = [math.log(sum(math.exp(z) for z in row)) for row in logits[:, b].tolist()]
        assert found["energy"][b].item() == pytest.approx(-sum(of_member) / 3, abs=1e-5)
        mean = [sum(column) / 3 for column in zip(*logits[:, b].tolist(), strict=True)]
        assert found["max_logit"][b].item() == pytest.approx(-max(mean), abs=1e-5)


@pytest.mark.case("P2")
@pytest.mark.parametrize("name", list(ev.ood.scores(torch.zeros(1, 1, 2))))
def test_each_score_tells_planted_ood_and_is_antisymmetric(name: str) -> None:
    """Elsewhere the members' logits are smaller and have less in common."""
    inside = ev.ood.scores(draw_logits(300, 5, 1, 8, seed=1) + draw_logits(300, 5, 4, 1, seed=2))
    outside = ev.ood.scores(draw_logits(200, 5, 4, 2, seed=3))
    found = ev.auroc(inside[name], outside[name])
    assert found > 0.8
    assert ev.auroc(outside[name], inside[name]) == pytest.approx(1 - found)
    flat = torch.full((7,), 3.0)
    assert ev.auroc(flat, flat[:4]) == 0.5


@pytest.mark.case("P3")
def test_a_prediction_of_two_certain_members_that_contradict_each_other() -> None:
    logits = torch.tensor([[[60.0, 0.0]], [[0.0, 60.0]]])
    prediction, scores = Prediction.from_logits(logits), ev.ood.scores(logits)
    for entropy in (prediction.entropy, scores["predictive_entropy"]):
        assert entropy.item() == pytest.approx(math.log(2))
    for expected in (prediction.expected_entropy, scores["expected_entropy"]):
        assert expected.item() == pytest.approx(0, abs=1e-6)
    assert not {"entropy", "uncertainty"} & set(scores)


@pytest.mark.case("P4")
def test_an_ensemble_of_one_is_its_base() -> None:
    base = randomise(Pictures()).eval()
    labels = torch.arange(12) % 10
    with torch.no_grad():
        logits = base(X)
    ens = sn.convert(base, 1)
    prediction = ens.predict(X)
    torch.testing.assert_close(prediction.probs, torch.softmax(logits, 1))
    assert torch.equal(prediction.modulation, torch.zeros(12))
    row = ev.summarize(ens.eval()(X), labels)
    alone = ev.summarize(logits[None], labels)
    assert row["accuracy"] == alone["accuracy"]
    assert row["nll"] == pytest.approx(alone["nll"], rel=1e-5)
    assert row["modulation"] == row["disagreement"] == row["jensen_gap"] == 0


@pytest.mark.case("P5")
@pytest.mark.parametrize("bins", [1, 4, 10, 15])
def test_probabilities_that_float32_rounds_to_0_and_1_are_counted(bins: int) -> None:
    logits = torch.zeros(40, 3)
    logits[:20, 0], logits[20:, 1] = 200.0, 1.0
    probs = torch.softmax(logits, 1)
    assert ((probs == 0) | (probs == 1)).any()
    labels = torch.arange(40) % 3
    table = ev.reliability(probs.log(), labels, bins)
    counts = [0] * bins
    for confidence in probs.amax(1).tolist():
        counts[oracle.width_bin(confidence, bins)] += 1
    assert list(table.count) == counts
    assert sum(counts) == 40
    pairs = probs.double().tolist(), labels.tolist()
    assert ev.ece(probs.log(), labels, bins) == pytest.approx(oracle.ece(*pairs, bins), abs=1e-7)


@pytest.mark.case("P6")
def test_a_small_sample_says_how_uncertain_its_calibration_is() -> None:
    log_probs, labels = draw(100, 10, seed=4)
    row = ev.summarize(log_probs[None], labels)
    assert row["ece"] > 0.08, "calibrated, but at this n it does not look so"
    assert row["ece_debiased"] < row["ece"]
    table = row["reliability"]
    assert (row["n"], row["bins"]) == (table["n"], table["bins"]) == (100, 15)
    assert table["scheme"] == "equal_width"
    for metric in (ev.ece, ev.adaptive_ece, ev.classwise_ece, ev.ece_debiased):
        interval = ev.bootstrap(metric, log_probs, labels, resamples=100)
        assert interval.low == 0
        assert interval.high >= row[metric.__name__] - 1e-12
        assert (interval.n, interval.bins) == (100, 15)
        assert interval.scheme in ("equal_width", "equal_mass")


class PeakMemory(TorchDispatchMode):
    """Most bytes at once in tensors made under this mode."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tree_map_only(Tensor, lambda t: self.known.add(id(t.untyped_storage())), (args, kwargs))
        result = func(*args, **(kwargs or {}))
        tree_map_only(Tensor, self.made, result)
        return result

    def made(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if id(storage) in self.known:
            return
        self.known.add(id(storage))
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self.gone, id(storage), size)

    def gone(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.live -= size


class Long(nn.Module):
    """Sequences (B, T, 4) → (B, 3): many activations, few parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 20)
        self.norm = nn.LayerNorm(20)
        self.fc = nn.Linear(20, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.relu(self.norm(self.first(x))).mean(1))


@pytest.mark.case("P7")
def test_prediction_in_chunks_has_a_bounded_peak_and_equal_results() -> None:
    peaks = {}
    for members in (2, 8):
        ens = apart(sn.convert(Long().eval(), members, init="normal"))
        x = torch.randn(40, 100, 4)
        whole = ens.predict(x)  # folding is verified here, once
        for chunk in (None, 20):
            with PeakMemory() as memory:
                found = ens.predict(x, chunk=chunk)
            torch.testing.assert_close(found.log_probs, whole.log_probs)
            torch.testing.assert_close(found.member_log_probs, whole.member_log_probs)
            torch.testing.assert_close(found.modulation, whole.modulation, rtol=1e-4, atol=1e-6)
            peaks[members, chunk] = memory.peak
    activation = 4 * 100 * 20 * 20
    assert peaks[8, None] > 16 * activation
    assert peaks[8, 20] < 6 * activation
    assert peaks[8, 20] < 1.1 * peaks[2, 20]


@pytest.mark.case("P7")
def test_measures_of_many_members_and_classes_have_a_bounded_peak(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measures, "SLICE_ELEMENTS", 2**14)
    peaks = {}
    for members, classes in ((2, 50), (16, 50), (16, 400)):
        logits = draw_logits(400, classes, members).float()
        with PeakMemory() as memory:
            ev.ood.scores(logits)
            ev.disagreement(torch.log_softmax(logits[:1], 2))
        peaks[members, classes] = memory.peak - 4 * 400 * classes  # what log_softmax returned
    assert peaks[16, 400] < 2 * peaks[2, 50]
    assert peaks[16, 400] < 8 * 400 * 400 * 16 / 4, (
        "one float64 copy of the logits is four times it"
    )


@pytest.mark.case("P8")
def test_rows_sum_to_1_and_stay_finite_at_logits_of_ten_thousand() -> None:
    logits = torch.tensor([[[1e4, -1e4, 0.0]] * 2, [[-1e4, 1e4, 0.0], [-1e4, -1e4, 1e4]]])
    prediction = Prediction.from_logits(logits)
    torch.testing.assert_close(prediction.probs.sum(1), torch.ones(2))
    assert torch.isfinite(prediction.log_probs.amax(1)).all()
    assert prediction.log_probs[0, 2].item() == pytest.approx(-1e4)
    labels = torch.tensor([0, 2])
    row = ev.summarize(logits, labels)
    # Every number is one of these probabilities.
    assert row["accuracy"] == ev.accuracy(prediction.log_probs, labels)
    assert row["nll"] == pytest.approx(ev.nll(prediction.log_probs, labels))
    assert row["ece"] == pytest.approx(ev.ece(prediction.log_probs, labels), abs=1e-6)
    assert row["nll"] == pytest.approx(math.log(2))
