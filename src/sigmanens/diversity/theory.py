r"""The map from τ to owners: what the diversity penalty alone prefers, and what it reaches.

An *owner* of a channel is a member with σ(γ) > ½. With k members at 1 and M - k at 0 the bounded
penalty is -[τ log((k e^{1/τ} + M - k)/M) - k/M] (arXiv 2607.23860), which the *preferred* k
minimises. Descent from γ ~ N(0, 1) *reaches* a larger number, which is simulated and cached.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from numbers import Integral, Real

import torch
from torch import Tensor

from sigmanens.errors import DiversityError

_PER_DECADE = 6
_GRID = tuple(0.02 * 10 ** (i / _PER_DECADE) for i in range(3 * _PER_DECADE + 1))  # τ = 0.02 … 20
_CHANNELS = 1024
FLAT = 0.03  # the map is flat where doubling τ adds less than this share of M/2 owners
_TOLERANCE = 0.02  # owners: about the standard error of the simulation


def is_number(value: object) -> bool:
    """Whether a value is a real number, of Python or NumPy, and no bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_temperature(tau: float, where: str = "") -> None:
    """Raise DiversityError unless 0 < τ < ∞."""
    if not is_number(tau) or not 0 < tau < math.inf:
        raise DiversityError(f"tau (τ){where} is {tau!r}; expected a finite number > 0")


def preferred_owners(tau: float, members: int) -> int:
    """Number of owners per channel that minimises the penalty alone: 1 … M/2, never all members.

    Raises:
        DiversityError: for τ ≤ 0 or M < 2.
    """
    check(tau, members)
    if tau > members:  # k* = M/2 - M/(12 τ) + …: nearest integers no longer change
        return int(members // 2)

    def value(k: int) -> float:
        # τ log((k e^{1/τ} + M - k)/M) - k/M without overflow at small τ or cancellation at large τ
        inactive = 1 - k / members
        return inactive + tau * math.log1p(inactive * math.expm1(-1.0 / tau))

    return max(range(1, members), key=value)


def force(s: Tensor, tau: float | Tensor, weight: float) -> Tensor:
    r"""Force :math:`-\partial L/\partial s_m = (\lambda/\tau)(M p_m - 1)` on each scale s = σ(γ).

    p is the softmax of s/τ over the members, so that a member rises if and only if it lies above
    the soft maximum of its channel; on γ the force is s (1 - s) times as large
    (arXiv 2607.23860). s (…, M, N) → (…, M, N).
    """
    return weight / tau * (s.shape[-2] * torch.softmax(s / tau, -2) - 1)


def full_sharing_pull(tau: float, members: int, weight: float) -> float:
    r"""Worth of a channel to a member, in nats of loss, above which all M members share it.

    :math:`\lambda [1/\tau + M \log(1 - (1 - e^{-1/\tau})/M)]`. The penalty rises by so much when
    the last member joins the others at σ(γ) = 1.
    """
    return weight * (1 / tau + members * math.log1p(math.expm1(-1 / tau) / members))


def descent(
    tau: float | Tensor,
    members: int,
    channels: int,
    *,
    weight: float = 1e-2,
    optimizer: Callable[[list[Tensor]], torch.optim.Optimizer] | None = None,
    steps: int = 2000,
    seed: int = 0,
) -> Iterator[Tensor]:
    """Train on the penalty alone from γ ~ N(0, 1): σ(γ) (M, N) at the start and after each step.

    Several temperatures (T, 1, 1) have the same start and give (T, M, N). ``optimizer`` makes the
    optimizer of [γ], without weight decay; by default SGD as for the paper's CNNs: rate 0.1 × 100,
    momentum 0.9. ``weight`` is λ of the "sum" form.
    """
    gamma = torch.randn(members, channels, generator=torch.Generator().manual_seed(seed))
    if isinstance(tau, Tensor):
        gamma = gamma.expand(len(tau), members, channels).clone()
    rule = (optimizer or partial(torch.optim.SGD, lr=10.0, momentum=0.9))([gamma])
    for step in range(steps + 1):
        s = torch.sigmoid(gamma)
        yield s
        if step < steps:
            gamma.grad = -s * (1 - s) * force(s, tau, weight)
            rule.step()


def mean_cosine(s: Tensor) -> Tensor:
    """Mean cosine of pairs of members: (…, M, N) → (…), float64."""
    a, b = torch.triu_indices(s.shape[-2], s.shape[-2], 1, device=s.device)
    unit = torch.nn.functional.normalize(s, dim=-1)
    return (unit @ unit.mT)[..., a, b].double().mean(-1)


def steps_to(path: Sequence[float], cosine: float) -> int | None:
    """The first step of a path of cosines with at most this one; None if there is none."""
    return next((step for step, at in enumerate(path) if at <= cosine), None)


@lru_cache(maxsize=16)
def _reached(members: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Simulate the mean owners and the mean pairwise cosine on the grid of τ."""
    counts: list[float] = []
    cosines: list[float] = []
    # Whatever the default device is, and whether the first call comes under autocast.
    with torch.device("cpu"), torch.autocast("cpu", enabled=False):
        # In groups of τ small enough for the state to stay in the processor's cache.
        for taus in torch.tensor(_GRID).split(max(1, 32 // members)):
            (s,) = deque(descent(taus.view(-1, 1, 1), members, _CHANNELS), maxlen=1)
            counts += (s > 0.5).sum(1).double().mean(1).tolist()
            cosines += mean_cosine(s).tolist()
    return tuple(counts), tuple(cosines)


def _interpolated(tau: float, values: tuple[float, ...]) -> float:
    """Linear in log τ between the points of the grid, constant beyond its ends."""
    last = len(_GRID) - 1
    position = min(max(_PER_DECADE * math.log10(tau / _GRID[0]), 0.0), last)
    i = min(int(position), last - 1)
    return values[i] + (position - i) * (values[i + 1] - values[i])


def reached_owners(tau: float, members: int) -> float:
    """Mean owners per channel after training on the penalty alone from γ ~ N(0, 1).

    The first call for an M simulates a grid of τ by :func:`descent`, which takes a second or two.
    Values between are interpolated in log τ; outside τ = 0.02 … 20 they are constant. At a high τ
    the penalty hardly acts, and 2,000 steps end near the start.

    Raises:
        DiversityError: for τ ≤ 0 or M < 2.
    """
    check(tau, members)
    return _interpolated(tau, _reached(int(members))[0])


def reached_cosine(tau: float, members: int) -> float:
    """Mean pairwise cosine of the scales then; details as of :func:`reached_owners`."""
    check(tau, members)
    return _interpolated(tau, _reached(int(members))[1])


def tau_for_owners(owners: float, members: int) -> float:
    """The smallest τ at which training on the penalty alone reaches a wanted number of owners.

        >>> tau = tau_for_owners(1.5, members=4)            # about 0.3

    Raises:
        DiversityError: if no τ reaches it. The message names the range.
    """
    check_members(members)
    counts = tuple(accumulate(_reached(int(members))[0], max))
    low, high = counts[0], counts[-1]
    if not (is_number(owners) and low - _TOLERANCE <= owners <= high + _TOLERANCE):
        raise DiversityError(
            f"owners={owners!r} is out of reach for {members} members: penalty-only descent ends "
            f"between {low:.2f} (τ = {_GRID[0]:g}) and {high:.2f} owners (τ near {_GRID[-1]:g})"
        )
    wanted = min(max(float(owners), low), high)
    i = next(i for i, count in enumerate(counts) if count >= wanted)
    if i == 0:
        return _GRID[0]
    part = (wanted - counts[i - 1]) / (counts[i] - counts[i - 1])
    return float(_GRID[i - 1] * (_GRID[i] / _GRID[i - 1]) ** part)


def owners_per_doubling(tau: float, members: int) -> float:
    """Rise of the reached owners when τ doubles, around τ; 0 where the map ends."""
    root = math.sqrt(2)
    return reached_owners(tau * root, members) - reached_owners(tau / root, members)


def flat_range(members: int) -> tuple[float, float] | None:
    """Smallest and largest τ at which doubling τ adds ``FLAT`` · M/2 owners or more.

    None for two members, which end with one owner of each channel at every τ.

    Raises:
        DiversityError: for M < 2.
    """
    steep = [tau for tau in _GRID if owners_per_doubling(tau, members) >= FLAT * members / 2]
    return (steep[0], steep[-1]) if steep else None


def check(tau: float, members: int) -> None:
    """Raise DiversityError unless 0 < τ < ∞ and M is an integer ≥ 2."""
    check_temperature(tau)
    check_members(members)


def check_members(members: int) -> None:
    """Raise DiversityError unless M is an integer ≥ 2."""
    if not is_number(members) or not isinstance(members, Integral) or members < 2:
        raise DiversityError(f"members is {members!r}; expected an integer ≥ 2")
