"""Pictures from a hub name or a local folder into memory, by one code path."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sigmanens.errors import ConfigError, DataError, MixedSizesError
from sigmanens.lab.data.images import ImageSet, check_labels, resize_images

if TYPE_CHECKING:
    from datasets import Dataset, Features

_CHUNK = 512
_BINARY = ("binary", "large_binary")
_LABEL_NAMES = ("label", "labels")
_HUB_PART = re.compile(r"[\w.-]+/[\w.-]+:[\w.-]+")


def load_images(
    source: str | os.PathLike[str],
    split: str,
    *,
    image_column: str | None = None,
    label_column: str | None = None,
    channels: int = 3,
    size: int | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    limit: int | None = None,
    seed: int = 0,
    allow_missing_classes: bool = False,
) -> ImageSet:
    """Load one split of a labelled picture set with ``datasets.load_dataset`` and decode it once.

    The pictures stay encoded in the cache of ``datasets`` (its place is set as usual there); the
    result lies in memory.

    Args:
        source: a hub name or a local folder (parquet files, or class folders of pictures).
        split: name of the split, such as "train".
        image_column: column of the pictures. None: the only column of type Image, or of encoded
            bytes.
        label_column: column of the labels. None: the only ClassLabel column, else the only column
            of strings or integers; one called "label" goes first. Values that are not a ClassLabel
            become class numbers in sorted order over all splits.
        channels: 3 (grey pictures become RGB) or 1 (colour pictures become grey). Alpha is dropped.
        size: height and width to resize to, see ``resize_images``; needed where pictures differ in
            size.
        mean: the channels' means, kept in the set as the default of its ``normalized``.
        std: the channels' standard deviations, likewise.
        limit: take only the first ``limit`` entries of a random permutation of the split.
        seed: seed of that permutation.
        allow_missing_classes: whether a split called "train..." may lack examples of a class.

    Returns:
        The pictures (N, channels, H, W) as uint8 with labels (N,) and class names.

    Raises:
        ConfigError: if ``channels`` or ``limit`` is out of range.
        DataError: if the source cannot be read, the split or a column is unknown, missing or
            ambiguous, the set is empty, a label lies out of range, a class has no example in a
            training split, or a picture cannot be decoded.
    """
    if channels not in (1, 3):
        raise ConfigError(f"channels must be 1 or 3; got {channels}.")
    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be at least 1; got {limit}.")
    splits = open_source(source)
    if split not in splits:
        raise DataError(f"{source} has no split {split!r}; it has: {', '.join(splits)}.")
    rows = splits[split]
    name = f"{Path(source).name}/{split}"
    image_column = _image_column(rows.features, image_column, name)
    label_column = _label_column(rows.features, label_column, image_column, name)
    if not len(rows):
        raise DataError(f"{name}: the data set is empty.")
    labels, classes = _labels(splits, split, label_column, name)
    if limit is not None:
        index = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))[:limit]
        rows, labels = rows.select(index.tolist()), labels[index]
    if split.startswith("train") and not allow_missing_classes:
        _check_every_class(labels, classes, name, limit)
    images = _decode(rows, image_column, channels, size, name)
    return ImageSet(
        images=images,
        labels=labels,
        classes=classes,
        name=name,
        mean=None if mean is None else tuple(mean),
        std=None if std is None else tuple(std),
    )


def open_source(source: str | os.PathLike[str]) -> Mapping[str, Dataset]:
    """Return the splits of a hub name, which may be followed by ``:<configuration>``, or folder."""
    import datasets

    path, parts = os.path.expanduser(source), []
    if _HUB_PART.fullmatch(str(source)):
        path, *parts = str(source).split(":")
    local = isinstance(source, os.PathLike) or str(source).startswith((".", "~", os.sep))
    if local and not os.path.isdir(path):
        raise DataError(f"There is no data folder {source}.")
    try:
        return datasets.load_dataset(path, *parts)
    except (
        datasets.exceptions.DatasetsError,
        FileNotFoundError,
        ConnectionError,
        ValueError,
    ) as error:
        reason: BaseException = error
        while reason.__cause__ is not None:
            reason = reason.__cause__
        text = str(reason)
        if "BatchSize must be greater than 0" in text:  # what a parquet file without rows raises
            text = "a split is empty (its parquet file has no row)"
        raise DataError(f"The data set {source} cannot be loaded: {text}.") from error


def _image_column(features: Features, given: str | None, name: str) -> str:
    """Return the column that holds the pictures."""
    import datasets

    def holds_pictures(feature: Any) -> bool:
        if isinstance(feature, Mapping):
            return set(feature) <= {"bytes", "path"} and "bytes" in feature
        return isinstance(feature, datasets.Image) or getattr(feature, "dtype", None) in _BINARY

    found = [column for column, feature in features.items() if holds_pictures(feature)]
    return pick_column("image", given, found, list(features), name)


def _label_column(features: Features, given: str | None, image_column: str, name: str) -> str:
    """Return the column that holds the labels."""
    import datasets

    plain = []
    for column, feature in features.items():
        kind = str(getattr(feature, "dtype", ""))
        if column != image_column and (
            kind == "large_string" or kind.startswith(("string", "int", "uint"))
        ):
            plain.append(column)
    typed = [c for c in plain if isinstance(features[c], datasets.ClassLabel)]
    found = typed or plain
    named = [column for column in found if column in _LABEL_NAMES]
    if given is not None:
        found = plain
    elif len(named) == 1:
        found = named
    return pick_column("label", given, found, list(features), name)


def pick_column(
    what: str, given: str | None, found: list[str], columns: list[str], name: str
) -> str:
    """Return the given column if it is one of those found, else the only one found."""
    has = f"The columns are: {', '.join(columns)}."
    if given is not None:
        if given not in columns:
            raise DataError(f"{name}: there is no column {given!r}. {has}")
        if given not in found:
            raise DataError(f"{name}: column {given!r} cannot hold {what}s. {has}")
        return given
    if not found:
        raise DataError(f"{name}: no {what} column was found. {has}")
    if len(found) > 1:
        raise DataError(
            f"{name}: several columns could hold {what}s ({', '.join(found)}); say which with "
            f"{what}_column=..."
        )
    return found[0]


def label_numbers(
    splits: Mapping[str, Dataset], split: str, given: str | None, other_column: str, name: str
) -> tuple[Tensor, tuple[str, ...]]:
    """The split's labels (N,) as int64 and the classes' names; their column is found.

    Args:
        splits: of the source.
        split: which.
        given: the column, or None.
        other_column: that of the texts or pictures, which holds no labels.
        name: of the set, for messages.
    """
    column = _label_column(splits[split].features, given, other_column, name)
    return _labels(splits, split, column, name)


def _labels(
    splits: Mapping[str, Dataset], split: str, column: str, name: str
) -> tuple[Tensor, tuple[str, ...]]:
    """Return the split's labels (N,) as int64 and the classes' names."""
    import datasets

    values = splits[split][column][:]
    if None in values:
        raise DataError(f"{name}: row {values.index(None)} has no label.")
    feature = splits[split].features[column]
    if isinstance(feature, datasets.ClassLabel):
        labels = torch.tensor(values, dtype=torch.int64)
        check_labels(labels, feature.num_classes, name)
        return labels, tuple(feature.names)
    everywhere = {
        value
        for rows in splits.values()
        if column in rows.features
        for value in rows.unique(column)
        if value is not None
    }
    ordered = sorted(everywhere)
    number = {value: i for i, value in enumerate(ordered)}
    labels = torch.tensor([number[value] for value in values], dtype=torch.int64)
    return labels, tuple(str(value) for value in ordered)


def _check_every_class(
    labels: Tensor, classes: tuple[str, ...], name: str, limit: int | None
) -> None:
    """Raise DataError if a class has no example."""
    counts = torch.bincount(labels, minlength=len(classes)).tolist()
    missing = [label for label, count in zip(classes, counts, strict=True) if not count]
    if missing:
        fix = "Raise limit" if limit is not None else "Complete the data"
        raise DataError(
            f"{name}: {len(missing)} of {len(classes)} classes have no example to train on, the "
            f"first is {missing[0]!r}. {fix}, or pass allow_missing_classes=True."
        )


def _decode(rows: Dataset, column: str, channels: int, size: int | None, name: str) -> Tensor:
    """Return the pictures as uint8 (N, channels, H, W)."""
    import datasets

    records = rows.select_columns([column]).cast_column(column, datasets.Image(decode=False))
    images: Tensor | None = None
    for start in range(0, len(records), _CHUNK):
        arrays = [
            _pixels(record, channels, f"{name}: picture {start + i}")
            for i, record in enumerate(records[start : start + _CHUNK][column])
        ]
        chunk = _stack(arrays, size, images, start, name)
        if images is None:
            images = torch.empty((len(records), *chunk.shape[1:]), dtype=torch.uint8)
        images[start : start + len(chunk)] = chunk
    assert images is not None  # the caller has refused an empty set
    return images


def _stack(
    arrays: list[np.ndarray], size: int | None, images: Tensor | None, start: int, name: str
) -> Tensor:
    """Return the arrays (H, W, C) as one tensor (n, C, H, W), resized where asked."""
    if size is None:
        expected = tuple(images.shape[2:]) if images is not None else arrays[0].shape[:2]
        for i, array in enumerate(arrays):
            if array.shape[:2] != expected:
                raise MixedSizesError(
                    f"{name}: pictures differ in size: picture {start + i} has {array.shape[:2]} "
                    f"pixels, the first {expected}. Pass size=... to resize them."
                )
    if size is None or len({array.shape for array in arrays}) == 1:
        stacked = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2)
        return stacked if size is None else resize_images(stacked, size)
    single = [torch.from_numpy(array).permute(2, 0, 1).unsqueeze(0) for array in arrays]
    return torch.cat([resize_images(image, size) for image in single])


def _pixels(record: Mapping[str, Any] | None, channels: int, where: str) -> np.ndarray:
    """Decode one picture to uint8 (H, W, channels)."""
    from PIL import Image

    if record is None or (record["bytes"] is None and record["path"] is None):
        raise DataError(f"{where} is missing.")
    encoded = record["bytes"]
    try:
        with Image.open(record["path"] if encoded is None else io.BytesIO(encoded)) as picture:
            if picture.mode[0] in "IF":
                raise DataError(
                    f"{where} has mode {picture.mode}; expected 8 bits a channel. Convert "
                    "the set first."
                )
            pixels = np.array(picture.convert("L" if channels == 1 else "RGB"))
    except (OSError, SyntaxError) as error:
        raise DataError(f"{where} cannot be decoded: {error}") from error
    return pixels.reshape(*pixels.shape[:2], channels)
