"""``sigmanens explain``: what the dial does, before anything is trained.

Everything comes from the penalty alone, from γ ~ N(0, 1): its map from τ to owners, its forces, and
a simulation of the optimizer on a few thousand channels. What the task does to it, no formula says.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sigmanens import theory
from sigmanens.errors import ConfigError, RunError
from sigmanens.split import (
    OPTIMIZERS,
    Optimizer,
    equal_sharing_curvature,
    force,
    full_sharing_pull,
    steps_to,
    trajectory,
)

__all__ = ["ExplainConfig", "Explanation", "Setting", "explain", "print_explanation"]

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
    weight: float = 1e-2
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
        equal_sharing: curvature in nats of the task above which equal members stay equal.
        path: cosine after each optimizer step, from 0 on.
        milestones: step at which the cosine has halved, and has fallen to 0.5, 0.29 and 0.1; None
            if it does not within the simulated steps.
    """

    config: ExplainConfig
    chosen: Setting
    settings: list[Setting]
    steep: tuple[float, float] | None
    full_sharing: float
    equal_sharing: float
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
        tau = 0.1 if config.tau is None else config.tau
    theory.check_temperature(tau)
    generator = torch.Generator().manual_seed(0)
    gamma = torch.randn(members, config.channels, generator=generator)
    settings = [_setting(t, members, weight, gamma) for t in sorted({*TAUS, tau})]
    optimizer = Optimizer(
        config.optimizer, config.lr * config.scale_lr_mult, config.momentum, config.nesterov
    )
    path = trajectory(tau, members, weight, optimizer, channels=config.channels, steps=config.steps)
    start = float(path[0])
    milestones = {f"{start / 2:.2f} (half)": steps_to(path, start / 2)}
    milestones |= {f"{cosine:g}": steps_to(path, cosine) for cosine in MILESTONES}
    return Explanation(
        config,
        next(s for s in settings if s.tau == tau),
        settings,
        theory.flat_range(members),
        full_sharing_pull(tau, members, weight),
        equal_sharing_curvature(tau, weight),
        path.tolist(),
        milestones,
    )


def _setting(tau: float, members: int, weight: float, gamma: torch.Tensor) -> Setting:
    s = torch.sigmoid(gamma)
    pull = s * (1 - s) * force(s, tau, weight)
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


# -- in words ------------------------------------------------------------------------------------


def sentences(found: Explanation) -> list[str]:
    """The explanation of the asked τ, a sentence or two each."""
    config, chosen = found.config, found.chosen
    members, tau = config.members, chosen.tau
    asked = "" if config.owners is None else f" (for owners={config.owners:g})"
    lines = [
        f"Owners: at τ={tau:.3g}{asked} the penalty alone prefers {chosen.preferred} of {members} "
        f"members per channel and reaches {chosen.reached:.2f}, because the random start decides; "
        f"the cosine of the scales then is {chosen.cosine:.2f}, against {found.path[0]:.2f} at the "
        "start.",
    ]
    if found.steep is None:
        lines.append(
            "Dial: with two members every τ ends with one owner of each channel. Steer by λ, or "
            "with target_cosine."
        )
    else:
        low, high = found.steep
        where = "flat" if chosen.flat else "steep enough to steer by"
        lines.append(
            f"Dial: the map from τ to owners can be steered between τ={low:.2g} and τ={high:.2g}, "
            f"and is flat outside. At τ={tau:.3g} it is {where}: doubling τ adds "
            f"{chosen.slope:.2f} owners."
        )
    step = found.rate * chosen.leader
    scale = (
        f"one step of plain SGD at rate {found.rate:g} moves the leader's γ by {step:.2g}"
        if config.optimizer == "sgd"
        else f"{config.optimizer} divides by its size, and moves every γ by up to {found.rate:g} "
        "in each of the first steps"
    )
    lines += [
        f"Force: at the start the penalty pushes γ of a channel's leader by {chosen.leader:.2g} "
        f"and of the others by {chosen.others:.2g} (−∂L/∂γ); {scale}, where γ spreads by 1. The "
        f"penalty counts as much as the task where the task's gradient on γ is about "
        f"{chosen.leader:.1g}.",
        f"Against the task: all {members} members keep a channel only if it is worth more than "
        f"{found.full_sharing:.2g} nats of loss to each; members with equal scales stay equal only "
        f"where the task's loss curves by more than λ/τ² = {found.equal_sharing:.2g}.",
    ]
    known = {name: step for name, step in found.milestones.items() if step is not None}
    if known:
        told = "; ".join(f"{name} after {step} steps" for name, step in known.items())
        late = max(known.values())
        hint = ""
        if late <= 50:
            hint = (
                " That is before a backbone has learnt anything: the partition is a random one. "
                "Delay the penalty (start=0.25), lower λ or the rate, or raise τ."
            )
        lines.append(f"Speed, penalty alone: the cosine is at {told}.{hint}")
    end = found.path[-1]
    never = [name for name, step in found.milestones.items() if step is None]
    if never:
        lines.append(
            f"Within {config.steps} steps it does not come to {', '.join(never)}; it ends at "
            f"{end:.2f}."
        )
    return lines


def table_rows(found: Explanation) -> list[list[str]]:
    """One row of words for each τ, under :data:`HEAD`."""
    return [
        [
            f"{s.tau:.3g}" + (" ←" if s.tau == found.chosen.tau else ""),
            f"{s.preferred}",
            f"{s.reached:.2f}",
            f"{s.cosine:.2f}",
            f"{s.slope:+.2f}" + (" flat" if s.flat else ""),
            f"{s.leader:+.2g}",
            f"{s.others:+.2g}",
        ]
        for s in found.settings
    ]


HEAD = ("τ", "prefers", "reaches", "cosine", "τ doubled", "push leader", "push others")
MEANING = {
    "prefers": "owners per channel that minimise the penalty alone",
    "reaches": "owners where penalty-only descent from γ ~ N(0, 1) ends (SGD, 2,000 steps)",
    "cosine": "mean pairwise cosine of the scales there",
    "τ doubled": "further owners when τ doubles",
    "push leader": "mean −∂L/∂γ at the start, on the largest scale of a channel",
    "push others": "the same on each other scale",
}


def bars(path: list[float], width: int = 40) -> list[str]:
    """The cosine by step as lines of blocks, at steps that grow by about half."""
    shown = [0]
    while shown[-1] < len(path) - 1:
        shown.append(min(len(path) - 1, max(shown[-1] + 1, round(shown[-1] * 1.6))))
    return [f"{step:>6} {path[step]:.2f} {'█' * round(width * path[step])}" for step in shown]


def print_explanation(found: Explanation) -> None:
    """Print it with rich: a table, the cosine by step, and what it means."""
    from rich.console import Console
    from rich.table import Table

    console, config = Console(), found.config
    momentum = f", momentum {config.momentum:g}" if config.optimizer == "sgd" else ""
    table = Table(
        title=f"{config.members} members, λ={config.weight:g}: the penalty alone",
        caption="owners are members with σ(γ) > ½; push is −∂L/∂γ at the start",
    )
    for name in HEAD:
        table.add_column(name, justify="right", no_wrap=True)
    for row in table_rows(found):
        table.add_row(*row)
    console.print(table)
    console.print(
        f"\nCosine of the scales by step, τ={found.chosen.tau:.3g}, {config.optimizer} at rate "
        f"{found.rate:g} ({config.lr:g} × {config.scale_lr_mult:g}){momentum}:",
        highlight=False,
    )
    for line in bars(found.path):
        console.print(line, highlight=False)
    console.print()
    for line in sentences(found):
        console.print(f"• {line}", highlight=False)


def write_page(found: Explanation, out: Path) -> Path:
    """Write the page of plots and tables; see :mod:`sigmanens.lab.explain_page`.

    Raises:
        RunError: if the file exists, or cannot be written. MissingPackageError: without plotly.
    """
    from sigmanens.lab.explain_page import render

    if out.exists():
        raise RunError(f"{out} exists already; give another --out")
    text = render(found)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as e:
        raise RunError(f"{out} cannot be written: {e.strerror or e}") from e
    return out


def as_config(values: dict[str, Any]) -> ExplainConfig:
    """The configuration from parsed options."""
    names = ExplainConfig.__dataclass_fields__
    return ExplainConfig(**{k: v for k, v in values.items() if k in names})
