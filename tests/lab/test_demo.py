"""The demo, at a size at which it takes seconds."""

from __future__ import annotations

import copy
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

pytest.importorskip("lightning")
pytest.importorskip("sklearn")

from sigmanens.errors import ConfigError
from sigmanens.lab.bench.material import load_material
from sigmanens.lab.bench.runner import run_bench
from sigmanens.lab.bench.trials import Trial
from sigmanens.lab.bench.work import Workshop
from sigmanens.lab.config import DemoConfig
from sigmanens.lab.demo import demo_study
from sigmanens.lab.runs import read_config, read_metrics

TINY = DemoConfig(members=2, taus=(0.5,), train=60, epochs=2, width=4, seeds=1, workers=1)
METHODS = ["single", "single_temperature", "deep_ensemble", "film", "sigmanens_lambda0"]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """A run, what it returned and what it printed."""
    folder = tmp_path_factory.mktemp("demo") / "run"
    text = io.StringIO()
    console = Console(file=text, width=120)
    found = run_bench(demo_study(TINY), folder, command="sigmanens demo", console=console)
    return folder, found, text.getvalue()


def rows_without_times(found: dict[str, Any]) -> list[dict[str, Any]]:
    rows = copy.deepcopy(found["rows"])
    assert all(row.pop("train_seconds") > 0 for row in rows)
    return rows


def test_the_folder_holds_a_whole_run(done: tuple[Path, dict[str, Any], str]) -> None:
    folder, found, _ = done
    assert {path.name for path in folder.iterdir()} == {
        "config.yaml", "metrics.json", "trials", "report.html",
    }  # fmt: skip
    assert read_metrics(folder) == found
    assert read_config(folder) == demo_study(TINY).to_dict()
    assert (found["preset"], found["command"]) == ("digits-demo", "sigmanens demo")
    assert (found["data"]["train"], found["data"]["validation"]) == (60, 400)
    report = (folder / "report.html").read_text(encoding="utf-8")
    assert report.lstrip().lower().startswith("<!doctype html>")
    assert report.rstrip().endswith("</html>")
    for word in ("FiLM-Ensemble control", "σN-Ens τ=0.5", "photo patches", "gaussian noise"):
        assert word in report


def test_every_method_has_a_row(done: tuple[Path, dict[str, Any], str]) -> None:
    _, found, _ = done
    given = [(r["method"], r["tau"], r["members"]) for r in found["rows"]]
    assert given == [
        (method, tau, 1 if method.startswith("single") else 2)
        for method, tau in [*((m, None) for m in METHODS), ("sigmanens", 0.5)]
    ]
    rows = {(r["method"], r["tau"]): r for r in found["rows"]}
    one = rows["single", None]["params"]
    assert rows["deep_ensemble", None]["params"] == 2 * one
    assert one < rows["sigmanens", 0.5]["params"] < rows["film", None]["params"] < 2 * one
    assert rows["single", None]["nll_calibrated"] == pytest.approx(
        rows["single_temperature", None]["nll"]
    )
    for row in found["rows"]:
        assert set(row["ood"]) == {"photo_patches", "uniform_noise", "gaussian_noise"}
        assert list(row["corruption"]["gaussian_noise"]) == ["1", "2", "3", "4", "5"]
        assert row["n"] == found["data"]["test"] == 1797 - 60 - 400


def test_a_file_gets_no_progress(done: tuple[Path, dict[str, Any], str]) -> None:
    assert done[2].strip() == ""


def test_a_terminal_gets_progress(tmp_path: Path) -> None:
    text = io.StringIO()
    console = Console(file=text, width=120, force_terminal=True)
    run_bench(demo_study(replace(TINY, epochs=1)), tmp_path / "run", console=console)
    assert "4 trainings" in text.getvalue()


@pytest.mark.slow
def test_two_workers_give_the_same_numbers(
    done: tuple[Path, dict[str, Any], str], tmp_path: Path
) -> None:
    _, found, _ = done
    config = replace(TINY, workers=2)
    console = Console(file=io.StringIO())
    other = run_bench(demo_study(config), tmp_path / "run", console=console)
    assert rows_without_times(other) == rows_without_times(found)
    assert other["choice"] == found["choice"]


def test_every_seed_and_every_separate_network_starts_on_its_own() -> None:
    study = demo_study(TINY)
    shops = [
        Workshop(study, Trial(seed, "separate", 2), load_material(study, seed)) for seed in (0, 1)
    ]
    starts = [shop.base(i).get_parameter("conv1.weight") for shop in shops for i in (0, 1)]
    for i, first in enumerate(starts):
        assert not any(torch.equal(first, other) for other in starts[i + 1 :])
    first, second = (shop.material.train.tensor for shop in shops)
    assert not torch.equal(first, second)
    assert len(first) == TINY.train


@pytest.mark.parametrize("values", [{"members": 1}, {"train": 1790}, {"train": 5}, {"train": 0}])
def test_a_size_that_cannot_be_run_is_refused_at_once(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=str(next(iter(values.values())))):
        run_bench(demo_study(replace(TINY, **values)), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []
