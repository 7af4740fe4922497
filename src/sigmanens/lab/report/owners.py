"""Owners of a channel: how many members share it, in all and layer by layer."""

from __future__ import annotations

from sigmanens.lab.report.curves import Curve, Quantity, curve_section, fixed
from sigmanens.lab.report.plot import INK, Panel, Section, axis, layout, plain
from sigmanens.lab.report.study import Group, Study, dig, numbers

_NAME = 24
"""Characters of a layer's name that fit beside the heat map; its end tells more than its start."""


def counts(group: Group, *path: str) -> list[float]:
    """Channels with k = 0 … M owners at ``path``, summed over seeds; empty where not measured."""
    found = [c for row in group.rows.values() if (c := numbers(dig(row, *path))) is not None]
    alike = [c for c in found if len(c) == len(found[0])]
    total = [sum(max(0.0, count) for count in column) for column in zip(*alike, strict=True)]
    return total if sum(total) > 0 else []


def layer_counts(group: Group) -> dict[str, list[float]]:
    """The same layer by layer."""
    found = {name: counts(group, "owners_by_layer", name) for name in group.keys("owners_by_layer")}
    widest = max((len(layer) for layer in found.values()), default=0)
    return {name: layer for name, layer in found.items() if layer and len(layer) == widest}


def owners(study: Study) -> Section | None:
    """How many members own a channel, for every method that was measured."""
    found = [(group, total) for group in study.groups if (total := counts(group, "owners"))]
    curves = [
        Curve(
            group.label,
            group.look,
            fixed((k, count / sum(total)) for k, count in enumerate(total)),
            group,
            width=3.5 if group is study.chosen else 1.8,
            marked=True,
        )
        for group, total in found
    ]
    widest = max((len(total) for _, total in found), default=0)
    shares = "share of the channels with k owners"
    return curve_section(
        "owners",
        "Owners per channel",
        "A member owns a channel when its scale σ(γ) exceeds one half. A small τ gives channels to "
        "few members, a large τ lets more of them share. Pooled over seeds.",
        [Quantity("share", shares, "share", {"rangemode": "tozero"})],
        curves,
        "owners of a channel",
        main=study.main,
        xaxis={"tickvals": list(range(widest))},
    )


def layer_panel(group: Group) -> Panel | None:
    """A heat map of the share of each layer's channels that have k owners."""
    found = layer_counts(group)
    if not found:
        return None
    names = list(found)
    shares = [[count / sum(layer) for count in layer] for layer in found.values()]
    ks = list(range(len(shares[0])))
    trace = {
        "type": "heatmap",
        "x": ks,
        "y": [plain(name) for name in names],
        "z": shares,
        "zmin": 0,
        "zmax": 1,
        "xgap": 1,
        "ygap": 1,
        "colorscale": [[0, "#f1f3f3"], [1, "#4fb8a3"]],
        "showscale": False,
        "texttemplate": "%{z:.2f}",
        "textfont": {"size": 11, "color": INK},
        "hovertemplate": "%{y}<br>%{x} owners: %{z:.3f} of the channels<extra></extra>",
    }
    short = [name if len(name) <= _NAME else f"…{name[1 - _NAME :]}" for name in names]
    down = {"type": "category", "tickvals": trace["y"], "ticktext": [plain(s) for s in short]}
    return Panel(
        "Owners per layer: share of its channels with k owners",
        [trace],
        layout(
            axis("k, the owners of a channel", tickvals=ks),
            axis("", autorange="reversed", tickfont={"size": 11}, **down),
        ),
        max(240, 84 + 18 * len(names)),
    )
