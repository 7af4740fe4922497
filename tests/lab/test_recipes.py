"""Ways to train by name, on the command line."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

pytest.importorskip("jsonargparse")

from sigmanens import Diversity
from sigmanens.lab.bench.config import BenchConfig
from sigmanens.lab.bench.trials import trials_of
from sigmanens.lab.cli import main
from sigmanens.lab.config import TrainConfig
from sigmanens.lab.recipes import RECIPES, recipe_path


def given(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The configuration that a command line stands for."""
    with pytest.raises(SystemExit) as left:
        main(["train", *arguments, "--data.source", "x", "--out", "unused", "--print_config"])
    assert left.value.code == 0
    plain: dict[str, Any] = yaml.safe_load(capsys.readouterr().out)
    return {k: v for k, v in plain.items() if k not in ("out", "resume")}


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_a_configuration(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain = given(capsys, "--recipe", name)
    TrainConfig.from_dict(plain).check()
    file = yaml.safe_load(recipe_path(name).read_text(encoding="utf-8"))
    for part, values in file.items():
        assert {k: plain[part][k] for k in values} == values


def test_what_is_given_after_a_recipe_counts(capsys: pytest.CaptureFixture[str]) -> None:
    plain = given(capsys, "--recipe=paper", "--recipe.epochs", "3", "--diversity.tau=0.7")
    assert plain["recipe"]["epochs"] == 3
    assert plain["recipe"]["milestones"] == [60, 120, 160]
    assert plain["diversity"] == given(capsys, "--recipe=paper")["diversity"] | {"tau": 0.7}


def test_an_unknown_recipe_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--recipe", "best", "--out", "unused"]) == 2
    said = capsys.readouterr().err
    assert "there is no recipe 'best'; there are" in said
    assert "paper" in said


def test_tau_is_higher_from_scratch_unless_something_else_sets_it() -> None:
    def tau(model: dict[str, Any], **dial: Any) -> Any:
        plain = {"data": {"source": "x"}, "model": model, "diversity": dial}
        return Diversity(**TrainConfig.from_dict(plain).penalty).tau

    assert tau({"name": "resnet8"}) == 1.0
    assert tau({"name": "resnet20", "weights": "file"}) == 0.1
    assert tau({"name": "timm/resnet18", "options": {"pretrained": True}}) == 0.1
    assert tau({"name": "resnet8"}, tau=0.3) == 0.3
    plain = {"data": {"source": "x"}, "diversity": {"owners": 1.5}}
    assert TrainConfig.from_dict(plain).penalty["tau"] is None


def test_the_penalty_is_weaker_on_trained_weights_unless_something_else_sets_it() -> None:
    def weight(model: dict[str, Any], **dial: Any) -> Any:
        plain = {"data": {"source": "x"}, "model": model, "diversity": dial}
        config = TrainConfig.from_dict(plain)
        assert config.penalised is (dial.get("weight") != 0)
        return config.penalty["weight"]

    assert weight({"name": "resnet8"}) == 1e-2
    assert weight({"name": "resnet20", "weights": "file"}) == 1e-4
    assert weight({"name": "resnet20", "weights": "file"}, weight=1e-3) == 1e-3
    assert weight({"name": "resnet8"}, weight=0) == 0
    for changed, expected in (({}, 1e-2), ({"model.weights": "file"}, 1e-4)):
        plain = {"study": "s", "methods": ["sigmanens"], "taus": [0.5],
                 "variants": {"v": {"change": changed}}}  # fmt: skip
        own = BenchConfig.from_dict(plain).changed("v")
        assert {trial.weight for trial in trials_of(own) if not trial.variant} == {expected}
    plain = {"study": "s", "methods": ["sigmanens"], "taus": [0.5], "pretrain": {}}
    assert BenchConfig.from_dict(plain).weight == 1e-4
