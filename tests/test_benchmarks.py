"""The benchmarks: fair turns, right verdicts, pages that say what the files say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("torch_uncertainty", reason="the rivals' layers: pip install -e '.[bench]'")

from benchmarks import __main__ as command
from benchmarks import measure
from benchmarks.goals import judged
from benchmarks.page import page
from benchmarks.plan import START, STOP, Job, layouts, table
from benchmarks.subjects import Subject

from sigmanens.lab.backbones.registry import build_backbone

ROOT = Path(__file__).resolve().parents[1]


def test_every_contestant_has_its_turn_and_ratios_are_taken_within_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, calls = [0.0], []

    def taking(name: str, seconds: list[float]) -> Any:
        times = iter(seconds)

        def run() -> None:
            calls.append(name)
            now[0] += next(times)

        return run

    monkeypatch.setattr(measure.time, "process_time", lambda: now[0])
    functions = {"a": taking("a", [9, 1, 2, 4]), "b": taking("b", [9, 3, 2, 8])}
    found = measure.interleaved(functions, "a", runs=3, seconds=1e9)
    assert calls == ["a", "b"] * 4
    assert found["a"].seconds == 2
    assert found["a"].ratio == 1
    assert (found["b"].seconds, found["b"].ratio, found["b"].spread) == (3, 2, (1, 3))
    functions = {"a": taking("a", [1] * 9), "b": taking("b", [1] * 9)}
    assert measure.interleaved(functions, "a", runs=8, seconds=0.0)["b"].runs == 2


def test_a_failure_is_a_row_and_that_of_the_reference_an_error() -> None:
    def broken() -> None:
        raise ValueError("no such\nlayer")

    found = measure.interleaved({"a": lambda: None, "b": broken}, "a", runs=1)
    assert found["b"].error == "ValueError: no such layer"
    assert found["b"].seconds is None
    with pytest.raises(ValueError, match="no such"):
        measure.interleaved({"a": lambda: None, "b": broken}, "b", runs=1)


def row(what: str, contestant: str, batch: int, ratio: float | None, **more: Any) -> dict[str, Any]:
    return {
        "what": what, "batch": batch, "precision": "fp32", "compiled": False, "runs": 3,
        "contestant": contestant, "seconds": ratio, "ratio": ratio, "spread": (ratio, ratio),
        "error": None,
    } | more  # fmt: skip


def example() -> dict[str, Any]:
    parts = {
        "train": {
            "Net": [
                row("train", "sigmanens folded", 8, 0.9),
                row("train", "sigmanens auto", 8, 1.2),
                row("train", "separate", 8, 1.0),
                row("train", "batchensemble", 8, 0.8),
                row("train", "packed", 8, None, error="ValueError: a | b"),
                row("train", "sigmanens folded", 8, 0.1, precision="bf16"),
            ]
        },
        "predict": {
            "Net": [row("predict", "sigmanens folded", b, r) for b, r in ((1, 0.5), (64, 0.7))]
        },
        "compiled training": {
            "Net": [row("train", "sigmanens folded", 8, 0.9, compiled=True, ratio_to_eager=0.84)]
        },
        "dial": {"Net": [{"shared": "nothing"} | row("train", "", 8, 4.0)]},
        "costs": {
            "Net": [
                {"batch": 8, "norms": 0.02, "penalty": 0.02, "conversion_seconds": 0.1}
                | {"checkpoint_bytes": 2048, "base_bytes": 4096}
                | {"base_parameters": 100, "parameters": 101}
            ]
        },
        "memory": {
            "Net": [
                {"contestant": "one network", "members": 1, "batch": 8, "bytes": 100},
                {"contestant": "sigmanens sequential", "members": 16, "batch": 8, "bytes": 110},
            ]
        },
    }
    machine = command.machine(1)
    done = {"version": 1, "members": 4, "commands": ["c"], "machine": machine, "parts": parts}
    return done | {"goals": judged(done)}


def test_goals_are_judged_by_the_fastest_of_ours_in_float32() -> None:
    goals = {(g["goal"], g["where"].split(",")[0].split(":")[0]): g for g in example()["goals"]}

    def verdict(goal: str, where: str) -> tuple[float, bool]:
        found = goals[goal, where]
        return round(found["value"], 6), found["met"]

    assert verdict("training step ≤ M separate steps", "B=8") == (0.9, True)
    assert verdict("prediction at batch 1", "B=1") == (0.5, False)
    assert verdict("prediction at a large batch", "B=64") == (0.7, True)
    assert verdict("compiled training step", "B=8") == (0.84, True)
    assert verdict("training step over batchensemble's", "B=8") == (1.125, False)
    assert ("training step over packed's", "B=8") not in goals
    assert verdict("σNorm and penalty over plain norms", "B=8") == (0.04, False)
    assert verdict("peak memory over one network", "M=16") == (1.1, True)


def test_the_page_holds_every_row() -> None:
    text = page(example(), "benchmarks/results/x.json")
    for line in (
        "| training step ≤ M separate steps | Net | B=8 | 1.00 | 0.90 | sigmanens folded | met |",
        "| train, B=8, fp32 | packed | failed | ValueError: a / b |",
        "| train, B=8, bf16 | sigmanens folded | 100.0 | 0.10 [0.10, 0.10] |",
        "; 0.84 × eager separate networks |",
        "| sigmanens sequential | 16 | 8 | 0 | 1.10 |",
        "| 2.0% | 2.0% | 0.10 | 2 | 4 | 1.010 |",
    ):
        assert line in text
    assert "**not met**" in text


def test_a_run_measures_and_writes_what_it_measured(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = Subject(
        lambda: build_backbone("resnet8", num_classes=10),
        lambda batch: torch.randn(batch, 3, 8, 8),
        (2,),
        (1, 2),
        (("nothing", ""), ("two stages", "layer3")),
    )
    monkeypatch.setattr(command, "SUBJECTS", {"small": small})
    out = tmp_path / "x.json"
    argv = ["--out", str(out), "--subjects", "small", "--runs", "1", "--seconds", "0"]
    assert command.main([*argv, "--parts", "predict", "costs"]) == 0
    assert command.main([*argv, "--parts", "train", "dial"]) == 0
    done = json.loads(out.read_text())
    assert done["parts"].keys() == {"train", "predict", "dial", "costs"}
    names = {r["contestant"] for r in done["parts"]["train"]["small"] if r["seconds"]}
    assert names >= {*command.OURS, "separate", "vmap", "batchensemble", "packed"}
    assert all(r["ratio"] > 0 for r in done["parts"]["dial"]["small"])
    assert done["parts"]["costs"]["small"][0]["checkpoint_bytes"] > 0
    assert "### small: training step" in capsys.readouterr().out
    assert page(done, "x.json")


def test_the_committed_page_is_that_of_the_committed_figures() -> None:
    source = ROOT / "benchmarks" / "results" / "two-cores.json"
    written = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    done = json.loads(source.read_text(encoding="utf-8"))
    assert done["goals"] == judged(done)
    assert written == page(done, source.relative_to(ROOT).as_posix())


def test_the_plan_adds_up() -> None:
    job = Job(parameters=1e6, tokens=10, width=4, depth=2, members=4, ranks=8, batch=16)
    found = layouts(job)
    assert [(x.data_ranks, x.member_ranks) for x in found] == [(8, 1), (4, 2), (2, 4)]
    trained = 1e6 + 4 * 5 * 4
    for x in found:
        assert x.rows * x.passes == 16 * 4 / 8  # the work of a rank
        assert x.compute_seconds == pytest.approx(8 * 6 * 1e6 * 10 / (989e12 * 0.4))
        assert x.traffic_bytes == pytest.approx(2 * 4 * trained * 7 / 8)
        assert x.state_bytes == trained * 16
        assert x.activation_bytes == 34 * 10 * 4 * 2 * x.rows
        assert 0 < x.efficiency < 1
    sharded = layouts(job, sharded=True)
    assert sharded[0].state_bytes == trained * 2
    assert sharded[0].traffic_bytes > sharded[-1].traffic_bytes
    text = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    assert text.split(START)[1].split(STOP)[0] == table(Job())
