"""Findings from the rows of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sigmanens.lab.findings import row_findings, row_warnings

ROOT = Path(__file__).resolve().parents[2]

SOUND: dict[str, Any] = {
    "members": 4, "tau": 0.3, "weight": 1e-3, "disagreement": 0.1, "modulation": 0.05,
    "nll": 0.4, "member_nll": 0.5, "cosine": 0.4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "options", "kind"),
    [
        ({}, {"single_nll": 0.45, "epochs": [{"cosine": 0.7, "saturation": 0.1}]}, None),
        ({"disagreement": 1e-4, "modulation": 1e-5}, {}, "one model"),
        ({}, {"single_nll": 0.35}, "weak members"),
        ({}, {"epochs": [{"cosine": 0.1, "saturation": 0.9}, {"cosine": 0.8}]}, "frozen partition"),
        ({}, {"epochs": [{"loss": 1.0}]}, None),
        ({"tau": 15.0}, {}, "flat dial"),
        ({"tau": 15.0, "weight": None}, {}, None),
        ({"members": 1, "disagreement": 0.0, "modulation": 0.0}, {}, None),
        ({"disagreement": None}, {}, None),
    ],
)
def test_each_finding_from_a_row(
    changes: dict[str, Any], options: dict[str, Any], kind: str | None
) -> None:
    found = [f.kind for f in row_findings(SOUND | changes, **options)]
    assert found == ([] if kind is None else [kind])


def test_rows_of_the_committed_results_are_read() -> None:
    text = (ROOT / "docs" / "results" / "cifar10-resnet20" / "metrics.json").read_text("utf-8")
    rows = json.loads(text)["rows"]
    (single,) = [row for row in rows if row["method"] == "single_temperature"]
    (ours,) = [row for row in rows if row["method"] == "sigmanens"]
    assert row_findings(single) == []
    findings = {f.kind: f for f in row_findings(ours, single_nll=single["nll"])}
    behind = ours["nll"] > single["nll"]
    assert ("weak members" in findings) == behind
    assert behind, "the page of results says so"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"temperature": 1.2, "accuracy": 0.9, "classes": 10, "n": 100}, []),
        ({"temperature": 1.2, "accuracy": 0.12, "classes": 10, "n": 100}, ["guessing among 10"]),
        ({"temperature": 1e4, "accuracy": 0.9, "classes": 10, "n": 100}, ["temperature is 10000"]),
        (
            {"temperature": 0.01, "accuracy": 0.5, "classes": 2, "n": 50},
            ["temperature is 0.01", "guessing among 2"],
        ),
        ({"accuracy": 0.1}, []),
    ],
)
def test_temperatures_at_their_bound_and_guessing_are_told(
    row: dict[str, Any], said: list[str]
) -> None:
    found = row_warnings(row)
    assert len(found) == len(said)
    assert all(part in text for part, text in zip(said, found, strict=True))
