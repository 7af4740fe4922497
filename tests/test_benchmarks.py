"""The benchmarks: fair turns, right verdicts, pages that say what the files say."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("torch_uncertainty", reason="the rivals' layers: pip install -e '.[bench]'")

from benchmarks import __main__ as command
from benchmarks import measure
from benchmarks.goals import judged
from benchmarks.load import served, under_load
from benchmarks.page import page, tables
from benchmarks.plan import START, STOP, Job, layouts, table
from benchmarks.runtime import FLOAT, INT8
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
        "compiled prediction": {
            "Net": [
                row("predict", "sigmanens folded", b, r, compiled=True, ratio_to_eager=r)
                for b, r in ((1, 0.3), (64, 0.8))
            ]
        },
        "onnx": {
            "Net": [
                row("predict", c, b, r, ratio_to_eager=r, precision=p, bytes=2**21, gap=gap)
                for c, b, r, p, gap in (
                    ("separate onnx", 64, 0.1, "fp32", None),
                    ("sigmanens onnx", 1, 0.2, "fp32", None),
                    ("sigmanens onnx", 64, 0.7, "fp32", None),
                    ("sigmanens onnx int8", 64, 0.6, "int8", 0.002),
                )
            ]
            + [row("predict", "sigmanens onnx small", 64, None, error="ValueError: a | b")]
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
    runs = [{"command": "c", "machine": command.machine(1)}]
    done = {"version": 2, "members": 4, "runs": runs, "parts": parts}
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
    assert verdict("compiled prediction at batch 1", "B=1") == (0.3, True)
    large = "prediction at a large batch, compiled or in ONNX Runtime"
    assert verdict(large, "B=64") == (0.7, True)
    assert goals[large, "B=64"]["by"] == "sigmanens onnx"
    assert verdict("training step over batchensemble's", "B=8") == (1.125, False)
    assert ("training step over packed's", "B=8") not in goals
    assert verdict("σNorm and penalty over plain norms", "B=8") == (0.04, False)
    assert verdict("peak memory over one network", "M=16") == (1.1, True)


def test_one_of_compiler_and_runtime_will_do_for_the_goal_at_a_large_batch() -> None:
    parts = example()["parts"]
    large = "prediction at a large batch, compiled or in ONNX Runtime"

    def by(*names: str) -> list[Any]:
        done = {"parts": {n: parts[n] for n in names}}
        return [(g["value"], g["met"], g["by"]) for g in judged(done) if g["goal"] == large]

    assert by("compiled prediction") == [(0.8, False, "sigmanens folded, compiled")]
    assert by("onnx") == [(0.7, True, "sigmanens onnx")]
    assert by("train") == []
    parts["onnx"] = {"Net": parts["onnx"]["Net"][:1]}
    assert by("onnx") == [(None, None, None)]


def test_the_tables_hold_every_row() -> None:
    text = tables(example(), "benchmarks/results/x.json")
    for line in (
        "| training step ≤ M separate steps | Net | B=8 | 1.00 | 0.90 | sigmanens folded | met |",
        "| train, B=8, fp32 | packed | failed | ValueError: a / b |",
        "| train, B=8, bf16 | sigmanens folded | 100.0 | 0.10 [0.10, 0.10] |",
        "; 0.84 × eager separate networks |",
        "| predict, B=64, int8 | sigmanens onnx int8 | 600.0 | 0.60 [0.60, 0.60] | 2.0 | 2.0e-03 |",
        "| sigmanens onnx small | failed | ValueError: a / b | – | – |",
        "| sigmanens sequential | 16 | 8 | 0 | 1.10 |",
        "| 2.0% | 2.0% | 0.10 | 2 | 4 | 1.010 |",
    ):
        assert line in text
    assert "**not met**" in text


def test_the_page_has_the_range_of_each_goal() -> None:
    done = example()
    text = page(done)
    assert "| training step ≤ M separate steps | 1.00 | 0.90 | met |" in text
    more = [
        g | {"value": 1.2, "met": False} for g in done["goals"] if g["goal"].startswith("training ")
    ]
    text = page(done | {"goals": [*done["goals"], *more]})
    assert "| training step ≤ M separate steps | 1.00 | 0.90–1.20 | **met in 1 of 2** |" in text


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
    assert len(done["runs"]) == 2
    assert page(done)
    assert tables(done, "x.json")


@pytest.mark.slow
def test_networks_in_onnx_runtime_are_measured_against_eager_ones(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for package in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(package)

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(16, 256), nn.LayerNorm(256), nn.ReLU(), nn.Linear(256, 10))

    monkeypatch.setattr(
        command, "SUBJECTS", {"small": Subject(make, lambda b: torch.randn(b, 16), (), (1, 9))}
    )
    out = tmp_path / "x.json"
    argv = ["--out", str(out), "--subjects", "small", "--runs", "1", "--seconds", "0"]
    assert command.main([*argv, "--parts", "onnx"]) == 0
    rows = json.loads(out.read_text())["parts"]["onnx"]["small"]
    assert [r["contestant"] for r in rows] == ["separate", *FLOAT, *INT8] * 2
    assert not [r["error"] for r in rows if r["error"]]
    assert all(r["ratio_to_eager"] == r["ratio"] > 0 for r in rows)
    by = {(r["contestant"], r["batch"]): r for r in rows}
    for name in INT8:
        exact = by[name.removesuffix(" int8"), 9]
        assert by[name, 9]["bytes"] < exact["bytes"]
        assert 0 < by[name, 9]["gap"] < 0.05
        assert exact["gap"] is None


def test_wrong_answers_under_load_are_counted() -> None:
    calls = iter(range(1000))

    def unreliable(x: torch.Tensor) -> torch.Tensor:
        return x + (next(calls) % 5 == 4)

    inputs = [torch.tensor([float(i)]) for i in range(4)]
    found = under_load({"right": lambda x: 2 * x, "wrong": unreliable}, inputs, 3, 10, 2)
    assert (found["right"]["wrong"], found["right"]["answers"]) == (0, 20)
    assert found["wrong"]["wrong"] == 4  # the first four calls were the answers alone
    assert 0 < found["right"]["latency"] <= found["right"]["latency_95"]
    assert found["right"]["throughput"] > 0


def test_what_is_served_answers_alike_with_and_without_a_runtime(tmp_path: Path) -> None:
    for package in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(package)

    def make() -> nn.Module:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 3))

    subject = Subject(make, lambda b: torch.randn(b, 6), (), (1,))
    x = torch.randn(4, 6)
    eager, runtime = (served(n, subject, 2, tmp_path)(x) for n in ("sigmanens", "sigmanens onnx"))
    torch.testing.assert_close(eager, runtime, rtol=0, atol=1e-5)
    alone = torch.softmax(make().eval()(x), 1)
    for name in ("one network", "separate", "separate onnx"):
        torch.testing.assert_close(served(name, subject, 2, tmp_path)(x), alone)


def test_a_contestant_that_cannot_be_exported_is_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *_: Any) -> None:
        raise ValueError(f"no {name}")

    small = Subject(
        lambda: nn.Sequential(nn.Conv1d(1, 9, 3), nn.BatchNorm1d(9), nn.Flatten(), nn.Linear(9, 3)),
        lambda b: torch.randn(b, 1, 3),
        (),
        (2,),
    )
    monkeypatch.setattr(command, "SUBJECTS", {"small": small})
    monkeypatch.setattr(command, "exported", refuse)
    rows = command._onnx("small", SimpleNamespace(runs=1, seconds=0.0))
    found = {r["contestant"]: r["error"] for r in rows}
    assert found == {name: f"ValueError: no {name}" for name in FLOAT} | {"separate": None}


def test_the_committed_pages_are_those_of_the_committed_figures() -> None:
    source = ROOT / "benchmarks" / "results" / "two-cores.json"
    done = json.loads(source.read_text(encoding="utf-8"))
    assert done["goals"] == judged(done)
    pages = {
        "performance.md": page(done),
        "performance-tables.md": tables(done, source.relative_to(ROOT).as_posix()),
    }
    for name, text in pages.items():
        assert (ROOT / "docs" / name).read_text(encoding="utf-8") == text


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
