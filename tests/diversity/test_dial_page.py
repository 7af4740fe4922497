"""The programs in docs/dial.md run, and what it says in numbers is so."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from pathlib import Path

import pytest

import sigmanens as sn

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
        "Owners in the place of τ",
        "A penalty that waits",
        "A closed loop",
        "Warnings",
    ]


def test_the_numbers_in_the_comments_are_right() -> None:
    _, printed = run("Before training: what the dial does")
    owners, cosine, tau, steep = printed.splitlines()
    assert float(owners) == pytest.approx(1.7, abs=0.05)
    assert float(cosine) == pytest.approx(0.27, abs=0.02)
    assert float(tau) == pytest.approx(0.3, abs=0.03)
    assert steep.startswith("(0.0")


def test_owners_set_tau_or_the_range_is_told() -> None:
    _, printed = run("Owners in the place of τ")
    assert f"{sn.diversity.tau_for_owners(1.5, 4):.3g}" in printed
    assert "owners=3 is out of reach for 4 members" in printed


def test_the_penalty_waits_and_rises() -> None:
    _, printed = run("A penalty that waits")
    strengths = [float(line.split()[1]) for line in printed.splitlines()]
    assert strengths == [0.0, 0.5, 1.0]
    cosines = [float(line.split()[2]) for line in printed.splitlines()]
    assert cosines[2] < cosines[1] - 0.05


def test_the_loop_comes_to_its_target() -> None:
    space, printed = run("A closed loop")
    assert float(printed.splitlines()[0]) == pytest.approx(0.5, abs=0.05)
    assert isinstance(space["diversity"], sn.Diversity)
    assert len(space["diversity"].path) == 300


def test_the_diagnosis_names_what_is_wrong() -> None:
    _, printed = run("Warnings")
    assert "weak members – the members are too weak" in printed
    kinds = {line.partition(" –")[0] for line in printed.splitlines()}
    table = set(re.findall(r"^\| (\w+ \w+) \|", TEXT.partition("## Warnings")[2], re.MULTILINE))
    assert kinds <= table == {
        "one model", "frozen partition", "weak members", "flat dial", "outweighed task"
    }  # fmt: skip
