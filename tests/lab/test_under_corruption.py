"""Numbers under corruption: kind by kind, and of all kinds of a severity together."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytest.importorskip("lightning")
pytest.importorskip("sklearn")

from torch import Tensor

from sigmanens.ensemble.prediction import log_mean_exp
from sigmanens.evaluation import metrics
from sigmanens.evaluation.calibration import apply_temperature
from sigmanens.lab.bench.under_corruption import clustered_mean, measure_corrupted
from sigmanens.lab.digits import Labelled

KINDS = ("fog", "snow", "blur")
TEMPERATURE = 1.7


def classes(rows: Tensor) -> Tensor:
    return rows % 5


def corrupt(name: str, severity: int) -> Labelled:
    return changed(ROWS, name, severity)


def changed(rows: dict[str, Tensor], name: str, severity: int) -> Labelled:
    """Pictures that are the logits themselves: the right class, less sure as severity grows."""
    generator = torch.Generator().manual_seed(severity + 10 * KINDS.index(name))
    noise = torch.randn(len(rows[name]), 5, generator=generator)
    labels = classes(rows[name])
    return Labelled(4 * torch.nn.functional.one_hot(labels, 5) + severity * noise, labels)


def logits(images: Tensor) -> Tensor:
    """Two members that differ."""
    return torch.stack([images, images.roll(1, 1) * 0.3 + images])


ROWS = {name: torch.arange(40) + 40 * i for i, name in enumerate(KINDS)}


def everything(rows: dict[str, Tensor], severity: int) -> tuple[Tensor, Tensor]:
    parts = [changed(rows, name, severity) for name in KINDS]
    mean = [log_mean_exp(torch.log_softmax(logits(p.images), 2)) for p in parts]
    return torch.cat(mean), torch.cat([p.labels for p in parts])


def test_kinds_together_are_all_their_samples() -> None:
    found, kept = measure_corrupted(logits, TEMPERATURE, corrupt, ROWS, 200)
    assert list(found["corruption"]) == list(KINDS)
    losses = []
    for severity in range(1, 6):
        mean, labels = everything(ROWS, severity)
        scaled = apply_temperature(mean, TEMPERATURE)
        together = found["corruption_pooled"][str(severity)]
        assert (together["n"], together["examples"]) == (120, 120)
        for key, log_probs in (("", mean), ("_calibrated", scaled)):
            assert together[f"nll{key}"] == pytest.approx(metrics.nll(log_probs, labels))
            assert together[f"ece{key}"] == pytest.approx(metrics.ece(log_probs, labels))
        alone = [found["corruption"][k][str(severity)] for k in KINDS]
        for key in ("accuracy", "nll", "nll_calibrated"):
            assert together[key] == pytest.approx(np.mean([a[key] for a in alone]), abs=1e-6)
        assert set(together["intervals"]) == {
            "accuracy", "nll", "nll_calibrated", "ece", "ece_calibrated",
        }  # fmt: skip
        for key, (low, high) in together["intervals"].items():
            assert low <= together[key] <= high
        losses.append(-mean.double().gather(1, labels[:, None])[:, 0])
    torch.testing.assert_close(kept["nll_corrupted"], torch.stack(losses).mean(0))
    assert torch.equal(kept["corrupted_rows"], torch.arange(120))


def test_few_samples_of_many_kinds_seem_less_calibrated_than_they_are() -> None:
    """What the numbers of all kinds together are for: a calibrated model, 20 samples a kind."""
    generator = torch.Generator().manual_seed(0)
    names = [str(i) for i in range(40)]
    rows = {name: 20 * i + torch.arange(20) for i, name in enumerate(names)}
    given = {(n, s): torch.randn(20, 5, generator=generator) for n in names for s in range(1, 6)}

    def calibrated(name: str, severity: int) -> Labelled:
        images = given[name, severity]
        draw = torch.Generator().manual_seed(int(name) * 10 + severity)
        labels = torch.multinomial(images.softmax(1), 1, generator=draw)[:, 0]
        return Labelled(images, labels)

    found, _ = measure_corrupted(lambda x: x[None], 1.0, calibrated, rows, 100)
    for severity in "12345":
        by_kind = np.mean([found["corruption"][n][severity]["ece"] for n in names])
        together = found["corruption_pooled"][severity]
        assert together["ece"] < 0.06 < 0.15 < by_kind
        assert together["intervals"]["ece"][0] == 0.0


def test_an_example_that_serves_for_all_kinds_is_drawn_once() -> None:
    rows = dict.fromkeys(KINDS, torch.arange(40))
    found, kept = measure_corrupted(
        logits, TEMPERATURE, lambda n, s: changed(rows, n, s), rows, 200
    )
    assert torch.equal(kept["corrupted_rows"], torch.arange(40).repeat(3))
    for together in found["corruption_pooled"].values():
        assert (together["n"], together["examples"]) == (120, 40)
        assert set(together["intervals"]) == {"accuracy", "nll", "nll_calibrated"}


def test_a_mean_over_groups_draws_groups() -> None:
    """Equal values within a group: as wide as the interval of the groups alone."""
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(50, generator=generator)
    alone = clustered_mean(values, torch.arange(50))
    tripled = clustered_mean(values.repeat(3), torch.arange(50).repeat(3))
    naive = clustered_mean(values.repeat(3), torch.arange(150))
    assert alone is not None
    assert tripled is not None
    assert naive is not None
    assert tripled.value == pytest.approx(alone.value)
    assert tripled.low == pytest.approx(alone.low)
    assert tripled.high == pytest.approx(alone.high)
    assert naive.high - naive.low < 0.8 * (alone.high - alone.low)
    uneven = clustered_mean(torch.tensor([1.0, 1.0, 4.0]), torch.tensor([7, 7, 9]))
    assert uneven is not None
    assert uneven.value == pytest.approx(2.0)
    assert clustered_mean(values[:3], torch.zeros(3, dtype=torch.int64)) is None
