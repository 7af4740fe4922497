"""Which part of a picture is shown, and at what size: the usual two ways of ImageNet networks.

Each is one window of the picture, resampled in one step: bilinear, and averaged over what a pixel
covers where the window is made smaller. torchvision's transforms draw from torch's generator, so
that what is seen of a picture would depend on its batch and on the readers; these do not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from PIL.Image import Image

Window = tuple[float, float, float, float]
"""Left, top, right and bottom in pixels."""

_RATIOS = (3 / 4, 4 / 3)
_TRIES = 10


def central_window(width: int, height: int, share: float) -> Window:
    """The square in the middle, its side ``share`` of the shorter side.

    With 224 / 256 this is what "resize to 256, crop the middle 224" shows.
    """
    side = share * min(width, height)
    left, top = (width - side) / 2, (height - side) / 2
    return left, top, left + side, top + side


def random_window(width: int, height: int, least: float, rng: np.random.Generator) -> Window:
    """A window of random area and shape at a random place (arXiv 1409.4842).

    The area is uniform in [least, 1] of the picture's, the logarithm of width / height uniform
    between those of 3/4 and 4/3. Where ten draws do not fit into the picture, it is the largest
    window in the middle that is no flatter than that.

    Args:
        width, height: of the picture, in pixels.
        least: smallest area, as a share of the picture's.
        rng: source of the draws.
    """
    low, high = math.log(_RATIOS[0]), math.log(_RATIOS[1])
    for _ in range(_TRIES):
        area = width * height * rng.uniform(least, 1.0)
        ratio = math.exp(rng.uniform(low, high))
        across, down = math.sqrt(area * ratio), math.sqrt(area / ratio)
        if across <= width and down <= height:
            left, top = rng.uniform(0, width - across), rng.uniform(0, height - down)
            return left, top, left + across, top + down
    across, down = min(width, height * _RATIOS[1]), min(height, width / _RATIOS[0])
    left, top = (width - across) / 2, (height - down) / 2
    return left, top, left + across, top + down


def show(picture: Image, window: Window, size: int) -> Image:
    """A window of a picture, resampled to size × size pixels."""
    from PIL.Image import Resampling

    # Rounding may have put an edge past the picture by less than 1e-9, which Pillow refuses.
    left, top, right, bottom = window
    box = max(left, 0), max(top, 0), min(right, picture.width), min(bottom, picture.height)
    return picture.resize((size, size), Resampling.BILINEAR, box=box)


def show_middle(picture: Image, share: float, size: int) -> Image:
    """The square in the middle, see :func:`central_window`, at size × size pixels."""
    return show(picture, central_window(*picture.size, share), size)


@dataclass(frozen=True)
class RandomView:
    """Random windows, half of them mirrored, that depend on a seed and the picture's number alone.

    Attributes:
        least: smallest area, as a share of the picture's.
        seed: 0 or more; another one for every epoch.
    """

    least: float
    seed: int

    def show(self, picture: Image, number: int, size: int) -> Image:
        """What is seen of the picture with a number, at size × size pixels."""
        from PIL.Image import Transpose

        rng = np.random.default_rng([self.seed, number])
        seen = show(picture, random_window(*picture.size, self.least, rng), size)
        return seen.transpose(Transpose.FLIP_LEFT_RIGHT) if rng.random() < 0.5 else seen
