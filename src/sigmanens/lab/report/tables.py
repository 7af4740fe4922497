"""The tables of a report as data: cells that know their text, their sort value and their spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sigmanens.lab.report import naming
from sigmanens.lab.report.study import Group, Stat, Study, dig, finite

__all__ = ["Cell", "Table", "bounded", "choice", "failures", "ood", "results", "seeds"]


@dataclass(frozen=True)
class Cell:
    """One cell: its text, the value it sorts by and copies as, its spread, a hover text.

    ``group`` puts the symbol of a method before the text; ``heat`` in [0, 1] tints the cell;
    ``mark`` is a short badge after the text; ``run`` makes a link to the details of that run.
    """

    text: str
    value: float | str | None = None
    sd: float | None = None
    hint: str = ""
    group: Group | None = None
    heat: float | None = None
    mark: str = ""
    run: str = ""

    @classmethod
    def of(cls, value: Stat | float | str | None, digits: int = 3, **more: Any) -> Cell:
        """A cell for a text, a number or a statistic over seeds."""
        if isinstance(value, str):
            return cls(value, value, **more)
        if not isinstance(value, Stat):
            return cls(naming.number(value, digits), value, **more)
        each = [f"seed {seed}: {naming.number(v, digits)}" for seed, v in value.by_seed.items()]
        text = naming.number(value.mean, digits)
        if value.sd is not None:
            text = f"{text} ± {naming.number(value.sd, digits)}"
        return cls(text, value.mean, value.sd, "\n".join(each), **more)


@dataclass(frozen=True)
class Table:
    """A caption, column heads and rows; the first cell of a row names it.

    ``bands`` is an optional line of (name, columns) above the heads; ``meaning`` explains heads.
    """

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    bands: Sequence[tuple[str, int]] = ()
    meaning: Mapping[str, str] = field(default_factory=dict)


_COLUMNS: tuple[tuple[str, tuple[str, ...], int, str], ...] = (
    ("accuracy", ("accuracy",), 3, "fraction of the samples labelled rightly"),
    ("NLL", ("nll",), 3, "mean negative log likelihood in nats; lower is better"),
    ("NLL scaled", ("nll_calibrated",), 3, "NLL after one temperature fitted on held-out data"),
    ("ECE", ("ece",), 3, "expected calibration error, 15 bins; lower is better"),
    ("ECE scaled", ("ece_calibrated",), 3, "ECE after the same temperature"),
    ("ECE debiased", ("ece_debiased",), 3, "ECE less what sampling noise alone would show"),
    ("Brier", ("brier",), 3, "squared distance of the probabilities from the label"),
    ("temperature", ("temperature",), 2, "the fitted temperature; above 1 means over-confident"),
    ("member accuracy", ("member_accuracy",), 3, "mean accuracy of the members, each alone"),
    ("member NLL", ("member_nll",), 3, "mean NLL of the members, each alone"),
    ("disagreement", ("disagreement",), 3, "fraction of samples two members label differently"),
    ("Jensen gap", ("jensen_gap",), 3, "member NLL − NLL of the averaged prediction, in nats"),
    ("pairwise KL", ("pairwise_kl",), 3, "mean KL divergence between two members, in nats"),
    ("modulation", ("modulation",), 3, "mutual information of label and member, in nats"),
    ("cosine", ("cosine",), 3, "mean cosine between two members' scales"),
    ("training s", ("train_seconds",), 1, "seconds of training"),
)
_DETAILS = ("pairwise KL", "modulation", "member NLL", "Brier", "ECE debiased")
"""Columns of the table by seed that the main table leaves out."""


def results(study: Study, linked: bool = False) -> Table:
    """One line per method: means over seeds, parameters beside one network.

    ``linked``: the names lead to the details of their runs.
    """
    columns = [
        column
        for column in _COLUMNS
        if column[0] not in _DETAILS and any(g.stat(*column[1]).by_seed for g in study.groups)
    ]
    priced = any(group.stat("params").by_seed for group in study.groups)
    rows = []
    for group in study.groups:
        params = group.stat("params").mean
        multiple = study.multiple(group).removesuffix(" ×")
        cost = [
            Cell(_count(params), params),
            Cell(f"{multiple} ×" if multiple else "–", float(multiple) if multiple else None),
        ]
        run = group.key if linked else ""
        mark = "chosen" if study.was_chosen(group) else ""
        rows.append(
            [
                Cell.of(group.label, group=group, mark=mark, run=run),
                *(cost if priced else ()),
                *(Cell.of(group.stat(*path), digits) for _, path, digits, _ in columns),
                Cell(str(len(group.rows)), float(len(group.rows))),
            ]
        )
    costs = ("parameters", "× one")
    return Table(
        f"Results on the {study.split} data",
        ["method", *(costs if priced else ()), *(column[0] for column in columns), "seeds"],
        rows,
        meaning={
            **({"× one": "parameters as a multiple of one network's"} if priced else {}),
            **{column[0]: column[3] for column in columns},
        },
    )


def seeds(study: Study) -> Table:
    """One line per method and seed, with the bootstrap intervals where there are any."""
    rows = [(group, seed, row) for group in study.groups for seed, row in group.rows.items()]
    columns = [c for c in _COLUMNS if any(finite(dig(row, *c[1])) is not None for *_, row in rows)]
    return Table(
        "One line per method and seed",
        ["method", "seed", "n", *(column[0] for column in columns)],
        [
            [
                Cell.of(group.label, group=group),
                Cell(str(seed), float(seed) if isinstance(seed, int) else seed),
                Cell(_whole(row.get("n")), finite(row.get("n"))),
                *(_with_interval(row, path, digits) for _, path, digits, _ in columns),
            ]
            for group, seed, row in rows
        ],
    )


def ood(study: Study) -> Table | None:
    """AUROC per OOD set and score, tinted from chance (0.5) to perfect (1)."""
    sets = [(name, score) for name, scores in study.ood.items() for score in scores]
    shown = [g for g in study.groups if any(g.stat("ood", *pair).by_seed for pair in sets)]
    if not shown:
        return None
    rows = []
    for group in shown:
        mark = "chosen" if study.was_chosen(group) else ""
        cells = [Cell.of(group.label, group=group, mark=mark)]
        for pair in sets:
            stat = group.stat("ood", *pair)
            heat = None if stat.mean is None else min(1.0, max(0.0, 2 * stat.mean - 1)) ** 3
            cells.append(Cell.of(stat, heat=heat))
        rows.append(cells)
    return Table(
        "AUROC of telling OOD samples from test samples",
        ["method", *(naming.words(score) for _, score in sets)],
        rows,
        bands=[("", 1), *((naming.words(name), len(scores)) for name, scores in study.ood.items())],
    )


def choice(study: Study) -> Table | None:
    """The validation numbers of every σN-Ens: what the choice was made from."""
    keys = [c for c in _COLUMNS if any(g.stat("validation", *c[1]).by_seed for g in study.sigma)]
    if not keys or len(study.sigma) < 2:
        return None
    return Table(
        "Validation numbers of the candidates",
        ["candidate", *(column[0] for column in keys)],
        [
            [
                Cell.of(group.label, group=group, mark="chosen" if study.was_chosen(group) else ""),
                *(Cell.of(group.stat("validation", *path), digits) for _, path, digits, _ in keys),
            ]
            for group in study.sigma
        ],
    )


def failures(study: Study) -> Table | None:
    """The trainings that failed, and why; they are in no other table."""
    found = study.metrics.get("failures")
    if not isinstance(found, Mapping) or not found:
        return None
    return Table(
        "Trainings that failed",
        ["training", "reason"],
        [[Cell.of(str(key)), Cell.of(str(reason))] for key, reason in found.items()],
    )


def _with_interval(row: Mapping[str, Any], path: tuple[str, ...], digits: int) -> Cell:
    return bounded(finite(dig(row, *path)), dig(row, "intervals", *path), digits)


def bounded(value: float | None, bounds: Any, digits: int = 3) -> Cell:
    """A number with the ends of its interval, where there are any."""
    if value is None or not isinstance(bounds, Sequence) or len(bounds) != 2:
        return Cell.of(value, digits)
    low, high = (naming.number(finite(bound), digits) for bound in bounds)
    return Cell(f"{naming.number(value, digits)} [{low}, {high}]", value)


def _count(value: float | None) -> str:
    """A number of parameters: 812, 81.1 k, 11.20 M."""
    if value is None:
        return "–"
    if value >= 1e6:
        return f"{value / 1e6:.2f} M"
    return f"{value / 1e3:.1f} k" if value >= 1e3 else f"{value:.0f}"


def _whole(value: Any) -> str:
    number = finite(value)
    return "–" if number is None else f"{number:,.0f}"
