"""A rival and a network from a user's file, in a study and in a training."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("lightning")
pytest.importorskip("sklearn")

from sigmanens.errors import ConfigError
from sigmanens.lab.backbones import build_backbone
from sigmanens.lab.bench import settings
from sigmanens.lab.bench.config import BenchConfig, MeasureConfig, register
from sigmanens.lab.bench.methods import builder_of
from sigmanens.lab.bench.runner import run_bench
from sigmanens.lab.config import DataConfig, ModelConfig, Recipe
from sigmanens.lab.plugins import imported, is_import

FILE = """
import copy
import torch
from torch import nn

class Several(nn.Module):
    def __init__(self, networks):
        super().__init__()
        self.networks = nn.ModuleList(networks)

    def forward(self, x):
        return torch.stack([network(x) for network in self.networks])

def noisy_copies(network, members, options):
    copies = [copy.deepcopy(network) for _ in range(members)]
    for one in copies:
        for p in one.parameters():
            p.data += options["noise"] * torch.randn_like(p)
    return Several(copies)

def line(num_classes, width=8):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.BatchNorm1d(width), nn.ReLU(),
                         nn.Linear(width, num_classes))

def nothing(*_, **__):
    return None
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "my_methods.py").write_text(FILE, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "my_methods", raising=False)
    yield tmp_path
    sys.modules.pop("my_methods", None)


STUDY = BenchConfig(
    study="own",
    data=DataConfig(source="digits", limit=60),
    model=ModelConfig("my_methods:line", {"width": 6}),
    recipe=Recipe(epochs=1, batch_size=30, lr=0.05),
    methods=["separate", "my_methods:noisy_copies"],
    options={"my_methods:noisy_copies": {"noise": 0.1}},
    seeds=[0],
    measure=MeasureConfig(features=False, resamples=40, watched=0),
)


def test_a_rival_and_a_network_of_a_file_run_in_a_study(here: Path) -> None:
    study = replace(STUDY, ensemble=replace(STUDY.ensemble, members=3))
    assert BenchConfig.from_dict(study.to_dict()) == study
    found = run_bench(study, here / "run")
    assert found["failures"] == {}
    rows = {row["method"]: row for row in found["rows"]}
    mine = rows["my_methods:noisy_copies"]
    assert (mine["members"], mine["params"]) == (3, 3 * rows["single"]["params"])
    assert mine["disagreement"] > 0
    names = {pair[side] for pair in found["differences"] for side in "ab"}
    assert "my_methods:noisy_copies m3" in names
    assert "my methods:noisy copies" in (here / "run" / "report.html").read_text("utf-8")


def test_a_registered_rival_is_found_by_its_name(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "_REGISTERED", {})
    with pytest.raises(ConfigError, match="a registered name or module:function"):
        replace(STUDY, methods=["mine"], options={}).check()
    register("mine", imported("my_methods:noisy_copies", "methods"))
    replace(STUDY, methods=["mine"], options={"mine": {"noise": 1.0}}).check()
    for taken in ("mine", "sigmanens", "a:b"):
        with pytest.raises(ConfigError, match="already"):
            register(taken, print)


def test_draws_of_a_rival_are_those_of_the_seed(here: Path) -> None:
    from sigmanens.lab.bench.material import load_material
    from sigmanens.lab.bench.trials import Trial
    from sigmanens.lab.bench.work import Workshop

    method = "my_methods:noisy_copies"
    material = load_material(STUDY, 0)

    def weights(seed: int) -> torch.Tensor:
        network = builder_of(method)(Workshop(STUDY, Trial(seed, method, 2), material))
        return torch.cat([p.flatten() for p in network.parameters()])

    assert torch.equal(weights(0), weights(0))
    assert not torch.equal(weights(0), weights(1))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no_such_module:f", "no_such_module cannot be imported: ModuleNotFoundError"),
        ("my_methods:absent", "my_methods has no function 'absent'"),
        ("my_methods:nothing", "returned a NoneType; expected a torch module"),
    ],
)
def test_what_is_no_network_is_named(here: Path, name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        build_backbone(name, num_classes=3)


def test_only_names_with_a_module_and_a_function_are_imported() -> None:
    assert is_import("package.module:function")
    assert not any(map(is_import, ("timm/resnet18", "resnet8", "a/b:c", ":f", "a:")))
    assert isinstance(build_backbone("digits", num_classes=3), nn.Module)
