"""The published parameters of the corruptions: 5 severities at 32, 64 and 224 px.

They are those of the three scripts that made CIFAR-10-C (32), Tiny-ImageNet-C (64) and ImageNet-C
(224): ``ImageNet-C/create_c`` of github.com/hendrycks/robustness, arXiv 1903.12261. Lengths are in
pixels; what a value means is said by the function of that name, which takes them in this order.
"""

from __future__ import annotations

import math

__all__ = ["CORRUPTIONS", "EXTRA_CORRUPTIONS", "TABLES", "nearest_table"]

Severities = tuple[tuple[float, ...], ...]

CORRUPTIONS: tuple[str, ...] = (
    "gaussian_noise",
    "shot_noise",
    "impulse_noise",
    "defocus_blur",
    "glass_blur",
    "motion_blur",
    "zoom_blur",
    "snow",
    "frost",
    "fog",
    "brightness",
    "contrast",
    "elastic_transform",
    "pixelate",
    "jpeg_compression",
)
"""The 15 standard corruptions, as the published folders and files are called."""

EXTRA_CORRUPTIONS: tuple[str, ...] = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
"""The 4 extra ones, published for choices such as that of a hyperparameter."""


def _one(*values: float) -> Severities:
    return tuple((value,) for value in values)


_CIFAR: dict[str, Severities] = {
    "gaussian_noise": _one(0.04, 0.06, 0.08, 0.09, 0.10),
    "shot_noise": _one(500, 250, 100, 75, 50),
    "impulse_noise": _one(0.01, 0.02, 0.03, 0.05, 0.07),
    "defocus_blur": ((0.3, 0.4), (0.4, 0.5), (0.5, 0.6), (1, 0.2), (1.5, 0.1)),
    "glass_blur": ((0.05, 1, 1), (0.25, 1, 1), (0.4, 1, 1), (0.25, 1, 2), (0.4, 1, 2)),
    "motion_blur": ((6, 1), (6, 1.5), (6, 2), (8, 2), (9, 2.5)),
    "zoom_blur": ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
    "snow": (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.95),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.9),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.9),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.85),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.8),
    ),
    "frost": ((1, 0.2, 0.2), (1, 0.3, 0.2), (0.9, 0.4, 0.2), (0.85, 0.4, 0.2), (0.75, 0.45, 0.2)),
    "fog": ((0.2, 3), (0.5, 3), (0.75, 2.5), (1, 2), (1.5, 1.75)),
    "brightness": _one(0.05, 0.1, 0.15, 0.2, 0.3),
    "contrast": _one(0.75, 0.5, 0.4, 0.3, 0.15),
    "elastic_transform": (
        (0, 0, 32 * 0.08),
        (32 * 0.05, 32 * 0.2, 32 * 0.07),
        (32 * 0.08, 32 * 0.06, 32 * 0.06),
        (32 * 0.1, 32 * 0.04, 32 * 0.05),
        (32 * 0.1, 32 * 0.03, 32 * 0.03),
    ),
    "pixelate": _one(0.95, 0.9, 0.85, 0.75, 0.65),
    "jpeg_compression": _one(80, 65, 58, 50, 40),
    "speckle_noise": _one(0.06, 0.1, 0.12, 0.16, 0.2),
    "gaussian_blur": _one(0.4, 0.6, 0.7, 0.8, 1),
    "spatter": (
        (0.62, 0.1, 0.7, 0.7, 0.5, 0),
        (0.65, 0.1, 0.8, 0.7, 0.5, 0),
        (0.65, 0.3, 1, 0.69, 0.5, 0),
        (0.65, 0.1, 0.7, 0.69, 0.6, 1),
        (0.65, 0.1, 0.5, 0.68, 0.6, 1),
    ),
    "saturate": ((0.3, 0), (0.1, 0), (1.5, 0), (2, 0.1), (2.5, 0.2)),
}

_TINY_IMAGENET: dict[str, Severities] = {
    "gaussian_noise": _one(0.04, 0.08, 0.12, 0.15, 0.18),
    "shot_noise": _one(250, 100, 50, 30, 15),
    "impulse_noise": _one(0.01, 0.02, 0.05, 0.08, 0.14),
    "defocus_blur": ((0.5, 0.6), (1, 0.1), (1.5, 0.1), (2.5, 0.01), (3, 0.1)),
    "glass_blur": ((0.1, 1, 1), (0.5, 1, 1), (0.6, 1, 2), (0.7, 2, 1), (0.9, 2, 2)),
    "motion_blur": ((10, 1), (10, 1.5), (10, 2), (10, 2.5), (12, 3)),
    "zoom_blur": ((1.06, 0.01), (1.11, 0.01), (1.16, 0.01), (1.21, 0.01), (1.26, 0.01)),
    "snow": (
        (0.1, 0.2, 1, 0.6, 8, 3, 0.8),
        (0.1, 0.2, 1, 0.5, 10, 4, 0.8),
        (0.15, 0.3, 1.75, 0.55, 10, 4, 0.7),
        (0.25, 0.3, 2.25, 0.6, 12, 6, 0.65),
        (0.3, 0.3, 1.25, 0.65, 14, 12, 0.6),
    ),
    "frost": (
        (1, 0.3, 0.3),
        (0.9, 0.4, 0.3),
        (0.8, 0.45, 0.3),
        (0.75, 0.5, 0.3),
        (0.7, 0.55, 0.3),
    ),
    "fog": ((0.4, 3), (0.7, 3), (1, 2.5), (1.5, 2), (2, 1.75)),
    "brightness": _one(0.1, 0.2, 0.3, 0.4, 0.5),
    "contrast": _one(0.4, 0.3, 0.2, 0.1, 0.05),
    "elastic_transform": (
        (0, 0, 64 * 0.08),
        (64 * 0.05, 64 * 0.3, 64 * 0.06),
        (64 * 0.1, 64 * 0.08, 64 * 0.06),
        (64 * 0.1, 64 * 0.03, 64 * 0.03),
        (64 * 0.16, 64 * 0.03, 64 * 0.02),
    ),
    "pixelate": _one(0.9, 0.8, 0.7, 0.6, 0.5),
    "jpeg_compression": _one(65, 58, 50, 40, 25),
    "speckle_noise": _one(0.15, 0.2, 0.25, 0.3, 0.35),
    "gaussian_blur": _one(0.5, 0.75, 1, 1.25, 1.5),
    "spatter": (
        (0.62, 0.1, 0.7, 0.7, 0.6, 0),
        (0.65, 0.1, 0.8, 0.7, 0.6, 0),
        (0.65, 0.3, 1, 0.69, 0.6, 0),
        (0.65, 0.1, 0.7, 0.68, 0.6, 1),
        (0.65, 0.1, 0.5, 0.67, 0.6, 1),
    ),
    "saturate": ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (30, 0.2)),
}

_IMAGENET: dict[str, Severities] = {
    "gaussian_noise": _one(0.08, 0.12, 0.18, 0.26, 0.38),
    "shot_noise": _one(60, 25, 12, 5, 3),
    "impulse_noise": _one(0.03, 0.06, 0.09, 0.17, 0.27),
    "defocus_blur": ((3, 0.1), (4, 0.5), (6, 0.5), (8, 0.5), (10, 0.5)),
    "glass_blur": ((0.7, 1, 2), (0.9, 2, 1), (1, 2, 3), (1.1, 3, 2), (1.5, 4, 2)),
    "motion_blur": ((10, 3), (15, 5), (15, 8), (15, 12), (20, 15)),
    "zoom_blur": ((1.11, 0.01), (1.16, 0.01), (1.21, 0.02), (1.26, 0.02), (1.31, 0.03)),
    "snow": (
        (0.1, 0.3, 3, 0.5, 10, 4, 0.8),
        (0.2, 0.3, 2, 0.5, 12, 4, 0.7),
        (0.55, 0.3, 4, 0.9, 12, 8, 0.7),
        (0.55, 0.3, 4.5, 0.85, 12, 8, 0.65),
        (0.55, 0.3, 2.5, 0.85, 12, 12, 0.55),
    ),
    "frost": ((1, 0.4, 1), (0.8, 0.6, 1), (0.7, 0.7, 1), (0.65, 0.7, 1), (0.6, 0.75, 1)),
    "fog": ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4)),
    "brightness": _one(0.1, 0.2, 0.3, 0.4, 0.5),
    "contrast": _one(0.4, 0.3, 0.2, 0.1, 0.05),
    # 244, not 224: as published.
    "elastic_transform": (
        (244 * 2, 244 * 0.7, 244 * 0.1),
        (244 * 2, 244 * 0.08, 244 * 0.2),
        (244 * 0.05, 244 * 0.01, 244 * 0.02),
        (244 * 0.07, 244 * 0.01, 244 * 0.02),
        (244 * 0.12, 244 * 0.01, 244 * 0.02),
    ),
    "pixelate": _one(0.6, 0.5, 0.4, 0.3, 0.25),
    "jpeg_compression": _one(25, 18, 15, 10, 7),
    "speckle_noise": _one(0.15, 0.2, 0.35, 0.45, 0.6),
    "gaussian_blur": _one(1, 2, 3, 4, 6),
    "spatter": (
        (0.65, 0.3, 4, 0.69, 0.6, 0),
        (0.65, 0.3, 3, 0.68, 0.6, 0),
        (0.65, 0.3, 2, 0.68, 0.5, 0),
        (0.65, 0.3, 1, 0.65, 1.5, 1),
        (0.67, 0.4, 1, 0.65, 1.5, 1),
    ),
    "saturate": ((0.3, 0), (0.1, 0), (2, 0), (5, 0.1), (20, 0.2)),
}

TABLES: dict[int, dict[str, Severities]] = {32: _CIFAR, 64: _TINY_IMAGENET, 224: _IMAGENET}
"""Side in pixels → corruption → the parameters of severities 1 to 5."""


def nearest_table(height: int, width: int) -> int:
    """The table whose side has the smallest ratio to the smaller side of a picture.

    Up to 45 px that is 32, up to 119 px 64, beyond 224.
    """
    side = min(height, width)
    return min(TABLES, key=lambda published: abs(math.log(side / published)))
