"""Networks that share nothing: one network (M = 1) or a deep ensemble (arXiv 1612.01474)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sigmanens.ensemble.prediction import logits_of
from sigmanens.errors import InputError

__all__ = ["SeparateNetworks"]


class SeparateNetworks(nn.Module):
    """M separate networks behind the ensemble's interface.

    Train each on its own: the mean of the members' losses would divide every network's gradient
    by M.

    Args:
        networks: M ≥ 1 networks from the same inputs to logits (B, C, …).

    Raises:
        InputError: if there is none.
    """

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        super().__init__()
        if not networks:
            raise InputError("SeparateNetworks got no network; expected at least one")
        self.networks = nn.ModuleList(networks)

    @property
    def num_members(self) -> int:
        """M."""
        return len(self.networks)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Logits (M, B, C, …)."""
        return torch.stack([logits_of(net(*args, **kwargs)) for net in self.networks])
