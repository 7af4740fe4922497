"""The dial as the configuration of a run has it."""

from __future__ import annotations

import pytest

from sigmanens.diversity import Diversity
from sigmanens.errors import ConfigError, DiversityError
from sigmanens.lab.config import DiversityConfig, TrainConfig


def made(**options: object) -> Diversity:
    given = TrainConfig.from_dict({"diversity": options})
    again = TrainConfig.from_dict(given.to_dict())
    assert again == given
    return Diversity(**again.penalty)


def test_the_default_is_that_of_the_library_but_for_tau_from_scratch() -> None:
    assert repr(made(tau=0.1)) == repr(Diversity())
    assert made().tau == 1.0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tau": 0.5}, "Diversity(tau=0.5, weight=0.01"),
        ({"owners": 1.5}, "Diversity(owners=1.5, weight=0.01"),
        ({"start": 0.25, "ramp": 10}, "start=0.25, ramp=10)"),
        ({"target_cosine": 0.4}, "target_cosine=0.4, moves='tau')"),
        ({"tau": 0.5, "target_cosine": 0.4, "moves": "weight"}, "moves='weight')"),
    ],
)
def test_every_key_reaches_the_penalty(options: dict[str, object], said: str) -> None:
    assert said in repr(made(**options))


def test_what_excludes_each_other_is_refused() -> None:
    with pytest.raises(DiversityError, match="tau and owners are given"):
        made(tau=0.1, owners=1.5)
    with pytest.raises(ConfigError, match=r"diversity.start is '5'; expected int \| float"):
        made(start="5")


def test_a_study_may_still_set_tau_and_weight() -> None:
    given = vars(DiversityConfig(start=3))
    diversity = Diversity(**given | {"tau": 2.0, "weight": 1e-3})
    assert (diversity.tau, diversity.weight, diversity.ramp.start) == (2.0, 1e-3, 3)
