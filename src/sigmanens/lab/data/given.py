"""Pictures and texts that a user gives for prediction, from wherever they are."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import Tensor

from sigmanens.errors import DataError, InputError
from sigmanens.lab.data.decoding import decoded, stacked
from sigmanens.lab.data.framing import RandomView, show_middle
from sigmanens.lab.data.images import normalize

if TYPE_CHECKING:
    from PIL.Image import Image

Picture: TypeAlias = "Path | Image"

PICTURE_FILES = (
    ".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp",
)  # fmt: skip
"""What is taken from a folder; a file that is named may end otherwise."""

TEXT_FILES = (".csv", ".jsonl", ".json", ".txt")


def given_pictures(inputs: Any) -> list[Picture]:
    """Files and Pillow pictures in the order given; a folder stands for the pictures below it.

    Raises:
        DataError: if a file or folder is not there, a folder has no picture, or nothing is given.
            InputError: for something else than paths and pictures.
    """
    from PIL.Image import Image

    found: list[Picture] = []
    for one in _several(inputs, (str, os.PathLike, Image)):
        if isinstance(one, Image):
            found.append(one)
            continue
        if not isinstance(one, (str, os.PathLike)):
            raise InputError(
                f"an input is a {type(one).__name__}; expected a path or a Pillow picture: the run "
                "was trained on pictures"
            )
        path = Path(one).expanduser()
        if path.is_dir():
            inside = (p for p in path.rglob("*") if p.suffix.lower() in PICTURE_FILES)
            pictures = sorted(p for p in inside if p.is_file() and not p.name.startswith("."))
            if not pictures:
                raise DataError(f"no picture lies below {one}; expected {', '.join(PICTURE_FILES)}")
            found += pictures
        elif path.is_file():
            found.append(path)
        else:
            raise DataError(f"there is no file or folder {one}; expected pictures or their folder")
    return found


@dataclass(frozen=True, eq=False)
class GivenPictures:
    """Makes of pictures what a network takes; a source of ``LazyPictures``.

    Attributes:
        pictures: files and Pillow pictures.
        reading: ``channels``, ``size`` (height and width), ``crop``, ``mean`` and ``std``, as
            ``inputs.json`` has them.
    """

    pictures: Sequence[Picture]
    reading: Mapping[str, Any]

    def make(self, rows: Tensor, view: RandomView | None = None) -> Tensor:
        """Normalised pictures (B, C, H, W), float32, at the positions ``rows`` (B,).

        Raises:
            DataError: if one cannot be decoded, or is not of the size that it has to have.
        """
        how, numbers = self.reading, rows.tolist()
        height, width = how["size"]
        size = height if height == width else None
        frame = (
            None if how["crop"] is None else partial(show_middle, share=how["crop"], size=height)
        )
        arrays = [
            decoded(_record(self.pictures[i]), how["channels"], f"picture {i}", frame)
            for i in numbers
        ]
        for i, array in zip(numbers, arrays, strict=True):
            if size is None and array.shape[:2] != (height, width):
                raise DataError(
                    f"{name_of(self.pictures[i], i)} has {array.shape[0]} × {array.shape[1]} "
                    f"pixels; this run was trained on {height} × {width} without data.size: resize "
                    "it first"
                )
        return normalize(
            stacked(arrays, size, None, numbers, "inputs"), how["mean"], how["std"], "inputs"
        )


def name_of(picture: Picture, number: int) -> str:
    """What a picture is called in results."""
    return str(picture) if isinstance(picture, Path) else f"picture {number}"


def _record(picture: Picture) -> dict[str, Any]:
    """A picture as ``datasets`` keeps it."""
    if isinstance(picture, Path):
        return {"bytes": None, "path": str(picture)}
    buffer = io.BytesIO()
    picture.save(buffer, "TIFF")  # as it is: whatever the mode
    return {"bytes": buffer.getvalue(), "path": None}


def given_texts(inputs: Any, column: str) -> list[str]:
    """Texts in the order given: strings, and what is in files.

    A path object is a file; so is a string that is given alone and ends like one.

    Args:
        inputs: one or several.
        column: where the texts stand in a file of several columns.

    Raises:
        DataError: if a file cannot be read or has no such column, or nothing is given. InputError:
            for something else than texts and paths.
    """
    if isinstance(inputs, str) and inputs.lower().endswith(TEXT_FILES):
        inputs = Path(inputs)
    found: list[str] = []
    for one in _several(inputs, (str, os.PathLike)):
        if isinstance(one, str):
            found.append(one)
        elif isinstance(one, os.PathLike):
            found += _texts_in(Path(one).expanduser(), column)
        else:
            raise InputError(
                f"an input is a {type(one).__name__}; expected a text or a path: the run was "
                "trained on texts"
            )
    return found


def _several(inputs: Any, single: tuple[type, ...]) -> list[Any]:
    """The inputs as a list, be they one or several; DataError if there is none."""
    one = isinstance(inputs, single) or not isinstance(inputs, Iterable)
    found = [inputs] if one else list(inputs)
    if not found:
        raise DataError("there is nothing to predict: no input was given")
    return found


def _texts_in(path: Path, column: str) -> list[str]:
    """The texts of a file: a column of CSV or JSON lines, or the lines of plain text."""
    kind = path.suffix.lower()
    if not path.is_file() or kind not in TEXT_FILES:
        what = "is no file of texts" if path.exists() else "does not exist"
        raise DataError(f"{path} {what}; expected a file that ends in {', '.join(TEXT_FILES)}")
    try:
        text = path.read_text(encoding="utf-8-sig")
        if kind == ".txt":
            rows: list[Any] = [{column: line} for line in text.splitlines() if line.strip()]
        elif kind == ".csv":
            rows = list(csv.DictReader(io.StringIO(text, newline=""), strict=True))
        elif text.lstrip().startswith("["):
            rows = json.loads(text)
        else:
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError, csv.Error) as error:  # bytes that are no UTF-8 are a ValueError
        raise DataError(f"{path} cannot be read as {kind[1:]} in UTF-8: {error}") from error
    if not rows or not isinstance(rows[0], dict):
        raise DataError(f"{path} has no row with named columns; expected a column {column!r}")
    columns = list(rows[0])
    chosen = column if column in columns else columns[0]
    if chosen != column and len(columns) > 1:
        raise DataError(
            f"{path} has no column {column!r}, which held the texts in training; it has "
            f"{', '.join(map(str, columns))}. Rename one, or leave one only"
        )
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or not isinstance(row.get(chosen), str):
            raise DataError(f"{path}: row {number} has no text in column {chosen!r}")
        if None in row:  # where csv puts what is too much
            raise DataError(
                f"{path}: row {number} has more fields than the head; texts with commas need quotes"
            )
    return [row[chosen] for row in rows]
