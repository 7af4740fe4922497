"""The page about the rivals: its program runs, and it names every rival."""

from __future__ import annotations

import re
from pathlib import Path

from sigmanens import baselines

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "rivals.md").read_text(encoding="utf-8")


def test_the_program_runs() -> None:
    program = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0]
    names: dict[str, object] = {}
    exec(compile(program, "docs/rivals.md", "exec"), names)
    assert names["logits"].shape == (4, 8, 10)  # type: ignore[attr-defined]
    assert names["pred"].probs.shape == (8, 10)  # type: ignore[attr-defined]


def test_every_rival_has_a_row() -> None:
    named = set(re.findall(r"^\| [^|]+ \| `(\w+)\(", PAGE, re.MULTILINE))
    assert named == set(baselines.__all__)
