"""Noise. Each function takes a picture (H, W, C) in [0, 1], a generator and the parameters."""

from __future__ import annotations

import numpy as np

from sigmanens.evaluation.corruption.operators import Array


def gaussian_noise(x: Array, rng: np.random.Generator, scale: float) -> Array:
    """x + ε, ε ~ N(0, scale²): little light."""
    return x + rng.normal(scale=scale, size=x.shape)


def shot_noise(x: Array, rng: np.random.Generator, photons: float) -> Array:
    """Poisson(photons · x) / photons: light is discrete."""
    return rng.poisson(x * photons) / photons


def impulse_noise(x: Array, rng: np.random.Generator, amount: float) -> Array:
    """A fraction ``amount`` of the values becomes 0 or 1, either with equal chance: bit errors."""
    draw = rng.random(x.shape)
    return np.where(draw < amount, np.where(draw < amount / 2, 0.0, 1.0), x)


def speckle_noise(x: Array, rng: np.random.Generator, scale: float) -> Array:
    """x + x ε, ε ~ N(0, scale²): the brighter, the more noise."""
    return x + x * rng.normal(scale=scale, size=x.shape)
