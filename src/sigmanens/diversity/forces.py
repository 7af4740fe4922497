r"""The forces by which the penalty parts members, and how fast it does under a given optimizer.

With :math:`s = \sigma(\gamma)` of one channel and p their softmax at τ, descent follows

.. math:: -\partial L/\partial s_j = \frac{\lambda}{\tau} (M p_j - 1), \qquad
          -\partial L/\partial\gamma_j = s_j (1 - s_j) \frac{\lambda}{\tau} (M p_j - 1),

so a member rises exactly if it lies above the soft maximum of its channel (arXiv 2607.23860).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from sigmanens.diversity.theory import check_members, check_temperature, is_number
from sigmanens.errors import InputError

__all__ = [
    "OPTIMIZERS",
    "Optimizer",
    "equal_sharing_curvature",
    "force",
    "full_sharing_pull",
    "steps_to",
    "trajectory",
]

OPTIMIZERS = ("sgd", "adam", "adamw")


@dataclass(frozen=True)
class Optimizer:
    """What trains the scales.

    Attributes:
        kind: "sgd", "adam" or "adamw".
        lr: rate of the scales themselves: the base rate times ``scale_lr_mult``.
        momentum: of SGD.
        nesterov: of SGD.

    Raises:
        InputError: for another kind, a rate ≤ 0, or a momentum outside [0, 1).
    """

    kind: str = "sgd"
    lr: float = 10.0
    momentum: float = 0.9
    nesterov: bool = False

    def __post_init__(self) -> None:
        if self.kind not in OPTIMIZERS:
            raise InputError(f"optimizer is {self.kind!r}; expected one of {', '.join(OPTIMIZERS)}")
        if not is_number(self.lr) or not 0 < self.lr < math.inf:
            raise InputError(f"the rate of the scales is {self.lr!r}; expected a finite number > 0")
        if not is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise InputError(f"momentum is {self.momentum!r}; expected a number in [0, 1)")

    def of(self, gamma: Tensor) -> torch.optim.Optimizer:
        """The optimizer, on γ alone and without decay."""
        if self.kind == "sgd":
            nesterov = self.nesterov and self.momentum > 0
            return torch.optim.SGD([gamma], self.lr, momentum=self.momentum, nesterov=nesterov)
        cls = torch.optim.Adam if self.kind == "adam" else torch.optim.AdamW
        return cls([gamma], self.lr, weight_decay=0.0)


def force(s: Tensor, tau: float, weight: float) -> Tensor:
    """Force of the penalty on each σ(γ), -∂L/∂s, positive upwards: s (M, N) → (M, N)."""
    check_temperature(tau)
    return weight / tau * (len(s) * torch.softmax(s / tau, 0) - 1)


def full_sharing_pull(tau: float, members: int, weight: float) -> float:
    r"""Task pull per member, in nats of loss, above which all M members share a channel.

    :math:`\lambda [1/\tau + M \log(1 - (1 - e^{-1/\tau})/M)]`: what the penalty loses, per member,
    when the last member joins the others at σ(γ) = 1. A weaker pull cannot keep it there.

    Raises:
        DiversityError: for τ ≤ 0 or M < 2.
    """
    check_temperature(tau)
    check_members(members)
    return weight * (1 / tau + members * math.log1p(math.expm1(-1 / tau) / members))


def equal_sharing_curvature(tau: float, weight: float) -> float:
    """Curvature of the task's loss in σ(γ), in nats, above which equal members stay equal: λ/τ².

    Close to equal scales the force on member j is (λ/τ²)(s_j - mean s), away from the mean.

    Raises:
        DiversityError: for τ ≤ 0.
    """
    check_temperature(tau)
    return weight / tau**2


def trajectory(
    tau: float,
    members: int,
    weight: float = 1e-2,
    optimizer: Optimizer | None = None,
    *,
    channels: int = 2000,
    steps: int = 1000,
    seed: int = 0,
) -> Tensor:
    """Mean pairwise cosine of σ(γ) after each step of the penalty alone, from γ ~ N(0, 1).

    Args:
        tau: τ > 0.
        members: M ≥ 2.
        weight: λ of the "sum" form.
        optimizer: of the scales; by default SGD as for the paper's CNNs: rate 0.1 × 100,
            momentum 0.9.
        channels: number of channels.
        steps: optimizer steps.
        seed: of the start.

    Returns:
        (steps + 1,) float64; the first is the start, about 0.85.

    Raises:
        DiversityError: for τ ≤ 0 or M < 2.
    """
    check_temperature(tau)
    check_members(members)
    generator = torch.Generator().manual_seed(seed)
    gamma = torch.randn(members, channels, generator=generator)
    descent = (optimizer or Optimizer()).of(gamma)
    a, b = torch.triu_indices(members, members, 1)
    found = []
    for step in range(steps + 1):
        s = torch.sigmoid(gamma)
        unit = torch.nn.functional.normalize(s, dim=1)
        found.append((unit @ unit.T)[a, b].mean())
        if step < steps:
            gamma.grad = -s * (1 - s) * force(s, tau, weight)
            descent.step()
    return torch.stack(found).double()


def steps_to(path: Tensor, cosine: float) -> int | None:
    """First step at which a cosine of :func:`trajectory` is at or below a value; None if never."""
    below = (path <= cosine).nonzero()
    return int(below[0]) if len(below) else None
