"""All errors in one place, each also the built-in that a caller may already catch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import sigmanens as sn
from sigmanens import errors

BUILTIN = (ValueError, TypeError, RuntimeError, ImportError)
CLASSES = [
    cls
    for cls in vars(errors).values()
    if isinstance(cls, type) and issubclass(cls, errors.SigmaNensError)
]


@pytest.mark.parametrize("cls", CLASSES, ids=lambda c: c.__name__)
def test_an_error_is_ours_and_a_built_in(cls: type[Exception]) -> None:
    assert issubclass(cls, sn.SigmaNensError)
    assert cls is sn.SigmaNensError or issubclass(cls, BUILTIN)
    assert cls.__doc__


def test_errors_are_defined_in_one_module() -> None:
    source = Path(errors.__file__).parent
    pattern = re.compile(r"^class (\w+)\(.*(?:Error|\bException)\b.*\):", re.MULTILINE)
    defined = {
        str(path.relative_to(source)): names
        for path in source.rglob("*.py")
        if (names := [n for n in pattern.findall(path.read_text()) if not n.startswith("_")])
    }
    assert defined.keys() == {"errors.py"}
    assert set(defined["errors.py"]) == {cls.__name__ for cls in CLASSES}
