"""torch-uncertainty's layers as the rivals use them. Needs torch-uncertainty: import it late.

Its BatchLinear and MaskedLinear take matrices only. Here they also take (M·B, …, F), of which each
member has a block of rows, as transformers give them.
"""

from __future__ import annotations

import torch
import torch_uncertainty.layers as library
from torch import Tensor
from torch_uncertainty.layers import BatchConv2d, PackedConv2d, PackedLinear

__all__ = [
    "BatchConv2d",
    "BatchLinear",
    "MaskedConv2d",
    "MaskedLinear",
    "PackedConv2d",
    "PackedLinear",
]


class BatchLinear(library.BatchLinear):
    """torch-uncertainty's BatchLinear for (M·B, …, in) → (M·B, …, out)."""

    def forward(self, inputs: Tensor) -> Tensor:
        rows = super().forward(inputs.flatten(0, -2))
        return rows.unflatten(0, inputs.shape[:-1])


class MaskedLinear(library.MaskedLinear):
    """torch-uncertainty's MaskedLinear for (M·B, …, in) → (M·B, …, out), with given masks."""

    def forward(self, inputs: Tensor) -> Tensor:
        rows = super().forward(inputs.flatten(0, -2))
        return rows.unflatten(0, inputs.shape[:-1])

    def set_masks(self, masks: Tensor) -> None:
        """Replace the masks by others (M, in), as a buffer."""
        _set_masks(self.mask, masks)


class MaskedConv2d(library.MaskedConv2d):
    """torch-uncertainty's MaskedConv2d with given masks."""

    def set_masks(self, masks: Tensor) -> None:
        """Replace the masks by others (M, in), as a buffer."""
        _set_masks(self.mask, masks)


def _set_masks(mask: torch.nn.Module, masks: Tensor) -> None:
    del mask.masks  # a parameter in float64, which would be counted and slow everything down
    mask.register_buffer("masks", masks)
