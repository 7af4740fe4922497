"""Hub names and folders: their splits, and which column is what."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from sigmanens.errors import ConfigError, DataError
from sigmanens.lab.data.images import check_labels, draw_order

if TYPE_CHECKING:
    from datasets import Dataset, Features

_BINARY = ("binary", "large_binary")
_LABEL_NAMES = ("label", "labels")
_HUB_PART = re.compile(r"[\w.-]+/[\w.-]+:[\w.-]+")


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


def image_column_of(features: Features, given: str | None, name: str) -> str:
    """Return the column that holds the pictures."""
    import datasets

    def holds_pictures(feature: Any) -> bool:
        if isinstance(feature, Mapping):
            return set(feature) <= {"bytes", "path"} and "bytes" in feature
        return isinstance(feature, datasets.Image) or getattr(feature, "dtype", None) in _BINARY

    found = [column for column, feature in features.items() if holds_pictures(feature)]
    return pick_column("image", given, found, list(features), name)


def label_column_of(features: Features, given: str | None, image_column: str, name: str) -> str:
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


def open_split(
    source: str | os.PathLike[str], split: str, limit: int | None
) -> tuple[Mapping[str, Dataset], Dataset, str]:
    """All splits of a source, the rows of one of them, and what that is called in messages.

    A split "train+test" is made of two, one after the other.

    Raises:
        ConfigError: if ``limit`` is out of range. DataError: if the source cannot be read, or the
            split is unknown or empty.
    """
    from datasets import concatenate_datasets

    if limit is not None and limit < 1:
        raise ConfigError(f"limit must be at least 1; got {limit}.")
    splits = dict(open_source(source))
    absent = [part for part in split.split("+") if part not in splits]
    if absent:
        raise DataError(f"{source} has no split {absent[0]!r}; it has: {', '.join(splits)}.")
    if split not in splits:
        splits[split] = concatenate_datasets([splits[part] for part in split.split("+")])
    name = f"{Path(source).name}/{split}"
    if not len(splits[split]):
        raise DataError(f"{name}: the data set is empty.")
    return splits, splits[split], name


def labelled_rows(
    splits: Mapping[str, Dataset],
    split: str,
    label_column: str | None,
    other_column: str,
    name: str,
    *,
    limit: int | None = None,
    skip: int = 0,
    classes: int | None = None,
    seed: int = 0,
    stratify: bool = False,
) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    """Positions (n,) of what is drawn from a split, its labels (n,) and the classes' names.

    Args:
        splits, split, label_column, other_column, name: as for :func:`label_numbers`.
        limit: take so many of a random order (see ``draw_order``); None: all.
        skip: leave out so many at the front of that order.
        classes: keep only the first so many classes; None: all.
        seed, stratify: of the order.
    """
    labels, names = label_numbers(splits, split, label_column, other_column, name)
    rows = torch.arange(len(labels))
    if classes is not None:
        if not 2 <= classes <= len(names):
            raise ConfigError(
                f"classes is {classes}; expected 2 to {len(names)}, the classes of {name}"
            )
        rows, names = rows[labels < classes], names[:classes]
    if limit is not None or skip:
        order = draw_order(labels[rows], seed, stratify)
        rows = rows[order[skip : None if limit is None else skip + limit]]
        if not len(rows):
            raise ConfigError(f"nothing is left of {name}: {skip} examples are drawn before")
    return rows, labels[rows], names


def label_numbers(
    splits: Mapping[str, Dataset], split: str, given: str | None, other_column: str, name: str
) -> tuple[Tensor, tuple[str, ...]]:
    """The split's labels (N,) as int64 and the classes' names.

    Args:
        splits: of the source.
        split: which.
        given: their column; None: it is found.
        other_column: that of the texts or pictures, which holds no labels.
        name: of the set, for messages.
    """
    import datasets

    column = label_column_of(splits[split].features, given, other_column, name)
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


def check_every_class(
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
