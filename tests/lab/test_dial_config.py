"""The penalty as the configuration of a run has it."""

from __future__ import annotations

import pytest

from sigmanens.diversity import Diversity, Ramp
from sigmanens.diversity.defaults import DEFAULTS
from sigmanens.lab.config import TrainConfig


def made(model: dict[str, object] | None = None, **options: object) -> Diversity:
    given = TrainConfig.from_dict({"diversity": options, "model": model or {"name": "resnet8"}})
    again = TrainConfig.from_dict(given.to_dict())
    assert again == given
    return again.diversity.penalty(again.tau, again.weight)


def test_the_default_depends_on_where_the_weights_come_from() -> None:
    scratch, tuned = DEFAULTS["scratch"], DEFAULTS["pretrained"]
    trained = {"name": "resnet20", "weights": "file"}
    loaded = {"name": "timm/resnet18", "options": {"pretrained": True}}
    assert repr(made()) == repr(Diversity(scratch.tau, scratch.weight))
    assert repr(made(trained)) == repr(made(loaded)) == repr(Diversity(tuned.tau, tuned.weight))
    assert made(tau=0.3).tau == 0.3
    assert made(trained, weight=0.2).weight == 0.2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"tau": 0.5, "weight": 0.1}, Diversity(0.5, 0.1)),
        ({"layers": "all", "form": "mean"}, Diversity(1.0, 0.01, "all", "mean")),
        ({"weight": {"value": 0.02, "start": 0.25}}, Diversity(1.0, Ramp(0.02, start=0.25))),
        ({"weight": {"value": 1, "length": 0.5}}, Diversity(1.0, Ramp(1, length=0.5))),
    ],
)
def test_every_key_reaches_the_penalty(options: dict[str, object], expected: Diversity) -> None:
    assert repr(made(**options)) == repr(expected)


def test_a_study_sets_tau_and_the_value_at_the_end_of_a_ramp() -> None:
    config = TrainConfig.from_dict({"diversity": {"weight": {"value": 0.02, "start": 0.5}}})
    assert config.weight == 0.02
    diversity = config.diversity.penalty(2.0, 1e-3)
    assert (diversity.tau, diversity.weight) == (2.0, Ramp(1e-3, start=0.5))
