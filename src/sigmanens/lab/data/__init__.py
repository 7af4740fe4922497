"""Pictures with labels: loaded by one code path, kept in memory, cut, normalised and batched."""

from sigmanens.lab.data.batching import augment_flip_crop, batches
from sigmanens.lab.data.images import ImageSet, resize_images, stratified_split
from sigmanens.lab.data.loading import load_images

__all__ = [
    "ImageSet",
    "augment_flip_crop",
    "batches",
    "load_images",
    "resize_images",
    "stratified_split",
]
