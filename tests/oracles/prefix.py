"""A late split as what it stands for: one network first, then each member's own part of it.

The network is cut by hand: ``first(network, x)`` is what lies before the members part, and
``then(network, h)`` the rest. Nothing is replayed, repeated or folded.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from tests.oracles.norms import member_networks
from torch import Tensor, nn

from sigmanens import SigmaEnsemble

First = Callable[[nn.Module, Any], Any]
Then = Callable[[nn.Module, Any], Tensor]


class LateSplit:
    """One copy of the base for the first part, and one for each member's part."""

    def __init__(self, base: nn.Module, ensemble: SigmaEnsemble, first: First, then: Then) -> None:
        self.members = [net.train(ensemble.training) for net in member_networks(base, ensemble)]
        self.whole = copy.deepcopy(self.members[0])
        self.first, self.then = first, then

    def __call__(self, x: Any) -> Tensor:
        """Logits of all members, (M, B, C)."""
        h = self.first(self.whole, x)
        return torch.stack([self.then(network, h) for network in self.members])

    def gradient(self, name: str) -> Tensor:
        """Of a shared parameter: that of the first part, and the sum over the members' parts."""
        networks = [self.whole, *self.members]
        parts = [network.get_parameter(name).grad for network in networks]
        return torch.stack([g for g in parts if g is not None]).sum(0)
