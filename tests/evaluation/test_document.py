"""The programs in docs/evaluation.md run, and it names every number of a row."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from sigmanens import evaluation as ev

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = (DOCS / "evaluation.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def space() -> dict[str, Any]:
    """The names that the document's programs leave behind, run one after the other."""
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, flags=re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 9
    names: dict[str, Any] = {}
    exec(compile("\n".join(blocks), "docs/evaluation.md", "exec"), names)
    return names


def test_the_document_runs(space: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    row = space["row"]
    assert row["accuracy"] > 0.8
    assert row["n"] == 1000
    assert space["of_members"].shape == (4, 500)
    assert space["calibrated"] == pytest.approx(
        ev.calibrated_nll(space["log_probs"], space["test_y"]), abs=0.01
    )
    assert space["score"].score(space["features"]).mean().abs() < 1e-6
    assert torch.isfinite(space["of_members"]).all()


def test_every_number_of_a_row_is_explained(space: dict[str, Any]) -> None:
    explained = set(re.findall(r"`(?:ev\.)?([a-z_0-9]+)`", TEXT))
    assert space["row"].keys() - explained == set()
    assert space["inside"].keys() - explained == set()
    classes = {"Mahalanobis", "RelativeMahalanobis", "KNN", "ViM"}
    assert classes <= set(re.findall(r"`([A-Za-z]+)`", TEXT)) & set(ev.__all__)


def test_examples_of_the_equivalent_say_what_the_text_says() -> None:
    curve = {1: [0.91, 0.92], 2: [0.86, 0.87], 4: [0.82, 0.83]}
    assert str(ev.deep_ensemble_equivalent(0.80, curve)).startswith("> 4.0")


def test_coverage_of_intervals_is_what_the_simulation_found() -> None:
    found = json.loads((DOCS / "coverage.json").read_text(encoding="utf-8"))
    assert found["level"] == 0.95

    def span(classwise: bool, samples: tuple[int, ...]) -> str:
        covered = [
            row["covered"]
            for row in found["rows"]
            if (row["metric"] == "classwise_ece") == classwise and row["n"] in samples
        ]
        return f"{min(covered):.2f} to {max(covered):.2f}"

    text = " ".join(TEXT.split())
    assert f"covered the truth {span(False, (200, 1000, 4000))} of the time" in text
    assert f"{span(True, (1000, 4000))} from 1,000 samples on" in text
    assert f"only {span(True, (200,))} at 200" in text
