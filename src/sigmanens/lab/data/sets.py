"""The pictures of one run, as its configuration asks for them: trained, chosen and measured on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch

from sigmanens.errors import ConfigError, DataError
from sigmanens.lab.config import DataConfig
from sigmanens.lab.data.images import ImageSet, draw_order
from sigmanens.lab.data.lazy import EncodedSet
from sigmanens.lab.data.loading import load_images, open_images

if TYPE_CHECKING:
    from sigmanens.lab.data.texts import TokenSet

__all__ = [
    "ImageSets",
    "PictureSet",
    "check_splits",
    "held_out",
    "load_sets",
    "load_train_whole",
    "without_classes",
]

PictureSet: TypeAlias = ImageSet | EncodedSet
"""Labelled pictures in memory, or encoded."""
Examples = TypeVar("Examples", "ImageSet | EncodedSet", "TokenSet")


@dataclass(frozen=True, eq=False)
class ImageSets:
    """Pictures of one run, before normalisation.

    Attributes:
        train: to train on; None where it was not asked for.
        validation: for the temperature and every choice.
        test: for the reported numbers only.
        ood: other things, by name.
        shift: the same classes from elsewhere, by name.
    """

    train: PictureSet | None
    validation: PictureSet
    test: PictureSet
    ood: Mapping[str, PictureSet] = field(default_factory=dict)
    shift: Mapping[str, PictureSet] = field(default_factory=dict)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        return self.test.classes


def load_sets(config: DataConfig, training: bool = True) -> ImageSets:
    """Load what a configuration names.

    Args:
        config: the sources, splits, sizes and draws.
        training: whether the training pictures are wanted.

    Raises:
        DataError: if a source or split cannot be read, or its classes differ from the test split's.
        ConfigError: if the configuration contradicts itself.
    """
    c = config
    if c.tokenizer is not None:
        raise ConfigError(
            f"data.tokenizer is {c.tokenizer!r}, but pictures are read here: studies of texts are "
            "run by 'sigmanens bench'"
        )
    check_splits(c)

    def images(split: str, limit: int | None) -> PictureSet:
        return _load(c, c.source, split, limit=limit, label_column=c.label_column,
                     stratify=c.stratify)  # fmt: skip

    train: PictureSet | None = None
    test = images(c.test_split, c.test_limit)
    if c.validation_from_train is not None:
        held, limit = c.validation_from_train, c.limit
        both = images(c.train_split, None if limit is None else limit + held)
        train, validation = held_out(both, c)
    elif c.validation_split is not None:
        validation = images(c.validation_split, None)
    else:
        validation, test = test.split(c.holdout, c.seed)
    if train is None and training:
        train = images(c.train_split, c.limit)
    for split, other in ((c.train_split, train), (c.validation_split, validation)):
        if other is not None and other.classes != test.classes:
            raise DataError(
                f"the splits {split!r} and {c.test_split!r} of {c.source} have different classes"
            )
    ood = {}
    for name, source in c.ood.items():
        drop = c.ood_without.get(name, [])
        found = _load(
            c, source, c.ood_splits.get(name, c.test_split), size=test.side,
            limit=None if drop else c.ood_limit, allow_missing_classes=True,
        )  # fmt: skip
        if drop:
            found = without_classes(found, drop)
            order = torch.randperm(len(found), generator=torch.Generator().manual_seed(c.seed))
            found = found.subset(order[: c.ood_limit])
        ood[name] = found
    shift = {}
    for name, source in c.shift.items():
        shift[name] = _load(c, source, c.test_split, size=test.side, limit=c.ood_limit)
        same_classes(test.classes, shift[name].classes, name)
    return ImageSets(train if training else None, validation, test, ood, shift)


def load_train_whole(config: DataConfig, limit: int | None = None) -> PictureSet:
    """Training pictures for a network that all trainings start from.

    They are those of the training split that are not held out for validation, whatever the limit
    of the trainings themselves.

    Args:
        config: the sources, splits, sizes and draws.
        limit: take only so many of them.
    """
    c = config
    encoded = replace(c, lazy=True)
    whole = _load(encoded, c.source, c.train_split, label_column=c.label_column)
    assert isinstance(whole, EncodedSet)
    order = draw_order(whole.labels, c.seed, c.stratify)
    held = c.validation_from_train
    if held is not None:
        first = len(order) - held if c.limit is None else c.limit
        order = torch.cat([order[:first], order[first + held :]])
    wanted = whole.subset(order[:limit])
    return wanted if c.lazy else wanted.decoded()


def _load(config: DataConfig, source: str, split: str, **changes: Any) -> PictureSet:
    """One split of a source in the way that all of a run are read."""
    c = config
    options = {
        "channels": c.channels, "size": c.size, "crop": c.crop, "mean": c.mean, "std": c.std,
        "seed": c.seed,
    } | changes  # fmt: skip
    if c.lazy:
        return open_images(source, split, readers=c.readers, **options)
    return load_images(source, split, **options)


def check_splits(config: DataConfig) -> None:
    """Raise ConfigError if splits are one and the same, or options name sets that there are not."""
    c = config
    if c.validation_split is not None and c.validation_from_train is not None:
        raise ConfigError(
            "data.validation_split and data.validation_from_train are both given; expected one "
            "place for the held-out pictures"
        )
    splits = {"train": c.train_split, "test": c.test_split, "validation": c.validation_split}
    for one, other in (("train", "test"), ("train", "validation"), ("test", "validation")):
        if splits[one] == splits[other]:
            raise ConfigError(
                f"data.{one}_split and data.{other}_split are both {splits[one]!r}: what is "
                "trained on, chosen on and reported on has to differ"
            )
    for key in ("ood_splits", "ood_without"):
        unknown = sorted(set(getattr(c, key)) - set(c.ood))
        if unknown:
            raise ConfigError(
                f"data.{key} names {unknown[0]!r}, which data.ood does not: it has "
                f"{', '.join(c.ood) or 'no set'}"
            )


def held_out(both: Examples, config: DataConfig) -> tuple[Examples, Examples]:
    """Training and validation examples from those of the training split that a run may use.

    Args:
        both: with a limit, the first ``limit + validation_from_train`` of the permutation; without,
            the whole split.
        config: says how many are held out.

    Raises:
        ConfigError: if there are too few to share.
    """
    held, limit = config.validation_from_train or 0, config.limit
    if limit is None:
        order = draw_order(both.labels, config.seed, config.stratify)
        both, limit = both.subset(order), len(both) - held
    if held < 1 or limit < 1 or len(both) < limit + held:
        raise ConfigError(
            f"data.validation_from_train is {held} and data.limit {config.limit}, but split "
            f"{config.train_split!r} has {len(both)} examples to share between them"
        )
    return both.subset(slice(limit)), both.subset(slice(limit, limit + held))


def same_classes(expected: tuple[str, ...], found: tuple[str, ...], name: str) -> None:
    """Raise DataError unless a set has the classes of the test data."""
    if expected != found:
        raise DataError(
            f"the set {name!r} of data.shift has the classes {', '.join(found[:5])} …, the test "
            f"data {', '.join(expected[:5])} …: what is measured on both has to mean the same"
        )


def without_classes(images: PictureSet, names: list[str]) -> PictureSet:
    """The pictures whose class is not named; the numbering of classes stays.

    Raises:
        ConfigError: if a name is no class of the set.
    """
    unknown = [n for n in names if n not in images.classes]
    if unknown:
        raise ConfigError(
            f"{images.name} has no class {unknown[0]!r}; it has {len(images.classes)} classes, the "
            f"first: {', '.join(images.classes[:5])}"
        )
    dropped = torch.tensor([images.classes.index(n) for n in names])
    return images.subset(~torch.isin(images.labels, dropped))
