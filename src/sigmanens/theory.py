r"""What the diversity penalty alone prefers, and what it reaches: the map from τ to owners.

An *owner* of a channel is a member with σ(γ) > ½. With k members at 1 and M - k at 0 the bounded
penalty is -[τ log((k e^{1/τ} + M - k)/M) - k/M]; its minimiser over integers is what the penalty
*prefers*. Every corner 1 ≤ k < M is locally stable, so what gradient descent *reaches* from
γ ~ N(0, 1) depends on the start and is larger; it is simulated here and cached.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from sigmanens.errors import DiversityError

__all__ = ["descend", "preferred_owners", "reached_cosine", "reached_owners", "tau_for_owners"]

_GRID = tuple(0.02 * 10 ** (i / 12) for i in range(37))  # τ = 0.02 … 20
_CHANNELS = 1024


def check_temperature(tau: float) -> None:
    """Raise DiversityError unless 0 < τ < ∞."""
    if isinstance(tau, bool) or not isinstance(tau, (int, float)) or not 0 < tau < math.inf:
        raise DiversityError(f"tau (τ) is {tau!r}; expected a finite number > 0")


def preferred_owners(tau: float, members: int) -> int:
    """Owners per channel that minimise the penalty alone, among 1 … M (M > 1).

    Args:
        tau: softmax temperature τ > 0.
        members: M ≥ 2.

    Raises:
        DiversityError: for τ ≤ 0 or M < 2.
    """
    check_temperature(tau)
    _check_members(members)

    def value(k: int) -> float:
        # log((k e^{1/τ} + M - k) / M), scaled by e^{-1/τ} so that small τ does not overflow
        rest = (members - k) * math.exp(-1.0 / tau)
        return tau * (1.0 / tau + math.log((k + rest) / members)) - k / members

    return max(range(1, members + 1), key=value)


def descend(
    tau: Tensor,
    members: int,
    channels: int,
    *,
    weight: float = 1e-2,
    lr: float = 10.0,
    momentum: float = 0.9,
    steps: int = 2000,
    seed: int = 0,
) -> Tensor:
    """Scales at which SGD on the penalty alone ends, started at γ ~ N(0, 1).

    Args:
        tau: temperatures (T,), simulated side by side from the same start.
        members: M.
        channels: N channels.
        weight: λ.
        lr: learning rate of γ.
        momentum: of SGD.
        steps: SGD steps.
        seed: of the start.

    Returns:
        σ(γ) (T, M, N).
    """
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(members, channels, generator=generator)
    gamma = start.expand(len(tau), members, channels).clone()
    velocity = torch.zeros_like(gamma)
    t = tau.view(-1, 1, 1)
    for _ in range(steps):
        s = torch.sigmoid(gamma)
        p = torch.softmax(s / t, 1)
        gradient = weight / t * s * (1 - s) * (1 - members * p)
        velocity.mul_(momentum).add_(gradient)
        gamma.sub_(velocity, alpha=lr)
    return torch.sigmoid(gamma)


@lru_cache(maxsize=16)
def _reached(members: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean owners and mean pairwise cosine on the grid of τ, by simulation."""
    s = descend(torch.tensor(_GRID), members, _CHANNELS)
    counts = (s > 0.5).sum(1).double().mean(1)
    unit = torch.nn.functional.normalize(s, dim=2)
    a, b = torch.triu_indices(members, members, 1)
    cosines = (unit @ unit.transpose(1, 2))[:, a, b].double().mean(1)
    return tuple(counts.tolist()), tuple(cosines.tolist())


def _interpolated(tau: float, values: tuple[float, ...]) -> float:
    if tau <= _GRID[0]:
        return values[0]
    if tau >= _GRID[-1]:
        return values[-1]
    position = 12 * math.log10(tau / _GRID[0])
    i = min(int(position), len(_GRID) - 2)
    return values[i] + (position - i) * (values[i + 1] - values[i])


def reached_owners(tau: float, members: int) -> float:
    """Mean owners per channel where penalty-only descent from γ ~ N(0, 1) ends.

    SGD with λ = 10⁻², γ rate 10, momentum 0.9, 2,000 steps, simulated once per M on a grid of τ
    and interpolated in log τ; constant outside τ = 0.02 … 20.

    Args:
        tau: softmax temperature τ > 0.
        members: M ≥ 2.

    Raises:
        DiversityError: for τ ≤ 0 or M < 2.
    """
    check_temperature(tau)
    _check_members(members)
    return _interpolated(tau, _reached(members)[0])


def reached_cosine(tau: float, members: int) -> float:
    """Mean pairwise cosine of the scales where penalty-only descent ends; as :func:`reached_owners`."""
    check_temperature(tau)
    _check_members(members)
    return _interpolated(tau, _reached(members)[1])


def tau_for_owners(owners: float, members: int) -> float:
    """The τ at which penalty-only descent reaches a wanted number of owners.

    Args:
        owners: wanted mean number of owners per channel.
        members: M ≥ 2.

    Raises:
        DiversityError: if no τ reaches it; the message gives the range.
    """
    _check_members(members)
    counts = _reached(members)[0]
    low, high = counts[0], counts[-1]
    if not low <= owners <= high:
        raise DiversityError(
            f"owners={owners} is out of reach for {members} members: penalty-only descent ends "
            f"between {low:.2f} (τ = {_GRID[0]:g}) and {high:.2f} (τ = {_GRID[-1]:g})"
        )
    left, right = _GRID[0], _GRID[-1]
    for _ in range(60):
        middle = math.sqrt(left * right)
        if _interpolated(middle, counts) < owners:
            left = middle
        else:
            right = middle
    return math.sqrt(left * right)


def _check_members(members: int) -> None:
    if isinstance(members, bool) or not isinstance(members, int) or members < 2:
        raise DiversityError(f"members is {members!r}; expected an integer ≥ 2")
