"""The demo, at a size at which it takes seconds."""

from __future__ import annotations

import copy
import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

pytest.importorskip("lightning")
pytest.importorskip("sklearn")

from sigmanens.ensemble.prediction import log_mean_exp
from sigmanens.errors import ConfigError, NonFiniteError, RunError
from sigmanens.evaluation import metrics
from sigmanens.lab.bench import work
from sigmanens.lab.bench.material import load_material
from sigmanens.lab.bench.measure import prediction_name
from sigmanens.lab.bench.trials import Trial
from sigmanens.lab.bench.work import Workshop
from sigmanens.lab.config import DemoConfig
from sigmanens.lab.demo import demo_study, run_demo
from sigmanens.lab.runs import read_config, read_metrics

TINY = DemoConfig(members=2, taus=(0.5,), train=60, epochs=2, width=4, seeds=1, workers=1)
METHODS = ["single", "single_temperature", "deep_ensemble", "film", "sigmanens_lambda0"]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """A run of two seeds and two τ, what it returned and what it printed."""
    folder = tmp_path_factory.mktemp("demo") / "run"
    text = io.StringIO()
    console = Console(file=text, width=120)
    config = replace(TINY, seeds=2, taus=(0.5, 2.0))
    found = run_demo(config, folder, command="sigmanens demo", console=console)
    return folder, found, text.getvalue()


def rows_without_times(found: dict[str, Any]) -> list[dict[str, Any]]:
    rows = copy.deepcopy(found["rows"])
    assert all(row.pop("train_seconds") > 0 for row in rows)
    return rows


def test_the_folder_holds_a_whole_run(done: tuple[Path, dict[str, Any], str]) -> None:
    folder, found, _ = done
    assert {path.name for path in folder.iterdir()} == {
        "config.yaml", "metrics.json", "predictions.safetensors", "report.html",
    }  # fmt: skip
    assert read_metrics(folder) == found
    assert read_config(folder) == demo_study(replace(TINY, seeds=2, taus=(0.5, 2.0))).to_dict()
    assert (found["preset"], found["command"]) == ("digits-demo", "sigmanens demo")
    assert (found["data"]["train"], found["data"]["validation"]) == (60, 400)
    report = (folder / "report.html").read_text(encoding="utf-8")
    assert report.lstrip().lower().startswith("<!doctype html>")
    assert report.rstrip().endswith("</html>")
    for word in ("FiLM-Ensemble control", "σN-Ens τ=2", "photo patches", "gaussian noise"):
        assert word in report


def test_every_method_has_a_row_of_every_seed(done: tuple[Path, dict[str, Any], str]) -> None:
    _, found, _ = done
    given = [(r["seed"], r["method"], r["tau"], r["members"]) for r in found["rows"]]
    assert given == [
        (seed, method, tau, 1 if method.startswith("single") else 2)
        for seed in (0, 1)
        for method, tau in [*((m, None) for m in METHODS), ("sigmanens", 0.5), ("sigmanens", 2.0)]
    ]
    rows = {(r["method"], r["tau"]): r for r in found["rows"] if r["seed"] == 0}
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


def test_predictions_give_the_numbers(done: tuple[Path, dict[str, Any], str]) -> None:
    folder, found, _ = done
    stored = load_file(folder / "predictions.safetensors")
    for row in found["rows"]:
        name = prediction_name(row)
        log_p = log_mean_exp(stored[f"seed{row['seed']}.{name}.member_log_probs"])
        labels = stored[f"seed{row['seed']}.labels"]
        assert row["nll"] == pytest.approx(metrics.nll(log_p, labels), rel=1e-5)
    assert not torch.equal(stored["seed0.labels"], stored["seed1.labels"])


def test_tau_is_chosen_by_validation_pictures_only(
    done: tuple[Path, dict[str, Any], str],
) -> None:
    _, found, _ = done
    means = {
        tau: sum(
            r["validation"]["nll_calibrated"] for r in found["rows"] if r["tau"] == tau
        ) / 2
        for tau in (0.5, 2.0)
    }  # fmt: skip
    assert found["choice"]["tau"] == min(means, key=lambda tau: means[tau])
    assert found["choice"]["criterion"] == "validation nll_calibrated"


def test_a_file_gets_no_progress(done: tuple[Path, dict[str, Any], str]) -> None:
    assert done[2].strip() == ""


def test_a_terminal_gets_progress(tmp_path: Path) -> None:
    text = io.StringIO()
    console = Console(file=text, width=120, force_terminal=True)
    run_demo(replace(TINY, epochs=1), tmp_path / "run", console=console)
    assert "4 trainings" in text.getvalue()


def test_two_workers_give_the_same_numbers(
    done: tuple[Path, dict[str, Any], str], tmp_path: Path
) -> None:
    _, found, _ = done
    config = replace(TINY, seeds=2, taus=(0.5, 2.0), workers=2)
    other = run_demo(config, tmp_path / "run", console=Console(file=io.StringIO()))
    assert rows_without_times(other) == rows_without_times(found)
    assert other["choice"] == found["choice"]
    stored = load_file(tmp_path / "run" / "predictions.safetensors")
    expected = load_file(done[0] / "predictions.safetensors")
    assert stored.keys() == expected.keys()
    assert all(torch.equal(stored[k], expected[k]) for k in stored)


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


def test_a_demo_that_fails_leaves_the_folder_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A demo is not resumed: what was begun is of no use."""

    def diverge(*_: Any, **__: Any) -> None:
        raise NonFiniteError("the loss is nan")

    with monkeypatch.context() as patch:
        patch.setattr(work, "train_network", diverge)
        with pytest.raises(RunError, match="the loss is nan"):
            run_demo(TINY, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_not_written_over(done: tuple[Path, dict[str, Any], str]) -> None:
    folder, found, _ = done
    with pytest.raises(RunError, match="holds a run already"):
        run_demo(TINY, folder)
    assert read_metrics(folder) == found


@pytest.mark.parametrize("values", [{"members": 1}, {"train": 1790}, {"train": 5}])
def test_a_size_that_cannot_be_run_is_refused_at_once(
    tmp_path: Path, values: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=str(next(iter(values.values())))):
        run_demo(replace(TINY, **values), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_metrics_are_plain_json(done: tuple[Path, dict[str, Any], str]) -> None:
    _, found, _ = done
    text = json.dumps(found, allow_nan=False)
    assert json.loads(text) == found
    films = [row for row in found["rows"] if row["method"] == "film"]
    assert all(row["owners"] is None and row["cosine"] is not None for row in films)
