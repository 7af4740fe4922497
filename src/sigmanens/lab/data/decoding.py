"""From encoded pictures to pixels."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from sigmanens.errors import DataError, MixedSizesError
from sigmanens.lab.data.framing import RandomView, central_window, show
from sigmanens.lab.data.images import resize_images

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["decode"]


def decode(
    records: Sequence[Mapping[str, Any] | None],
    *,
    channels: int,
    size: int | None,
    crop: float | None,
    name: str,
    numbers: Sequence[int],
    side: tuple[int, int] | None = None,
    view: RandomView | None = None,
) -> Tensor:
    """Decode a few pictures.

    Args:
        records: ``{"bytes": …, "path": …}`` of each, as ``datasets`` keeps pictures.
        channels: 3 (grey pictures become RGB) or 1.
        size: height and width to bring them to; None: as they are.
        crop: share of the shorter side that the square in the middle shows; None: the whole picture
            is brought to ``size``, see ``resize_images``.
        name: of the set, for messages.
        numbers: the number of each picture in its set.
        side: height and width that they must have where no size is given; None: those of the first.
        view: random windows in the place of ``crop``.

    Returns:
        (n, channels, H, W), uint8.

    Raises:
        DataError: if a picture is missing or cannot be decoded. MixedSizesError: if sizes differ
            and none is given.
    """
    arrays = []
    for record, number in zip(records, numbers, strict=True):
        frame: Callable[[Image], Image] | None = None
        if view is not None and size is not None:
            frame = partial(view.show, number=number, size=size)
        elif crop is not None and size is not None:
            frame = partial(_middle, crop=crop, size=size)
        arrays.append(_pixels(record, channels, f"{name}: picture {number}", frame))
    return _stack(arrays, size, side, numbers, name)


def _middle(picture: Image, crop: float, size: int) -> Image:
    return show(picture, central_window(*picture.size, crop), size)


def _stack(
    arrays: list[np.ndarray],
    size: int | None,
    side: tuple[int, int] | None,
    numbers: Sequence[int],
    name: str,
) -> Tensor:
    """Return the arrays (H, W, C) as one tensor (n, C, H, W), resized where asked."""
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


def _pixels(
    record: Mapping[str, Any] | None,
    channels: int,
    where: str,
    frame: Callable[[Image], Image] | None,
) -> np.ndarray:
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
            plain = picture.convert("L" if channels == 1 else "RGB")
            pixels = np.array(plain if frame is None else frame(plain))
    except (OSError, SyntaxError) as error:
        file = f" ({record['path']})" if record["path"] else ""
        raise DataError(f"{where}{file} cannot be decoded: {error}") from error
    return pixels.reshape(*pixels.shape[:2], channels)
