"""How a run's OOD scores are distributed, on the test data and on each OOD set."""

from __future__ import annotations

from sigmanens.lab.report import naming
from sigmanens.lab.report.curves import Curve, Quantity, curve_panels, fixed
from sigmanens.lab.report.naming import Look
from sigmanens.lab.report.plot import INK, Panel, series
from sigmanens.lab.report.study import Group, Study, dig, numbers


def histograms(group: Group) -> dict[str, tuple[list[float], dict[str, list[float]]]]:
    """Edges of the bins, and the counts by set with those of the test data as "", by score.

    Of the first seed that has any; empty where none was kept.
    """
    for row in group.rows.values():
        found = {}
        for score in group.keys("ood_histograms"):
            table = dig(row, "ood_histograms", score)
            edges, inside = numbers(dig(table, "edges")) or [], numbers(dig(table, "inside")) or []
            sets = dig(table, "sets")
            read = {n: numbers(dig(sets, n)) for n in group.keys("ood_histograms", score, "sets")}
            fit = {n: c for n, c in read.items() if c is not None and len(c) == len(inside)}
            if fit and len(edges) == len(inside) + 1 and min(inside) >= 0:
                found[score] = edges, {"": inside, **fit}
        if found:
            return found
    return {}


def score_panels(study: Study, group: Group) -> list[Panel]:
    """One plot per score: the share of the samples in each bin, a line for each set."""
    panels = []
    for score, (edges, counts) in histograms(group).items():
        curves = []
        for i, (name, values) in enumerate(counts.items()):
            shares = [value / (sum(values) or 1.0) for value in values]
            points = fixed(zip(edges, [*shares, shares[-1]], strict=True))
            look = series(i - 1) if name else Look(INK, "solid")
            curves.append(
                Curve(naming.words(name) if name else f"{study.split} data", look, points)
            )
        quantity = Quantity(
            "share", f"OOD score: {naming.words(score)}", "share of the samples",
            {"rangemode": "tozero"},
        )  # fmt: skip
        across = "score (further right = more OOD)"
        for panel in curve_panels(
            [quantity], curves, across, xaxis={"nticks": 6}, height=300, keyed=True
        ):
            for trace in panel.traces:
                trace["line"]["shape"] = "hv"
            panel.traces[0] |= {"fill": "tozeroy", "fillcolor": "rgba(28, 33, 38, .12)"}
            panels.append(panel)
    return panels
