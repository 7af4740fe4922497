"""What a row keeps for the report: histograms of OOD scores, owners of each layer's channels."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

pytest.importorskip("lightning")

from tests.lab.small import ensemble

from sigmanens.evaluation import ood
from sigmanens.lab.digits import digits_sets
from sigmanens.lab.ood_histograms import BINS, ood_histograms
from sigmanens.lab.plain import to_json
from sigmanens.lab.report.owners import layer_counts
from sigmanens.lab.report.reading import read_study
from sigmanens.lab.report.scores import histograms
from sigmanens.lab.rows import EvaluationData, evaluate, member_logits


def counted(values: Tensor, edges: list[float]) -> list[int]:
    """Counts bin by bin; what lies outside counts in the outermost bins."""
    found = [0] * (len(edges) - 1)
    for value in values.tolist():
        place = sum(value >= edge for edge in edges[1:-1])
        found[place] += 1
    return found


def test_histograms_count_every_score_once():
    generator = torch.Generator().manual_seed(0)
    inside = {"max_softmax": torch.rand(400, generator=generator), "energy": torch.zeros(400)}
    inside["energy"].normal_(generator=generator)
    sets = {
        name: {"max_softmax": torch.rand(200, generator=generator), "energy": energy}
        for name, energy in (("near", inside["energy"][:200] + 1), ("far", torch.full((50,), 99.0)))
    }
    auroc = {
        name: {score: ood.auroc(inside[score], found[score]) for score in found}
        for name, found in sets.items()
    }
    found = ood_histograms(inside, sets, auroc)
    assert found is not None
    assert list(found) == ["max_softmax", "energy"]  # the usual one and the best one
    for score, table in found.items():
        edges = table["edges"]
        assert len(edges) == BINS + 1
        assert table["inside"] == counted(inside[score], edges)
        for name, counts in table["sets"].items():
            assert counts == counted(sets[name][score], edges)
    assert sum(found["energy"]["sets"]["far"]) == 50


def test_best_score_is_named_once_and_what_cannot_be_binned_is_left_out():
    inside = {"max_softmax": torch.linspace(0, 1, 50), "flat": torch.zeros(50)}
    outside = {"a": {"max_softmax": torch.linspace(0.5, 1, 50), "flat": torch.zeros(50)}}
    found = ood_histograms(inside, outside, {"a": {"max_softmax": 0.7, "flat": 0.5}})
    assert found is not None
    assert list(found) == ["max_softmax"]
    found = ood_histograms(inside, outside, {"a": {"max_softmax": 0.7, "flat": 0.9}})
    assert found is not None
    assert list(found) == ["max_softmax"]
    found = ood_histograms(inside, outside, {"a": {"max_softmax": float("nan"), "flat": 0.5}})
    assert found is not None
    assert list(found) == ["max_softmax"]
    assert ood_histograms(inside, {}, {}) is None
    same = {"max_softmax": torch.ones(5)}
    assert ood_histograms(same, {"a": same}, {"a": {"max_softmax": 0.5}}) is None


def test_a_row_keeps_what_the_report_draws():
    digits = digits_sets(train=60, validation=60, ood=40, seed=0)
    data = EvaluationData(digits.validation, digits.test, digits.ood)
    model = ensemble(3)
    row, _ = evaluate(
        member_logits(model), data, method="sigmanens", network=model, members=3, params=1,
        resamples=40,
    )  # fmt: skip
    norms = model.sigma_norms()
    assert list(row["owners_by_layer"]) == list(norms)
    for name, norm in norms.items():
        owners = (norm.gates().detach().flatten(1) > 0.5).sum(0).tolist()
        assert row["owners_by_layer"][name] == [owners.count(k) for k in range(4)]
    scores = ood.scores(member_logits(model)(data.test.images))
    table = row["ood_histograms"]["max_softmax"]
    assert table["inside"] == counted(scores["max_softmax"], table["edges"])
    assert set(table["sets"]) == set(digits.ood)
    best = max(scores, key=lambda s: sum(found[s] for found in row["ood"].values()))
    assert set(row["ood_histograms"]) == {"max_softmax", best}
    study = read_study(json.loads(json.dumps(to_json({"version": 1, "rows": [row]}))))
    assert set(layer_counts(study.groups[0])) == set(norms)
    assert list(histograms(study.groups[0])) == list(row["ood_histograms"])
