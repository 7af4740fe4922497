"""The entry for pictures: checks, one source of randomness per picture, the choice of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from zlib import crc32

import numpy as np
import torch
from torch import Tensor

from sigmanens.errors import InputError
from sigmanens.evaluation.corruption import blur, digital, extra, noise, weather
from sigmanens.evaluation.corruption.checks import check_seed, check_severity, sample_numbers
from sigmanens.evaluation.corruption.operators import Array, as_bytes
from sigmanens.evaluation.corruption.tables import (
    CORRUPTIONS,
    EXTRA_CORRUPTIONS,
    TABLES,
    nearest_table,
)

_FUNCTIONS: dict[str, Callable[..., Array]] = {
    "gaussian_noise": noise.gaussian_noise,
    "shot_noise": noise.shot_noise,
    "impulse_noise": noise.impulse_noise,
    "defocus_blur": blur.defocus_blur,
    "glass_blur": blur.glass_blur,
    "motion_blur": blur.motion_blur,
    "zoom_blur": blur.zoom_blur,
    "snow": weather.snow,
    "frost": weather.frost,
    "fog": weather.fog,
    "brightness": weather.brightness,
    "contrast": digital.contrast,
    "elastic_transform": digital.elastic_transform,
    "pixelate": digital.pixelate,
    "jpeg_compression": digital.jpeg_compression,
    "speckle_noise": noise.speckle_noise,
    "gaussian_blur": blur.gaussian_blur,
    "spatter": extra.spatter,
    "saturate": extra.saturate,
}
_COLOUR_ONLY = {"saturate"}
_SMALLEST = 8  # pixels: below, the lengths of the tables have no meaning


def corrupt(
    images: Tensor,
    name: str,
    severity: int,
    *,
    seed: int = 0,
    indices: Iterable[int] | None = None,
    table: int | None = None,
) -> Tensor:
    """Corrupt pictures as ImageNet-C, Tiny-ImageNet-C and CIFAR-10-C do (arXiv 1903.12261).

    Picture i is changed by its own random numbers, which depend on ``seed``, ``name``, ``severity``
    and ``indices[i]`` and on nothing else: a set corrupted in chunks, in another order or in part
    gives the same pictures. No global random state is read or changed. Values are rounded down to
    8 bits, as in the published sets. Where and why the result departs from those is told in
    docs/corruption.md.

    Args:
        images: (N, C, H, W) uint8, C = 3 (RGB) or 1 (grey), at least 8 × 8 pixels, any device.
            On grey pictures noise is drawn once per pixel, and coloured drops and frost have their
            grey value; ``saturate`` needs colour.
        name: one of ``CORRUPTIONS`` or ``EXTRA_CORRUPTIONS``.
        severity: 1 to 5.
        seed: 0 or more.
        indices: the number of each picture in its set, N integers ≥ 0; 0 … N−1 by default. Give
            ``range(1000, 2000)`` for the second thousand.
        table: 32, 64 or 224: whose parameters to take. By default those of the published set whose
            side is nearest in ratio to the pictures' smaller side: up to 45 px that of 32, up to
            119 px that of 64, beyond that of 224. Lengths are in pixels and are not rescaled.

    Returns:
        (N, C, H, W) uint8 on the device of ``images``.

    Raises:
        InputError: an unknown name, severity, table or seed; pictures of another type or shape;
            not one index for each picture.
    """
    _check(images, name, severity, seed)
    count, channels, height, width = images.shape
    if name in _COLOUR_ONLY and channels == 1:
        raise InputError(f"{name} changes colours, and these pictures are grey (C = 1)")
    numbers = sample_numbers(indices, count, "images")
    if table is None:
        table = nearest_table(height, width)
    elif table not in TABLES:
        raise InputError(f"table is {table!r}; published parameters exist for {list(TABLES)} px")
    parameters = TABLES[table][name][severity - 1]
    function = _FUNCTIONS[name]
    pictures = images.movedim(1, -1).cpu().numpy()
    out = np.empty_like(pictures, order="C")
    for i, number in enumerate(numbers):
        rng = np.random.default_rng([seed, crc32(name.encode()), severity, number])
        out[i] = as_bytes(function(pictures[i] / 255.0, rng, *parameters))
    return torch.from_numpy(out).movedim(-1, 1).contiguous().to(images.device)


def _check(images: Tensor, name: str, severity: int, seed: int) -> None:
    if name not in _FUNCTIONS:
        known = ", ".join(CORRUPTIONS + EXTRA_CORRUPTIONS)
        raise InputError(f"no corruption is called {name!r}; there are {known}")
    check_severity(severity)
    check_seed(seed)
    if not isinstance(images, Tensor):
        raise InputError(f"images is a {type(images).__name__}; expected a tensor (N, C, H, W)")
    if images.dtype != torch.uint8:
        raise InputError(
            f"images are {images.dtype}; expected uint8 in 0 … 255, before any normalisation: "
            "(255 * x).round().to(torch.uint8) for x in [0, 1]"
        )
    shape = tuple(images.shape)
    if images.ndim != 4 or shape[1] not in (1, 3):
        last = images.ndim == 4 and shape[3] in (1, 3)
        hint = "; channels come first: images.permute(0, 3, 1, 2)" if last else ""
        raise InputError(f"images are {shape}; expected (N, C, H, W) with C = 1 or 3{hint}")
    if min(shape[2:]) < _SMALLEST:
        raise InputError(
            f"images are {shape[2]} × {shape[3]} pixels; expected at least {_SMALLEST} × "
            f"{_SMALLEST}. Corrupt the original size and shrink afterwards"
        )
