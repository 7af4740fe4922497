"""Configurations: through YAML and back, and every mistake named."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("yaml")

import yaml

from sigmanens.conversion.config import ConversionConfig
from sigmanens.diversity import Ramp
from sigmanens.errors import ConfigError
from sigmanens.lab.config import (
    CONTROLS,
    DataConfig,
    DemoConfig,
    DiversityConfig,
    ModelConfig,
    Recipe,
    TrainConfig,
)
from sigmanens.lab.demo import demo_study

ROOT = Path(__file__).resolve().parents[2]
FULL = TrainConfig(
    data=DataConfig(
        source="data/cifar10", mean=[0.5, 0.4, 0.3], std=[0.2, 0.2, 0.2], size=32, limit=100,
        ood={"mnist": "data/mnist"},
    ),
    model=ModelConfig("resnet8", {"width": 4, "extra": [1, {"a": None}]}, "weights.pt"),
    ensemble=ConversionConfig(members=3, schedule=2, shift=True),
    diversity=DiversityConfig(tau=0.5, weight=Ramp(1e-5, start=0.25)),
    recipe=Recipe(lr=1e-4, scale_lr_mult=10, nesterov=False),
    controls=["single", "sigmanens_lambda0"],
    seed=7,
    threads=2,
)  # fmt: skip


@pytest.mark.parametrize("config", [TrainConfig(), FULL], ids=["defaults", "full"])
def test_round_trip_through_yaml(config: TrainConfig) -> None:
    text = yaml.safe_dump(config.to_dict())
    again = TrainConfig.from_dict(yaml.safe_load(text))
    assert again == config
    assert asdict(again) == asdict(config)


def test_what_is_not_said_is_the_default() -> None:
    config = TrainConfig.from_dict({"data": {"source": "x"}, "recipe": {"lr": 1}})
    assert config == TrainConfig(data=DataConfig(source="x"), recipe=Recipe(lr=1))
    config.check()


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.stem)
def test_configurations_of_the_project_are_right(path: Path) -> None:
    TrainConfig.from_dict(yaml.safe_load(path.read_text(encoding="utf-8"))).check()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"modle": {}}, r"unknown key modle; known here: control_recipe, controls, data,"),
        (
            {"recipe": {"epoch": 3}},
            r"unknown key recipe\.epoch; known here: averaging,",
        ),
        ({"data": {3: 1}}, r"unknown key data\.3;"),
        ({"recipe": None}, r"has None at recipe; expected keys"),
        ({"data": "data/cifar10"}, r"has 'data/cifar10' at data; expected keys"),
        (["data"], r"has \['data'\] at its top"),
        ({"recipe": {"epochs": "forty"}}, r"recipe\.epochs is 'forty'; expected int"),
        ({"recipe": {"epochs": 2.5}}, r"recipe\.epochs is 2\.5; expected int"),
        ({"recipe": {"epochs": True}}, r"recipe\.epochs is True; expected int"),
        ({"recipe": {"lr": "1e-3"}}, r"recipe\.lr is '1e-3'; expected float"),
        ({"recipe": {"nesterov": 1}}, r"recipe\.nesterov is 1; expected bool"),
        ({"controls": "single"}, r"controls is 'single'; expected list"),
        ({"controls": [1]}, r"controls is \[1\]; expected list"),
        ({"data": {"mean": [0.5, "x"]}}, r"data\.mean is .*; expected list\[float\] \| None"),
        ({"data": {"ood": ["a"]}}, r"data\.ood is \['a'\]; expected dict"),
        ({"data": {"ood": {"a": 3}}}, r"data\.ood is {'a': 3}; expected dict"),
        ({"ensemble": {"schedule": 1.5}}, r"ensemble\.schedule is 1\.5; expected str \| int"),
        ({"ensemble": {"head": "warm"}}, r"at ensemble: head is 'warm'; expected one of 'auto'"),
        ({"ensemble": {"members": 2, "schedule": 5}}, "at ensemble: schedule is 5"),
        ({"ensemble": {"gain": 2}}, r"unknown key ensemble\.gain"),
        ({"diversity": {"weight": {"start": 0.5}}}, r"misses the key diversity\.weight\.value"),
        ({"diversity": {"weight": {"value": 1.0, "start": "5"}}}, r"weight\.start is '5'"),
        ({"diversity": {"weight": {"value": 1.0, "start": 5}}}, "start of the ramp is 5"),
        ({"diversity": {"target_cosine": 0.5}}, r"unknown key diversity\.target_cosine"),
        ({"threads": "two"}, r"threads is 'two'; expected int \| None"),
    ],
)
def test_mistakes_in_a_file_are_named(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig.from_dict(given)


def _set(part: str, key: str, value: Any) -> Callable[[TrainConfig], None]:
    def change(config: TrainConfig) -> None:
        if part == "ensemble":  # frozen
            config.ensemble = replace(config.ensemble, **{key: value})
        else:
            setattr(getattr(config, part) if part else config, key, value)

    return change


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([_set("data", "source", "")], "data.source is missing"),
        ([_set("", "controls", ["single", "deep"])], "controls names 'deep'; expected any of"),
        ([_set("model", "weights", None)], "controls names 'single_finetuned', but model names no"),
        ([_set("data", "holdout", 0.0)], "data.holdout is 0.0"),
        ([_set("data", "holdout", 1.0)], "data.holdout is 1.0"),
        ([_set("recipe", "epochs", 0)], "recipe.epochs is 0"),
        ([_set("recipe", "batch_size", 0)], "recipe.batch_size 0"),
        ([_set("recipe", "precision", "16")], "recipe.precision is '16'"),
        ([_set("recipe", "flip_crop", -1)], "recipe.flip_crop is -1"),
        ([_set("recipe", "member_batches", "each")], "recipe.member_batches is 'each'"),
        (
            [_set("recipe", "member_batches", "share"), _set("ensemble", "members", 3)],
            "3 members do not divide a batch of 128",
        ),
        ([_set("", "threads", 0)], "threads is 0"),
        ([_set("ensemble", "scale", "linear")], "ensemble.scale is 'linear'"),
        (
            [_set("diversity", "weight", 0.0), _set("", "controls", ["sigmanens_lambda0"])],
            "ensemble itself has no penalty",
        ),
        (
            [_set("ensemble", "members", 1), _set("", "controls", ["sigmanens_lambda0"])],
            "ensemble itself has no penalty",
        ),
    ],
)
def test_values_that_no_part_could_use(
    changes: list[Callable[[TrainConfig], None]], message: str
) -> None:
    config = TrainConfig(DataConfig("x"), ModelConfig(weights="w.pt"), controls=list(CONTROLS))
    config.check()
    for change in changes:
        change(config)
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        config.check()


def test_a_control_without_a_penalty_is_an_ensemble_without_one() -> None:
    config = TrainConfig(data=DataConfig(source="x"))
    config.ensemble = replace(config.ensemble, scale="linear")
    config.diversity.weight = 0.0
    config.check()
    assert not config.penalised


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"members": 1}, "members is 1; the demo compares at least 2"),
        ({"taus": ()}, r"taus is \[\]"),
        ({"taus": (0.1, 0.5, 0.1)}, r"taus is \[0\.1, 0\.5, 0\.1\]; expected .* each once"),
        ({"taus": (0.5, 0.0)}, r"taus is \[0\.5, 0\.0\]; expected at least one τ > 0"),
        ({"taus": (0.5, math.nan)}, r"taus is \[0\.5, nan\]; expected at least one τ > 0"),
        ({"weight": -0.1}, r"weight is -0\.1"),
        ({"weight": math.nan}, "weight is nan"),
        ({"epochs": 0}, "epochs is 0 and .* must be at least 1"),
        ({"width": 0}, "width is 0"),
        ({"seeds": 0}, "seeds is 0"),
        ({"workers": 0}, "workers is 0"),
    ],
)
def test_sizes_of_the_demo(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        demo_study(DemoConfig(**values)).check()


def test_configurations_load_without_the_large_libraries() -> None:
    heavy = ["lightning", "datasets", "plotly", "sklearn", "timm", "transformers", "torchvision"]
    code = (
        "import sys; from sigmanens.lab.cli import _parser; _parser(); "
        f"print([name for name in {heavy} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
