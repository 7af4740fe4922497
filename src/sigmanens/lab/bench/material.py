"""What the trainings of a study are made from and measured on: pictures, texts or digits."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sigmanens.errors import ConfigError
from sigmanens.lab.backbones.registry import pretrained_classes
from sigmanens.lab.bench.config import BenchConfig
from sigmanens.lab.bench.corrupted import (
    corruption_names,
    draw_rows,
    picture_corrupter,
    text_corrupter,
)
from sigmanens.lab.config import DataConfig
from sigmanens.lab.data.sets import PictureSet, check_splits, load_sets, load_train_whole
from sigmanens.lab.data.texts import TokenSet
from sigmanens.lab.digits import Labelled
from sigmanens.lab.rows import EvaluationData

DIGITS_NOISE = 3
"""Severity of the noise that training and test digits have."""


@dataclass(frozen=True, eq=False)
class Material:
    """What the trainings of one seed are made from and measured on.

    Attributes:
        train: training examples, as the network takes them.
        data: validation and test examples and OOD sets, likewise.
        classes: number of classes.
        shift: examples of the same classes from elsewhere, by name.
        corrupt: gives test examples under a corruption, by its name and severity.
        corrupted: positions (n,) of those test examples, by the names it knows.
        names: what the sets are called, for the record.
        positions: places of the "train" and "validation" examples in the training split.
        inputs: the names of the classes, and how an input becomes what the network takes: what
            ``inputs.json`` of a run holds (:mod:`sigmanens.lab.predicting`).
        padding: number of the padding token, of texts.
    """

    train: Labelled
    data: EvaluationData
    classes: int
    shift: Mapping[str, Labelled] = field(default_factory=dict)
    corrupt: Callable[[str, int], Labelled] | None = None
    corrupted: Mapping[str, Tensor] = field(default_factory=dict)
    names: Mapping[str, Any] = field(default_factory=dict)
    padding: int | None = None
    positions: Mapping[str, list[int]] = field(default_factory=dict)
    inputs: Mapping[str, Any] = field(default_factory=dict)


def located(config: BenchConfig) -> DataConfig:
    """The data with hub names replaced by folders of ``data_root``, where that is given."""
    data = config.data
    if config.data_root is None or data.source == "digits":
        return data
    root = Path(config.data_root).expanduser().absolute()

    def place(source: str) -> str:
        return str(root / Path(source).name.partition(":")[0])

    ood, shift = ({n: place(s) for n, s in sets.items()} for sets in (data.ood, data.shift))
    return replace(data, source=place(data.source), ood=ood, shift=shift)


def load_material(config: BenchConfig, seed: int) -> Material:
    """The examples of one seed; kept in memory for the next training that needs the same.

    Raises:
        DataError, ConfigError: if a set cannot be read, or the configuration contradicts itself.
    """
    given = config.measure
    measure = json.dumps([given.corruptions, given.corruption_limit, given.corruption_draw])
    data = located(config)
    own = seed if data.source == "digits" else 0  # each seed cuts the digits in another way
    if config.redraw:
        data = replace(data, seed=data.seed + seed)
    return _material(json.dumps(vars(data)), measure, own)


def load_base_pictures(config: BenchConfig) -> tuple[Labelled, int]:
    """What the base of a study is trained on (``config.pretrain``), and the number of classes.

    Raises:
        DataError, ConfigError: as :func:`load_material`.
    """
    data = located(config)
    check_splits(data)
    limit = None if config.pretrain is None else config.pretrain.limit
    images = load_train_whole(data, limit)
    return _labelled(images), len(images.classes)


def unread(config: BenchConfig) -> BenchConfig:
    """The same study, of whose pictures none is decoded before it is needed."""
    if config.data.tokenizer is not None or config.data.source == "digits":
        return config
    data, measure = replace(config.data, lazy=True), replace(config.measure, corruptions=[])
    return replace(config, data=data, measure=measure)


def check_trained_head(
    config: BenchConfig,
    classes: int,
    remedy: str = "Set trained_head: false, so that one network is trained first",
) -> None:
    """Raise ConfigError if a pretrained head is said to answer, and cannot: it has other classes.

    Args:
        config: the study.
        classes: number of classes of its data.
        remedy: what to do then.
    """
    model = config.model
    if not config.pretrained or model.weights or config.pretrain:
        return  # a file that does not fit is refused by itself
    known = pretrained_classes(model.name)
    if known is not None and known != classes:
        raise ConfigError(
            f"the pretrained weights of {model.name} answer in {known} classes, the data have "
            f"{classes}: the head is new, and 'single' would be a network with a random head. "
            f"{remedy}"
        )


def check_padding(network: nn.Module, padding: int | None, name: str) -> None:
    """Raise ConfigError if a network takes another padding token than the texts have."""
    own = getattr(network, "padding", None)
    if padding is not None and own is not None and padding != own:
        raise ConfigError(
            f"data.tokenizer fills texts up with token {padding}, but {name} takes {own} for "
            "padding: use the tokenizer of the model"
        )


@lru_cache(maxsize=2)
def _material(data: str, measure: str, seed: int) -> Material:
    config = DataConfig(**json.loads(data))
    corruptions, limit, draw = json.loads(measure)
    if config.source == "digits":
        return _digits(seed, 200 if config.limit is None else config.limit)
    sets = load_sets(config)
    kinds = corruption_names(corruptions, texts=config.tokenizer is not None)
    drawn = {"train": sets.train, "validation": sets.validation}
    positions = {k: v.positions.tolist() for k, v in drawn.items() if v.positions is not None}
    rows = draw_rows(sets.test.labels, limit, kinds, draw, config.seed)
    corrupt, what = None, f"texts of at most {config.length} tokens"
    if not isinstance(sets.test, TokenSet):
        what = f"pictures of {sets.test.side} px"
        corrupt = picture_corrupter(config, rows) if rows else None
    elif rows:
        corrupt = text_corrupter(config, sets.test, rows)
    test = _labelled(sets.test)
    return Material(
        train=_labelled(sets.train),
        data=EvaluationData(
            _labelled(sets.validation),
            test,
            {name: examples.normalized() for name, examples in sets.ood.items()},
        ),
        classes=len(sets.classes),
        shift={name: _labelled(examples) for name, examples in sets.shift.items()},
        corrupt=corrupt,
        corrupted=rows,
        names={
            "description": f"{Path(config.source).name}: {len(sets.train):,} training {what}, "
            f"{len(sets.classes)} classes",
            "train": len(sets.train),
            "validation": len(sets.validation),
            "test": len(sets.test),
            "ood": {name: len(examples) for name, examples in sets.ood.items()},
            "shift": {name: len(examples) for name, examples in sets.shift.items()},
        },
        padding=getattr(sets.test, "padding", None),
        positions=positions,
        inputs={"classes": list(sets.classes)} | _reading(config, sets.test, test.images.shape),
    )


def _reading(
    config: DataConfig, examples: PictureSet | TokenSet, shape: Sequence[int]
) -> dict[str, Any]:
    """How examples are read, (N, C, H, W) or (N, L), with what the configuration leaves open."""
    if isinstance(examples, TokenSet):
        found: dict[str, Any] = {"kind": "texts", "column": examples.column}
        kept: tuple[str, ...] = ("tokenizer", "length")
    else:
        found = {"kind": "pictures", "size": list(shape[2:])}
        kept = ("channels", "crop", "mean", "std")
    return found | {key: getattr(config, key) for key in kept}


def _labelled(examples: PictureSet | TokenSet) -> Labelled:
    return Labelled(examples.normalized(), examples.labels)


def _digits(seed: int, count: int) -> Material:
    """Few handwritten digits seen through noise, and the same at five severities."""
    from sigmanens.lab.digits import SIDE, digits_sets, noisy

    digits = digits_sets(train=count, seed=seed)
    generator = torch.Generator().manual_seed(1000 + seed)

    def seen(part: Labelled) -> Labelled:
        return Labelled(noisy(part.tensor, DIGITS_NOISE, generator), part.labels)

    train, validation, test = seen(digits.train), seen(digits.validation), seen(digits.test)

    def corrupt(name: str, level: int) -> Labelled:
        noise = torch.Generator().manual_seed(2000 + seed)
        return Labelled(noisy(test.tensor, level, noise), test.labels)

    return Material(
        train=train,
        data=EvaluationData(validation, test, digits.ood),
        classes=len(digits.classes),
        corrupt=corrupt,
        corrupted={"gaussian_noise": torch.arange(len(test.labels))},
        names={
            "description": "scikit-learn's handwritten digits (8×8, real), with Gaussian noise of "
            f"severity {DIGITS_NOISE} in training and test alike; another split for every seed",
            "train": len(train.labels),
            "validation": len(validation.labels),
            "test": len(test.labels),
            "ood": {name: len(images) for name, images in digits.ood.items()},
        },
        inputs={
            "classes": list(digits.classes),
            "kind": "pictures",
            "size": [SIDE, SIDE],
            "channels": 1,
            "crop": None,
            "mean": None,
            "std": None,
        },
    )
