"""From encoded pictures to pixels."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sigmanens.errors import DataError, MixedSizesError
from sigmanens.lab.data.images import resize_images

if TYPE_CHECKING:
    from PIL.Image import Image


def stacked(
    arrays: Sequence[np.ndarray],
    size: int | None,
    side: tuple[int, int] | None,
    numbers: Sequence[int],
    name: str,
) -> Tensor:
    """Pictures (H, W, C) as one tensor (n, C, H, W), uint8.

    Args:
        arrays: the pictures.
        size: height and width to bring them to; None: as they are.
        side: height and width that they must have where no size is given; None: those of the first.
        numbers: the number of each picture in its set.
        name: of the set, for messages.

    Raises:
        MixedSizesError: if sizes differ and none is given.
    """
    if size is None:
        expected = side or arrays[0].shape[:2]
        for number, array in zip(numbers, arrays, strict=True):
            if array.shape[:2] != expected:
                raise MixedSizesError(
                    f"{name}: pictures differ in size: picture {number} has {array.shape[:2]} "
                    f"pixels, the first {expected}. Pass size=... to resize them."
                )
    if size is None or len({array.shape for array in arrays}) == 1:
        stacked = torch.from_numpy(np.stack(arrays)).permute(0, 3, 1, 2)
        stacked = stacked.contiguous()  # the order of bytes decides how a network rounds
        return stacked if size is None else resize_images(stacked, size)
    single = [torch.from_numpy(array).permute(2, 0, 1).contiguous()[None] for array in arrays]
    return torch.cat([resize_images(image, size) for image in single])


def decoded(
    record: Mapping[str, Any] | None,
    channels: int,
    where: str,
    frame: Callable[[Image], Image] | None,
) -> np.ndarray:
    """Decode one picture.

    Args:
        record: ``{"bytes": …, "path": …}``, as ``datasets`` keeps a picture.
        channels: 3 (grey pictures become RGB) or 1.
        where: its set and number, for messages.
        frame: gives the part that is shown, at its final size; None: all of it.

    Returns:
        pixels (H, W, channels), uint8.

    Raises:
        DataError: if the picture is missing or cannot be decoded.
    """
    from PIL import Image

    if record is None or (record["bytes"] is None and record["path"] is None):
        raise DataError(f"{where} is missing.")
    encoded = record["bytes"]
    where += f" ({record['path']})" if record["path"] else ""
    try:
        with Image.open(record["path"] if encoded is None else io.BytesIO(encoded)) as picture:
            if picture.mode[0] in "IF":
                raise DataError(
                    f"{where} has mode {picture.mode}; expected 8 bits a channel. Convert "
                    "the set first."
                )
            plain = picture.convert("L" if channels == 1 else "RGB")
            pixels = np.array(plain if frame is None else frame(plain))
    except DataError:
        raise
    except Exception as error:  # a damaged file may raise anything
        raise DataError(f"{where} cannot be decoded: {error}") from error
    return pixels.reshape(*pixels.shape[:2], channels)
