"""The examples of one run, as its configuration asks for them: trained, chosen and measured on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch

from sigmanens.errors import ConfigError, DataError
from sigmanens.lab.config import DataConfig
from sigmanens.lab.data.images import Examples, ImageSet, draw_order
from sigmanens.lab.data.lazy import EncodedSet
from sigmanens.lab.data.loading import load_images, open_images
from sigmanens.lab.data.texts import TokenSet, load_texts, load_tokenizer

PictureSet: TypeAlias = ImageSet | EncodedSet
"""Labelled pictures in memory, or encoded."""
REST = "rest"
"""Name of the test split that holds what of the training split is not drawn."""


@dataclass(frozen=True, eq=False)
class Sets:
    """Pictures of one run before normalisation, or texts.

    Attributes:
        train: to train on.
        validation: for the temperature and every choice.
        test: for the reported numbers only.
        ood: other things, by name.
        shift: the same classes from elsewhere, by name.
    """

    train: PictureSet | TokenSet
    validation: PictureSet | TokenSet
    test: PictureSet | TokenSet
    ood: Mapping[str, PictureSet | TokenSet] = field(default_factory=dict)
    shift: Mapping[str, PictureSet | TokenSet] = field(default_factory=dict)

    @property
    def classes(self) -> tuple[str, ...]:
        """Names of the classes."""
        return self.test.classes


def load_sets(config: DataConfig) -> Sets:
    """Load what a configuration names.

    Args:
        config: the sources, splits, sizes and draws.

    Raises:
        DataError: if a source or split cannot be read, or its classes differ from the test split's.
        ConfigError: if the configuration contradicts itself.
    """
    c = config
    check_splits(c)
    from_test, test = load_test(c)
    if c.validation_from_train is not None:
        held, limit = c.validation_from_train, c.limit
        both = _load(c, c.source, c.train_split, None if limit is None else limit + held, own=True)
        train, validation = held_out(both, c)
    else:
        train = _load(c, c.source, c.train_split, c.limit, own=True)
        validation = from_test
        if c.validation_split is not None:
            validation = _load(c, c.source, c.validation_split, own=True)
    for split, other in ((c.train_split, train), (c.validation_split, validation)):
        if other.classes != test.classes:
            raise DataError(
                f"the splits {split!r} and {c.test_split!r} of {c.source} have different classes"
            )
    size = None if c.tokenizer is not None else test.side
    ood = {}
    for name, source in c.ood.items():
        drop, split = c.ood_without.get(name, []), c.ood_splits.get(name, c.test_split)
        found = _load(c, source, split, None if drop else c.ood_limit, size)
        if drop:
            found = without_classes(found, drop)
            order = torch.randperm(len(found), generator=torch.Generator().manual_seed(c.seed))
            found = found.subset(order[: c.ood_limit])
        ood[name] = found
    shift = {}
    for name, source in c.shift.items():
        shift[name] = _load(c, source, c.test_split, c.ood_limit, size)
        same_classes(test.classes, shift[name].classes, name)
    return Sets(train, validation, test, ood, shift)


def load_test(config: DataConfig) -> tuple[Any, Any]:
    """What is reported on, after the part of it that is held out for choices, if there is one."""
    c = config
    if c.test_split == REST:
        drawn = (c.limit or 0) + (c.validation_from_train or 0)
        return None, _load(c, c.source, c.train_split, c.test_limit, own=True, skip=drawn)
    test = _load(c, c.source, c.test_split, c.test_limit, own=True)
    if c.validation_from_train is None and c.validation_split is None:
        return test.split(c.holdout, c.seed)
    return None, test


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
    whole = _load(encoded, c.source, c.train_split, own=True)
    assert isinstance(whole, EncodedSet)
    order = draw_order(whole.labels, c.seed, c.stratify)
    held = c.validation_from_train
    if held is not None:
        first = len(order) - held if c.limit is None else c.limit
        order = torch.cat([order[:first], order[first + held :]])
    wanted = whole.subset(order[:limit])
    return wanted if c.lazy else wanted.decoded()


def _load(
    config: DataConfig,
    source: str,
    split: str,
    limit: int | None = None,
    size: int | None = None,
    own: bool = False,
    skip: int = 0,
) -> Any:
    """One split of a source in the way that all of a run are read.

    Args:
        config: how.
        source: where.
        split: which.
        limit: take only so many.
        size: of pictures, where it is not that of the configuration.
        own: whether it is the source of the run, to which its labels' column, classes and draw
            apply.
        skip: leave out so many at the front of the draw.
    """
    c = config
    options: dict[str, Any] = {
        "limit": limit, "skip": skip, "seed": c.seed, "stratify": own and c.stratify,
        "label_column": c.label_column if own else None, "classes": c.classes if own else None,
    }  # fmt: skip
    if c.tokenizer is not None:
        tokenizer = load_tokenizer(c.tokenizer)
        return load_texts(source, split, tokenizer=tokenizer, length=c.length, **options)
    options |= {
        "channels": c.channels, "size": size or c.size, "crop": c.crop, "mean": c.mean,
        "std": c.std, "allow_missing_classes": not own,
    }  # fmt: skip
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
    if c.test_split == REST and (c.limit is None or c.validation_from_train is None):
        raise ConfigError(
            f"data.test_split is {REST!r}, what is not drawn from split {c.train_split!r}: give "
            "data.limit and data.validation_from_train, the numbers that are drawn"
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
