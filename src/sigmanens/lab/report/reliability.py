"""Reliability: accuracy against confidence, bin by bin."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from sigmanens.lab.plain import finite
from sigmanens.lab.report.curves import Curve, Quantity, curve_panels, curve_section
from sigmanens.lab.report.plot import MUTED, Panel, Section
from sigmanens.lab.report.study import Group, Stat, Study, dig, numbers

_LISTS = ("count", "confidence", "accuracy")


@dataclass(frozen=True)
class Bin:
    """A confidence bin with samples in it, pooled over seeds; ``count`` is the mean of a seed."""

    count: float
    confidence: float
    accuracy: float

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95 % interval of the accuracy, from the samples of one seed."""
        n, p, z = self.count, self.accuracy, 1.96
        middle = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z / (1 + z * z / n) * (p * (1 - p) / n + z * z / (4 * n * n)) ** 0.5
        return max(0.0, middle - half), min(1.0, middle + half)


def bins(group: Group) -> list[Bin]:
    """The reliability bins of a group that hold samples; empty where not measured."""
    pooled: dict[tuple[float, float], list[Bin]] = {}
    tables = 0
    for row in group.rows.values():
        edges = numbers(dig(row, "reliability", "edges")) or []
        lists = [dig(row, "reliability", name) for name in _LISTS]
        if not all(isinstance(v, list | tuple) and len(v) == len(edges) - 1 for v in lists):
            continue
        tables += 1
        for ends, *entry in zip(pairwise(edges), *lists, strict=True):
            known = [value for item in entry if (value := finite(item)) is not None]
            if len(known) == 3 and known[0] > 0 and all(0 <= share <= 1 for share in known[1:]):
                pooled.setdefault(ends, []).append(Bin(*known))
    found = []
    for _, entries in sorted(pooled.items()):
        total = sum(b.count for b in entries)
        confidence = sum(b.count * b.confidence for b in entries) / total
        accuracy = sum(b.count * b.accuracy for b in entries) / total
        found.append(Bin(total / tables, confidence, accuracy))
    return found


_QUANTITIES = [
    Quantity("accuracy", "accuracy of each bin", "accuracy", {"range": [0, 1.02]}),
    Quantity("count", "samples in each bin", "samples", {"type": "log"}),
]
_WHOLE = {"range": [0, 1]}
_DIAGONAL = {
    "type": "line", "x0": 0, "y0": 0, "x1": 1, "y1": 1,
    "line": {"color": MUTED, "width": 1.5, "dash": "dash"},
}  # fmt: skip


def reliability(study: Study) -> Section | None:
    """Accuracy against confidence; one network, separate ones and the chosen σN-Ens at first."""
    curves = [curve for group in study.groups if (curve := _curve(group)) is not None]
    found = curve_section(
        "reliability",
        "Reliability, before temperature scaling",
        "Accuracy of the predictions in each confidence bin. On the diagonal, confidence can be "
        "taken at its word; below it, the model is over-confident. Whiskers: 95 % interval of the "
        "bin's accuracy from the samples of one seed. Bins are pooled over seeds.",
        _QUANTITIES,
        curves,
        "confidence",
        main=study.leading,
        xaxis=_WHOLE,
    )
    if found is not None:
        found.panels[0].layout["shapes"] = [_DIAGONAL]
    return found


def reliability_panels(group: Group) -> list[Panel]:
    """The diagram of one group alone; empty where it has no bins."""
    curve = _curve(group)
    if curve is None:
        return []
    wanted = _QUANTITIES[0]._replace(title=f"Reliability, ECE {group.stat('ece')}")
    return curve_panels([wanted], [curve], "confidence", xaxis=_WHOLE, shapes=[_DIAGONAL])


def _curve(group: Group) -> Curve | None:
    points = [(b.confidence, partial(_measured, b)) for b in bins(group)]
    curve = Curve(group.label, group.look, points, group, marked=True, spread=True)
    return curve if points else None


def _measured(found: Bin, key: str) -> Stat:
    if key == "count":
        return Stat({"": found.count})
    return Stat({"": found.accuracy}, found.interval)
