"""What a run shows on the terminal: a table and a few lines."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import fmean
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sigmanens.lab.report import naming
from sigmanens.lab.report.reading import read_study
from sigmanens.lab.report.study import Group, Stat, Study
from sigmanens.lab.report.summary import summary

_COLUMNS = (
    ("accuracy", "accuracy"),
    ("NLL", "nll"),
    ("NLL (T)", "nll_calibrated"),
    ("ECE", "ece"),
    ("differ", "disagreement"),
)
_USUAL = ("max_softmax", "predictive_entropy")


def print_run(metrics: Mapping[str, Any], console: Console) -> None:
    """Print what a run shows: the table, the headline, a line for each topic, what is wrong.

    Raises what :func:`console_table` does.
    """
    said = summary(metrics)
    console.print(console_table(metrics))
    console.print(Text(f"\n{said.headline}", style="bold"))
    for topic, line in said.lines:
        console.print(Text(f"• {topic}: {line}"))
    if any("†" in line for _, line in said.lines):
        console.print(Text("† also survives Holm's correction for all methods of the run"))
    warned = {text: row["method"] for row in metrics["rows"] for text in row.get("findings") or ()}
    for text, method in warned.items():
        console.print(Text(f"! {method}: {text}"))


def console_table(metrics: Mapping[str, Any]) -> Table:
    """The main numbers of a parsed ``metrics.json``, one line per method.

    Means over seeds ± one standard deviation; "–" where not measured. OOD is the mean AUROC over
    the OOD sets by max softmax, where that was measured. Raises ``InputError`` as
    :func:`~sigmanens.lab.report.summary.summary` does.
    """
    study = read_study(metrics)
    seeds = len(study.seeds)
    spread = f", mean ± sd over {seeds} seeds" if seeds > 1 else ", 1 seed"
    title = f"Results on the {study.split} data{spread}"
    table = Table(
        title=title, title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True
    )
    table.add_column("method")
    for name in ("params", *(name for name, _ in _COLUMNS), "OOD"):
        table.add_column(name, justify="right", no_wrap=True)
    for group in study.groups:
        chosen = group is study.chosen
        table.add_row(
            Text(f"{group.label} ←" if chosen else group.label),
            naming.times(study.multiple(group)).replace(" ", "") or "–",
            *(_text(group.stat(key)) for _, key in _COLUMNS),
            _ood(study, group),
            style="bold" if chosen else "",
        )
    table.caption = (
        "params: × one network; NLL (T): with a fitted temperature; "
        "differ: fraction of samples two members label differently; OOD: mean AUROC"
    )
    return table


def _text(stat: Stat) -> Text:
    """The mean, and the spread below it where there are several seeds."""
    text = Text(naming.number(stat.mean))
    if stat.sd is not None:
        text.append(f"\n±{naming.number(stat.sd)}", style="dim")
    return text


def _ood(study: Study, group: Group) -> str:
    """The mean AUROC over the OOD sets, over the seeds in which each was measured."""
    scores = {
        name: next((score for score in _USUAL if score in known), known[0])
        for name, known in study.ood.items()
    }
    means = [group.stat("ood", *pair).mean for pair in scores.items()]
    known = [mean for mean in means if mean is not None]
    return naming.number(fmean(known) if known else None)
