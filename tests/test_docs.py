"""What the documents show is what the files of the runs say."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_tables_are_made_from_the_metrics():
    done = subprocess.run(
        [sys.executable, "docs/make_tables.py", "--check"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": ""},
    )
    assert done.returncode == 0, done.stdout + done.stderr
