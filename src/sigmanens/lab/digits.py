"""Real data embedded in scikit-learn: small digits, and pictures that are not digits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sigmanens.errors import ConfigError, InputError
from sigmanens.lab.data import Pictures, stratified_split

SIDE = 8
"""Height and width of a digit in pixels."""

NOISE_DEVIATIONS = (0.08, 0.16, 0.24, 0.32, 0.4)
"""Standard deviation of the noise that :func:`noisy` adds, for severity 1 to 5."""

_SCALES = (1, 2, 4)
_LUMA = (0.299, 0.587, 0.114)
_FLAT = 16 / 255


class Labelled(NamedTuple):
    """Pictures (N, C, H, W), float32, with class numbers (N,), int64.

    Pictures may also be made batch by batch when asked for (:class:`LazyPictures`), and token
    numbers (N, L), int64, may stand in their place.
    """

    images: Pictures
    labels: Tensor

    @property
    def tensor(self) -> Tensor:
        """The pictures (N, C, H, W), for what needs all of them at once.

        Raises:
            InputError: if they are not in memory.
        """
        if not isinstance(self.images, Tensor):
            raise InputError(
                f"{len(self.images)} pictures are read batch by batch, and here all are needed at "
                "once: load them without data.lazy"
            )
        return self.images


@dataclass(frozen=True, eq=False)
class DigitsData:
    """The parts of one study on digits; no picture is in two of them.

    Attributes:
        train: few pictures, so that a single network is over-confident.
        validation: for choosing a temperature, and between settings.
        test: the rest, for the reported numbers.
        ood: pictures (N, 1, 8, 8) in [0, 1] that are not digits: ``photo_patches``,
            ``uniform_noise``, ``gaussian_noise``.
        classes: the classes' names.
    """

    train: Labelled
    validation: Labelled
    test: Labelled
    ood: dict[str, Tensor]
    classes: tuple[str, ...]


def digits_sets(
    train: int = 200, validation: int = 400, ood: int = 600, seed: int = 0
) -> DigitsData:
    """Cut scikit-learn's 1,797 handwritten digits into three stratified parts, and add OOD sets.

    Args:
        train: number of training pictures.
        validation: number of validation pictures.
        ood: number of pictures of each out-of-distribution set.
        seed: seed of every draw.

    Returns:
        The parts; pixels are scaled from 0..16 to [0, 1].

    Raises:
        ConfigError: if a part would have fewer than one picture a class, or ``ood`` is below 1.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = torch.from_numpy(digits.images).to(torch.float32).div_(16).unsqueeze(1)
    labels = torch.from_numpy(digits.target).to(torch.int64)
    classes = tuple(str(name) for name in digits.target_names)
    test = len(labels) - train - validation
    if min(train, validation, test) < len(classes) or ood < 1:
        raise ConfigError(
            f"Of {len(labels)} digits, train={train} and validation={validation} leave {test} for "
            f"the test; each part needs at least {len(classes)}, and ood={ood} at least 1."
        )
    generator = torch.Generator().manual_seed(seed)
    first, rest = stratified_split(labels, train, generator)
    second, third = stratified_split(labels[rest], validation, generator)

    def part(rows: Tensor) -> Labelled:
        return Labelled(images[rows], labels[rows])

    shape = (ood, 1, SIDE, SIDE)
    return DigitsData(
        train=part(first),
        validation=part(rest[second]),
        test=part(rest[third]),
        ood={
            "photo_patches": photo_patches(ood, generator),
            "uniform_noise": torch.rand(shape, generator=generator),
            "gaussian_noise": (0.5 + 0.25 * torch.randn(shape, generator=generator)).clamp_(0, 1),
        },
        classes=classes,
    )


def photo_patches(count: int, generator: torch.Generator) -> Tensor:
    """Draw grey 8x8 patches of scikit-learn's two sample photographs, at three scales.

    A photograph is averaged over 1, 2 or 4 pixels a side and cut into patches that do not overlap.
    Each patch is stretched so that its pixels span [0, 1]; patches of nearly one tone are left out.

    Args:
        count: number of patches, shared between the scales as evenly as possible.
        generator: source of the draw.

    Returns:
        (count, 1, 8, 8), float32 in [0, 1].

    Raises:
        ConfigError: if there are not as many patches.
    """
    from sklearn.datasets import load_sample_images

    weights = torch.tensor(_LUMA)
    photos = [
        (torch.tensor(photo, dtype=torch.float32) / 255 @ weights)[None, None]
        for photo in load_sample_images().images
    ]
    chosen = []
    for i, scale in enumerate(_SCALES):
        patches = torch.cat([_tiles(F.avg_pool2d(photo, scale)) for photo in photos])
        low, high = patches.amin((1, 2, 3), True), patches.amax((1, 2, 3), True)
        clear = (high - low).flatten() > _FLAT
        stretched = ((patches - low) / (high - low))[clear]
        share = count // len(_SCALES) + (i < count % len(_SCALES))
        if share > len(stretched):
            raise ConfigError(
                f"The photographs give {len(stretched)} patches at scale {scale}, fewer than "
                f"the {share} that {count} in all would need."
            )
        order = torch.randperm(len(stretched), generator=generator)
        chosen.append(stretched[order[:share]])
    return torch.cat(chosen)


def _tiles(picture: Tensor) -> Tensor:
    """Cut a picture (1, 1, H, W) into tiles (N, 1, 8, 8) that do not overlap."""
    tiles = picture.unfold(2, SIDE, SIDE).unfold(3, SIDE, SIDE)
    return tiles.reshape(-1, 1, SIDE, SIDE)


def noisy(images: Tensor, severity: int, generator: torch.Generator | None = None) -> Tensor:
    """Add Gaussian noise: ``clip(x + s n, 0, 1)``, n ~ N(0, 1), s growing with the severity.

    From equal states of the generator, a greater severity moves every pixel at least as far.

    Args:
        images: (N, C, H, W), float in [0, 1].
        severity: 1 to 5, see ``NOISE_DEVIATIONS``.
        generator: source of the noise; None: PyTorch's own.

    Returns:
        (N, C, H, W) in [0, 1], a new tensor.

    Raises:
        InputError: if the severity is not 1 to 5.
    """
    if not isinstance(severity, int) or not 1 <= severity <= len(NOISE_DEVIATIONS):
        raise InputError(f"severity must be 1 to {len(NOISE_DEVIATIONS)}; got {severity!r}.")
    deviation = NOISE_DEVIATIONS[severity - 1]
    noise = torch.randn(images.shape, generator=generator, dtype=images.dtype)
    return (images + deviation * noise.to(images.device)).clamp_(0, 1)
