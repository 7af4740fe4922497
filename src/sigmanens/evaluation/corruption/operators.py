"""What several corruptions are made of: separable linear maps, motion blur, plasma.

A picture is an array (H, W, C) of float64 with values in [0, 1]; a layer is (H, W).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy import ndimage

Array = npt.NDArray[np.float64]

LUMA = np.array([0.299, 0.587, 0.114])
"""ITU-R BT.601: the weights of red, green and blue in the grey value."""


def as_bytes(x: Array) -> npt.NDArray[np.uint8]:
    """8-bit values ⌊255 x⌋ of a picture, as the published sets were stored.

    The margin keeps a value that no corruption touched from being lowered by float rounding.
    """
    return np.floor(np.clip(x, 0, 1) * 255 + 1e-6).astype(np.uint8)


def grey(x: Array) -> Array:
    """Grey value (H, W, 1) of a picture with one or three channels."""
    return x if x.shape[2] == 1 else (x @ LUMA)[..., None]


def in_colour(rgb: npt.ArrayLike, channels: int) -> Array:
    """A colour (3,) as it looks in a picture of ``channels`` channels."""
    colour = np.asarray(rgb, dtype=np.float64)
    return colour if channels == 3 else np.array([colour @ LUMA])


def separable(x: Array, rows: Array, columns: Array) -> Array:
    """Apply ``rows`` (H', H) along the height and ``columns`` (W', W) along the width."""
    along_height = np.tensordot(rows, x, axes=(1, 0))
    return np.moveaxis(np.tensordot(columns, along_height, axes=(1, 1)), 0, 1)


def gaussian(x: Array, sigma: float, mode: str = "nearest", truncate: float = 4.0) -> Array:
    """Gaussian blur of standard deviation ``sigma`` in pixels along height and width."""
    height, width = x.shape[:2]
    return separable(
        x,
        gaussian_matrix(height, sigma, mode, truncate),
        gaussian_matrix(width, sigma, mode, truncate),
    )


@lru_cache(maxsize=64)
def gaussian_matrix(size: int, sigma: float, mode: str, truncate: float) -> Array:
    """The Gaussian filter of scipy along one axis as a matrix (size, size)."""
    eye = np.eye(size)
    if sigma == 0:
        return eye
    return ndimage.gaussian_filter1d(eye, sigma, axis=0, mode=mode, truncate=truncate)


def zoom(x: Array, factor: float) -> Array:
    """The middle of a picture enlarged by ``factor`` ≥ 1 to the whole, linearly interpolated."""
    height, width = x.shape[:2]
    return separable(x, zoom_matrix(height, factor), zoom_matrix(width, factor))


@lru_cache(maxsize=256)
def zoom_matrix(size: int, factor: float) -> Array:
    """:func:`zoom` along one axis as a matrix (size, size)."""
    kept = math.ceil(size / factor)
    first = (size - kept) // 2
    enlarged = ndimage.zoom(np.eye(size)[first : first + kept], (factor, 1), order=1)
    trim = (len(enlarged) - size) // 2
    return enlarged[trim : trim + size]


def motion(x: Array, radius: float, sigma: float, degrees: float) -> Array:
    """A trail in one direction: Σ_i w_i x(p + i·u), i = 0 … 2⌈radius⌉, w_i ∝ exp(−i²/2σ²).

    u is the unit vector of the angle, from the x-axis towards the bottom of the picture. Positions
    are rounded to whole pixels, and the border continues outwards. This is what ImageMagick, which
    made the published sets, calls motion blur.

    Args:
        x: picture (H, W, C) or layer (H, W).
        radius: half the length of the trail in pixels.
        sigma: standard deviation of the weights in pixels.
        degrees: the angle.
    """
    steps = np.arange(2 * math.ceil(radius) + 1)
    weights = np.exp(-(steps**2) / (2 * sigma**2))
    weights /= weights.sum()
    angle = math.radians(degrees)
    right = np.ceil(steps * math.cos(angle) - 0.5).astype(int)
    down = np.ceil(steps * math.sin(angle) - 0.5).astype(int)
    margin = len(steps)
    height, width = x.shape[:2]
    padded = np.pad(x, ((margin, margin), (margin, margin)) + ((0, 0),) * (x.ndim - 2), "edge")
    out = np.zeros_like(x)
    for weight, dy, dx in zip(weights, down + margin, right + margin, strict=True):
        out += weight * padded[dy : dy + height, dx : dx + width]
    return out


def plasma(size: int, decay: float, rng: np.random.Generator) -> Array:
    """A cloud (size, size) in [0, 1] by the diamond-square algorithm, continued periodically.

    Midpoints of ever smaller squares get the mean of their four neighbours plus uniform noise,
    whose amplitude falls by ``decay``² at each halving.

    Args:
        size: side in pixels, a power of two.
        decay: > 1; the larger, the smoother.
        rng: source of the noise.
    """
    grid = np.zeros((size, size))
    step, amplitude = size, 100.0**2

    def jitter(mean: Array) -> Array:
        return mean + rng.uniform(-amplitude, amplitude, mean.shape)

    while step >= 2:
        half = step // 2
        corners = grid[::step, ::step]
        upper = corners + np.roll(corners, -1, axis=1)
        left = corners + np.roll(corners, -1, axis=0)
        centres = jitter((upper + np.roll(upper, -1, axis=0)) / 4)
        grid[half::step, half::step] = centres
        grid[::step, half::step] = jitter((upper + centres + np.roll(centres, 1, axis=0)) / 4)
        grid[half::step, ::step] = jitter((left + centres + np.roll(centres, 1, axis=1)) / 4)
        step = half
        amplitude /= decay**2
    grid -= grid.min()
    return grid / grid.max()
