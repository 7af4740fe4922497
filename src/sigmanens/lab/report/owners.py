"""Owners of a channel: how many members share it, in all and layer by layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sigmanens.lab.report import naming
from sigmanens.lab.report.plot import INK, Figure, Panel, axis, colour, hover, layout, plain
from sigmanens.lab.report.study import Group, Study, dig, finite
from sigmanens.lab.report.tables import Cell, Table

__all__ = ["layer_counts", "layer_panel", "layer_table", "owners"]

_SPELT = 24
"""Number of layers up to which the cells of the heat map hold their numbers."""
_NAME = 24
"""Characters of a layer's name that fit beside the heat map; its end tells more than its start."""


def owners(study: Study) -> Figure | None:
    """How many members own a channel, for every method that was measured."""
    found = [(group, share) for group in study.groups if (share := group.owners) is not None]
    if not found:
        return None
    shown = [pair for pair in found if pair[0] in study.main] or found
    ceiling = min(1.0, max(max(share.values()) for _, share in shown) * 1.18)
    means = {group.key: sum(k * part for k, part in share.items()) for group, share in shown}
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
        panels=panels,
        panel_width=210,
        table=Table(
            "Share of channels with k owners",
            ["method", "k", "share"],
            [
                [Cell.of(group.label), Cell.of(k, 0), Cell.of(part)]
                for group, share in found
                for k, part in share.items()
            ],
        ),
    )


def layer_counts(group: Group) -> dict[str, list[float]]:
    """Channels with k = 0 … M owners by layer, summed over seeds; empty where not measured."""
    found: dict[str, list[float]] = {}
    for row in group.rows.values():
        layers = dig(row, "owners_by_layer")
        for name, counts in layers.items() if isinstance(layers, Mapping) else ():
            if not isinstance(counts, Sequence) or isinstance(counts, str) or len(counts) == 0:
                continue
            read = [max(0.0, finite(count) or 0.0) for count in counts]
            known = found.setdefault(str(name), [0.0] * len(read))
            if len(known) == len(read):
                found[str(name)] = [a + b for a, b in zip(known, read, strict=True)]
    widest = max((len(counts) for counts in found.values()), default=0)
    return {k: v for k, v in found.items() if sum(v) > 0 and len(v) == widest}


def layer_panel(group: Group) -> Panel | None:
    """A heat map of the share of each layer's channels that have k owners."""
    found = layer_counts(group)
    if not found:
        return None
    names = list(found)
    shares = [[count / sum(counts) for count in counts] for counts in found.values()]
    ks = list(range(len(shares[0])))
    trace: dict[str, Any] = {
        "type": "heatmap",
        "x": ks,
        "y": list(range(len(names))),
        "z": shares,
        "zmin": 0,
        "zmax": 1,
        "xgap": 1,
        "ygap": 1,
        "colorscale": [[0, "#f1f3f3"], [1, "#4fb8a3"]],
        "showscale": False,
        "hoverinfo": "text",
        "hovertext": [
            [
                hover(name, f"{k} owners: {naming.number(share)} of the channels")
                for k, share in zip(ks, row, strict=True)
            ]
            for name, row in zip(names, shares, strict=True)
        ],
    }
    if len(names) <= _SPELT:
        trace["text"] = [[naming.number(s, 2) if s else "" for s in row] for row in shares]
        trace["texttemplate"] = "%{text}"
        trace["textfont"] = {"size": 11, "color": INK}
    every = max(1, -(-len(names) // 30))
    return Panel(
        title="Owners per layer: share of its channels with k owners",
        traces=[trace],
        layout=layout(
            axis("k, the owners of a channel", tickvals=ks, gridcolor="rgba(0,0,0,0)"),
            axis(
                "",
                tickvals=list(range(0, len(names), every)),
                ticktext=[plain(_short(name)) for name in names[::every]],
                autorange="reversed",
                gridcolor="rgba(0,0,0,0)",
                tickfont={"size": 11},
            ),
        ),
        height=min(620, max(240, 84 + 21 * len(names))),
    )


def layer_table(study: Study) -> Table | None:
    """One line per method and layer: its channels and the mean number of owners."""
    rows = []
    for group in study.groups:
        for name, counts in layer_counts(group).items():
            total = sum(counts)
            mean = sum(k * count for k, count in enumerate(counts)) / total
            shares = [naming.number(count / total, 2) for count in counts]
            rows.append(
                [
                    Cell.of(group.label, group=group),
                    Cell.of(name),
                    Cell.of(total / max(1, len(group.rows)), 0),
                    Cell.of(mean, 2),
                    Cell.of(" · ".join(shares)),
                ]
            )
    if not rows:
        return None
    return Table(
        "Owners per layer",
        ["method", "layer", "channels", "mean owners", "share with 0 · 1 · … · M owners"],
        rows,
    )


def _short(name: str) -> str:
    return name if len(name) <= _NAME else f"…{name[1 - _NAME :]}"
