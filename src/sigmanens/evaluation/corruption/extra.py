"""Two of the extra corruptions; the other two are in ``noise`` and ``blur``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from scipy import ndimage

from sigmanens.evaluation.corruption.operators import Array, as_bytes, gaussian, in_colour

WATER = np.array([175, 238, 238]) / 255  # pale turquoise
MUD = np.array([63, 42, 20]) / 255

Layer = npt.NDArray[np.uint8]


def saturate(x: Array, rng: np.random.Generator, factor: float, offset: float) -> Array:
    """Saturation · ``factor`` + ``offset``, at the same hue and value.

    A grey pixel has no hue; as in the published sets it counts as red.
    """
    value, low = x.max(axis=2, keepdims=True), x.min(axis=2, keepdims=True)
    span = value - low
    saturation = np.divide(span, value, out=np.zeros_like(span), where=value > 0)
    wanted = np.clip(saturation * factor + offset, 0, 1)
    towards_red = np.broadcast_to(np.array([0.0, 1.0, 1.0]), x.shape)
    depth = np.divide(value - x, span, out=towards_red.copy(), where=span > 0)
    return value * (1 - wanted * depth)


def spatter(
    x: Array,
    rng: np.random.Generator,
    mean: float,
    spread: float,
    sigma: float,
    threshold: float,
    amount: float,
    mud: float,
) -> Array:
    """Drops on the lens: of water (``mud`` 0) or of mud (``mud`` 1).

    Drops are where noise N(mean, spread²), blurred by ``sigma``, is above ``threshold``. Water adds
    light where the drops' relief has a slope, at most ``amount``; mud covers, and ``amount`` is the
    blur of its edge.
    """
    liquid = gaussian(rng.normal(mean, spread, size=x.shape[:2]), sigma)
    channels = x.shape[2]
    if mud:
        cover = gaussian((liquid > threshold).astype(np.float64), amount)
        cover = np.where(cover < 0.8, 0.0, cover)[..., None]
        return x * (1 - cover) + in_colour(MUD, channels) * cover
    drops = as_bytes(np.where(liquid < threshold, 0.0, liquid))
    light = drops * _relief(drops)
    if light.max() == 0:
        return x
    return x + amount * (light / light.max())[..., None] * in_colour(WATER, channels)


def _relief(drops: Layer) -> Array:
    """How drops (H, W) catch light from one side: slopes of the distance to their edges."""
    free = ~edges(drops)
    distance = np.full(drops.shape, 20.0)
    if not free.all():
        distance = np.minimum(ndimage.distance_transform_edt(free), 20.0)
    distance = np.floor(ndimage.uniform_filter(distance, 3, mode="mirror") + 1e-6)
    levels = equalise(distance.astype(np.uint8)).astype(np.float64)
    slope = np.array([[-2, -1, 0], [-1, 1, 1], [0, 1, 2]], dtype=np.float64)
    lit = np.clip(ndimage.correlate(levels, slope, mode="mirror"), 0, 255)
    return np.rint(ndimage.uniform_filter(lit, 3, mode="mirror"))


def edges(layer: Layer, low: float = 50, high: float = 150) -> npt.NDArray[np.bool_]:
    """Edges of a layer (H, W) by Canny's method: ridges of the gradient above ``low`` that are
    connected with a part above ``high``.

    The gradient is Sobel's, its size |∂x| + |∂y|; a ridge is no lower than its two neighbours in
    the direction of the gradient, rounded to 45°.
    """
    values = layer.astype(np.float64)
    dx = ndimage.sobel(values, axis=1, mode="nearest")
    dy = ndimage.sobel(values, axis=0, mode="nearest")
    size = np.abs(dx) + np.abs(dy)
    around = np.pad(size, 1)
    height, width = layer.shape

    def at(down: int, right: int) -> Array:
        return around[1 + down : 1 + down + height, 1 + right : 1 + right + width]

    tangent = np.tan(np.pi / 8)
    flat, steep = np.abs(dy) < tangent * np.abs(dx), np.abs(dy) * tangent > np.abs(dx)
    falling = (dx < 0) == (dy < 0)
    ridge = np.where(
        flat,
        (size > at(0, -1)) & (size >= at(0, 1)),
        np.where(
            steep,
            (size > at(-1, 0)) & (size >= at(1, 0)),
            np.where(
                falling,
                (size > at(-1, -1)) & (size > at(1, 1)),
                (size > at(-1, 1)) & (size > at(1, -1)),
            ),
        ),
    )
    weak = ridge & (size > low)
    parts, count = ndimage.label(weak, structure=np.ones((3, 3)))
    strong = np.zeros(count + 1, dtype=bool)
    strong[parts[weak & (size > high)]] = True
    return strong[parts] & weak


def equalise(layer: Layer) -> Layer:
    """Histogram equalisation: the smallest level becomes 0, the largest 255."""
    counts = np.bincount(layer.ravel(), minlength=256)
    first = int(layer.min())
    rest = layer.size - counts[first]
    if rest == 0:
        return layer
    below = np.cumsum(counts) - counts[first]
    return np.rint(np.clip(below, 0, None) * (255 / rest)).astype(np.uint8)[layer]
