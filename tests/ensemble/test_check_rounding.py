"""Where float32 is too coarse to compare with the base, conversion says so and refuses nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import sigmanens as sn


class Fragile(nn.Module):
    """Magnifies the rounding of its norm until the answers are noise in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 3)
        nn.init.uniform_(self.norm.weight, 0.5, 1.5)
        self.norm.running_mean += 0.3

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.sin(1e6 * self.norm(x)))


def test_rounding_is_no_reason_to_refuse() -> None:
    base, x = Fragile().eval(), torch.randn(16, 8)
    with pytest.warns(sn.SigmaNensWarning, match="rounding in float32 moves the logits"):
        ensemble = sn.convert(base, 2, example=x, schedule="sequential")
    assert any("too much to tell" in note for note in ensemble.report.notes)
    sn.convert(base.double(), 2, example=x.double(), schedule="sequential")  # tells: no warning


def test_a_norm_that_is_used_otherwise_is_still_refused() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 3)
            nn.init.uniform_(self.norm.weight, 0.5, 1.5)

        def forward(self, x: Tensor) -> Tensor:
            plain = type(self.norm) is nn.BatchNorm1d
            return self.head(self.norm(x) + (1.0 if plain else 0.0))

    with pytest.raises(sn.errors.ConversionError, match="does not reproduce the base"):
        sn.convert(Twice().eval(), 2, example=torch.randn(16, 8), schedule="sequential")
