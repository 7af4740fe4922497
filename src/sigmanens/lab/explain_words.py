"""What ``sigmanens explain`` prints: a table and three sentences."""

from __future__ import annotations

from collections.abc import Callable

from sigmanens.lab.explain import Explanation, Setting

COLUMNS: dict[str, tuple[str, Callable[[Setting], str], str]] = {
    "prefers": (
        "preferred",
        lambda s: f"{s.preferred}",
        "owners per channel that minimise the penalty alone",
    ),
    "reaches": (
        "reached",
        lambda s: f"{s.reached:.2f}",
        "owners where penalty-only descent from γ ~ N(0, 1) ends (SGD, 2,000 steps)",
    ),
    "cosine": ("cosine", lambda s: f"{s.cosine:.2f}", "mean pairwise cosine of the scales there"),
    "τ doubled": (
        "slope",
        lambda s: f"{s.slope:+.2f}" + (" flat" if s.flat else ""),
        "further owners when τ doubles",
    ),
    "push leader": (
        "leader",
        lambda s: f"{s.leader:+.2g}",
        "mean −∂L/∂γ at the start, on the largest scale of a channel",
    ),
    "push others": ("others", lambda s: f"{s.others:+.2g}", "the same on each other scale"),
}
"""Columns after τ: the field of a setting, how it is written, what it means."""


def sentences(found: Explanation) -> dict[str, str]:
    """Three sentences on the asked τ, by topic: owners, force and speed."""
    config, chosen = found.config, found.chosen
    asked = "" if config.owners is None else f" (for owners={config.owners:g})"
    if found.steep is None:
        dial = "with two members every τ ends there: steer by λ"
    else:
        low, high = found.steep
        flat = "too little to steer by" if chosen.flat else "enough to steer by"
        dial = f"doubling τ adds {chosen.slope:.2f} owners, {flat}"
        dial += f" (steep: τ={low:.2g} to {high:.2g})"
    reached = {name: step for name, step in found.milestones.items() if step is not None}
    speed = ", ".join(f"{name} after {step} steps" for name, step in reached.items())
    if not reached:
        speed = f"{found.path[-1]:.2f} after {config.steps} steps"
    hint = ""
    if reached and max(reached.values()) <= 50:
        hint = " (before a backbone has learnt: delay the penalty with a Ramp, or lower λ)"
    return {
        "Owners": f"at τ={chosen.tau:.3g}{asked} the penalty alone prefers {chosen.preferred} of "
        f"{config.members} members per channel and reaches {chosen.reached:.2f}, with a cosine of "
        f"{chosen.cosine:.2f}; {dial}.",
        "Force": f"at the start it pushes γ of a channel's largest scale by {chosen.leader:.2g} "
        f"and of the others by {chosen.others:.2g}; all members keep a channel only if it is worth "
        f"more than {found.full_sharing:.2g} nats of loss to each.",
        "Speed": f"with {config.optimizer} at rate {found.rate:g} of γ the cosine goes from "
        f"{found.path[0]:.2f} to {speed}{hint}.",
    }


def tau_text(found: Explanation, setting: Setting) -> str:
    """τ, with an arrow beside the asked one."""
    return f"{setting.tau:.3g}" + (" ←" if setting.tau == found.chosen.tau else "")


def print_explanation(found: Explanation) -> None:
    """Print the table and the sentences with rich."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    table = Table(
        title=f"{found.config.members} members, λ={found.config.weight:g}: the penalty alone",
        caption="owners are members with σ(γ) > ½; push is −∂L/∂γ at the start",
    )
    for name in ("τ", *COLUMNS):
        table.add_column(name, justify="right", no_wrap=True)
    for s in found.settings:
        table.add_row(tau_text(found, s), *(text(s) for _, text, _ in COLUMNS.values()))
    console.print(table)
    for topic, line in sentences(found).items():
        console.print(f"• {topic}: {line}", highlight=False)
