"""A labelled set of pictures in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from sigmanens.errors import DataError, InputError

_CHUNK = 1024
Examples = TypeVar("Examples", bound="LabelledSet")


class LabelledSet:
    """Examples with labels, which can be cut into parts.

    Attributes:
        labels: class numbers (N,), int64 in [0, len(classes)).
        classes: the classes' names.
        name: what the set is called in messages and results.
    """

    labels: Tensor
    classes: tuple[str, ...]
    name: str
    what: ClassVar[str] = "pictures"

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self: Examples, index: Tensor | Sequence[int] | slice) -> Examples:
        """The examples at the positions (or under the mask, or in the slice) ``index``."""
        raise NotImplementedError

    def split(self: Examples, fraction: float, seed: int = 0) -> tuple[Examples, Examples]:
        """Cut into two disjoint parts with the same share of every class.

        Args:
            fraction: share of the first part, in (0, 1).
            seed: seed of the draw.

        Returns:
            The part with ``round(fraction * N)`` examples, and the rest; both keep the set's order.

        Raises:
            InputError: if the fraction is not in (0, 1) or leaves a part empty.
        """
        count = round(fraction * len(self)) if 0 < fraction < 1 else 0
        if not 0 < count < len(self):
            raise InputError(
                f"{self.name}: fraction must lie in (0, 1) and leave both parts at least one of "
                f"{len(self)} {self.what}; got {fraction}."
            )
        generator = torch.Generator().manual_seed(seed)
        first, second = stratified_split(self.labels, count, generator)
        return self.subset(first), self.subset(second)


@dataclass(frozen=True, eq=False)
class ImageSet(LabelledSet):
    """Pictures and labels in memory.

    Attributes:
        images: pixels (N, C, H, W), uint8 in [0, 255].
        labels: class numbers (N,), int64 in [0, len(classes)).
        classes: the classes' names.
        name: what the set is called in messages and results.
        mean: the channels' means, for pixels in [0, 1]; None: 0.
        std: the channels' standard deviations, likewise; None: 1.
        positions: place of each picture in the split that it comes from (N,), int64; None: not
            known.

    Raises:
        DataError: if the set is empty, or the tensors' shapes, dtypes or labels do not fit.
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    name: str = "images"
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    positions: Tensor | None = None

    def __post_init__(self) -> None:
        images, labels = self.images, self.labels
        if images.dtype != torch.uint8 or images.ndim != 4:
            raise DataError(
                f"{self.name}: images must be uint8 of shape (N, C, H, W); got {images.dtype} "
                f"of shape {tuple(images.shape)}."
            )
        check_labelled(images, labels, len(self.classes), self.name)

    @property
    def num_classes(self) -> int:
        """Number of classes, those without an example included."""
        return len(self.classes)

    @property
    def side(self) -> int:
        """Width of the pictures in pixels."""
        return int(self.images.shape[-1])

    def pixels(self, rows: Tensor) -> Tensor:
        """Pixels (B, C, H, W), uint8, of the pictures at positions ``rows`` (B,)."""
        return self.images[rows]

    def normalized(self) -> Tensor:
        """Return ``(images / 255 - mean) / std`` as float32 (N, C, H, W); see :func:`normalize`."""
        return normalize(self.images, self.mean, self.std, self.name)

    def subset(self, index: Tensor | Sequence[int] | slice) -> ImageSet:
        """Return the pictures at the positions (or under the mask, or in the slice) ``index``."""
        if not isinstance(index, slice):
            index = torch.as_tensor(index)
        places = None if self.positions is None else self.positions[index]
        return replace(self, images=self.images[index], labels=self.labels[index], positions=places)


def normalize(
    images: Tensor, mean: Sequence[float] | None, std: Sequence[float] | None, name: str
) -> Tensor:
    """Return ``(images / 255 - mean) / std`` as float32 (N, C, H, W).

    Args:
        images: (N, C, H, W), uint8.
        mean: one number per channel, for pixels in [0, 1]. None: 0.
        std: one positive number per channel. None: 1.
        name: of the set, for messages.

    Raises:
        InputError: if the number of values is not the number of channels, or a deviation is not
            positive.
    """
    channels = images.shape[1]

    def per_channel(what: str, values: Sequence[float]) -> Tensor:
        if len(values) != channels:
            raise InputError(
                f"{name}: {what} needs {channels} values, one per channel; got {len(values)}."
            )
        return torch.tensor(values, dtype=torch.float32).view(1, channels, 1, 1)

    pixels = images.to(torch.float32).div_(255)
    if mean is not None:
        pixels.sub_(per_channel("mean", mean))
    if std is not None:
        deviation = per_channel("std", std)
        if not (deviation > 0).all():
            raise InputError(f"{name}: std must be positive; got {tuple(std)}.")
        pixels.div_(deviation)
    return pixels


def check_labelled(examples: Tensor, labels: Tensor, num_classes: int, name: str) -> None:
    """Raise DataError unless each of the examples (N, ...), at least one, has its label."""
    if labels.dtype != torch.int64 or labels.shape != examples.shape[:1]:
        raise DataError(
            f"{name}: labels must be int64 of shape ({len(examples)},); got {labels.dtype} "
            f"of shape {tuple(labels.shape)}."
        )
    if not len(examples):
        raise DataError(f"{name}: the data set is empty.")
    check_labels(labels, num_classes, name)


def check_labels(labels: Tensor, num_classes: int, name: str) -> None:
    """Raise DataError if a label of (N,) int64 lies outside [0, num_classes)."""
    wrong = ((labels < 0) | (labels >= num_classes)).nonzero().flatten()
    if len(wrong):
        row = int(wrong[0])
        raise DataError(
            f"{name}: {len(wrong)} labels lie outside 0..{num_classes - 1}; the first is "
            f"{int(labels[row])} in row {row}. A label of -1 marks a row without one."
        )


def resize_images(images: Tensor, size: int) -> Tensor:
    """Resize pictures to size x size pixels.

    A whole number of pixels is averaged where both sides are multiples of ``size``, else the
    pictures are interpolated bilinearly with antialiasing. The aspect ratio is not kept.

    Args:
        images: (N, C, H, W), uint8.
        size: the new height and width.

    Returns:
        (N, C, size, size), uint8, rounded to the nearest value.

    Raises:
        InputError: if the size is not a positive integer.
    """
    if size < 1:
        raise InputError(f"size must be a positive number of pixels; got {size}.")
    height, width = images.shape[-2:]
    if (height, width) == (size, size):
        return images
    parts = []
    for chunk in images.split(_CHUNK):
        pixels = chunk.to(torch.float32)
        if height % size == 0 and width % size == 0:
            pixels = F.avg_pool2d(pixels, (height // size, width // size))
        else:
            pixels = F.interpolate(pixels, size=(size, size), mode="bilinear", antialias=True)
        parts.append(pixels.round_().clamp_(0, 255).to(torch.uint8))
    return torch.cat(parts)


def stratified_split(
    labels: Tensor, count: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw positions with the same share of every class.

    Args:
        labels: class numbers (N,), int64.
        count: number of positions to draw, 0 <= count <= N. A class of n examples gives
            ``count * n / N`` of them, rounded down or up so that the sum is ``count``.
        generator: source of the draw.

    Returns:
        The positions drawn (count,) and the others (N - count,), each ascending, int64.
    """
    classes, sizes = labels.unique(return_counts=True)
    share = sizes * count
    take = share // len(labels)
    largest = (share % len(labels)).argsort(descending=True, stable=True)
    take[largest[: count - int(take.sum())]] += 1
    drawn = torch.zeros(len(labels), dtype=torch.bool)
    for value, number in zip(classes, take.tolist(), strict=True):
        rows = (labels == value).nonzero().flatten()
        drawn[rows[torch.randperm(len(rows), generator=generator)[:number]]] = True
    return drawn.nonzero().flatten(), (~drawn).nonzero().flatten()


def draw_order(labels: Tensor, seed: int, stratify: bool = False) -> Tensor:
    """A random order of a set, of which the first so many are drawn.

    Args:
        labels: class numbers (N,), int64.
        seed: seed of the order.
        stratify: spread every class evenly over the order, so that the first so many hold all
            classes in proportion: of classes of equal size, equal numbers or one more.

    Returns:
        a permutation (N,), int64; without ``stratify`` that of ``torch.randperm``.
    """
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    if not stratify:
        return order
    place = torch.empty(len(labels), dtype=torch.float64)
    drawn = labels[order]
    for value in drawn.unique():
        own = (drawn == value).nonzero().flatten()
        place[own] = (torch.arange(len(own), dtype=torch.float64) + 0.5) / len(own)
    return order[place.argsort(stable=True)]
