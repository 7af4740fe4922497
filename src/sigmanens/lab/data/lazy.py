"""Pictures that are made when a batch of them is asked for, for sets that memory does not hold."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from math import prod
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor

from sigmanens.errors import ConfigError, DataError
from sigmanens.lab.data.decoding import decoded, stacked
from sigmanens.lab.data.framing import RandomView, show_middle
from sigmanens.lab.data.images import ImageSet, LabelledSet, check_labels, normalize

if TYPE_CHECKING:
    from PIL.Image import Image

_CHUNK = 512

RECORD = "picture"
"""Column of the encoded pictures of an :class:`EncodedSet`."""


class PictureSource(Protocol):
    """Where :class:`LazyPictures` come from."""

    def make(self, rows: Tensor, view: RandomView | None) -> Tensor:
        """Normalised pictures (B, C, H, W), float32, at the positions ``rows`` (B,)."""


@dataclass(frozen=True, eq=False)
class LazyPictures:
    """Stands where a tensor of pictures (N, C, H, W) would: ``x[rows]`` and ``x.split(n)`` give
    batches, which are the same whenever and in whatever order they are asked for.

    Attributes:
        source: makes the pictures.
        rows: their positions in the source (N,), int64.
        shape: (N, C, H, W).
        view: random windows instead of the usual one, for training.
        readers: threads that make batches ahead, in :meth:`split` and :meth:`batches`.
    """

    source: PictureSource
    rows: Tensor
    shape: tuple[int, int, int, int]
    view: RandomView | None = None
    readers: int = 0

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Tensor | Sequence[int] | slice) -> Tensor:
        """The batch (B, C, H, W) at the positions ``index``, float32."""
        return self.source.make(self.rows[index], self.view)

    def take(self, index: Tensor | Sequence[int] | slice) -> LazyPictures:
        """The pictures at the positions ``index``, of which none is made yet."""
        rows = self.rows[index]
        return replace(self, rows=rows, shape=(len(rows), *self.shape[1:]))

    def viewed(self, least: float, seed: int) -> LazyPictures:
        """The same through random windows of at least the share ``least`` of the area.

        What is seen of a picture depends on the seed and the picture alone.
        """
        return replace(self, view=RandomView(least, seed))

    def split(self, size: int) -> Iterator[Tensor]:
        """All pictures in order, ``size`` at a time."""
        return self.batches(torch.arange(len(self)).split(size))

    def batches(self, parts: Iterable[Tensor]) -> Iterator[Tensor]:
        """The batches at positions ``parts``, in this order; at most ``readers`` wait in memory.

        By threads, as decoding lets others run: the processes of torch's DataLoader would be
        started anew, and import everything, for each pass over a set.
        """
        if not self.readers:
            yield from (self[part] for part in parts)
            return
        remaining = iter(parts)
        with ThreadPoolExecutor(self.readers) as pool:
            ahead: deque[Future[Tensor]] = deque()
            try:
                for part in islice(remaining, self.readers):
                    ahead.append(pool.submit(self.__getitem__, part))
                while ahead:
                    batch = ahead.popleft().result()
                    for part in islice(remaining, 1):
                        ahead.append(pool.submit(self.__getitem__, part))
                    yield batch
            finally:  # whoever iterates may stop early
                pool.shutdown(cancel_futures=True)


Pictures: TypeAlias = Tensor | LazyPictures
"""Normalised pictures (N, C, H, W) in memory, or made when asked for."""


def take(pictures: Pictures, rows: Tensor) -> Pictures:
    """The pictures at the positions ``rows``; those that are not in memory stay so."""
    return pictures.take(rows) if isinstance(pictures, LazyPictures) else pictures[rows]


@dataclass(frozen=True, eq=False)
class EncodedSet(LabelledSet):
    """Encoded pictures with labels: what ``ImageSet`` is to pictures in memory.

    Attributes:
        records: rows with a column ``RECORD`` of ``{"bytes": …, "path": …}``, such as a data set of
            ``datasets``.
        labels: class numbers (N,), int64 in [0, len(classes)).
        classes: the classes' names.
        size: height and width of the pictures when decoded; None: as they are, which has to be the
            same for all.
        crop: share of the shorter side that the square shown holds; None: the whole picture is
            brought to size × size.
        channels: 3 or 1.
        name: what the set is called in messages and results.
        mean, std: of the channels, for pixels in [0, 1].
        readers: threads that decode ahead.
        rows: position of each picture in ``records`` (N,), int64; None: all of them in order.

    Raises:
        DataError: if the set is empty, or a label does not fit. ConfigError: for a number of
            readers or a size out of range.
    """

    records: Any
    labels: Tensor
    classes: tuple[str, ...]
    size: int | None = None
    crop: float | None = None
    channels: int = 3
    name: str = "images"
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    readers: int = 0
    rows: Tensor = field(default=None)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.rows is None:
            object.__setattr__(self, "rows", torch.arange(len(self.records)))
        if not len(self.labels) or len(self.labels) != len(self.rows):
            raise DataError(
                f"{self.name}: {len(self.rows)} pictures with {len(self.labels)} labels; expected "
                "at least one, and a label for each"
            )
        check_labels(self.labels, len(self.classes), self.name)
        if self.readers < 0 or (self.size is not None and self.size < 1):
            raise ConfigError(
                f"readers is {self.readers} and size {self.size}; expected readers ≥ 0, size ≥ 1"
            )

    @property
    def positions(self) -> Tensor:
        """Place of each picture in the split that it comes from (N,), int64."""
        return self.rows

    @property
    def side(self) -> int:
        """Width of the pictures in pixels; where no size is given, that of the first."""
        return self._shape()[2]

    def pixels(self, rows: Tensor, view: RandomView | None = None) -> Tensor:
        """Decode the pictures at positions ``rows`` (B,).

        Returns:
            (B, channels, size, size), uint8.

        Raises:
            DataError: if a picture is missing or cannot be decoded. MixedSizesError: if no size is
                given, and those of the pictures differ.
        """
        return self._decode(rows, view, None)

    def _decode(
        self, rows: Tensor, view: RandomView | None, side: tuple[int, int] | None
    ) -> Tensor:
        numbers = self.rows[rows].tolist()
        arrays = [
            decoded(
                record, self.channels, f"{self.name}: picture {number}", self._frame(number, view)
            )
            for record, number in zip(self.records[numbers][RECORD], numbers, strict=True)
        ]
        return stacked(arrays, self.size, side, numbers, self.name)

    def _frame(self, number: int, view: RandomView | None) -> Callable[[Image], Image] | None:
        """What shows the wanted part of a picture; None: all of it is shown."""
        if self.size is None:
            return None
        if view is not None:
            return partial(view.show, number=number, size=self.size)
        return None if self.crop is None else partial(show_middle, share=self.crop, size=self.size)

    def make(self, rows: Tensor, view: RandomView | None = None) -> Tensor:
        """The same, normalised: (B, channels, size, size), float32."""
        return normalize(self.pixels(rows, view), self.mean, self.std, self.name)

    def normalized(self) -> LazyPictures:
        """All pictures, normalised when they are asked for."""
        count = len(self)
        shape = (count, *self._shape())
        return LazyPictures(self, torch.arange(count), shape, readers=self.readers)

    def decoded(self) -> ImageSet:
        """All pictures in memory.

        Raises:
            as :meth:`pixels`.
        """
        pixels: Tensor | None = None
        for rows in torch.arange(len(self)).split(_CHUNK):
            side = None if pixels is None else (pixels.shape[2], pixels.shape[3])
            part = self._decode(rows, None, side)
            if pixels is None:
                pixels = part.new_empty((len(self), *part.shape[1:]))
            pixels[rows[0] : rows[-1] + 1] = part
        assert pixels is not None  # an empty set was refused
        return ImageSet(
            pixels, self.labels, self.classes, self.name, self.mean, self.std, self.rows
        )

    def nbytes(self) -> int:
        """Memory that all pictures would take as pixels, were they as large as the first."""
        return len(self) * prod(self._shape())

    def _shape(self) -> tuple[int, int, int]:
        if self.size is not None:
            return self.channels, self.size, self.size
        _, channels, height, width = self.pixels(torch.tensor([0])).shape
        return channels, height, width

    def subset(self, index: Tensor | Sequence[int] | slice) -> EncodedSet:
        """The pictures at the positions (or under the mask, or in the slice) ``index``."""
        if not isinstance(index, slice):
            index = torch.as_tensor(index)
        return replace(self, labels=self.labels[index], rows=self.rows[index])
