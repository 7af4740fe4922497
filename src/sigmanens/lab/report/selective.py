"""When to trust an answer: errors left at each coverage, and which classes are confused."""

from __future__ import annotations

from typing import Any

from sigmanens.lab.report.curves import Curve, Quantity, curve_section
from sigmanens.lab.report.plot import ACCENT, Panel, Section, axis, layout, plain
from sigmanens.lab.report.study import Group, Stat, Study, dig, numbers

_RISK = Quantity("risk", "errors among the answered", "share of errors", {"rangemode": "tozero"})


def risk_coverage(study: Study) -> Section | None:
    """Risk against coverage; one network, separate ones and the chosen σN-Ens at first."""
    curves = [curve for group in study.groups if (curve := _curve(group)) is not None]
    return curve_section(
        "risk",
        "Answer only where it is sure",
        "The network answers its most confident examples. The curve shows the share of wrong "
        "answers among them. Lower is better. At coverage 1 all are answered. "
        "sigmanens predict --abstain-at-risk chooses the coverage for a risk that you name.",
        [_RISK],
        curves,
        "coverage",
        main=study.leading,
        ends=True,
        xaxis={"range": [0, 1.02]},
    )


def confusion_panel(study: Study, group: Group) -> Panel | None:
    """True by predicted class of the first seed; None where it was not counted."""
    counts = dig(group.row, "confusion")
    rows = [numbers(row) for row in counts] if isinstance(counts, list) else []
    if not rows or any(row is None or len(row) != len(rows) for row in rows):
        return None
    classes = dig(study.metrics, "data", "classes")
    known = isinstance(classes, list) and len(set(classes)) == len(classes) == len(rows)
    names = [plain(str(name)) for name in classes] if known else [str(i) for i in range(len(rows))]
    shares = [[n / (sum(row) or 1.0) for n in row] for row in rows if row is not None]
    trace: dict[str, Any] = {
        "type": "heatmap", "z": shares, "x": names, "y": names, "zmin": 0, "zmax": 1,
        "colorscale": [[0, "#ffffff"], [1, ACCENT]], "showscale": False, "customdata": counts,
        "hovertemplate": "true %{y}, predicted %{x}: %{z:.1%}, %{customdata} examples"
        "<extra></extra>",
    }  # fmt: skip
    ordered = {"type": "category", "autorange": "reversed"}
    axes = axis("predicted class", type="category"), axis("true class", **ordered)
    return Panel("Confusion, share of each true class", [trace], layout(*axes))


def _curve(group: Group) -> Curve | None:
    """The mean over seeds, at the coverages that all of them have."""
    tables = {seed: dig(row, "risk_coverage") for seed, row in group.rows.items()}
    read = {
        seed: dict(zip(x, y, strict=True))
        for seed, table in tables.items()
        if (x := numbers(dig(table, "coverage"))) and (y := numbers(dig(table, "risk")))
        and len(x) == len(y)
    }  # fmt: skip
    if not read:
        return None
    shared = sorted(set.intersection(*map(set, read.values())))
    points = [(at, _at({seed: found[at] for seed, found in read.items()})) for at in shared]
    return Curve(group.label, group.look, points, group) if points else None


def _at(risks: dict[Any, float]) -> Any:
    return lambda key: Stat(risks)
