r"""The forces of the penalty on the scales, and how fast they part the members.

With :math:`s = \sigma(\gamma)` of one channel and p their softmax at τ, descent follows

.. math:: -\partial L/\partial s_j = \frac{\lambda}{\tau} (M p_j - 1), \qquad
          -\partial L/\partial\gamma_j = s_j (1 - s_j) \frac{\lambda}{\tau} (M p_j - 1),

so a member rises if and only if it lies above the soft maximum of its channel (arXiv 2607.23860).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from sigmanens.diversity.theory import check, check_temperature


def force(s: Tensor, tau: float, weight: float) -> Tensor:
    """Force -∂L/∂s of the penalty on each scale s = σ(γ), positive upwards: s (M, N) → (M, N)."""
    check_temperature(tau)
    return weight / tau * (len(s) * torch.softmax(s / tau, 0) - 1)


def full_sharing_pull(tau: float, members: int, weight: float) -> float:
    r"""Worth of a channel to a member, in nats of loss, above which all M members share it.

    :math:`\lambda [1/\tau + M \log(1 - (1 - e^{-1/\tau})/M)]`. The penalty rises by so much when
    the last member joins the others at σ(γ) = 1.

    Raises:
        DiversityError: for τ ≤ 0 or M < 2.
    """
    check(tau, members)
    return weight * (1 / tau + members * math.log1p(math.expm1(-1 / tau) / members))


def equal_sharing_curvature(tau: float, weight: float) -> float:
    """Curvature λ/τ² of the task's loss in σ(γ), in nats, above which equal members stay equal.

    Near equal scales the penalty pushes member j away from the mean by (λ/τ²)(s_j - mean s).
    """
    check_temperature(tau)
    return weight / tau**2


def trajectory(
    tau: float,
    members: int,
    weight: float = 1e-2,
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None,
    *,
    channels: int = 2000,
    steps: int = 1000,
    seed: int = 0,
) -> Tensor:
    """Train on the penalty alone from γ ~ N(0, 1), and measure the cosine of σ(γ) at each step.

    Args:
        tau, members, weight: τ > 0, M ≥ 2, and λ of the "sum" form.
        optimizer: makes the optimizer of [γ], without weight decay; by default SGD as for the
            paper's CNNs: rate 0.1 × 100, momentum 0.9.
        channels, steps, seed: number of channels and optimizer steps; seed of the start.

    Returns:
        mean pairwise cosines (steps + 1,), float64; the first is that of the start, about 0.85.

    Raises:
        DiversityError: for τ ≤ 0 or M < 2.
    """
    check(tau, members)
    generator = torch.Generator().manual_seed(seed)
    gamma = torch.randn(members, channels, generator=generator)
    descent = (optimizer or partial(torch.optim.SGD, lr=10.0, momentum=0.9))([gamma])
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
    """The first step of :func:`trajectory` with at most this cosine; None if there is none."""
    below = (path <= cosine).nonzero()
    return int(below[0]) if len(below) else None
