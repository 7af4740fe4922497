"""What the trainings of a study are made from and measured on: pictures, texts or digits."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sigmanens.errors import ConfigError
from sigmanens.lab.backbones import registry
from sigmanens.lab.bench.config import BenchConfig
from sigmanens.lab.bench.corrupted import (
    check_names,
    corruption_names,
    draw_rows,
    first_of,
    picture_corrupter,
)
from sigmanens.lab.config import DataConfig
from sigmanens.lab.data.sets import (
    PictureSet,
    check_splits,
    held_out,
    load_sets,
    load_train_whole,
    same_classes,
)
from sigmanens.lab.digits import Labelled
from sigmanens.lab.rows import EvaluationData

__all__ = [
    "Material",
    "check_padding",
    "check_trained_head",
    "first_of",
    "load_base_pictures",
    "load_material",
    "located",
]

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


def check_trained_head(config: BenchConfig, classes: int) -> None:
    """Raise ConfigError if a pretrained head is said to answer, and cannot: it has other classes.

    Args:
        config: the study.
        classes: number of classes of its data.
    """
    model = config.model
    if not config.pretrained or model.weights or config.pretrain:
        return  # a file that does not fit is refused by itself
    remedy = "Set trained_head: false, so that one network is trained first"
    registry.check_trained_head(model.name, classes, remedy)


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
        return _digits(seed, config.limit or 200)
    if config.tokenizer is not None:
        return _texts(config, corruptions, limit, draw)
    return _pictures(config, corruptions, limit, draw)


def _pictures(config: DataConfig, corruptions: list[str], limit: int, draw: str) -> Material:
    sets = load_sets(config)
    assert sets.train is not None
    kinds = corruption_names(corruptions)
    rows = draw_rows(sets.test.labels, limit, kinds, draw, config.seed)
    return Material(
        train=_labelled(sets.train),
        data=EvaluationData(
            _labelled(sets.validation),
            _labelled(sets.test),
            {name: images.normalized() for name, images in sets.ood.items()},
        ),
        classes=len(sets.classes),
        shift={name: _labelled(images) for name, images in sets.shift.items()},
        corrupt=picture_corrupter(config, rows) if rows else None,
        corrupted=rows,
        names=_names(config, sets, f"pictures of {sets.test.side} px"),
    )


def _names(config: DataConfig, sets: Any, what: str) -> dict[str, Any]:
    return {
        "description": f"{Path(config.source).name}: {len(sets.train):,} training {what}, "
        f"{len(sets.classes)} classes",
        "train": len(sets.train),
        "validation": len(sets.validation),
        "test": len(sets.test),
        "ood": {name: len(examples) for name, examples in sets.ood.items()},
        "shift": {name: len(examples) for name, examples in sets.shift.items()},
    }


def _labelled(images: PictureSet) -> Labelled:
    return Labelled(images.normalized(), images.labels)


def _texts(config: DataConfig, corruptions: list[str], limit: int, draw: str) -> Material:
    from sigmanens.evaluation.corruption import TEXT_CORRUPTIONS, corrupt_text
    from sigmanens.lab.data.texts import TokenSet, encode, load_texts, load_tokenizer

    tokenizer = load_tokenizer(str(config.tokenizer))

    def load(source: str, split: str, count: int | None) -> TokenSet:
        own = config.label_column if source == config.source else None
        return load_texts(
            source, split, tokenizer=tokenizer, length=config.length, limit=count,
            seed=config.seed, label_column=own,
            stratify=config.stratify and source == config.source,
        )  # fmt: skip

    check_splits(config)
    test = load(config.source, config.test_split, config.test_limit)
    held = config.validation_from_train
    if held is not None:
        count = None if config.limit is None else config.limit + held
        both = load(config.source, config.train_split, count)
        train, validation = held_out(both, config)
    else:
        train = load(config.source, config.train_split, config.limit)
        if config.validation_split is not None:
            validation = load(config.source, config.validation_split, None)
        else:
            validation, test = test.split(config.holdout, config.seed)
    ood = {
        name: load(source, config.ood_splits.get(name, config.test_split), config.ood_limit)
        for name, source in config.ood.items()
    }
    shift = {n: load(s, config.test_split, config.ood_limit) for n, s in config.shift.items()}
    for name, found in shift.items():
        same_classes(test.classes, found.classes, name)

    names = (
        tuple(TEXT_CORRUPTIONS) if set(corruptions) & {"standard", "all"} else tuple(corruptions)
    )
    check_names(names, tuple(TEXT_CORRUPTIONS))
    rows = draw_rows(test.labels, limit, names, draw, config.seed)

    def corrupt(name: str, severity: int) -> Labelled:
        some = test.subset(rows[name])
        changed = corrupt_text(some.texts, name, severity, seed=config.seed)
        return Labelled(encode(changed, tokenizer, config.length), some.labels)

    sets = _TextSets(train, validation, test, ood, shift)
    return Material(
        train=Labelled(train.tokens, train.labels),
        data=EvaluationData(
            Labelled(validation.tokens, validation.labels),
            Labelled(test.tokens, test.labels),
            {name: found.tokens for name, found in ood.items()},
        ),
        classes=len(test.classes),
        shift={name: Labelled(found.tokens, found.labels) for name, found in shift.items()},
        corrupt=corrupt if names else None,
        corrupted=rows,
        names=_names(config, sets, f"texts of at most {config.length} tokens"),
        padding=test.padding,
    )


@dataclass(frozen=True, eq=False)
class _TextSets:
    """Like ``ImageSets``."""

    train: Any
    validation: Any
    test: Any
    ood: Mapping[str, Any]
    shift: Mapping[str, Any]

    @property
    def classes(self) -> tuple[str, ...]:
        found: tuple[str, ...] = self.test.classes
        return found


def _digits(seed: int, count: int) -> Material:
    """Few handwritten digits seen through noise, and the same at five severities."""
    from sigmanens.lab.digits import digits_sets, noisy

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
    )
