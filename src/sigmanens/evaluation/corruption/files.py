"""The published corrupted sets, in the layouts in which they are distributed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sigmanens.errors import DataError
from sigmanens.evaluation.corruption.checks import check_severity
from sigmanens.evaluation.corruption.tables import CORRUPTIONS, EXTRA_CORRUPTIONS

SUFFIXES = {".jpeg", ".jpg", ".png"}


class PictureFiles(NamedTuple):
    """Pictures that lie in files.

    Attributes:
        paths: N files, by class and then by name.
        labels: (N,) int64, positions in ``classes``.
        classes: names of the classes (WordNet ids).
    """

    paths: list[Path]
    labels: Tensor
    classes: tuple[str, ...]


def read_cifar_c(
    folder: str | Path, name: str, severity: int | None = None
) -> tuple[Tensor, Tensor]:
    """Pictures and labels of one corruption of CIFAR-10-C or CIFAR-100-C.

    ``folder/name.npy`` holds 5 n pictures (10,000 each in the published sets), severity s in rows
    (s−1) n … s n − 1, and ``folder/labels.npy`` as many labels, those of the test set five times.

    Args:
        folder: where the ``.npy`` files are.
        name: of the corruption, as the file is called.
        severity: 1 to 5; None for all.

    Returns:
        pictures (n, 3, H, W) uint8 and labels (n,) int64; without ``severity`` (5, n, 3, H, W) and
        (5, n), severity 1 first.

    Raises:
        DataError: a file that is missing or not in this layout. InputError: a severity that does
            not exist.
    """
    if severity is not None:
        check_severity(severity)
    folder = Path(folder)
    pictures = _load(folder / f"{name}.npy")
    labels = _load(folder / "labels.npy")
    if pictures.dtype != np.uint8 or pictures.ndim != 4 or pictures.shape[3] not in (1, 3):
        raise DataError(
            f"{folder / f'{name}.npy'} holds {pictures.dtype} {pictures.shape}; expected uint8 "
            "(rows, height, width, channels)"
        )
    rows = len(pictures)
    if rows == 0 or rows % 5:
        raise DataError(
            f"{folder / f'{name}.npy'} has {rows} rows; expected five times the test set, one part "
            "for each severity. A file of a single severity is not in this layout"
        )
    if labels.shape != (rows,) or labels.dtype.kind not in "iu":
        raise DataError(
            f"{folder / 'labels.npy'} holds {labels.dtype} {labels.shape}; expected {rows} "
            f"integers, one for each row of {name}.npy"
        )
    parts = np.asarray(labels, dtype=np.int64).reshape(5, -1)
    if (parts != parts[0]).any():
        raise DataError(
            f"{folder / 'labels.npy'} does not repeat itself five times, so the rows are not "
            "ordered by severity; expected severity s in rows (s-1)·n to s·n"
        )
    stacked = pictures.reshape(5, rows // 5, *pictures.shape[1:])
    which = slice(None) if severity is None else severity - 1
    chosen = torch.from_numpy(np.array(stacked[which])).movedim(-1, -3).contiguous()
    return chosen, torch.from_numpy(parts[which].copy())


def read_imagenet_c(
    folder: str | Path, name: str, severity: int, *, classes: Sequence[str] | None = None
) -> PictureFiles:
    """The files of one corruption and severity of ImageNet-C or Tiny-ImageNet-C.

    They lie in ``folder/name/severity/<WordNet id>/``.

    Args:
        folder: where the folders of the corruptions are.
        name: of the corruption, as its folder is called.
        severity: 1 to 5.
        classes: WordNet ids in the order of the network's classes; by default those found, sorted,
            which is the order of ImageNet-1k if all 1,000 are there.

    Raises:
        DataError: a folder that is missing or empty, or holds a class that is not in ``classes``.
        InputError: a severity that does not exist.
    """
    check_severity(severity)
    place = Path(folder) / name / str(severity)
    if not place.is_dir():
        raise DataError(f"no folder {place}; expected {_layout(Path(folder), name)}")
    found = sorted(entry.name for entry in place.iterdir() if entry.is_dir())
    order = tuple(found if classes is None else classes)
    position = {wnid: i for i, wnid in enumerate(order)}
    unknown = [wnid for wnid in found if wnid not in position]
    if unknown:
        raise DataError(f"{place} holds classes that are not in classes: {', '.join(unknown[:5])}")
    paths: list[Path] = []
    labels: list[int] = []
    for wnid in found:
        files = sorted(f for f in (place / wnid).iterdir() if f.suffix.lower() in SUFFIXES)
        paths.extend(files)
        labels.extend([position[wnid]] * len(files))
    if not paths:
        raise DataError(f"no pictures below {place}; expected {_layout(Path(folder), name)}")
    return PictureFiles(paths, torch.tensor(labels, dtype=torch.int64), order)


def _load(path: Path) -> np.ndarray:
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in path.parent.glob("*.npy"))) or "no .npy file"
        raise DataError(f"no file {path}; the folder holds {known}")
    try:
        return np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as e:
        raise DataError(f"{path} is not a numpy file: {e}") from e


def _layout(folder: Path, name: str) -> str:
    known = name in CORRUPTIONS + EXTRA_CORRUPTIONS
    hint = "" if known else f" ({name!r} is not the name of a published corruption)"
    return f"{folder}/<corruption>/<severity>/<WordNet id>/*.JPEG{hint}"
