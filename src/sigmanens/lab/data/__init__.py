"""Pictures with labels: loaded by one code path, in memory or encoded, cut, normalised, batched."""

from sigmanens.lab.data.batching import augment_flip_crop, batches
from sigmanens.lab.data.images import ImageSet, draw_order, resize_images, stratified_split
from sigmanens.lab.data.lazy import EncodedSet, LazyPictures, Pictures, take
from sigmanens.lab.data.loading import load_images, open_images

__all__ = [
    "EncodedSet",
    "ImageSet",
    "LazyPictures",
    "Pictures",
    "augment_flip_crop",
    "batches",
    "draw_order",
    "load_images",
    "open_images",
    "resize_images",
    "stratified_split",
    "take",
]
