"""τ and λ where a user gives none: one table for the library, the command line and the estimator.

docs/dial.md shows this table; a test compares the two.
"""

from __future__ import annotations

from typing import NamedTuple


class Default(NamedTuple):
    """τ, λ and the reason for them."""

    tau: float
    weight: float
    reason: str


DEFAULTS = {
    "library": Default(0.1, 1e-2, "published for CNNs from scratch"),
    "scratch": Default(1.0, 1e-2, "the best of six τ on CIFAR-10 small, λ as published"),
    "pretrained": Default(0.1, 1e-4, "published for fine-tuning CNNs"),
    "estimator": Default(0.5, 1e-3, "published for transformers, between the other two"),
}
"""By entry. "scratch" and "pretrained" are ``sigmanens train`` without and with trained weights."""

DEFAULT_TAU, DEFAULT_WEIGHT, _ = DEFAULTS["library"]
