"""Random predictions for the tests of this folder."""

from __future__ import annotations

import torch
from torch import Tensor


def draw_logits(
    samples: int, classes: int, members: int = 1, scale: float = 2.0, seed: int = 0
) -> Tensor:
    """Member logits (M, B, C) that share a part and differ in another, float64."""
    generator = torch.Generator().manual_seed(seed)
    common = torch.randn(1, samples, classes, generator=generator, dtype=torch.float64)
    own = torch.randn(members, samples, classes, generator=generator, dtype=torch.float64)
    return scale * (common + own) / 2**0.5


def draw(
    samples: int, classes: int, scale: float = 2.0, seed: int = 0, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probabilities (B, C) and labels drawn from them, then divided by ``temperature``.

    Temperature 1 is calibrated; below 1 the prediction is over-confident, and fitting finds
    1/temperature.
    """
    log_probs = torch.log_softmax(draw_logits(samples, classes, 1, scale, seed)[0], 1)
    generator = torch.Generator().manual_seed(seed + 1)
    labels = torch.multinomial(log_probs.exp(), 1, generator=generator).squeeze(1)
    return torch.log_softmax(log_probs / temperature, 1), labels


def draw_members(
    samples: int, classes: int, members: int, scale: float = 2.0, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Member log-probabilities (M, B, C) and labels drawn from the first member."""
    log_probs = torch.log_softmax(draw_logits(samples, classes, members, scale, seed), 2)
    generator = torch.Generator().manual_seed(seed + 1)
    labels = torch.multinomial(log_probs[0].exp(), 1, generator=generator).squeeze(1)
    return log_probs, labels
