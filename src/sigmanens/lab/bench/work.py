"""One training of a study at work: its data, its networks, its seeds."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from sigmanens.checkpoint import write_atomic
from sigmanens.convert import convert
from sigmanens.diversity import Diversity
from sigmanens.ensemble import SigmaEnsemble
from sigmanens.errors import RunError
from sigmanens.lab.backbones import build_backbone, load_weights
from sigmanens.lab.bench.config import BenchConfig
from sigmanens.lab.bench.trials import Trial
from sigmanens.lab.config import DataConfig
from sigmanens.lab.data.images import ImageSet
from sigmanens.lab.data.sets import load_sets
from sigmanens.lab.digits import Labelled
from sigmanens.lab.rows import EvaluationData
from sigmanens.lab.training import TrainingResult, train_network
from sigmanens.objective import EnsembleLoss

__all__ = ["Material", "Workshop", "load_material", "located"]


@dataclass(frozen=True, eq=False)
class Material:
    """What the trainings of one seed are made from and measured on.

    Attributes:
        train: training examples, as the network takes them.
        data: validation and test examples and OOD sets, likewise.
        classes: number of classes.
        corrupt: gives the first test examples under a corruption, by its name and severity.
        corruptions: the names it knows.
        names: what the sets are called, for the record.
    """

    train: Labelled
    data: EvaluationData
    classes: int
    corrupt: Callable[[str, int], Labelled] | None = None
    corruptions: tuple[str, ...] = ()
    names: Mapping[str, Any] = field(default_factory=dict)


def located(config: BenchConfig) -> DataConfig:
    """The data with hub names replaced by folders of ``data_root``, where that is given."""
    if config.data_root is None:
        return config.data
    root = Path(config.data_root)

    def place(source: str) -> str:
        return str(root / Path(source).name)

    ood = {name: place(source) for name, source in config.data.ood.items()}
    return replace(config.data, source=place(config.data.source), ood=ood)


def load_material(config: BenchConfig, seed: int) -> Material:
    """The examples of one seed; kept in memory for the next training that needs the same."""
    measure = json.dumps([config.measure.corruptions, config.measure.corruption_limit])
    data = located(config)
    own = seed if data.source == "digits" else 0  # each seed cuts the digits in another way
    return _material(json.dumps(vars(data)), measure, own)


@lru_cache(maxsize=2)
def _material(data: str, measure: str, seed: int) -> Material:
    config = DataConfig(**json.loads(data))
    corruptions, limit = json.loads(measure)
    if config.source == "digits":
        return _digits(seed)
    sets = load_sets(config)
    assert sets.train is not None
    names = {
        "description": f"{Path(config.source).name}: {len(sets.train):,} training pictures of "
        f"{sets.test.images.shape[-1]} px, {len(sets.classes)} classes",
        "train": len(sets.train),
        "validation": len(sets.validation),
        "test": len(sets.test),
        "ood": {name: len(images) for name, images in sets.ood.items()},
    }
    return Material(
        train=_labelled(sets.train),
        data=EvaluationData(
            _labelled(sets.validation),
            _labelled(sets.test),
            {name: images.normalized() for name, images in sets.ood.items()},
        ),
        classes=len(sets.classes),
        corrupt=_corrupter(config, limit) if corruptions else None,
        corruptions=_corruption_names(corruptions),
        names=names,
    )


def _labelled(images: ImageSet) -> Labelled:
    return Labelled(images.normalized(), images.labels)


def _digits(seed: int) -> Material:
    """Few handwritten digits seen through noise, and the same at five severities."""
    from sigmanens.lab.digits import digits_sets, noisy

    severity = 3
    digits = digits_sets(seed=seed)
    generator = torch.Generator().manual_seed(1000 + seed)

    def seen(part: Labelled) -> Labelled:
        return Labelled(noisy(part.images, severity, generator), part.labels)

    train, validation, test = seen(digits.train), seen(digits.validation), seen(digits.test)

    def corrupt(name: str, level: int) -> Labelled:
        noise = torch.Generator().manual_seed(2000 + seed)
        return Labelled(noisy(test.images, level, noise), test.labels)

    return Material(
        train=train,
        data=EvaluationData(validation, test, digits.ood),
        classes=len(digits.classes),
        corrupt=corrupt,
        corruptions=("gaussian_noise",),
        names={
            "description": "scikit-learn's handwritten digits (8×8, real), with Gaussian noise of "
            f"severity {severity} in training and test alike; another split for every seed",
            "train": len(train.labels),
            "validation": len(validation.labels),
            "test": len(test.labels),
            "ood": {name: len(images) for name, images in digits.ood.items()},
        },
    )


def _corruption_names(given: list[str]) -> tuple[str, ...]:
    if not given:
        return ()
    from sigmanens.evaluation.corruption import CORRUPTIONS, EXTRA_CORRUPTIONS

    known = {"standard": tuple(CORRUPTIONS), "all": (*CORRUPTIONS, *EXTRA_CORRUPTIONS)}
    return tuple(dict.fromkeys(name for g in given for name in known.get(g, (g,))))


def _corrupter(config: DataConfig, limit: int) -> Callable[[str, int], Labelled]:
    """Corrupt the test pictures at their own size, then bring them to that of the network."""
    from sigmanens.evaluation.corruption import corrupt

    whole = load_sets(
        replace(config, size=None, ood={}, ood_without={}), training=False
    ).test.subset(slice(limit))

    @cache
    def pixels(name: str, severity: int) -> ImageSet:
        changed = replace(whole, images=corrupt(whole.images, name, severity, seed=config.seed))
        return changed if config.size is None else changed.resize(config.size)

    return lambda name, severity: _labelled(pixels(name, severity))


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
    def options(self) -> dict[str, Any]:
        """Further arguments of the method's builder."""
        return dict(self.config.options.get(self.trial.method, {}))

    def seed(self, index: int = 0) -> int:
        """Of network number ``index``; ensembles on one backbone use number 0."""
        return 100 * self.trial.seed + index

    def generator(self) -> torch.Generator:
        """Source of scales, masks and heads."""
        return torch.Generator().manual_seed(self.seed())

    def base(self, index: int = 0) -> nn.Module:
        """Network number ``index`` before any training here."""
        model = self.config.model
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed(index))
            options = {"num_classes": self.material.classes} | model.options
            network = build_backbone(model.name, **options)
        return load_weights(network, model.weights) if model.weights else network

    def convert(self, **changes: Any) -> SigmaEnsemble:
        """A σN-Ens as the study asks for it, but for ``changes``."""
        options = vars(self.config.ensemble) | {"members": self.members} | changes
        return convert(self.base(), generator=self.generator(), **options)

    def diversity(self) -> Diversity | None:
        """The penalty of this trial."""
        if self.trial.tau is None:
            return None
        given = vars(self.config.diversity)
        return Diversity(**given | {"tau": self.trial.tau, "weight": self.trial.weight})

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
            return _load_trained(network, kept)
        done = self._train(network, index, name, diversity, cost)
        if kept is not None:
            kept.parent.mkdir(parents=True, exist_ok=True)
            tensors = _plain(network.state_dict())
            told = json.dumps({"seconds": done.seconds, "history": done.history})
            write_atomic(kept, save_tensors(tensors, {"training": told}))
        return done

    def _train(
        self,
        network: nn.Module,
        index: int,
        name: str,
        diversity: Diversity | None,
        cost: float,
    ) -> TrainingResult:
        return train_network(
            network,
            self.material.train,
            self.config.recipe,
            EnsembleLoss(diversity=diversity),
            seed=self.seed(index),
            folder=None if self.folder is None else self.folder / "training" / name,
            advance=lambda: self.advance(cost),
        )


def _plain(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors as a file holds them: on the CPU, in the usual memory format, none shared."""
    return {k: v.detach().cpu().contiguous().clone() for k, v in state.items()}


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
