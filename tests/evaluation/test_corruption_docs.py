"""docs/corruption.md: its example runs, and its table is that of the measured file."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

from PIL import Image

from sigmanens.evaluation.corruption import CORRUPTIONS, EXTRA_CORRUPTIONS

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "corruption.md").read_text(encoding="utf-8")


def test_the_example_runs(capsys) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    names: dict[str, object] = {}
    # One severity of each: this test is about the calls.
    exec(code.replace("in SEVERITIES", "in SEVERITIES[2:3]"), names)
    printed = capsys.readouterr().out
    assert printed.startswith("[")
    assert "a gripping story , told with warmth" not in printed
    assert names["corrupted"].shape == names["images"].shape  # type: ignore[attr-defined]


def test_the_table_is_made_from_the_measured_file() -> None:
    spec = importlib.util.spec_from_file_location("make_corruption", DOCS / "make_corruption.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    measured = json.loads((DOCS / "corruption.json").read_text(encoding="utf-8"))
    assert module.table(measured) in PAGE
    for rows in measured["rows"].values():
        assert set(rows) == set(CORRUPTIONS + EXTRA_CORRUPTIONS)
        assert min(rows.values()) > 0


def test_the_contact_sheet_has_a_row_for_each_corruption() -> None:
    assert (DOCS / "corruption.png").stat().st_size < 1.5e6
    with Image.open(DOCS / "corruption.png") as sheet:
        assert sheet.height == 24 + 19 * 100
        assert sheet.width > 12 * 96
