"""From a configuration and a folder of pictures to a run, and back from its checkpoint."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("datasets")
pytest.importorskip("lightning")
pytest.importorskip("sklearn")

import pyarrow
import pyarrow.parquet as parquet
from tests.lab.pictures import digits_rgb, write_digits, write_noise, write_split

from sigmanens import EnsembleLoss
from sigmanens.baselines import SeparateNetworks
from sigmanens.conversion.config import ConversionConfig
from sigmanens.ensemble.prediction import log_mean_exp
from sigmanens.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    DiversityError,
    InputError,
    NonFiniteError,
    RunError,
    SigmaNensError,
)
from sigmanens.evaluation import metrics
from sigmanens.lab import pipeline
from sigmanens.lab.backbones import build_backbone
from sigmanens.lab.bench import work
from sigmanens.lab.bench.trials import Trial
from sigmanens.lab.config import (
    DataConfig,
    DiversityConfig,
    ModelConfig,
    Recipe,
    TrainConfig,
)
from sigmanens.lab.data import load_images, sets
from sigmanens.lab.digits import Labelled
from sigmanens.lab.pipeline import evaluate_run, load_run, train_run
from sigmanens.lab.report import summary
from sigmanens.lab.runs import read_config, read_metrics
from sigmanens.lab.training import train_network

MEAN, STD = [0.3, 0.7, 0.15], [0.35, 0.35, 0.2]
TIMES = ("train_seconds", "seconds", "environment")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    write_digits(root / "digits", train=(0, 200), validation=(200, 280), test=(280, 480))
    write_noise(root / "noise")
    return root


@dataclass
class Done:
    folder: Path
    config: TrainConfig
    metrics: dict[str, Any]

    @property
    def rows(self) -> dict[str, dict[str, Any]]:
        return {row["method"]: row for row in self.metrics["rows"]}


def configuration(folders: Path, **changes: Any) -> TrainConfig:
    """Two members of a small ResNet-8 for two epochs, on 200 pictures."""
    given = {
        "data": DataConfig(
            source=str(folders / "digits"),
            mean=MEAN,
            std=STD,
            ood={"noise": str(folders / "noise")},
        ),
        "model": ModelConfig("resnet8", {"width": 4}),
        "ensemble": ConversionConfig(members=2),
        "diversity": DiversityConfig(tau=0.5, weight=1e-2),
        "recipe": Recipe(epochs=2, batch_size=40, lr=0.05, flip_crop=1),
        "controls": [],
        "seed": 3,
    }
    return copy.deepcopy(TrainConfig(**(given | changes)))


def run(config: TrainConfig, folder: Path, **options: Any) -> Done:
    return Done(folder, config, train_run(config, folder, console=Console(quiet=True), **options))


@pytest.fixture(scope="module")
def scratch(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Done:
    config = configuration(folders, controls=["single", "single_temperature", "sigmanens_lambda0"])
    return run(config, tmp_path_factory.mktemp("runs") / "scratch", command="sigmanens train")


@pytest.fixture(scope="module")
def weights(folders: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A network pretrained on the training pictures, in a file."""
    torch.manual_seed(11)
    network = build_backbone("resnet8", width=4)
    recipe = Recipe(epochs=20, batch_size=40, lr=0.2, weight_decay=0.0)
    train_network(SeparateNetworks([network]), labelled(folders, "train"), recipe, EnsembleLoss())
    path = tmp_path_factory.mktemp("weights") / "resnet8.safetensors"
    save_file(network.state_dict(), path)
    return path


@pytest.fixture(scope="module")
def pretrained(folders: Path, weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Done:
    config = configuration(
        folders,
        model=ModelConfig("resnet8", {"width": 4}, str(weights)),
        controls=["single", "single_temperature", "single_finetuned", "sigmanens_lambda0"],
        recipe=Recipe(epochs=1, batch_size=40, lr=0.01),
    )
    return run(config, tmp_path_factory.mktemp("runs") / "pretrained")


def labelled(folders: Path, split: str) -> Labelled:
    images = load_images(folders / "digits", split, mean=MEAN, std=STD)
    return Labelled(images.normalized(), images.labels)


def without_times(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if k not in TIMES} for row in rows]


def numbers(value: Any, prefix: str = "") -> dict[str, float]:
    """All numbers of a row by their path, times left out."""
    if isinstance(value, dict):
        found: dict[str, float] = {}
        for key, inner in value.items():
            if key not in TIMES:
                found |= numbers(inner, f"{prefix}/{key}")
        return found
    if isinstance(value, list):
        return numbers({str(i): v for i, v in enumerate(value)}, prefix)
    return {prefix: value} if isinstance(value, (int, float)) else {}


# -- a finished run ------------------------------------------------------------------------------


def test_a_run_holds_everything(scratch: Done) -> None:
    assert {path.name for path in scratch.folder.iterdir()} == {
        "config.yaml", "metrics.json", "inputs.json", "predictions.safetensors", "checkpoint",
        "report.html",
    }  # fmt: skip
    assert TrainConfig.from_dict(read_config(scratch.folder)) == scratch.config
    stored = read_metrics(scratch.folder)
    assert stored == scratch.metrics
    assert (stored["version"], stored["command"]) == (1, "sigmanens train")
    assert stored["preset"] == "resnet8 on digits"
    assert stored["data"] == {
        "description": "digits: 200 training pictures of 16 px, 10 classes",
        "train": 200, "validation": 100, "test": 100, "ood": {"noise": 40}, "shift": {},
        "classes": [f"digit {i}" for i in range(10)],
    }  # fmt: skip
    ours = stored["histories"][-1]
    assert (ours["method"], [entry["epoch"] for entry in ours["epochs"]]) == ("sigmanens", [1, 2])
    weights = next((scratch.folder / "checkpoint").glob("*.safetensors"))
    assert stored["checkpoint_bytes"] == weights.stat().st_size
    report = (scratch.folder / "report.html").read_text(encoding="utf-8")
    assert "σN-Ens τ=0.5" in report
    assert str(scratch.folder) not in json.dumps(stored)


def test_rows_are_the_controls_and_the_ensemble(scratch: Done) -> None:
    keys = ("method", "members", "tau", "weight")
    assert [tuple(row[k] for k in keys) for row in scratch.metrics["rows"]] == [
        ("single", 1, None, None),
        ("single_temperature", 1, None, None),
        ("sigmanens_lambda0", 2, None, None),
        ("sigmanens", 2, 0.5, 0.01),
    ]
    rows = scratch.rows
    assert all(row["n"] == 100 and row["seed"] == 3 for row in rows.values())
    assert rows["single"]["nll_calibrated"] == pytest.approx(rows["single_temperature"]["nll"])
    assert rows["single"]["train_seconds"] == rows["single_temperature"]["train_seconds"] > 0
    assert rows["sigmanens"]["cosine"] < rows["sigmanens_lambda0"]["cosine"]
    assert rows["sigmanens"]["params"] == rows["sigmanens_lambda0"]["params"]
    assert set(rows["sigmanens"]["ood"]) == {"noise"}


def test_numbers_of_a_control_are_those_of_a_training_by_hand(scratch: Done, folders: Path) -> None:
    torch.manual_seed(300)  # a study keeps room for the other networks of seed 3
    network = SeparateNetworks([build_backbone("resnet8", width=4)])
    train_network(
        network, labelled(folders, "train"), scratch.config.recipe, EnsembleLoss(), seed=300
    )
    whole = load_images(folders / "digits", "test", mean=MEAN, std=STD)
    held_out, test = whole.split(0.5, 0)
    with torch.no_grad():
        log_p = torch.log_softmax(network(test.normalized())[0], 1)
    row = scratch.rows["single"]
    assert row["accuracy"] == pytest.approx(metrics.accuracy(log_p, test.labels))
    assert row["nll"] == pytest.approx(metrics.nll(log_p, test.labels), rel=1e-5)
    stored = load_file(scratch.folder / "predictions.safetensors")
    assert torch.equal(stored["labels"], test.labels)
    assert torch.equal(stored["validation_labels"], held_out.labels)
    torch.testing.assert_close(stored["single_m1.member_log_probs"][0], log_p)
    methods = "single_m1", "single_temperature_m1", "sigmanens_lambda0_m2", "sigmanens_m2_tau0.5"
    kept = ("member_log_probs", "validation_member_log_probs")
    assert stored.keys() == {f"{m}.{k}" for m in methods for k in kept} | {
        "labels", "validation_labels",
    }  # fmt: skip


def test_a_run_can_be_repeated_with_other_controls(scratch: Done, tmp_path: Path) -> None:
    torch.manual_seed(77)
    config = copy.deepcopy(scratch.config)
    config.controls = []
    alone = run(config, tmp_path / "alone")
    assert without_times(alone.metrics["rows"]) == without_times(scratch.metrics["rows"])[-1:]
    assert alone.metrics["histories"] == scratch.metrics["histories"][-1:]
    assert load_run(alone.folder)[0].plan.init == "normal"
    config.seed = 4
    found = run(config, tmp_path / "other").rows["sigmanens"]
    assert found["nll"] != scratch.rows["sigmanens"]["nll"]


def test_evaluating_a_run_gives_its_numbers(pretrained: Done) -> None:
    done = pretrained
    torch.manual_seed(5)
    found = evaluate_run(done.folder, command="sigmanens evaluate")
    assert found["command"] == "sigmanens evaluate"
    (row,) = found["rows"]
    assert {k: row[k] for k in ("method", "tau", "weight", "members", "seed")} == {
        "method": "sigmanens", "tau": 0.5, "weight": 0.01, "members": 2, "seed": 3,
    }  # fmt: skip
    assert row["train_seconds"] is None
    expected = numbers(done.rows["sigmanens"])
    assert len(expected) > 60
    assert numbers(row) == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert row["ood"]["noise"]["energy"] != 0.5


def test_a_run_loads_as_an_ensemble(scratch: Done, folders: Path) -> None:
    ensemble, shop = load_run(scratch.folder)
    assert shop.config.recipe == scratch.config.recipe
    _, test = load_images(folders / "digits", "test", mean=MEAN, std=STD).split(0.5, 0)
    found = ensemble.predict(test.normalized())
    stored = load_file(scratch.folder / "predictions.safetensors")
    torch.testing.assert_close(
        found.member_log_probs, stored["sigmanens_m2_tau0.5.member_log_probs"]
    )
    row = scratch.rows["sigmanens"]
    assert float(ensemble.temperature) == pytest.approx(row["temperature"])
    assert metrics.nll(found.log_probs, test.labels) == pytest.approx(
        row["nll_calibrated"], rel=1e-4
    )


def test_the_first_members_can_be_evaluated(scratch: Done) -> None:
    (row,) = evaluate_run(scratch.folder, members=1)["rows"]
    stored = load_file(scratch.folder / "predictions.safetensors")
    first, labels = stored["sigmanens_m2_tau0.5.member_log_probs"][0], stored["labels"]
    assert (row["members"], row["disagreement"], row["cosine"]) == (1, 0, None)
    assert row["nll"] == pytest.approx(metrics.nll(first, labels), rel=1e-5)
    for members in (0, 3):
        with pytest.raises(InputError, match=f"members is {members}; expected 1 to 2"):
            evaluate_run(scratch.folder, members=members)


def test_pretrained_networks_keep_their_function_until_trained(
    pretrained: Done, weights: Path, folders: Path
) -> None:
    base = build_backbone("resnet8", width=4)
    base.load_state_dict(load_file(weights))
    _, test = load_images(folders / "digits", "test", mean=MEAN, std=STD).split(0.5, 0)
    with torch.no_grad():
        log_p = torch.log_softmax(base.eval()(test.normalized()), 1)
    rows = pretrained.rows
    assert list(rows) == [
        "single", "single_temperature", "single_finetuned", "sigmanens_lambda0", "sigmanens",
    ]  # fmt: skip
    assert rows["single"]["nll"] == pytest.approx(metrics.nll(log_p, test.labels), rel=1e-5)
    assert rows["single"]["train_seconds"] is None
    assert rows["single_finetuned"]["train_seconds"] > 0
    assert len({rows[m]["nll"] for m in rows}) == 5
    ensemble, _ = load_run(pretrained.folder)
    assert (ensemble.plan.init, ensemble.plan.head) == ("preserve", "copy")
    # One short epoch at a low rate after a long training: as good as the long training.
    assert rows["single"]["accuracy"] > 0.8
    assert rows["sigmanens"]["accuracy"] > 0.8
    assert rows["sigmanens"]["params"] > rows["single"]["params"]


def test_new_heads_stand_beside_one_network_with_such_a_head(
    folders: Path, weights: Path, tmp_path: Path
) -> None:
    config = configuration(
        folders, controls=None, model=ModelConfig("resnet8", {"width": 4}, str(weights)),
        ensemble=ConversionConfig(members=2, init="preserve", head="fresh"),
    )  # fmt: skip
    found = run(config, tmp_path / "run").metrics
    one, ours = found["rows"]
    assert (one["method"], one["variant"], one["head"]) == (
        "single_finetuned", "fresh_head", "fresh",
    )  # fmt: skip
    assert (ours["method"], ours["head"]) == ("sigmanens", "fresh")
    assert one["params"] > sum(p.numel() for p in build_backbone("resnet8", width=4).parameters())
    (pair,) = found["differences"]
    gap = pair["metrics"]["nll"]
    assert gap["value"] == pytest.approx(one["nll"] - ours["nll"], abs=1e-5)
    assert gap["basis"] == "samples"
    assert "one network, fine-tuned as long, fresh head (" in summary(found).headline


def test_only_members_are_saved_where_only_they_were_trained(folders: Path, tmp_path: Path) -> None:
    """From scratch: the base must be the same random network again, whatever was drawn before."""
    config = configuration(folders, ensemble=ConversionConfig(members=2, train="members"))
    done = run(config, tmp_path / "run")
    saved = load_file(next((done.folder / "checkpoint").glob("*.safetensors")))
    assert not any("conv" in key for key in saved)
    torch.manual_seed(12345)
    (row,) = evaluate_run(done.folder)["rows"]
    assert row["nll"] == pytest.approx(done.rows["sigmanens"]["nll"], rel=1e-5)
    config.seed = 4
    (done.folder / "config.yaml").write_text(json.dumps(config.to_dict()))
    with pytest.raises(CheckpointError, match="not the base"):
        load_run(done.folder)


def test_a_validation_split_is_used_and_test_is_whole(folders: Path, tmp_path: Path) -> None:
    config = configuration(folders)
    config.data.validation_split = "validation"
    config.data.ood, config.data.limit, config.data.test_limit = {}, 120, 150
    done = run(config, tmp_path / "run")
    found = done.metrics["data"]
    assert (found["train"], found["validation"], found["test"]) == (120, 80, 150)
    assert done.rows["sigmanens"]["ood"] == {}
    stored = load_file(done.folder / "predictions.safetensors")
    assert torch.equal(
        stored["validation_labels"], load_images(folders / "digits", "validation").labels
    )
    held_out = log_mean_exp(stored["sigmanens_m2_tau0.5.validation_member_log_probs"])
    assert done.rows["sigmanens"]["validation"]["nll"] == pytest.approx(
        metrics.nll(held_out, stored["validation_labels"]), rel=1e-5
    )


def test_an_ensemble_without_a_penalty_is_named_for_what_it_is(
    folders: Path, tmp_path: Path
) -> None:
    config = configuration(folders, ensemble=ConversionConfig(2, scale="linear", shift=True))
    config.diversity.weight, config.recipe.epochs = 0.0, 1
    (row,) = run(config, tmp_path / "run").metrics["rows"]
    assert (row["method"], row["members"], row["tau"], row["weight"]) == ("film", 2, None, None)
    config.ensemble = ConversionConfig(members=2)
    assert pipeline._ensemble_trial(config) == Trial(3, "sigmanens_lambda0", 2)
    config.ensemble, config.diversity.weight = ConversionConfig(members=1), 0.1
    assert pipeline._ensemble_trial(config) == Trial(3, "sigmanens_lambda0", 1)


def test_threads_are_set(folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", asked.append)
    config = configuration(folders, threads=2)
    config.data.source = "./nowhere"
    with pytest.raises(DataError):
        run(config, tmp_path / "run")
    assert asked == [2]


# -- interrupted ---------------------------------------------------------------------------------


class Crash(RuntimeError):
    """The machine goes down."""


class Breaking(EnsembleLoss):
    """A loss of all trainings of a run together, until the machine goes down."""

    left = 0

    def task(self, logits: Tensor, y: Tensor, **options: Any) -> Tensor:
        type(self).left -= 1
        if self.left < 0:
            raise Crash
        return super().task(logits, y, **options)


@pytest.mark.parametrize("steps", [7, 28])
def test_a_run_that_crashed_is_resumed(
    scratch: Done, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    """In the second epoch of the single network, and in the last of all."""
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(Breaking, "left", steps)
        patch.setattr(work, "EnsembleLoss", Breaking)
        with pytest.raises(Crash):
            run(scratch.config, folder)
    assert {path.name for path in folder.iterdir()} == {"config.yaml", "training"}
    with pytest.raises(RunError, match=r"unfinished run already.*--resume"):
        run(scratch.config, folder)
    other = copy.deepcopy(scratch.config)
    other.recipe.lr = 0.04
    with pytest.raises(RunError, match="another configuration"):
        run(other, folder, resume=True)
    resumed = run(scratch.config, folder, resume=True)
    assert without_times(resumed.metrics["rows"]) == without_times(scratch.metrics["rows"])
    assert resumed.metrics["histories"] == scratch.metrics["histories"]
    assert not (folder / "training").exists()
    with pytest.raises(RunError, match="is finished: there is nothing to resume"):
        run(scratch.config, folder, resume=True)


def test_a_report_that_cannot_be_written_leaves_the_run_to_be_resumed(
    folders: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = configuration(folders)
    config.recipe.epochs = 1

    def full(*_: Any) -> None:
        raise RunError("the report cannot be written")

    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "write_report", full)
        with pytest.raises(RunError, match="report cannot be written"):
            run(config, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.json").exists()
    with monkeypatch.context() as patch:  # nothing is trained again
        patch.setattr(Breaking, "left", 0)
        patch.setattr(work, "EnsembleLoss", Breaking)
        run(config, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "report.html").exists()


# -- refused -------------------------------------------------------------------------------------


def _set(part: str, key: str, value: Any) -> Callable[[TrainConfig], None]:
    def change(config: TrainConfig) -> None:
        setattr(getattr(config, part), key, value)

    return change


def _imagenet(config: TrainConfig) -> None:
    config.model = ModelConfig("timm/resnet18", {"pretrained": True})


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (_set("data", "source", "./nowhere"), DataError, "no data folder"),
        (_set("data", "train_split", "training"), DataError, "no split 'training'"),
        (_set("data", "mean", [0.5]), InputError, "mean needs 3 values"),
        (_set("data", "ood", {"gone": "./nowhere"}), DataError, "no data folder"),
        (_set("model", "weights", "./none.safetensors"), DataError, "no weight file"),
        (_set("model", "name", "resnet9"), ConfigError, "Unknown backbone"),
        (_set("diversity", "tau", 0.0), DiversityError, "0"),
        (_set("diversity", "layers", "nothing"), DiversityError, "selects no converted norm"),
        (_set("recipe", "epochs", 0), ConfigError, "recipe.epochs is 0"),
        (_imagenet, ConfigError, "1000 classes, .* Leave 'single' .* out of controls"),
    ],
)
def test_what_cannot_work_shows_before_anything_is_trained(
    folders: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[TrainConfig], None],
    error: type[SigmaNensError],
    message: str,
) -> None:
    """And leaves the folder as it was, for the command with the mistake put right."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Breaking, "left", 0)
    monkeypatch.setattr(work, "EnsembleLoss", Breaking)
    config = configuration(folders, controls=["single"])
    change(config)
    with pytest.raises(error, match=message):
        run(config, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("split", ["train", "validation"])
def test_splits_with_other_classes_are_refused(tmp_path: Path, split: str) -> None:
    images, labels = digits_rgb()
    names = [f"digit {i}" for i in range(10)]
    for i, part in enumerate(("train", "validation", "test")):
        given = names[::-1] if part == split else names
        rows = slice(60 * i, 60 * (i + 1))
        write_split(tmp_path / part, part, images[rows], labels[rows], given)
    config = configuration(tmp_path)
    config.data.validation_split, config.data.ood = "validation", {}

    def load(source: str, part: str, **options: Any) -> Any:
        return load_images(tmp_path / part, part, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sets, "load_images", load)
        with pytest.raises(DataError, match=f"'{split}' and 'test' .* different classes"):
            run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_training_that_diverges_leaves_no_metrics(folders: Path, tmp_path: Path) -> None:
    config = configuration(folders)
    config.recipe.lr = 1e20
    with pytest.raises(NonFiniteError):
        run(config, tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.json").exists()
    with pytest.raises(RunError, match="holds no checkpoint: it is no finished run"):
        load_run(tmp_path / "run")
    with pytest.raises(RunError, match="unfinished run: it has no metrics"):
        evaluate_run(tmp_path / "run")


def test_a_finished_run_is_never_written_over(scratch: Done) -> None:
    before = (scratch.folder / "metrics.json").read_bytes()
    with pytest.raises(RunError, match="holds a run already"):
        run(scratch.config, scratch.folder)
    assert (scratch.folder / "metrics.json").read_bytes() == before


# -- real data -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_real_cifar10_with_a_pretrained_resnet20(shared: Path, tmp_path: Path) -> None:
    (tmp_path / "cifar10").mkdir()
    for split, name in (("train", "train-00000-of-00005"), ("test", "test-00000-of-00001")):
        file = parquet.ParquetFile(shared / "cifar10" / f"{name}.parquet")
        rows = next(file.iter_batches(256))
        table = pyarrow.Table.from_batches([rows], file.schema_arrow)
        parquet.write_table(table, tmp_path / "cifar10" / f"{split}.parquet")
    config = TrainConfig(
        data=DataConfig(
            source=str(tmp_path / "cifar10"), mean=[0.485, 0.456, 0.406],
            std=[0.229, 0.224, 0.225], limit=64,
        ),
        model=ModelConfig(
            "resnet20", weights=str(shared / "weights" / "resnet20_cifar10.safetensors")
        ),
        ensemble=ConversionConfig(members=2, schedule="sequential"),
        diversity=DiversityConfig(weight=1e-3),
        recipe=Recipe(
            epochs=1, batch_size=64, lr=0.003, flip_crop=4, channels_last=True,
        ),
        controls=["single", "single_temperature"],
    )  # fmt: skip
    done = run(config, tmp_path / "run")
    rows = done.rows
    assert rows["single"]["n"] == 128
    assert 0.85 < rows["single"]["accuracy"] < 0.98
    assert rows["single"]["temperature"] > 1.2
    assert rows["single_temperature"]["nll"] < rows["single"]["nll"]
    assert rows["sigmanens"]["accuracy"] > 0.8
    assert rows["sigmanens"]["pairwise_kl"] > 0
    assert 0.6 < rows["sigmanens"]["cosine"] < 0.95
    (row,) = evaluate_run(done.folder)["rows"]
    assert row["nll"] == pytest.approx(rows["sigmanens"]["nll"], rel=1e-3)
