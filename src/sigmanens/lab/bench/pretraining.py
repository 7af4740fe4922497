"""The network that all trainings of a study start from, trained once where the study says so."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from safetensors import safe_open
from torch import nn

from sigmanens.baselines import SeparateNetworks
from sigmanens.errors import ConfigError, RunError
from sigmanens.lab.backbones.registry import drawn_backbone
from sigmanens.lab.bench.config import BenchConfig
from sigmanens.lab.bench.material import load_base_pictures
from sigmanens.lab.runs import write_tensors
from sigmanens.lab.training import train_network
from sigmanens.training.loss import EnsembleLoss


@dataclass(frozen=True)
class Base:
    """A trained base.

    Attributes:
        path: of its weights, a file of safetensors.
        seconds: of its training.
        history: of the epochs.
        train: number of training pictures.
    """

    path: Path
    seconds: float
    history: list[dict[str, float]]
    train: int


def build_base(config: BenchConfig, classes: int) -> nn.Module:
    """The untrained base; its weights depend on ``pretrain.seed`` alone.

    Raises:
        ConfigError: if the study trains none, or as ``drawn_backbone``.
    """
    if config.pretrain is None:
        raise ConfigError("the study has no pretrain: its trainings start from what model says")
    return drawn_backbone(config.model, classes, config.pretrain.seed)


def train_base(
    config: BenchConfig, folder: Path, advance: Callable[[], None] = lambda: None
) -> Base:
    """Train the base of a study, go on with it after an interruption, or find it trained.

    It is trained with all CPU threads, before the trainings that start from it.

    Args:
        config: the study, with ``pretrain``.
        folder: where the base is kept.
        advance: called after each epoch.

    Raises:
        RunError: if the file of an earlier training is damaged. What ``train_network`` raises.
    """
    path = folder / "network.safetensors"
    if path.exists():
        return _found(path)
    data, classes = load_base_pictures(config)
    network = build_base(config, classes)
    assert config.pretrain is not None  # build_base has refused it
    done = train_network(
        SeparateNetworks([network]), data, config.pretrain.recipe, EnsembleLoss(),
        seed=config.pretrain.seed, folder=folder / "training", advance=advance,
    )  # fmt: skip
    told = {"seconds": done.seconds, "history": done.history, "train": len(data.labels)}
    write_tensors(path, network.state_dict(), {"training": json.dumps(told)})
    shutil.rmtree(folder / "training", ignore_errors=True)
    return Base(path, **told)  # type: ignore[arg-type]


def _found(path: Path) -> Base:
    try:
        with safe_open(path, "pt") as file:
            return Base(path, **json.loads(file.metadata()["training"]))
    except Exception as e:  # a damaged or foreign file may raise anything
        raise RunError(
            f"{path} does not hold the base of a study: {e}. Remove it to train it again"
        ) from e
