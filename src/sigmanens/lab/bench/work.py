"""One training of a study at work: its data, its networks, its seeds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from sigmanens.diversity import Diversity
from sigmanens.ensemble.convert import convert
from sigmanens.ensemble.ensemble import SigmaEnsemble
from sigmanens.errors import RunError
from sigmanens.lab.backbones.registry import base_network
from sigmanens.lab.bench.config import BenchConfig
from sigmanens.lab.bench.material import Material, check_padding
from sigmanens.lab.bench.trials import Trial
from sigmanens.lab.runs import network_seed, write_tensors
from sigmanens.lab.training import TrainingResult, drawn, train_network
from sigmanens.training.loss import EnsembleLoss


class Workshop:
    """Everything that the training and measuring of one trial needs.

    Args:
        config: the study's configuration, its variant already applied.
        trial: which training.
        material: the examples.
        folder: where networks are kept: an interrupted training goes on there, a finished one is
            not done again. None: not kept.
        advance: told the cost of each epoch of one network.
    """

    def __init__(
        self,
        config: BenchConfig,
        trial: Trial,
        material: Material,
        folder: Path | None = None,
        advance: Callable[[float], None] = lambda cost: None,
    ) -> None:
        self.config, self.trial, self.material = config, trial, material
        self.folder, self.advance = folder, advance

    @property
    def members(self) -> int:
        """M."""
        return self.trial.members

    @property
    def device(self) -> torch.device:
        """Where networks are measured: the accelerator, if there is one."""
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def options(self) -> dict[str, Any]:
        """Further arguments of the method's builder."""
        return dict(self.config.options.get(self.trial.method, {}))

    def seed(self, index: int = 0) -> int:
        """Of network number ``index``; ensembles on one backbone use number 0."""
        return network_seed(self.trial.seed, index)

    def generator(self) -> torch.Generator:
        """Source of scales, masks and heads."""
        return torch.Generator().manual_seed(self.seed())

    def base(self, index: int = 0) -> nn.Module:
        """Network number ``index`` before any training here.

        Raises:
            ConfigError: if it takes another padding token than the texts have, or as
                ``build_backbone``.
        """
        model = self.config.model
        network = base_network(model, self.material.classes, self.seed(index))
        check_padding(network, self.material.padding, model.name)
        return network

    def convert(self, **changes: Any) -> SigmaEnsemble:
        """A σN-Ens as the study asks for it, but for ``changes``."""
        config = replace(self.config.ensemble, members=self.members, **changes)
        return convert(self.base(), config, generator=self.generator())

    def diversity(self) -> Diversity | None:
        """The penalty of this trial."""
        if self.trial.tau is None or self.trial.weight is None:
            return None
        return self.config.diversity.penalty(self.trial.tau, self.trial.weight)

    def fit(
        self,
        network: nn.Module,
        *,
        index: int = 0,
        name: str = "network",
        diversity: Diversity | None = None,
        cost: float = 1.0,
    ) -> TrainingResult:
        """Train in place under the study's recipe, or load what an earlier run trained.

        Args:
            network: maps pictures to member logits.
            index: number of its seed.
            name: what its file is called, where a trial trains several.
            diversity: the penalty.
            cost: of one epoch, in passes of one network.

        Raises:
            RunError: if the file of the earlier run does not fit. What ``train_network`` raises.
        """
        kept = None if self.folder is None else self.folder / "networks" / f"{name}.safetensors"
        if kept is not None and kept.exists():
            found = _load_trained(network, kept)
            network.to(self.device)
            return found
        done = train_network(
            network,
            self.material.train,
            self.config.recipe,
            EnsembleLoss(diversity=diversity),
            seed=self.seed(index),
            watched=drawn(self.material.data.validation, self.config.measure.watched),
            validation=self.material.data.validation,
            folder=None if self.folder is None else self.folder / "training" / name,
            advance=lambda: self.advance(cost),
        )
        network.to(self.device)  # from where Lightning has taken it
        if kept is not None:
            told = json.dumps({"seconds": done.seconds, "history": done.history})
            write_tensors(kept, network.state_dict(), {"training": told})
        return done


def _load_trained(network: nn.Module, path: Path) -> TrainingResult:
    """Put trained tensors into a network that was built in the same way."""
    try:
        with safe_open(path, "pt") as file:  # no mapping: it has keys() only
            told = json.loads(file.metadata()["training"])
            tensors = {key: file.get_tensor(key) for key in list(file.keys())}
        network.load_state_dict(tensors)
    except Exception as e:  # a damaged or foreign file may raise anything
        raise RunError(f"{path} does not hold this network: {e}. Remove it to train again") from e
    network.eval()
    return TrainingResult(told["history"], told["seconds"])
