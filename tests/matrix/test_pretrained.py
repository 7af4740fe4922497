"""Pretrained networks keep their answers when they are converted; a few samples of each."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from tests.matrix import pretrained
from tests.matrix.pretrained import PRETRAINED, Pretrained, compare

ROOT = Path(__file__).resolve().parents[2]
BY_NAME = {entry.name: entry for entry in PRETRAINED}
# Enough that a third of the answers or more must be right.
SAMPLES = {"ResNet-20": 60, "ResNet-56": 30, "EfficientNet-Lite0": 10}


@pytest.mark.parametrize("name", BY_NAME)
def test_accuracy_is_that_of_the_base(name: str, shared: Path) -> None:
    entry = BY_NAME[name]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the packages that bring weights, at import
        for package in entry.packages:
            pytest.importorskip(package)
    if "MiniLM" in name:
        entry = _with_few_sentences(entry)
    found = compare(entry, shared, SAMPLES.get(name, 60), members=2)
    accuracy = found["accuracy"]
    assert found["n"] == SAMPLES.get(name, 60)
    assert found["init"] == "preserve"
    assert accuracy["base"] > 0.6
    assert accuracy["ensemble"] == accuracy["member 0"] == accuracy["base"]
    assert found["nll"]["ensemble"] == pytest.approx(found["nll"]["base"], abs=1e-4)
    assert found["largest_difference"] < 1e-4 * found["largest_logit"]
    assert found["norms"] == {"ResNet-20": 19, "ResNet-56": 55, "EfficientNet-Lite0": 49}.get(
        name, 13
    )
    assert found["parameters"]["ensemble"] > found["parameters"]["base"]


def _with_few_sentences(entry: Pretrained) -> Pretrained:
    return replace(entry, build=partial(pretrained._minilm, sentences=150))


def test_a_changed_function_shows(shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison can fail: one scale of one member is moved."""
    original = pretrained.sn.convert

    def convert(*args: object, **kwargs: object) -> object:
        ensemble = original(*args, **kwargs)  # type: ignore[arg-type]
        with torch.no_grad():
            list(ensemble.sigma_norms().values())[-1].logit[1] += 1.0
        return ensemble

    monkeypatch.setattr(pretrained.sn, "convert", convert)
    found = compare(BY_NAME["ResNet-20"], shared, 20, members=2)
    assert found["largest_difference"] > 1e-3 * found["largest_logit"]


def test_the_page_has_every_pretrained_network() -> None:
    document = json.loads((ROOT / "docs" / "real_weights.json").read_text(encoding="utf-8"))
    assert [row["network"] for row in document["rows"]] == list(BY_NAME)
    page = (ROOT / "docs" / "compatibility.md").read_text(encoding="utf-8")
    for row in document["rows"]:
        assert len(set(row["accuracy"].values())) == 1, row["network"]
        assert f"| {row['network']} | {row['weights']} |" in page
