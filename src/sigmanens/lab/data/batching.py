"""Mini-batches of pictures, in memory or not, and their augmentation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from sigmanens.errors import InputError
from sigmanens.lab.data.lazy import LazyPictures, Pictures

BORDERS = ("zero", "reflect")


def batches(
    images: Pictures,
    labels: Tensor,
    batch_size: int,
    generator: torch.Generator | None = None,
    drop_last: bool = False,
    groups: Sequence[Tensor] = (),
    turns: torch.Generator | None = None,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Go once through a set, batch by batch.

    Args:
        images: (N, ...); those that are not in memory are made batch by batch.
        labels: (N, ...).
        batch_size: number of examples a batch.
        generator: source of a random order; None: the set's own.
        drop_last: whether to leave out a last batch that is smaller.
        groups: positions of the examples, in groups whose sizes are multiples of ``batch_size``,
            but for the last; under a random order each batch comes from one group.
        turns: source of the order of these batches.

    Returns:
        An iterator over pairs of images (B, ...) and labels (B, ...).
    """
    total = len(images)
    order = torch.arange(total)
    if generator is not None:
        mixed = [g[torch.randperm(len(g), generator=generator)] for g in groups or [order]]
        order = torch.cat(mixed)
    parts = order[: total - total % batch_size if drop_last else total].split(batch_size)
    if groups and generator is not None:
        parts = tuple(parts[i] for i in torch.randperm(len(parts), generator=turns).tolist())
    made: Iterable[Tensor] = (images[rows] for rows in parts)
    if isinstance(images, LazyPictures):
        made = images.batches(parts)
    for rows, x in zip(parts, made, strict=True):
        yield x, labels[rows]


def augment_flip_crop(
    x: Tensor,
    padding: int = 4,
    generator: torch.Generator | None = None,
    border: str = "zero",
) -> Tensor:
    """Shift each picture by up to ``padding`` pixels and mirror half of them: crop, then flip.

    Each picture is padded on all sides, an H x W window is cut at a place drawn
    uniformly, and the window is mirrored left to right with probability 1/2. The draws are, in this
    order: B tops, B lefts (integers in [0, 2 padding]), B uniform numbers (a flip where below 1/2).

    Args:
        x: pictures (B, C, H, W), of any dtype.
        padding: greatest shift in pixels.
        generator: source of the draws; None: PyTorch's own on the CPU.
        border: "zero" pads with 0 on the scale of x (black for raw pixels, the mean for normalised
            ones), "reflect" mirrors the picture at its edges.

    Returns:
        (B, C, H, W), a new tensor of the same dtype on the same device.

    Raises:
        InputError: if x has not four dimensions, the padding is negative or not smaller than the
            picture under "reflect", or the border is unknown.
    """
    if x.ndim != 4:
        raise InputError(f"x must have shape (B, C, H, W); got {tuple(x.shape)}.")
    if padding < 0:
        raise InputError(f"padding must not be negative; got {padding}.")
    if border not in BORDERS:
        raise InputError(f"border must be one of {', '.join(BORDERS)}; got {border!r}.")
    if border == "reflect" and padding >= min(x.shape[-2:]):
        raise InputError(
            f"padding {padding} reflects more than a picture of {tuple(x.shape[-2:])}."
        )
    batch, _, height, width = x.shape
    device = generator.device if generator is not None else torch.device("cpu")
    span = 2 * padding + 1
    top = torch.randint(span, (batch,), generator=generator, device=device).to(x.device)
    left = torch.randint(span, (batch,), generator=generator, device=device).to(x.device)
    flip = (torch.rand(batch, generator=generator, device=device) < 0.5).to(x.device)
    mode = "reflect" if border == "reflect" else "constant"
    windows = F.pad(x, (padding,) * 4, mode).unfold(2, height, 1).unfold(3, width, 1)
    crop = windows[torch.arange(batch, device=x.device), :, top, left]
    return torch.where(flip.view(batch, 1, 1, 1), crop.flip(3), crop)
