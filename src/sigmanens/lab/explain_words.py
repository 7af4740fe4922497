"""What ``sigmanens explain`` prints: sentences, a table, and the split as lines of blocks."""

from __future__ import annotations

from sigmanens.lab.explain import Explanation

__all__ = ["HEAD", "MEANING", "bars", "print_explanation", "sentences", "table_rows"]

HEAD = ("τ", "prefers", "reaches", "cosine", "τ doubled", "push leader", "push others")
MEANING = {
    "prefers": "owners per channel that minimise the penalty alone",
    "reaches": "owners where penalty-only descent from γ ~ N(0, 1) ends (SGD, 2,000 steps)",
    "cosine": "mean pairwise cosine of the scales there",
    "τ doubled": "further owners when τ doubles",
    "push leader": "mean −∂L/∂γ at the start, on the largest scale of a channel",
    "push others": "the same on each other scale",
}


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
            "Dial: with two members every τ ends with one owner of each channel. Steer by λ."
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
                "Delay the penalty (a Ramp as its weight), lower λ or the rate, or raise τ."
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
    """One row of words for each τ, under ``HEAD``."""
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
