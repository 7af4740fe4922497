"""Blur. Each function takes a picture (H, W, C) in [0, 1], a generator and the parameters."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from scipy import ndimage

from sigmanens.evaluation.corruption.operators import Array, as_bytes, gaussian, motion, zoom


def gaussian_blur(x: Array, rng: np.random.Generator, sigma: float) -> Array:
    """Gaussian blur of standard deviation ``sigma``."""
    return gaussian(x, sigma)


def defocus_blur(x: Array, rng: np.random.Generator, radius: float, soft: float) -> Array:
    """Mean over a disk of ``radius``, its edge softened by a Gaussian ``soft``: out of focus."""
    return ndimage.correlate(x, disk(radius, soft)[..., None], mode="mirror")


@lru_cache(maxsize=32)
def disk(radius: float, soft: float) -> Array:
    """The kernel (2R+1, 2R+1) of :func:`defocus_blur`.

    Its sum is 1, except that at radii of 8 and 10 the softening at the border of its grid adds 1 %,
    as published.
    """
    reach, taps = (8, 1) if radius <= 8 else (int(radius), 2)
    y, x = np.mgrid[-reach : reach + 1, -reach : reach + 1]
    flat = (x**2 + y**2 <= radius**2).astype(np.float64)
    flat /= flat.sum()
    bell = np.exp(-(np.arange(-taps, taps + 1) ** 2) / (2 * soft**2))
    bell /= bell.sum()
    kernel = ndimage.correlate(flat, np.outer(bell, bell), mode="mirror")
    used = np.flatnonzero(kernel.any(axis=0))
    return kernel[used[0] : used[-1] + 1, used[0] : used[-1] + 1]


def glass_blur(
    x: Array, rng: np.random.Generator, sigma: float, reach: float, passes: float
) -> Array:
    """Blur, replace each pixel by one up to ``reach`` away, blur again: frosted glass.

    The pixels are visited from the last to the first, ``passes`` times, and each takes the present
    value of its neighbour. The published script reads as if it exchanged the two; on pictures with
    channels its statement copies, and the published sets show that.
    """
    height, width, channels = x.shape
    d = int(reach)
    source = np.arange(height * width)
    rows, columns = np.arange(height - d, d, -1), np.arange(width - d, d, -1)
    here = (rows[:, None] * width + columns).ravel()
    order: list[int] = source.tolist()
    for _ in range(int(passes)):
        dx, dy = rng.integers(-d, d, size=(2, len(here)))
        for target, neighbour in zip(here.tolist(), (here + dy * width + dx).tolist(), strict=True):
            order[target] = order[neighbour]
    blurred = as_bytes(gaussian(x, sigma)) / 255
    return gaussian(blurred.reshape(-1, channels)[order].reshape(x.shape), sigma)


def motion_blur(x: Array, rng: np.random.Generator, radius: float, sigma: float) -> Array:
    """A trail of up to 2 · ``radius`` pixels at an angle between −45° and 45°."""
    return motion(x, radius, sigma, rng.uniform(-45, 45))


def zoom_blur(x: Array, rng: np.random.Generator, stop: float, step: float) -> Array:
    """Mean of the picture and its enlargements by 1, 1 + ``step``, … up to ``stop``."""
    factors = np.arange(1, stop, step)  # float rounding includes ``stop`` itself, as published
    total = x + sum(zoom(x, float(factor)) for factor in factors)
    return total / (len(factors) + 1)
