"""One run in detail: what a click on a point of the frontier shows."""

from __future__ import annotations

from sigmanens.lab.report import naming
from sigmanens.lab.report.compare import METRICS
from sigmanens.lab.report.findings import group_findings
from sigmanens.lab.report.layers import layer_panel
from sigmanens.lab.report.plot import Figure
from sigmanens.lab.report.reliability import reliability_panel
from sigmanens.lab.report.scores import score_panels
from sigmanens.lab.report.shift import curve_panels
from sigmanens.lab.report.study import Group, Study
from sigmanens.lab.report.training import curve_panels as training_panels

__all__ = ["details", "first_run"]

_OWNERS = ("sigmanens", "sigmanens_lambda0", "fixed_masks")
"""Methods whose channels have owners."""


def details(study: Study) -> list[tuple[Group, Figure]]:
    """One figure per method and setting, in the order of the tables; [] below two of them."""
    if len(study.groups) < 2:
        return []
    found = [(group, _detail(study, group)) for group in study.groups]
    return found if any(figure.panels for _, figure in found) else []


def first_run(study: Study) -> Group:
    """The run that is shown before the reader selects another: the chosen one."""
    return study.chosen or study.groups[-1]


def _detail(study: Study, group: Group) -> Figure:
    reliability, owners = reliability_panel(group), layer_panel(group)
    parts = {
        "reliability bins": [reliability] if reliability else [],
        "owners per layer": [owners] if owners else [],
        "corruptions": curve_panels(study, group),
        "distributions of OOD scores": score_panels(study, group),
        "training curves": training_panels(study, group),
    }
    absent = [name for name, panels in parts.items() if not panels]
    if group.method not in _OWNERS and "owners per layer" in absent:
        absent.remove("owners per layer")
    notes = [f"Warning: {text}" for text in group_findings(group)]
    if absent:
        notes.append(f"Not in this run: {', '.join(absent)}.")
    return Figure(
        key=f"run-{group.key}",
        title=group.label,
        caption=" ".join(notes),
        summary=_summary(study, group),
        panels=[panel for panels in parts.values() for panel in panels],
    )


def _summary(study: Study, group: Group) -> str:
    settings = [
        f"{symbol} = {naming.amount(value)}"
        for symbol, value in (("M", group.members), ("τ", group.tau), ("λ", group.weight))
        if value is not None
    ]
    if group.variant:
        settings.append(f"variant {naming.words(group.variant)}")
    if study.multiple(group):
        settings.append(f"{study.multiple(group)} the parameters of one network")
    seeds = len(group.rows)
    settings.append(f"{seeds} seed{'s' if seeds > 1 else ''}")
    numbers = [
        f"{METRICS[key].name} {group.stat(key)}"
        for key in ("accuracy", "nll", "nll_calibrated", "ece")
        if group.stat(key).by_seed
    ]
    measured = ", ".join(numbers) or "nothing measured"
    return f"{', '.join(settings)}. {measured[:1].upper()}{measured[1:]}."
