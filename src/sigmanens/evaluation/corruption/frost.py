"""Drawn textures of frost, in the place of the five photographs of the published script.

Each is ice crystals on a cloudy pane: needles, and ferns whose side branches leave the stem at 60°.
The mean colour and the spread of the brightness are those of the photograph it stands for. The
textures are always the same, and continue periodically in both directions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from PIL import Image, ImageDraw
from scipy import ndimage

from sigmanens.evaluation.corruption.operators import Array, plasma

SIDE = 512


@dataclass(frozen=True)
class Pane:
    """What a texture looks like.

    Attributes:
        colour: mean red, green and blue in [0, 1].
        spread: standard deviation of the brightness.
        needles: number of single crystals.
        ferns: number of branched ones.
        length: of a crystal, in pixels at scale 1.
        cloud: share of the cloudy pane in the brightness, 0 to 1; the rest is crystals.
    """

    colour: tuple[float, float, float]
    spread: float
    needles: int
    ferns: int
    length: float
    cloud: float


# colour and spread: measured on frost1 to frost5 of the script, whose sixth is never drawn.
PANES = (
    Pane((0.31, 0.58, 0.65), 0.07, needles=250, ferns=200, length=60, cloud=0.4),
    Pane((0.79, 0.80, 0.84), 0.09, needles=700, ferns=220, length=70, cloud=0.4),
    Pane((0.79, 0.80, 0.84), 0.09, needles=700, ferns=220, length=70, cloud=0.4),
    Pane((0.54, 0.60, 0.65), 0.11, needles=500, ferns=260, length=40, cloud=0.25),
    Pane((0.44, 0.48, 0.53), 0.17, needles=150, ferns=320, length=60, cloud=0.3),
)


@lru_cache(maxsize=4)
def textures(scale: float) -> tuple[Array, ...]:
    """The five textures (S, S, 3) in [0, 1], S = 512 · ``scale`` pixels."""
    return tuple(_shrink(_draw(number), scale) for number in range(len(PANES)))


@lru_cache(maxsize=len(PANES))
def _draw(number: int) -> Array:
    pane = PANES[number]
    rng = np.random.default_rng([number, 0x1CE])
    crystals = _standard(ndimage.gaussian_filter(_crystals(pane, rng), 0.6, mode="wrap"))
    cloud = _standard(plasma(SIDE, 1.6, rng))
    relief = _standard(pane.cloud * cloud + (1 - pane.cloud) * crystals)
    bright = pane.spread * np.clip(relief, -3, 3)
    return np.clip(np.array(pane.colour) + bright[..., None], 0, 1)


def _shrink(texture: Array, scale: float) -> Array:
    if scale == 1:
        return texture
    # Linear interpolation between the nearest pixels, without smoothing first, as the published
    # script shrank its photographs: what is left of thin crystals is coarse grain.
    places = (np.arange(round(SIDE * scale)) + 0.5) / scale - 0.5
    grid = np.stack(np.meshgrid(places, places, indexing="ij"))
    channels = [
        ndimage.map_coordinates(texture[..., c], grid, order=1, mode="grid-wrap") for c in range(3)
    ]
    return np.stack(channels, axis=2)


def _standard(layer: Array) -> Array:
    return (layer - layer.mean()) / layer.std()


def _crystals(pane: Pane, rng: np.random.Generator) -> Array:
    """Brightness (SIDE, SIDE) of needles and ferns; what leaves on one side enters on the other."""
    canvas = Image.new("F", (2 * SIDE, 2 * SIDE))
    pen = ImageDraw.Draw(canvas)

    def line(x: float, y: float, angle: float, length: float, light: float, width: int) -> None:
        end = (x + length * math.cos(angle), y + length * math.sin(angle))
        pen.line([(x, y), end], fill=light, width=width)

    kinds = rng.permutation([False] * pane.needles + [True] * pane.ferns)
    for fern in kinds:
        x, y = rng.uniform(SIDE / 2, 3 * SIDE / 2, size=2)
        angle, light = rng.uniform(0, 2 * math.pi), rng.uniform(0.2, 1)
        length = min(pane.length * rng.uniform(0.4, 1.6), SIDE / 3)
        line(x, y, angle, length, light, int(rng.integers(1, 3)))
        if not fern:
            continue
        for along in np.arange(2.0, length, 3.0):
            px, py = x + along * math.cos(angle), y + along * math.sin(angle)
            reach = 0.45 * (length - along) * rng.uniform(0.6, 1)
            for side in (-1, 1):
                line(px, py, angle + side * math.pi / 3, reach, light * rng.uniform(0.6, 1), 1)
    drawn = np.asarray(canvas, dtype=np.float64)
    return drawn.reshape(2, SIDE, 2, SIDE).max(axis=(0, 2))
