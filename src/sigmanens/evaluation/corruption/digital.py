"""Digital. Each function takes a picture (H, W, C) in [0, 1], a generator and the parameters."""

from __future__ import annotations

from io import BytesIO

import numpy as np
from PIL import Image
from scipy import ndimage

from sigmanens.evaluation.corruption.operators import Array, as_bytes, gaussian


def contrast(x: Array, rng: np.random.Generator, factor: float) -> Array:
    """(x − mean) · factor + mean, with the mean of each channel."""
    mean = x.mean(axis=(0, 1), keepdims=True)
    return (x - mean) * factor + mean


def elastic_transform(
    x: Array, rng: np.random.Generator, strength: float, sigma: float, shift: float
) -> Array:
    """An affine map that moves three points by up to ``shift``, then a smooth random displacement.

    The displacement is uniform noise in [−1, 1], blurred by ``sigma`` and times ``strength``.
    """
    height, width, _ = x.shape
    middle = np.array([height // 2, width // 2], dtype=np.float64)
    arm = min(height, width) // 3
    before = middle + arm * np.array([[1, 1], [-1, 1], [-1, -1]])
    after = before + rng.uniform(-shift, shift, size=before.shape)
    ones = np.ones((3, 1))
    back = np.linalg.solve(np.hstack([after, ones]), before)  # (3, 2): from new to old places
    grid = np.mgrid[:height, :width].astype(np.float64)
    old = np.tensordot(back[:2], grid, axes=(0, 0)) + back[2][:, None, None]
    moved = _sample(x, old, "mirror")
    noise = rng.uniform(-1, 1, size=(2, height, width))
    field = np.stack([gaussian(part, sigma, mode="reflect", truncate=3.0) for part in noise])
    return _sample(moved, grid + strength * field, "reflect")


def _sample(x: Array, places: Array, mode: str) -> Array:
    """Values at ``places`` (2, H, W), rows and columns in pixels, linearly interpolated."""
    channels = [
        ndimage.map_coordinates(x[..., c], places, order=1, mode=mode) for c in range(x.shape[2])
    ]
    return np.stack(channels, axis=2)


def pixelate(x: Array, rng: np.random.Generator, factor: float) -> Array:
    """Shrunk by ``factor`` and enlarged again, with box filters."""
    height, width, _ = x.shape
    small = (max(1, int(width * factor)), max(1, int(height * factor)))
    box = Image.Resampling.BOX
    return _from_pillow(_to_pillow(x).resize(small, box).resize((width, height), box))


def jpeg_compression(x: Array, rng: np.random.Generator, quality: float) -> Array:
    """Written and read as JPEG of this quality, with Pillow's subsampling of colours (4:2:0)."""
    file = BytesIO()
    _to_pillow(x).save(file, "JPEG", quality=int(quality))
    return _from_pillow(Image.open(file))


def _to_pillow(x: Array) -> Image.Image:
    return Image.fromarray(as_bytes(x if x.shape[2] == 3 else x[..., 0]))


def _from_pillow(picture: Image.Image) -> Array:
    values = np.asarray(picture, dtype=np.float64) / 255
    return values if values.ndim == 3 else values[..., None]
