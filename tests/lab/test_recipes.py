"""Ways to train by name, on the command line."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

pytest.importorskip("jsonargparse")

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


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--model.weights", "w.pt"], "finetune"),
        (["--model.options", "{pretrained: true}", "--recipe.epochs=3"], "finetune"),
        (["--data.tokenizer", "t", "--model.name", "transformers/t"], "finetune-texts"),
        (["--model.name", "resnet20"], None),
        (["--model.weights", "w.pt", "--recipe", "scratch"], "scratch"),
    ],
)
def test_pretrained_weights_bring_their_recipe(
    arguments: list[str], name: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = given(capsys, *arguments)
    if name is None:
        expected = TrainConfig().to_dict()
    else:
        rest = [a for a in arguments if a not in ("--recipe", "scratch")]
        expected = given(capsys, "--recipe", name, *rest)
    for part in ("ensemble", "diversity", "recipe"):
        assert plain[part] == expected[part]
    assert name != "finetune" or plain["recipe"]["keep"] == "best"


def test_an_unknown_recipe_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--recipe", "best", "--out", "unused"]) == 2
    said = capsys.readouterr().err
    assert "there is no recipe 'best'; there are" in said
    assert "paper" in said
