"""Weather. Each function takes a picture (H, W, C) in [0, 1], a generator and the parameters."""

from __future__ import annotations

import math

import numpy as np

from sigmanens.evaluation.corruption.frost import textures
from sigmanens.evaluation.corruption.operators import (
    Array,
    as_bytes,
    grey,
    motion,
    plasma,
    zoom,
)


def snow(
    x: Array,
    rng: np.random.Generator,
    mean: float,
    spread: float,
    size: float,
    threshold: float,
    radius: float,
    sigma: float,
    keep: float,
) -> Array:
    """Flakes with trails over a whitened picture.

    Noise N(mean, spread²), enlarged by ``size`` and cut off below ``threshold``, falls along a
    trail (``radius``, ``sigma``) within 45° of the vertical; it is added once upright and once
    turned by 180°. The picture keeps a part ``keep``, the rest is whitened.
    """
    flakes = zoom(rng.normal(mean, spread, size=x.shape[:2]), size)
    flakes = as_bytes(np.where(flakes < threshold, 0.0, flakes)) / 255
    flakes = motion(flakes, radius, sigma, rng.uniform(-135, -45))[..., None]
    white = np.maximum(x, 1.5 * grey(x) + 0.5)
    return keep * x + (1 - keep) * white + flakes + flakes[::-1, ::-1]


def frost(x: Array, rng: np.random.Generator, keep: float, amount: float, scale: float) -> Array:
    """keep · x + amount · frost, a random part of one of five textures shrunk by ``scale``.

    The published sets took photographs; the textures here are drawn (:func:`.frost.textures`).
    """
    choice = textures(scale)
    texture = choice[rng.integers(len(choice))]
    side = len(texture)
    top, left = rng.integers(side, size=2)
    height, width, channels = x.shape
    # The textures continue periodically.
    part = texture[np.ix_((top + np.arange(height)) % side, (left + np.arange(width)) % side)]
    return keep * x + amount * (part if channels == 3 else grey(part))


def fog(x: Array, rng: np.random.Generator, amount: float, decay: float) -> Array:
    """(x + amount · cloud) · max / (max + amount), the cloud by diamond-square."""
    height, width = x.shape[:2]
    cloud = plasma(2 ** math.ceil(math.log2(max(height, width))), decay, rng)
    brightest = x.max()
    return (x + amount * cloud[:height, :width, None]) * brightest / (brightest + amount)


def brightness(x: Array, rng: np.random.Generator, amount: float) -> Array:
    """Value (the largest channel) + ``amount``, at the same hue and saturation."""
    value = x.max(axis=2, keepdims=True)
    brighter = np.clip(value + amount, 0, 1)
    ratio = np.divide(x, value, out=np.ones_like(x), where=value > 0)
    return brighter * ratio
