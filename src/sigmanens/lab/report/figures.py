"""The figures of a report, in their order: those under noise and of owners are made here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sigmanens.lab.report import naming
from sigmanens.lab.report.compare import METRICS, interval
from sigmanens.lab.report.dial import by_members, by_tau, by_weight
from sigmanens.lab.report.frontier import frontier
from sigmanens.lab.report.plot import (
    INK,
    Figure,
    Panel,
    axis,
    colour,
    hover,
    layout,
    others,
)
from sigmanens.lab.report.reliability import reliability
from sigmanens.lab.report.study import Group, Study
from sigmanens.lab.report.tables import Cell, Table, bounded
from sigmanens.lab.report.training import training

__all__ = ["FIGURES", "figures", "owners", "severity"]


def owners(study: Study) -> Figure | None:
    """How many members own a channel, for every method that was measured."""
    found = [(group, share) for group in study.groups if (share := group.owners) is not None]
    if not found:
        return None
    main = study.main
    shown = sorted(found, key=lambda pair: pair[0] not in main)
    first = sum(group in main for group, _ in found)
    ceiling = min(1.0, max(max(share.values()) for _, share in shown) * 1.18)
    means = {group.key: sum(k * part for k, part in share.items()) for group, share in shown}
    named = shown[: first or len(shown)]
    said = [f"{naming.number(means[group.key], 2)} at {group.label}" for group, _ in named]
    panels = []
    for group, share in shown:
        trace = {
            "type": "bar",
            "x": list(share),
            "y": list(share.values()),
            "text": [naming.number(part, 2) if part else "" for part in share.values()],
            "textposition": "outside",
            "textfont": {"size": 11, "color": INK},
            "cliponaxis": False,
            "marker": {"color": colour(group)},
            "hoverinfo": "text",
            "hovertext": [
                hover(group.label, f"{k} owners: {naming.number(part)} of the channels")
                for k, part in share.items()
            ],
        }
        panels.append(
            Panel(
                title=f"mean {naming.number(means[group.key], 2)}",
                group=group,
                traces=[trace],
                layout=layout(
                    axis("owners of a channel", tickvals=list(share), gridcolor="rgba(0,0,0,0)"),
                    axis("share of channels", range=[0, ceiling]),
                    bargap=0.15,
                ),
                height=230,
            )
        )
    return Figure(
        key="owners",
        title="Owners per channel",
        caption=(
            "A member owns a channel when its scale σ(γ) exceeds one half. A small τ gives "
            "channels to few members, a large τ lets more of them share. Pooled over seeds."
        ),
        summary=f"Mean number of owners per channel: {', '.join(said)}.",
        panels=panels,
        panel_width=210,
        first=first if 0 < first < len(shown) else None,
        table=Table(
            "Share of channels with k owners",
            ["method", "k", "share"],
            [
                [Cell.of(group.label), Cell.of(k, 0), Cell.of(part)]
                for group, share in shown
                for k, part in share.items()
            ],
        ),
    )


def severity(study: Study) -> Figure | None:
    """ECE, accuracy and NLL of every method against the severity of the corruption."""
    levels = ["0", *study.severities]
    shown = [g for g in study.groups if any(g.corruption(s, "ece").by_seed for s in levels[1:])]
    if not shown:
        return None
    keys = [k for k in ("ece", "accuracy", "nll") if shown[0].corruption(levels[-1], k).by_seed]
    kinds = [naming.words(kind) for kind in study.kinds]
    over = "the examples of all kinds together, which are" if study.pooled else "the mean over"
    what = kinds[0] if len(kinds) == 1 else f"{over} {', '.join(kinds)}"
    ranked = sorted(shown, key=lambda g: g.corruption(levels[-1], "ece").mean or 0.0)
    first, last = ranked[0], ranked[-1]
    return Figure(
        key="severity",
        title="Under corruption",
        caption=(
            f"Corruption: {what}. Severity 0 is the clean {study.split} data. Means over seeds; "
            "hover for the spread."
        ),
        summary=(
            f"At severity {levels[-1]} the ECE is lowest for {first.label} "
            f"({first.corruption(levels[-1], 'ece')}) and highest for {last.label} "
            f"({last.corruption(levels[-1], 'ece')})."
        ),
        panels=[
            Panel(
                title=f"{_sentence(METRICS[key].name)} ({METRICS[key].better} is better)",
                traces=[_severity_line(study, group, levels, key) for group in shown],
                layout=layout(
                    axis("severity", tickvals=[int(s) for s in levels]),
                    axis(METRICS[key].name, rangemode="normal" if key == "accuracy" else "tozero"),
                ),
            )
            for key in keys
        ],
        legend=shown,
        rest=others(shown, study.main),
        table=Table(
            "Numbers under corruption",
            ["method", "severity", *(METRICS[key].name for key in keys)],
            [
                [
                    Cell.of(group.label),
                    Cell.of(int(level), 0),
                    *(_corrupted(group, level, key) for key in keys),
                ]
                for group in shown
                for level in levels
            ],
        ),
    )


def _corrupted(group: Group, level: str, key: str) -> Cell:
    """The spread over seeds, or the interval of a single one where it was measured."""
    stat = group.corruption(level, key)
    within = ("intervals", key) if level == "0" else ("corruption_pooled", level, "intervals", key)
    ends = interval(group, *within)
    return Cell.of(stat) if ends is None else bounded(stat.mean, ends)


def _severity_line(study: Study, group: Group, levels: list[str], key: str) -> dict[str, Any]:
    points = [(level, group.corruption(level, key)) for level in levels]
    known = [(level, stat) for level, stat in points if stat.mean is not None]
    chosen = group is study.chosen
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "x": [int(level) for level, _ in known],
        "y": [stat.mean for _, stat in known],
        "line": {
            "color": colour(group),
            "width": 3.5 if chosen else 1.8,
            "dash": group.look.dash,
        },
        "marker": {"symbol": group.look.symbol, "size": 9 if chosen else 7},
        "cliponaxis": False,
        "meta": group.key,
        "hoverinfo": "text",
        "hovertext": [
            hover(group.label, f"severity {level}", f"{METRICS[key].name} {stat}")
            for level, stat in known
        ],
    }


def _sentence(text: str) -> str:
    """``text`` with a capital first letter, Greek left alone."""
    return text if text.startswith("σ") else text[:1].upper() + text[1:]


FIGURES: Sequence[Callable[[Study], Figure | None]] = (
    frontier, by_tau, by_weight, by_members, reliability, severity, owners, training,
)  # fmt: skip
"""The figures of a page in their order; each returns None where the run has nothing for it."""


def figures(study: Study) -> list[Figure]:
    """The figures that this run has numbers for."""
    return [figure for build in FIGURES if (figure := build(study)) is not None]
