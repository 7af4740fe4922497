"""Crops of scikit-learn's two embedded photographs, for the tests of this folder."""

from __future__ import annotations

from functools import lru_cache

import torch
from sklearn.datasets import load_sample_images
from torch import Tensor
from torch.nn.functional import interpolate

CROPPED = {32: 128, 64: 192, 224: 300}
"""Side wanted → side of the crop that is shrunk to it."""


@lru_cache(maxsize=8)
def photographs(side: int, count: int) -> Tensor:
    """``count`` different crops (count, 3, side, side) uint8, shrunk to ``side`` pixels."""
    images = [
        torch.from_numpy(image.copy()).permute(2, 0, 1) for image in load_sample_images().images
    ]
    generator = torch.Generator().manual_seed(side)
    crops = []
    for i in range(count):
        image, size = images[i % 2], CROPPED[side]
        top, left = (
            int(torch.randint(0, extent - size + 1, (), generator=generator))
            for extent in image.shape[1:]
        )
        crop = image[None, :, top : top + size, left : left + size].float()
        crops.append(interpolate(crop, size=(side, side), mode="area").round().to(torch.uint8))
    return torch.cat(crops)
