"""What turning one knob does, all else equal: metrics against τ, against λ and against M."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from sigmanens.lab.report import naming
from sigmanens.lab.report.compare import METRICS
from sigmanens.lab.report.curves import Curve, Quantity, curve_section
from sigmanens.lab.report.naming import Setting
from sigmanens.lab.report.plot import Section
from sigmanens.lab.report.study import Group, Study

_METRICS = ("nll_calibrated", "accuracy", "ece")
_REFERENCES = ("single", "deep_ensemble", "sigmanens_lambda0", "fixed_masks")
_TICKS = 8


class _Knob(NamedTuple):
    """A field of a setting: its figure's title, its axis, which groups turn it, what is left."""

    key: str
    title: str
    name: str
    turned: Callable[[Group], bool]
    rest: Callable[[Setting], Setting]
    least: int = 2


_KNOBS = (
    _Knob(
        "tau", "The dial turned: metrics against τ", "τ",
        lambda g: g.method == "sigmanens", lambda s: s._replace(tau=None), least=3,
    ),
    _Knob(
        "weight", "The weight of the penalty: metrics against λ", "λ",
        lambda g: g.method == "sigmanens" and not g.variant, lambda s: s._replace(weight=None),
    ),
    _Knob(
        "members", "More members: metrics against M", "M, the number of members",
        lambda g: (g.members or 0) > 1, lambda s: s._replace(members=None),
    ),
)  # fmt: skip


def dial(study: Study) -> list[Section]:
    """Metrics against τ, λ and M, for those that were turned; methods without them stand level."""
    return [section for knob in _KNOBS if (section := _section(study, knob)) is not None]


def _section(study: Study, knob: _Knob) -> Section | None:
    lines: dict[Setting, list[tuple[float, Group]]] = {}
    for group in study.groups:
        value = getattr(group, knob.key)
        if knob.turned(group) and value is not None:
            lines.setdefault(knob.rest(group.setting), []).append((value, group))
    lines = {s: sorted(p, key=lambda at: at[0]) for s, p in lines.items() if len(p) >= knob.least}
    if not lines:
        return None
    names = naming.labels(list(lines))
    curves = [
        Curve(
            name,
            points[-1][1].look._replace(dash="dash") if setting.variant else points[-1][1].look,
            [(value, group.stat) for value, group in points],
            width=2.2,
            marked=True,
            spread=True,
        )
        for name, (setting, points) in zip(names, lines.items(), strict=True)
    ]
    values = sorted({value for points in lines.values() for value, _ in points})
    alike = {1, None, *(group.members for points in lines.values() for _, group in points)}
    levels = [
        Curve(
            group.label,
            _level(group),
            [(x, group.stat) for x in (values[0], values[-1])],
            level=True,
        )
        for group in study.groups
        if group.method in (("single",) if knob.key == "members" else _REFERENCES)
        and group.members in alike
        and not group.variant
    ]
    ticks = values[:: -(-len(values) // _TICKS)]
    across = {"tickvals": ticks, "ticktext": [naming.amount(value) for value in ticks]}
    if values[0] > 0 and values[-1] / values[0] >= 4:
        across["type"] = "log"
    several = len(study.seeds) > 1
    return curve_section(
        knob.key,
        knob.title,
        f"{'Means over seeds' if several else 'One seed'}, {study.split} data."
        f" Whiskers: {'one standard deviation' if several else '95 % bootstrap interval'}."
        f"{' Level lines: methods that have no such setting.' if levels else ''}",
        [Quantity(m, METRICS[m].title, METRICS[m].name, {"nticks": 6}) for m in _METRICS],
        [*levels, *curves],
        knob.name,
        first="line",
        xaxis=across,
    )


def _level(group: Group) -> naming.Look:
    """The look of a level line, never solid."""
    look = group.look
    return look._replace(dash="longdash") if look.dash == "solid" else look
