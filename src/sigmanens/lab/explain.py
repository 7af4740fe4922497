"""``sigmanens explain``: what the dial does, before anything is trained.

Everything comes from the penalty alone, from γ ~ N(0, 1): its map from τ to owners, its forces, and
a simulation of the optimizer on a few thousand channels. What the task does to it, no formula says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sigmanens.diversity import theory
from sigmanens.diversity.defaults import DEFAULT_TAU, DEFAULT_WEIGHT
from sigmanens.errors import ConfigError

OPTIMIZERS = ("sgd", "adam", "adamw")
TAUS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
MILESTONES = (0.5, 0.29, 0.1)  # cosines whose step is told


@dataclass
class ExplainConfig:
    """What to explain.

    Attributes:
        members: M.
        tau: τ; none: 0.1, or what ``owners`` asks for.
        owners: wanted owners per channel, in the place of τ.
        weight: λ.
        optimizer: of the scales: "sgd", "adam" or "adamw".
        lr: base learning rate.
        scale_lr_mult: factor on the rate of the scales.
        momentum: of SGD.
        nesterov: Nesterov momentum.
        steps: optimizer steps to simulate.
        channels: channels to simulate.
    """

    members: int = 4
    tau: float | None = None
    owners: float | None = None
    weight: float = DEFAULT_WEIGHT
    optimizer: str = "sgd"
    lr: float = 0.1
    scale_lr_mult: float = 100.0
    momentum: float = 0.9
    nesterov: bool = False
    steps: int = 500
    channels: int = 2000

    def check(self) -> None:
        """Raise ConfigError for values that mean nothing."""
        if self.tau is not None and self.owners is not None:
            raise ConfigError("tau and owners are given, each of which sets τ; give one of them")
        if self.optimizer not in OPTIMIZERS:
            raise ConfigError(
                f"optimizer is {self.optimizer!r}; expected one of {', '.join(OPTIMIZERS)}"
            )
        if not 0 < self.weight < float("inf"):
            raise ConfigError(f"weight is {self.weight:g}; expected λ > 0")
        if self.lr <= 0 or self.scale_lr_mult <= 0 or not 0 <= self.momentum < 1:
            raise ConfigError("expected lr > 0, scale_lr_mult > 0 and momentum in [0, 1)")
        if not 10 <= self.steps <= 20_000 or not 100 <= self.channels <= 100_000:
            raise ConfigError("expected 10 to 20000 steps and 100 to 100000 channels")


@dataclass(frozen=True)
class Setting:
    """What the penalty does at one τ.

    Attributes:
        tau: τ.
        preferred: owners per channel that the penalty alone prefers.
        reached: owners where penalty-only descent ends.
        cosine: of the scales there.
        slope: further owners when τ doubles.
        flat: whether that is too little to steer by.
        leader: mean force on γ of a channel's largest scale at the start, -∂L/∂γ.
        others: mean force on γ of the others.
    """

    tau: float
    preferred: int
    reached: float
    cosine: float
    slope: float
    flat: bool
    leader: float
    others: float


@dataclass(frozen=True)
class Explanation:
    """All of it.

    Attributes:
        config: what was asked.
        chosen: the asked τ.
        settings: the asked τ among others, by rising τ.
        steep: τ between which τ steers the owners; None: nowhere.
        full_sharing: task pull in nats per member above which all members keep a channel.
        path: cosine after each optimizer step, from 0 on.
        milestones: step at which the cosine has halved, and has fallen to 0.5, 0.29 and 0.1; None
            if it does not within the simulated steps.
    """

    config: ExplainConfig
    chosen: Setting
    settings: list[Setting]
    steep: tuple[float, float] | None
    full_sharing: float
    path: list[float]
    milestones: dict[str, int | None]

    @property
    def rate(self) -> float:
        """Learning rate of γ."""
        return self.config.lr * self.config.scale_lr_mult


def explain(config: ExplainConfig) -> Explanation:
    """Compute what is to be told.

    Raises:
        ConfigError: for values that mean nothing. DiversityError: for an M or τ that is none, or
            owners out of reach.
    """
    config.check()
    members, weight = config.members, config.weight
    theory.check_members(members)
    if config.owners is not None:
        tau = theory.tau_for_owners(config.owners, members)
    else:
        tau = DEFAULT_TAU if config.tau is None else config.tau
    theory.check_temperature(tau)
    generator = torch.Generator().manual_seed(0)
    gamma = torch.randn(members, config.channels, generator=generator)
    settings = [_setting(t, members, weight, gamma) for t in sorted({*TAUS, tau})]
    optimizer = _optimizer(config)
    states = theory.descent(
        tau, members, config.channels, weight=weight, optimizer=optimizer, steps=config.steps
    )
    path = [float(theory.mean_cosine(s)) for s in states]
    half = path[0] / 2
    milestones = {f"{half:.2f} (half)": theory.steps_to(path, half)}
    milestones |= {f"{cosine:g}": theory.steps_to(path, cosine) for cosine in MILESTONES}
    return Explanation(
        config,
        next(s for s in settings if s.tau == tau),
        settings,
        theory.flat_range(members),
        theory.full_sharing_pull(tau, members, weight),
        path,
        milestones,
    )


def _optimizer(config: ExplainConfig) -> Callable[[list[torch.Tensor]], torch.optim.Optimizer]:
    """Makes the optimizer of the scales, without weight decay."""
    lr = config.lr * config.scale_lr_mult
    if config.optimizer == "sgd":
        nesterov = config.nesterov and config.momentum > 0
        return partial(torch.optim.SGD, lr=lr, momentum=config.momentum, nesterov=nesterov)
    cls = torch.optim.Adam if config.optimizer == "adam" else torch.optim.AdamW
    return partial(cls, lr=lr, weight_decay=0.0)


def _setting(tau: float, members: int, weight: float, gamma: torch.Tensor) -> Setting:
    s = torch.sigmoid(gamma)
    pull = s * (1 - s) * theory.force(s, tau, weight)
    leads = s == s.amax(0)
    slope = theory.owners_per_doubling(tau, members)
    return Setting(
        tau,
        theory.preferred_owners(tau, members),
        theory.reached_owners(tau, members),
        theory.reached_cosine(tau, members),
        slope,
        slope < theory.FLAT * members / 2,
        float(pull[leads].mean()),
        float(pull[~leads].mean()),
    )


def as_config(values: dict[str, Any]) -> ExplainConfig:
    """The configuration from parsed options."""
    names = ExplainConfig.__dataclass_fields__
    return ExplainConfig(**{k: v for k, v in values.items() if k in names})
