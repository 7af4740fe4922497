"""The tables of a report as data: cells that know their text, their sort value and their spread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Any

from sigmanens.lab.report import naming
from sigmanens.lab.report.study import Group, Stat, Study


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
        hint = "\n".join(each) if len(each) > 1 else ""
        return cls(value.text(digits), value.mean, value.sd, hint, **more)


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


@dataclass(frozen=True)
class Column:
    """A column of a table by group; ``tint`` turns its values into heats, ``band`` stands above."""

    head: str
    cell: Callable[[Group], Cell]
    meaning: str = ""
    tint: Callable[[list[Any]], list[float | None]] | None = None
    band: str = ""


def by_group(
    study: Study,
    caption: str,
    columns: Iterable[Column],
    groups: Sequence[Group] | None = None,
    *,
    first: str = "method",
    linked: bool = False,
) -> Table | None:
    """One line per group, without the columns that were measured in none; None without any.

    ``linked``: the names lead to the details of their runs.
    """
    shown = study.groups if groups is None else groups
    found = [(c, [c.cell(group) for group in shown]) for c in columns]
    found = [(c, cells) for c, cells in found if any(cell.value is not None for cell in cells)]
    if not found:
        return None
    tinted = []
    for column, cells in found:
        heats = column.tint([cell.value for cell in cells]) if column.tint else [None] * len(cells)
        tinted.append([replace(cell, heat=heat) for cell, heat in zip(cells, heats, strict=True)])
    names = [
        Cell.of(
            group.label,
            group=group,
            mark="chosen" if study.was_chosen(group) else "",
            run=group.key if linked else "",
        )
        for group in shown
    ]
    bands = [(band, len(list(same))) for band, same in groupby(c.band for c, _ in found)]
    return Table(
        caption,
        [first, *(column.head for column, _ in found)],
        list(zip(names, *tinted, strict=True)),
        bands=[("", 1), *bands] if any(band for band, _ in bands) else (),
        meaning={column.head: column.meaning for column, _ in found if column.meaning},
    )


_MAIN = (
    ("accuracy", "accuracy", 3, "fraction of the samples labelled rightly"),
    ("NLL", "nll", 3, "mean negative log likelihood in nats; lower is better"),
    ("NLL scaled", "nll_calibrated", 3, "NLL after one temperature fitted on held-out data"),
    ("ECE", "ece", 3, "expected calibration error, 15 bins; lower is better"),
    ("ECE scaled", "ece_calibrated", 3, "ECE after the same temperature"),
    ("temperature", "temperature", 2, "the fitted temperature; above 1 means over-confident"),
    ("member accuracy", "member_accuracy", 3, "mean accuracy of the members, each alone"),
    ("disagreement", "disagreement", 3, "fraction of samples two members label differently"),
    ("Jensen gap", "jensen_gap", 3, "member NLL − NLL of the averaged prediction, in nats"),
    ("cosine", "cosine", 3, "mean cosine between two members' scales"),
    ("training s", "train_seconds", 1, "seconds of training"),
)
_DETAILS = (
    ("ECE debiased", "ece_debiased", 3, "ECE less what sampling noise alone would show"),
    ("Brier", "brier", 3, "squared distance of the probabilities from the label"),
    ("member NLL", "member_nll", 3, "mean NLL of the members, each alone"),
    ("pairwise KL", "pairwise_kl", 3, "mean KL divergence between two members, in nats"),
    ("modulation", "modulation", 3, "mutual information of label and member, in nats"),
)
"""Columns of the table by seed that the main table leaves out."""


def _columns(specs: Iterable[tuple[str, str, int, str]], *within: str) -> list[Column]:
    """Columns of (head, key, digits, meaning), whose keys lie ``within`` mappings of a row."""
    return [
        Column(head, partial(_cell, (*within, key), digits), meaning)
        for head, key, digits, meaning in specs
    ]


def _cell(path: tuple[str, ...], digits: int, group: Group) -> Cell:
    return Cell.of(group.stat(*path), digits)


def results(study: Study, linked: bool = False) -> Table | None:
    """One line per method: means over seeds, parameters beside one network."""
    columns = (
        Column("parameters", lambda g: _count(g.stat("params").mean)),
        Column(
            "× one",
            lambda g: Cell(naming.times(study.multiple(g)) or "–", study.multiple(g)),
            "parameters as a multiple of one network's",
        ),
        *_columns(_MAIN),
        Column("seeds", lambda g: Cell.of(len(g.rows), 0)),
    )
    return by_group(study, f"Results on the {study.split} data", columns, linked=linked)


def seeds(study: Study) -> Table | None:
    """One line per method and seed, with the bootstrap intervals where there are any."""
    alone = [replace(g, rows={seed: row}) for g in study.groups for seed, row in g.rows.items()]
    columns = (
        Column("seed", lambda g: Cell.of(str(next(iter(g.rows))))),
        Column("n", lambda g: Cell.of(g.stat("n").mean, 0)),
        *_columns((*_MAIN, *_DETAILS)),
    )
    return by_group(study, "One line per method and seed", columns, alone)


def ood(study: Study) -> Table | None:
    """AUROC per OOD set and score, tinted from chance (0.5) to perfect (1)."""

    def tint(means: list[Any]) -> list[float | None]:
        return [None if m is None else min(1.0, max(0.0, 2 * m - 1)) ** 3 for m in means]

    sets = [(name, score) for name, scores in study.ood.items() for score in scores]
    shown = [g for g in study.groups if any(g.stat("ood", *pair).by_seed for pair in sets)]
    columns = [
        Column(
            naming.words(score), partial(_cell, ("ood", name, score), 3), "", tint,
            naming.words(name),
        )
        for name, score in sets
    ]  # fmt: skip
    return by_group(study, "AUROC of telling OOD samples from test samples", columns, shown)


def choice(study: Study) -> Table | None:
    """The validation numbers of every σN-Ens: what the choice was made from."""
    if len(study.sigma) < 2:
        return None
    columns = _columns((*_MAIN, *_DETAILS), "validation")
    caption = "Validation numbers of the candidates"
    return by_group(study, caption, columns, study.sigma, first="candidate")


def failures(study: Study) -> Table | None:
    """The trainings that failed, and why; they are in no other table."""
    found = study.metrics.get("failures")
    if not isinstance(found, Mapping) or not found:
        return None
    rows = [[Cell.of(str(key)), Cell.of(str(reason))] for key, reason in found.items()]
    return Table("Trainings that failed", ["training", "reason"], rows)


def _count(value: float | None) -> Cell:
    """A number of parameters: 812, 81.1 k, 11.20 M."""
    for size, letter, digits in ((1e6, " M", 2), (1e3, " k", 1)):
        if value is not None and value >= size:
            return Cell(f"{value / size:.{digits}f}{letter}", value)
    return Cell.of(value, 0)
