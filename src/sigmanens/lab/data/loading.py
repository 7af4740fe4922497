"""Pictures from a hub name or a local folder, in memory or encoded, by one code path."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from sigmanens.errors import ConfigError
from sigmanens.lab.data.images import ImageSet
from sigmanens.lab.data.lazy import RECORD, EncodedSet
from sigmanens.lab.data.sources import (
    check_every_class,
    image_column_of,
    labelled_rows,
    open_split,
)


def load_images(source: str | os.PathLike[str], split: str, **options: Any) -> ImageSet:
    """Load one split of a labelled picture set with ``datasets.load_dataset`` and decode it once.

    The pictures stay encoded in the cache of ``datasets`` (its place is set as usual there); the
    result lies in memory.

    Args:
        source: a hub name or a local folder (parquet files, or class folders of pictures).
        split: name of the split, such as "train".
        options: as for :func:`open_images`; ``size`` is needed where pictures differ in size only.

    Returns:
        The pictures (N, channels, H, W) as uint8 with labels (N,) and class names.

    Raises:
        ConfigError, DataError: as :func:`open_images`; DataError also if a picture cannot be
            decoded.
    """
    return open_images(source, split, **options).decoded()


def open_images(
    source: str | os.PathLike[str],
    split: str,
    *,
    size: int | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    channels: int = 3,
    crop: float | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    limit: int | None = None,
    skip: int = 0,
    classes: int | None = None,
    seed: int = 0,
    stratify: bool = False,
    allow_missing_classes: bool = False,
    readers: int = 0,
) -> EncodedSet:
    """Like :func:`load_images`, but pictures stay encoded until a batch of them is asked for.

    Args:
        source: a hub name or a local folder (parquet files, or class folders of pictures).
        split: name of the split, such as "train".
        size: height and width to resize to, see ``resize_images``; None: as they are.
        image_column: column of the pictures. None: the only column of type Image, or of encoded
            bytes.
        label_column: column of the labels. None: the only ClassLabel column, else the only column
            of strings or integers; one called "label" goes first. Values that are not a ClassLabel
            become class numbers in sorted order over all splits.
        channels: 3 (grey pictures become RGB) or 1 (colour pictures become grey). Alpha is dropped.
        crop: share of the shorter side that the square shown holds, such as 224 / 256; None: the
            whole picture, whatever its shape.
        mean: the channels' means, by which the set is normalised.
        std: the channels' standard deviations, likewise.
        limit: take only the first ``limit`` entries of a random permutation of the split.
        skip: leave out so many at its front.
        classes: take only the first so many classes.
        seed: seed of that permutation.
        stratify: whether these hold all classes in proportion.
        allow_missing_classes: whether a split called "train..." may lack examples of a class.
        readers: threads that decode ahead; 0: each batch is decoded when it is asked for.

    Raises:
        ConfigError: if ``channels``, ``limit`` or ``crop`` is out of range.
        DataError: if the source cannot be read, the split or a column is unknown, missing or
            ambiguous, the set is empty, a label lies out of range, or a class has no example in a
            training split.
    """
    import datasets

    check_framing(size, crop)
    if channels not in (1, 3):
        raise ConfigError(f"channels must be 1 or 3; got {channels}.")
    splits, rows, name = open_split(source, split, limit)
    image_column = image_column_of(rows.features, image_column, name)
    places, labels, names = labelled_rows(
        splits, split, label_column, image_column, name,
        limit=limit, skip=skip, classes=classes, seed=seed, stratify=stratify,
    )  # fmt: skip
    if split.startswith("train") and not allow_missing_classes:
        check_every_class(labels, names, name, limit)
    encoded = datasets.Image(decode=False)
    records = rows.select_columns([image_column]).cast_column(image_column, encoded)
    return EncodedSet(
        records=records.rename_column(image_column, RECORD),
        labels=labels,
        classes=names,
        size=size,
        crop=crop,
        channels=channels,
        name=name,
        mean=None if mean is None else tuple(mean),
        std=None if std is None else tuple(std),
        readers=readers,
        rows=places,
    )


def check_framing(size: int | None, crop: float | None) -> None:
    """Raise ConfigError unless ``crop`` is a share in (0, 1] and comes with a size."""
    if crop is not None and (size is None or not 0 < crop <= 1):
        raise ConfigError(
            f"crop is {crop} and size {size}; expected a share of the shorter side in (0, 1], and "
            "the size that it is brought to"
        )
