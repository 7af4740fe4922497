"""The config of a conversion: one object for arguments, checkpoints and YAML files."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.networks import dense, randomise

import sigmanens as sn
from sigmanens import ConversionConfig
from sigmanens.errors import InputError

OPTIONS: list[dict[str, Any]] = [
    {},
    {"layers": "^1$"},
    {"layers": ["4"], "head": "shared"},
    {"layers": lambda name, module: name == "4"},
    {"layers": None, "init": "preserve", "shift": True},
    {"init": "normal", "head": "fresh"},
    {"scale": "linear", "head_name": "6", "schedule": 2},
    {"train": "members", "batch_dims": {0: 0}},
]


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def state(ensemble: sn.SigmaEnsemble) -> dict[str, torch.Tensor]:
    return {k: v.detach().clone() for k, v in ensemble.state_dict().items()}


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: ",".join(o) or "defaults")
def test_options_config_and_plan_build_the_same_ensemble(options: dict[str, Any]) -> None:
    base = randomise(dense()).eval()
    made = sn.convert(base, 3, generator=generator(), **options)
    plan = ConversionConfig.from_dict(json.loads(json.dumps(made.plan.to_dict())))
    assert plan == made.plan
    for config in (ConversionConfig(3, **options), plan):
        again = sn.convert(base, config, generator=generator())
        assert again.plan == made.plan
        assert again.schedule == made.schedule
        assert state(again).keys() == state(made).keys()
        for key, value in state(made).items():
            assert torch.equal(again.state_dict()[key], value), key


def test_the_plan_says_what_auto_became() -> None:
    plan = sn.convert(randomise(dense()), 2).plan
    assert (plan.init, plan.head) == ("preserve", "copy")
    assert (plan.norms, plan.heads) == (("1", "4"), ("6",))
    assert sn.convert(dense(), 2, head="shared").plan.heads == ()
    with pytest.raises(InputError, match=r"not resolved \(layers='all', init='auto'.*ens\.plan"):
        _ = ConversionConfig(2).norms


def test_in_place_takes_a_config_too() -> None:
    base = dense()
    assert sn.convert_(base, ConversionConfig(2, layers="1")).plan.norms == ("1",)


@pytest.mark.parametrize("convert", [sn.convert, sn.convert_])
def test_options_beside_a_config_are_refused(convert: Any) -> None:
    config = ConversionConfig(2)
    message = r"beside it head='fresh', shift=True.*dataclasses\.replace\(config, head='fresh'"
    with pytest.raises(InputError, match=message):
        convert(dense(), config, head="fresh", shift=True)
    assert convert(dense(), replace(config, head="fresh", shift=True)).plan.shift is True


def test_all_and_none_mean_every_norm_here_and_for_the_penalty() -> None:
    for layers in ("all", None):
        ens = sn.convert(dense(), 2, layers=layers)
        assert ens.plan.norms == ("1", "4")
        assert sn.Diversity(layers=layers).chosen(ens) == ("all norms", ["1", "4"])
    with pytest.raises(InputError, match="layers='auto' chooses norms for the diversity penalty"):
        sn.convert(dense(), 2, layers="auto")


def test_equal_settings_are_equal_configs() -> None:
    assert ConversionConfig(layers=None) == ConversionConfig(layers="all")
    assert ConversionConfig(layers=["a"]) == ConversionConfig(layers=("a",))
    assert ConversionConfig(batch_dims={0: 1}) == ConversionConfig(batch_dims={"0": 1})
    assert ConversionConfig(batch_dims={}) == ConversionConfig()


def test_a_callable_has_no_json() -> None:
    with pytest.raises(InputError, match=r"layers is a callable.*ens\.plan\.to_dict\(\)"):
        ConversionConfig(layers=lambda name, module: True).to_dict()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 9}, "has version 9; expected 1"),
        ({"gain": 2, "norm": []}, "unknown keys: gain, norm"),
        ({"members": 0}, "members is 0"),
    ],
)
def test_dictionaries_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        ConversionConfig.from_dict(ConversionConfig().to_dict() | change)
