"""The network that all trainings of a study start from: trained once, on what it may see."""

from __future__ import annotations

import io
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

pytest.importorskip("datasets")
pytest.importorskip("lightning")
pytest.importorskip("sklearn")

from rich.console import Console
from safetensors.torch import load_file
from tests.lab.pictures import write_digits

from sigmanens.conversion.config import ConversionConfig
from sigmanens.errors import ConfigError, RunError
from sigmanens.lab.backbones import build_backbone, load_weights
from sigmanens.lab.bench import pretraining
from sigmanens.lab.bench.config import BenchConfig, MeasureConfig, PretrainConfig, Variant
from sigmanens.lab.bench.cost import cost_table
from sigmanens.lab.bench.material import load_base_pictures, load_material
from sigmanens.lab.bench.pretraining import train_base
from sigmanens.lab.bench.runner import run_bench
from sigmanens.lab.bench.trials import trials_of
from sigmanens.lab.config import DataConfig, ModelConfig, Recipe
from sigmanens.lab.data import lazy, load_images


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> BenchConfig:
    folder = write_digits(tmp_path_factory.mktemp("base"), train=(0, 300), test=(300, 500))
    return BenchConfig(
        study="based",
        data=DataConfig(source=str(folder), size=8, limit=60, seed=2),
        model=ModelConfig("digits", {"width": 4, "in_channels": 3}),
        pretrain=PretrainConfig(Recipe(epochs=8, batch_size=30, lr=0.2), seed=5),
        ensemble=ConversionConfig(members=2, init="preserve", head="copy"),
        recipe=Recipe(epochs=1, batch_size=30, lr=0.01),
        methods=["separate", "sigmanens"],
        taus=[0.5],
        seeds=[0],
        measure=MeasureConfig(resamples=50),
    )


@pytest.fixture(scope="module")
def done(study: BenchConfig, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("study") / "run"
    return folder, run_bench(study, folder)


def test_all_trainings_start_from_one_network(
    study: BenchConfig, done: tuple[Path, dict[str, Any]]
) -> None:
    folder, found = done
    assert found["failures"] == {}
    rows = {row["method"]: row for row in found["rows"]}
    assert {"single", "single_finetuned", "deep_ensemble", "sigmanens"} <= set(rows)
    base = load_weights(
        build_backbone("digits", width=4, in_channels=3), folder / "base" / "network.safetensors"
    )
    test = load_material(study, 0).data.test
    with torch.no_grad():
        right = (base.eval()(test.tensor).argmax(1) == test.labels).float().mean()
    assert rows["single"]["accuracy"] == pytest.approx(float(right))
    assert right > 0.3
    assert rows["single"]["train_seconds"] is None
    assert found["base"]["train"] == 300  # all training pictures, not the 60 of the trainings
    assert (found["base"]["seed"], len(found["base"]["epochs"])) == (5, 8)
    assert not (folder / "base" / "training").exists()


def test_it_is_trained_once(
    study: BenchConfig, done: tuple[Path, dict[str, Any]], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    folder = tmp_path / "run"
    shutil.copytree(done[0], folder)
    before = (folder / "base" / "network.safetensors").read_bytes()
    monkeypatch.setattr(pretraining, "train_network", None)  # not called
    more = run_bench(replace(study, taus=[0.5, 2.0]), folder, resume=True)
    assert len(more["rows"]) == len(done[1]["rows"]) + 1
    assert more["base"] == done[1]["base"]
    assert (folder / "base" / "network.safetensors").read_bytes() == before
    shutil.rmtree(folder / "base")  # nothing is left to train: it is not needed
    again = run_bench(replace(study, taus=[0.5, 2.0]), folder, resume=True)
    assert again["rows"] == more["rows"]
    assert again["base"] == more["base"]
    other = replace(study, pretrain=replace(study.pretrain, seed=6))
    with pytest.raises(RunError, match="another configuration"):
        run_bench(other, folder, resume=True)


def test_no_untrained_head_is_measured(
    study: BenchConfig, done: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """Networks with heads of a norm and a Linear start from the base; the untouched has none."""
    folder = tmp_path / "run"
    shutil.copytree(done[0], folder)
    heads = Variant("separate", {"options.separate": {"head": "fresh"}})
    more = run_bench(replace(study, variants={"fresh_head": heads}), folder, resume=True)
    added = {row["method"] for row in more["rows"] if row["variant"] == "fresh_head"}
    assert added == {"single_finetuned", "deep_ensemble"}


def test_it_sees_no_picture_that_is_held_out(study: BenchConfig) -> None:
    """Whatever the limit of the trainings, or its own; and it sees all the others."""
    whole = load_images(study.data.source, "train", size=8)

    def pixels(images: torch.Tensor) -> list[bytes]:
        return [bytes((p * 255).round().to(torch.uint8).flatten().tolist()) for p in images]

    everything = pixels(whole.images.float() / 255)
    assert len(set(everything)) == len(everything)
    for limit in (None, 60):
        for stratify in (False, True):
            data = replace(study.data, limit=limit, validation_from_train=40, stratify=stratify)
            config = replace(study, data=data)
            seen = pixels(load_base_pictures(config)[0].tensor)
            held = pixels(load_material(config, 0).data.validation.tensor)
            trained = pixels(load_material(config, 0).train.tensor)
            assert len(held) == 40
            assert set(seen) == set(everything) - set(held)
            assert set(trained) <= set(seen)
            few = replace(config, pretrain=replace(study.pretrain, limit=70))
            assert pixels(load_base_pictures(few)[0].tensor) == seen[:70]


SLOW = """
import sys, time
from pathlib import Path
import yaml
from sigmanens.lab.bench.config import BenchConfig
from sigmanens.lab.bench.pretraining import train_base
config = BenchConfig.from_dict(yaml.safe_load(Path(sys.argv[1]).read_text()))
done = []
train_base(
    config, Path(sys.argv[2]), lambda: done.append(1) if not done else time.sleep(600)
)
"""


@pytest.mark.slow
def test_killed_and_resumed_is_the_same_network(
    study: BenchConfig, done: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    """SIGKILL in the second epoch, of which no state is kept yet."""
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study.to_dict()), encoding="utf-8")
    base = tmp_path / "base"
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", SLOW, str(tmp_path / "study.yaml"), str(base)],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, start_new_session=True,
    ) as process:  # fmt: skip
        limit = time.monotonic() + 300
        while not (base / "training" / "last.ckpt").exists():
            assert process.poll() is None, "it ended before it was killed"
            assert time.monotonic() < limit
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    assert not (base / "network.safetensors").exists()
    epochs = []
    found = train_base(study, base, lambda: epochs.append(1))
    assert len(epochs) == 7  # of eight
    expected = load_file(done[0] / "base" / "network.safetensors")
    assert all(torch.equal(v, expected[k]) for k, v in load_file(found.path).items())
    found.path.write_bytes(found.path.read_bytes()[:-10])
    with pytest.raises(RunError, match="does not hold the base"):
        train_base(study, base)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": ModelConfig("digits", weights="x.pt")}, "names pretrained weights already"),
        ({"model": ModelConfig("timm/x", {"pretrained": True})}, "names pretrained weights"),
        ({"trained_head": False}, "trained_head is false"),
        ({"data": DataConfig("digits")}, "each seed cuts the digits"),
        ({"data": DataConfig("x", tokenizer="minilm")}, "pretrain is for pictures"),
        ({"pretrain": PretrainConfig(limit=0)}, r"pretrain\.limit is 0"),
        ({"pretrain": PretrainConfig(Recipe(epochs=0))}, r"pretrain: recipe\.epochs is 0"),
        ({"variants": {"a": Variant(change={"pretrain.seed": 3})}}, "start from the same network"),
        ({"variants": {"a": Variant(change={"pretrain.recipe.lr": 3})}}, "the same network"),
    ],
)
def test_a_base_that_would_not_be_started_from_is_refused(
    study: BenchConfig, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(study, **change).check()


def test_it_survives_the_configuration_s_file(study: BenchConfig) -> None:
    again = BenchConfig.from_dict(yaml.safe_load(yaml.safe_dump(study.to_dict())))
    assert again == study
    assert study.pretrained
    assert trials_of(study)
    older = study.to_dict()
    del older["pretrain"]
    assert BenchConfig.from_dict(older).pretrain is None
    with pytest.raises(ConfigError, match="unknown key"):
        BenchConfig.from_dict({"pretrain": {"epochs": 3}})


def test_its_cost_is_told(study: BenchConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before more than a few of the 500 pictures are decoded."""
    decoded: list[str] = []
    real = lazy.decoded

    def counted(record: Any, channels: int, where: str, frame: Any) -> Any:
        decoded.append(where)
        return real(record, channels, where, frame)

    monkeypatch.setattr(lazy, "decoded", counted)
    said = io.StringIO()
    Console(width=160, file=said).print(cost_table(study))
    (line,) = [x for x in said.getvalue().splitlines() if "the base" in x]
    assert line.split()[-1] == "80"  # eight epochs of 300 pictures in batches of 30
    assert 0 < len(decoded) < 20
