"""The programs in docs/dial.md run, and what it says in numbers is so."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from pathlib import Path

import pytest

import sigmanens as sn
from sigmanens.diversity.defaults import DEFAULTS

TEXT = (Path(__file__).parents[2] / "docs" / "dial.md").read_text(encoding="utf-8")


def programs() -> dict[str, str]:
    """The code of each section that has some, by heading."""
    sections = re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]
    found = {}
    for section in sections:
        blocks = re.findall(r"^```python\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
        if blocks:
            found[section.partition("\n")[0]] = "\n".join(blocks)
    return found


def run(section: str) -> tuple[dict[str, object], str]:
    space: dict[str, object] = {}
    with contextlib.redirect_stdout(io.StringIO()) as printed, warnings.catch_warnings():
        warnings.simplefilter("error")
        exec(compile(programs()[section], section, "exec"), space)
    return space, printed.getvalue()


def test_there_are_programs() -> None:
    assert list(programs()) == [
        "Before training: what the dial does",
        "τ for so many owners",
        "A penalty that changes in training",
        "Warnings",
    ]


def test_the_numbers_in_the_comments_are_right() -> None:
    _, printed = run("Before training: what the dial does")
    owners, cosine, tau, steep = printed.splitlines()
    assert float(owners) == pytest.approx(1.7, abs=0.05)
    assert float(cosine) == pytest.approx(0.27, abs=0.02)
    assert float(tau) == pytest.approx(0.3, abs=0.03)
    assert steep.startswith("(0.0")


def test_tau_for_owners_is_told_or_the_range() -> None:
    _, printed = run("τ for so many owners")
    assert f"Diversity(tau={sn.diversity.tau_for_owners(1.5, 4):g}, weight=0.01" in printed
    assert "owners=3 is out of reach for 4 members" in printed


def test_the_penalty_waits_and_rises() -> None:
    _, printed = run("A penalty that changes in training")
    rows = [[float(v) for v in line.split()] for line in printed.splitlines()]
    assert [row[:3] for row in rows] == [
        [0, 1.0, 0.0], [15, 1 - 0.5 * 15 / 40, pytest.approx(0.005)], [39, 1 - 0.5 * 39 / 40, 0.01]
    ]  # fmt: skip
    assert rows[2][3] < rows[1][3] - 0.05


def test_the_table_of_defaults_is_that_of_the_code() -> None:
    table = re.findall(r"^\| `(.*) \| ([\d.]+) \| ([\d.]+) \| (.*) \|$", TEXT, re.MULTILINE)
    rows = {entry: (float(tau), float(weight), why) for entry, tau, weight, why in table}
    named = ["sn.Diversity()`", "sigmanens train`, from scratch",
             "sigmanens train`, with trained weights", "SigmaEnsembleClassifier`"]  # fmt: skip
    assert rows == dict(zip(named, map(tuple, DEFAULTS.values()), strict=True))


def test_the_diagnosis_names_what_is_wrong() -> None:
    _, printed = run("Warnings")
    assert "weak members – the members are too weak" in printed
    kinds = {line.partition(" –")[0] for line in printed.splitlines()}
    table = set(re.findall(r"^\| (\w+ \w+) \|", TEXT.partition("## Warnings")[2], re.MULTILINE))
    assert kinds <= table == {
        "one model", "frozen partition", "weak members", "flat dial", "outweighed task"
    }  # fmt: skip
