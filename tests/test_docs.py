"""What the documents show is what the files of the runs say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "script", ["make_tables.py", pytest.param("measure_collapse.py", marks=pytest.mark.slow)]
)
def test_the_tables_are_made_from_the_metrics(script: str) -> None:
    done = subprocess.run(
        [sys.executable, f"docs/{script}", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": ""},
    )
    assert done.returncode == 0, done.stdout + done.stderr
