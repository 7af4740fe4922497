"""Folders of pictures in the layout of the hub, for tests of the whole path."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import torch
from PIL import Image
from torch import Tensor

PICTURE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def write_split(
    folder: Path, split: str, images: Tensor, labels: Tensor, classes: Sequence[str]
) -> None:
    """Write pictures (N, C, H, W), uint8, as ``folder/split.parquet``."""
    folder.mkdir(parents=True, exist_ok=True)
    encoded = [_png(image) for image in images.permute(0, 2, 3, 1).numpy()]
    columns: dict[str, Any] = {
        "image": pa.array([{"bytes": b, "path": None} for b in encoded], PICTURE),
        "label": pa.array(labels.tolist(), pa.int64()),
    }
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(classes))}
    )
    about = {"huggingface": json.dumps({"info": {"features": features.to_dict()}})}
    table = pa.table(columns).replace_schema_metadata(about)
    parquet.write_table(table, folder / f"{split}.parquet")


def _png(pixels: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def digits_rgb() -> tuple[Tensor, Tensor]:
    """All digits in colour, (1797, 3, 16, 16) uint8, and their labels: in a shuffled order."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    pixels = torch.from_numpy(digits.images).mul(255 / 16).round().to(torch.uint8)
    large = pixels.repeat_interleave(2, 1).repeat_interleave(2, 2).unsqueeze(1)
    tint = torch.cat([large, 255 - large, large // 2], 1)
    order = torch.randperm(len(tint), generator=torch.Generator().manual_seed(0))
    return tint[order], torch.from_numpy(digits.target)[order].long()


def write_digits(folder: Path, **splits: tuple[int, int]) -> Path:
    """Write the rows [start, stop) of :func:`digits_rgb` as each split."""
    images, labels = digits_rgb()
    names = [f"digit {i}" for i in range(10)]
    for split, (start, stop) in splits.items():
        write_split(folder, split, images[start:stop], labels[start:stop], names)
    return folder


def write_noise(folder: Path, count: int = 40) -> Path:
    """Write an OOD set: a split "test" of grey noise, 20 pixels wide."""
    generator = torch.Generator().manual_seed(1)
    images = torch.randint(256, (count, 1, 20, 20), generator=generator, dtype=torch.uint8)
    write_split(folder, "test", images.expand(-1, 3, -1, -1), torch.zeros(count), ["noise"])
    return folder
