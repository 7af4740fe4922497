"""``sigmanens explain``: its numbers are those of the theory, its page asks for nothing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jsonargparse")
pytest.importorskip("plotly")
pytest.importorskip("rich")

from sigmanens.diversity import theory
from sigmanens.errors import ConfigError, DiversityError
from sigmanens.lab.cli import main
from sigmanens.lab.explain import ExplainConfig, explain
from sigmanens.lab.explain_words import sentences

SMALL = {"steps": 30, "channels": 800}


def test_the_scratch_settings_give_the_known_speed_and_end_states() -> None:
    found = explain(ExplainConfig(**SMALL))  # type: ignore[arg-type]
    assert found.rate == 10
    assert found.path[0] == pytest.approx(0.85, abs=0.015)
    assert found.path[5] == pytest.approx(0.29, abs=0.015)
    assert found.path[10] == pytest.approx(0.10, abs=0.015)
    known = {0.05: (0.02, 1.04), 0.1: (0.07, 1.12), 0.2: (0.16, 1.32), 0.5: (0.27, 1.66)}
    known |= {1.0: (0.32, 1.81), 2.0: (0.35, 1.91)}
    settings = {s.tau: s for s in found.settings}
    for tau, (cosine, owners) in known.items():
        assert settings[tau].cosine == pytest.approx(cosine, abs=0.03)
        assert settings[tau].reached == pytest.approx(owners, abs=0.15)
    assert [settings[t].preferred for t in (0.1, 0.5, 1.0)] == [1, 1, 2]
    assert [t for t, s in settings.items() if s.flat] == [0.05, 5.0]
    assert found.steep is not None
    assert settings[0.1].leader > 0 > settings[0.1].others
    words = " ".join(sentences(found).values())
    assert "reaches 1.1" in words
    assert "delay the penalty" in words
    assert list(sentences(found)) == ["Owners", "Force", "Speed"]


def test_owners_are_turned_into_tau() -> None:
    found = explain(ExplainConfig(members=8, owners=2.5, **SMALL))  # type: ignore[arg-type]
    assert found.chosen.tau == theory.tau_for_owners(2.5, 8)
    assert found.chosen.reached == pytest.approx(2.5, abs=0.02)
    assert "(for owners=2.5)" in sentences(found)["Owners"]
    with pytest.raises(DiversityError, match="out of reach for 8 members"):
        explain(ExplainConfig(members=8, owners=7.0))


def test_a_slow_optimizer_is_said_not_to_arrive() -> None:
    found = explain(ExplainConfig(optimizer="adam", lr=1e-5, **SMALL))  # type: ignore[arg-type]
    assert set(found.milestones.values()) == {None}
    assert (
        "with adam at rate 0.001 of γ the cosine goes from 0.85 to 0.84 after 30"
        in sentences(found)["Speed"]
    )


def test_two_members_have_no_dial() -> None:
    found = explain(ExplainConfig(members=2, **SMALL))  # type: ignore[arg-type]
    assert found.steep is None
    assert "with two members every τ ends there" in sentences(found)["Owners"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tau": 0.1, "owners": 1.5}, "tau and owners are given"),
        ({"optimizer": "lion"}, "optimizer is 'lion'"),
        ({"weight": 0.0}, "weight is 0"),
        ({"momentum": 1.0}, "momentum in"),
        ({"steps": 3}, "10 to 20000 steps"),
    ],
)
def test_values_that_mean_nothing_are_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        explain(ExplainConfig(**options))


def test_the_command_prints_and_writes_a_page_that_asks_for_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new"
    given = ["explain", "--members", "4", "--tau", "0.3", "--steps", "30", "--out", str(folder)]
    assert main(given) == 0
    printed = capsys.readouterr().out
    assert "0.3 ←" in printed
    assert "• Speed: " in printed
    text = (folder / "explain.html").read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    assert "τ=0.3" in text
    head, _, _ = text.partition("/**")  # plotly's own source mentions addresses
    assert "<script src" not in text
    assert "<link" not in head
    assert main(given) == 1
    assert "exists already" in capsys.readouterr().err
    assert main([*given[:-1], str(folder / "other.html")]) == 0
    assert (folder / "other.html").read_text(encoding="utf-8") == text


def test_wrong_usage_has_status_2_and_an_unreachable_wish_1(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["explain", "--optimizer", "lion"]) == 2
    assert "optimizer is 'lion'" in capsys.readouterr().err
    assert main(["explain", "--owners", "3.5"]) == 1
    assert "out of reach for 4 members" in capsys.readouterr().err


def test_it_loads_no_training_library() -> None:
    code = (
        "import sys; from sigmanens.lab.explain import explain, ExplainConfig; "
        "print(sorted({'lightning', 'datasets', 'timm', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_page_without_plotly_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [n for n in sys.modules if n.startswith("sigmanens.lab.report")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "sigmanens.lab.explain_page", raising=False)
    monkeypatch.setitem(sys.modules, "plotly.io", None)
    assert main(["explain", "--steps", "30", "--out", str(tmp_path / "page.html")]) == 1
    out = capsys.readouterr()
    assert "need plotly: pip install 'sigmanens[lab]'" in out.err
    assert "• Speed: " in out.out
