"""The pages of docs/tutorials run, or quote what their program printed."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from sigmanens.integrations.estimator import SigmaEnsembleClassifier

ROOT = Path(__file__).resolve().parents[2]
TUTORIALS = ROOT / "docs" / "tutorials"


def test_the_pages_quote_the_outputs() -> None:
    done = subprocess.run(
        [sys.executable, "docs/make_tutorials.py", "--check"],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("page", "program"), [("timm", "timm_classifier"), ("sst2", "text_classification")]
)
def test_an_output_begins_with_its_command(page: str, program: str) -> None:
    first, *rest = (TUTORIALS / f"{page}.txt").read_text(encoding="utf-8").splitlines()
    assert first.startswith(f"$ python examples/{program}.py --data ")
    assert any("norms converted, 0 kept, 0 refused" in line for line in rest)
    text = (TUTORIALS / f"{page}.md").read_text(encoding="utf-8")
    assert f"\n{first}\n" in text


def test_the_page_on_scikit_learn_runs() -> None:
    text = (TUTORIALS / "sklearn.md").read_text(encoding="utf-8")
    code = "\n".join(re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL))
    space: dict[str, object] = {}
    exec(compile(code, "sklearn.md", "exec"), space)
    model = space["model"]
    assert isinstance(model, SigmaEnsembleClassifier)
    assert model.score(space["x_test"], space["y_test"]) > 0.9
