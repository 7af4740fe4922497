"""Layers without an ensemble: a call is a pass of all members, or of those that a test chooses."""

from __future__ import annotations

import pytest

from sigmanens.passes.context import MemberAxis, Pass


@pytest.fixture(autouse=True)
def _every_call_is_a_pass(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where a test is about networks: their passes are those of the ensemble."""
    if request.module.__name__.rpartition(".")[2] in ("test_norms", "test_norm_precision"):

        def chosen(self: MemberAxis) -> Pass:
            return self.chosen

        monkeypatch.setattr(MemberAxis, "current", property(chosen))
