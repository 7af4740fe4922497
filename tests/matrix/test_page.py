"""docs/compatibility.md is what docs/compatibility.json says, and that covers every network."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests.matrix.behaviours import CHEAP, COSTLY
from tests.matrix.networks import networks

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "docs" / "make_compatibility.py"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("make_compatibility", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "JSON", tmp_path / "compatibility.json")
    monkeypatch.setattr(module, "PAGE", tmp_path / "compatibility.md")
    return module


def test_the_page_is_made_from_the_json() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_json_covers_the_matrix() -> None:
    document = json.loads((ROOT / "docs" / "compatibility.json").read_text(encoding="utf-8"))
    assert document["behaviours"] == [*CHEAP, *COSTLY]
    assert [row["network"] for row in document["rows"]] == [e.id for e in networks()]
    for row, entry in zip(document["rows"], networks(), strict=True):
        assert set(row["cells"]) >= set(CHEAP), entry.id
        assert not any(v.startswith("FAIL") for v in row["cells"].values()), entry.id
        assert row["refusal"].partition(":")[0] == entry.refused, entry.id


@pytest.mark.slow
def test_a_run_replaces_its_rows_and_columns_only(script: ModuleType) -> None:
    arguments = ["--only", "^torch/MLP, (BatchNorm1d|parametrised)", "--skip", *COSTLY]
    assert script.main(arguments) == 0
    document = json.loads(script.JSON.read_text(encoding="utf-8"))
    trained, refused = document["rows"]
    assert set(trained["cells"].values()) == {"pass"}
    assert refused["refusal"].startswith("UnsupportedNormError: ")
    trained["cells"]["ONNX"] = "upstream: it has no operator"
    script.JSON.write_text(json.dumps(document), encoding="utf-8")
    assert script.main(["--only", "MLP, BatchNorm1d$", "--skip", *COSTLY, "member(i)"]) == 0
    after = json.loads(script.JSON.read_text(encoding="utf-8"))["rows"]
    assert [row["network"] for row in after] == [trained["network"], refused["network"]]
    assert after[0]["cells"] == trained["cells"]
    costly = ["--only", "parametrised", "--skip", *CHEAP, "export", "ONNX"]
    assert script.main(costly) == 0  # what was refused stays so, and keeps its words
    again = json.loads(script.JSON.read_text(encoding="utf-8"))["rows"][1]
    assert again["refusal"] == refused["refusal"]
    page = script.PAGE.read_text(encoding="utf-8")
    assert "* torch/MLP, parametrised LayerNorm: conversion" in page
    assert "* torch/MLP, BatchNorm1d: ONNX\n\n      it has no operator" in page


def test_a_fault_is_shown_and_fails_the_run(script: ModuleType) -> None:
    row = {
        "network": "timm/odd", "cells": {"convert": "FAIL: lost a norm"}, "norms": 1,
        "parameters": 10, "notes": [], "refusal": "", "seconds": 0,
    }  # fmt: skip
    document = {"version": 1, "environment": {}, "behaviours": ["convert"], "rows": [row]}
    script.JSON.write_text(json.dumps(document), encoding="utf-8")
    assert script.main(["--render"]) == 1
    page = script.PAGE.read_text(encoding="utf-8")
    assert "| odd | 1 | 10 | **FAULT** |" in page
    assert "## Faults\n\n* timm/odd: convert\n\n      lost a norm" in page
    assert script.main(["--check"]) == 0
    script.PAGE.write_text(page + "typed by hand", encoding="utf-8")
    assert script.main(["--check"]) == 1


def test_unknown_rows_and_columns_are_refused(script: ModuleType) -> None:
    with pytest.raises(SystemExit, match="no behaviour"):
        script.main(["--skip", "compiling"])
    with pytest.raises(SystemExit, match="matches none"):
        script.main(["--only", "no such network"])
