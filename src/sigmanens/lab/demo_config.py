"""What ``sigmanens demo`` can be told. Imports none of the large libraries."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sigmanens.errors import ConfigError

__all__ = ["DemoConfig"]


@dataclass
class DemoConfig:
    """Size of the demo.

    Attributes:
        members: M.
        taus: temperatures τ of the penalty.
        weight: λ.
        train: number of training pictures.
        epochs: passes over them.
        width: channels of the network's first stage.
        seeds: number of repetitions with other data splits, weights and orders.
        workers: seeds trained side by side, each in a process of its own with one CPU thread
            (more threads do not help networks this small); 1: in this process.
    """

    members: int = 4
    taus: tuple[float, ...] = (0.1, 0.5, 2.0)
    weight: float = 1e-2
    train: int = 200
    epochs: int = 60
    width: int = 16
    seeds: int = 4
    workers: int = 2

    def check(self) -> None:
        """Raise ConfigError for sizes the demo cannot run with."""
        if self.members < 2:
            raise ConfigError(f"members is {self.members}; the demo compares at least 2")
        usable = all(0 < tau < math.inf for tau in self.taus)
        if not self.taus or not usable or len(set(self.taus)) < len(self.taus):
            given = ", ".join(f"{tau:g}" for tau in self.taus) or "empty"
            raise ConfigError(f"taus is {given}; expected at least one τ > 0, each once")
        if not 0 <= self.weight < math.inf:
            raise ConfigError(f"weight is {self.weight:g}; expected λ of at least 0")
        for key in ("epochs", "width", "seeds", "workers"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key} is {getattr(self, key)}; expected at least 1")
