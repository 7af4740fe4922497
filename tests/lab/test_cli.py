"""The command line: what it prints, and with which status it ends."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("datasets")
pytest.importorskip("jsonargparse")
pytest.importorskip("lightning")

import torch
import yaml
from safetensors.torch import load_file
from tests.lab.pictures import write_digits, write_noise

import sigmanens
from sigmanens.errors import RunError
from sigmanens.lab import pipeline
from sigmanens.lab.backbones import build_backbone
from sigmanens.lab.bench import runner, work
from sigmanens.lab.cli import main
from sigmanens.lab.config import DemoConfig, TrainConfig
from sigmanens.lab.demo import demo_study
from sigmanens.lab.runs import read_config, read_metrics


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with pictures and a configuration of a short training on them."""
    root = tmp_path_factory.mktemp("cli")
    write_digits(root / "digits", train=(0, 120), test=(120, 240))
    write_noise(root / "noise")
    config = {
        "data": {"source": str(root / "digits"), "ood": {"noise": str(root / "noise")}},
        "model": {"name": "resnet8", "options": {"width": 4}},
        "ensemble": {"members": 2},
        "recipe": {"epochs": 9, "batch_size": 40, "lr": 0.05},
        "controls": ["single"],
    }
    (root / "config.yaml").write_text(yaml.safe_dump(config))
    return root


@pytest.fixture(scope="module")
def trained(root: Path) -> Path:
    out = root / "runs" / "trained"
    given = ["train", "--config", str(root / "config.yaml"), "--out", str(out)]
    changes = ["--recipe.epochs", "1", "--diversity.tau=0.5", "--threads", "1"]
    assert main([*given, *changes]) == 0
    return out


def usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What is printed about wrong usage, after the status was checked."""
    with pytest.raises(SystemExit) as stopped:
        main(arguments)
    assert stopped.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err) < 600
    return err


def failure(arguments: list[str], capsys: pytest.CaptureFixture[str], status: int = 1) -> str:
    """The one line that is printed about a failure, after the status was checked."""
    assert main(arguments) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, words in (
        (["--help"], ("demo", "train", "evaluate", "calibrated")),
        (["demo", "--help"], ("--out", "--taus", "temperatures τ of the penalty", "--workers")),
        (["train", "--help"], ("--resume", "--recipe.lr", "base learning rate", "--config")),
        (["evaluate", "--help"], ("RUN", "--json", "--members")),
        (["--version"], (sigmanens.__version__,)),
    ):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 0
        text = capsys.readouterr().out
        assert all(word in text for word in words)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "command"),
        (["fly"], "fly"),
        (["train"], "required: train.out"),
        (["demo"], "required: demo.out"),
        (["evaluate"], "required: evaluate.run"),
        (["train", "--out", "run", "--nope", "3"], "unrecognized arguments: --nope 3"),
        (["train", "--out", "run", "--recipe.epochs", "forty"], "forty"),
        (["train", "--out", "run", "--config", "none.yaml"], "File does not exist"),
        (["demo", "--out", "run", "--seeds", "1.5"], "1.5"),
    ],
)
def test_wrong_usage(
    arguments: list[str],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert reason in usage_error(arguments, capsys)
    assert list(tmp_path.iterdir()) == []


def test_wrong_key_in_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.yaml").write_text("recipe: {epoch: 3}")
    arguments = ["train", "--config", str(tmp_path / "config.yaml"), "--out", str(tmp_path / "run")]
    assert "epoch" in usage_error(arguments, capsys)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["train", "--out", "run"], "data.source is missing"),
        (["train", "--out", "run", "--data.source", "x", "--controls=[deep]"], "names 'deep'"),
        (["demo", "--out", "run", "--taus=[0.1,0.1]"], "taus is [0.1, 0.1]"),
        (["demo", "--out", "run", "--train", "1790"], "train=1790"),
    ],
)
def test_values_nothing_can_be_done_with_are_wrong_usage(
    arguments: list[str],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    line = failure(arguments, capsys, status=2)
    assert line.startswith(f"sigmanens {arguments[0]}: ")
    assert reason in line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--data.source", "./gone"], "There is no data folder ./gone"),
        (["--model.weights", "gone.pt"], "There is no weight file gone.pt"),
        (["--ensemble.head_name", "top"], "head_name='top' is no module"),
    ],
)
def test_failures_have_one_line(
    arguments: list[str],
    reason: str,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["train", "--config", str(root / "config.yaml"), "--out", "run", *arguments]
    line = failure(given, capsys)
    assert line.startswith("sigmanens train: ")
    assert reason in line
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_a_run_is_refused(
    trained: Path, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (trained / "metrics.json").read_bytes()
    config = ["--config", str(root / "config.yaml")]
    for arguments in (
        ["train", *config, "--out", str(trained)],
        ["demo", "--out", str(trained)],
        ["evaluate", str(trained), "--out", str(trained)],
    ):
        assert "holds a run already" in failure(arguments, capsys)
    stored = ["--config", str(trained / "config.yaml")]
    line = failure(["train", *stored, "--out", str(trained), "--resume"], capsys)
    assert "is finished: there is nothing to resume" in line
    assert (trained / "metrics.json").read_bytes() == before


def test_flags_override_the_file(trained: Path, root: Path) -> None:
    config = TrainConfig.from_dict(read_config(trained))
    assert (config.recipe.epochs, config.recipe.lr, config.diversity.tau) == (1, 0.05, 0.5)
    assert (config.model.options, config.controls, config.threads) == ({"width": 4}, ["single"], 1)
    assert config.data.ood == {"noise": str(root / "noise")}
    stored = read_metrics(trained)
    assert [row["method"] for row in stored["rows"]] == ["single", "sigmanens"]
    assert stored["command"].startswith("sigmanens train --config ")
    assert stored["command"].endswith("--recipe.epochs 1 --diversity.tau=0.5 --threads 1")


def test_train_prints_its_results(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = ["--config", str(root / "config.yaml"), "--recipe.epochs=1", "--controls=[]"]
    assert main(["train", *config, "--out", str(tmp_path / "run")]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("training sigmanens\nepoch 1 of 1\n")  # no terminal: no moving bar
    assert "σN-Ens τ=1" in out
    size = next((tmp_path / "run" / "checkpoint").glob("*.safetensors")).stat().st_size
    assert f"Members on disk: {size:,} bytes" in out
    assert f"Report: {tmp_path / 'run' / 'report.html'}" in out


@pytest.mark.parametrize(
    ("command", "kind"), [("train", TrainConfig), ("demo", DemoConfig)], ids=["train", "demo"]
)
def test_printed_configurations_work_as_files(
    command: str,
    kind: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change = {"train": ["--data.source", "./here", "--recipe.lr", "1e-3"], "demo": ["--train=99"]}
    with pytest.raises(SystemExit) as stopped:
        main([command, *change[command], "--print_config"])
    assert stopped.value.code == 0
    (tmp_path / "printed.yaml").write_text(capsys.readouterr().out, encoding="utf-8")
    given: list[Any] = []

    def keep(config: Any, out: Path, **options: Any) -> None:
        given.extend([config, out])
        raise RunError("seen")

    monkeypatch.setattr(pipeline, "train_run", keep)
    monkeypatch.setattr(runner, "run_bench", keep)
    assert main([command, "--config", str(tmp_path / "printed.yaml"), "--out", "run"]) == 1
    expected = kind()
    if command == "train":
        expected.data.source, expected.recipe.lr = "./here", 1e-3
    else:
        expected.train = 99
        expected = demo_study(expected)
    assert given == [expected, Path("run")]


def test_the_configuration_of_a_run_resumes_it(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def crash(*_: Any) -> None:
        raise RunError("the report cannot be written")

    out = str(tmp_path / "run")
    config = ["--config", str(root / "config.yaml"), "--recipe.epochs", "1"]
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "write_report", crash)
        assert main(["train", *config, "--out", out]) == 1
    capsys.readouterr()
    assert "continue a training with --resume" in failure(["train", *config, "--out", out], capsys)
    stored = ["--config", f"{out}/config.yaml"]
    assert main(["train", *stored, "--out", out, "--resume"]) == 0
    assert len(read_metrics(tmp_path / "run")["rows"]) == 2


def test_evaluate_prints_json_and_nothing_else(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["evaluate", str(trained), "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    row = json.loads(out)
    expected = read_metrics(trained)["rows"][-1]
    assert row["method"] == "sigmanens"
    assert row["nll"] == pytest.approx(expected["nll"], rel=1e-5)
    assert row["ood"]["noise"] == pytest.approx(expected["ood"]["noise"], rel=1e-4)
    assert main(["evaluate", str(trained), "--json", "--members=1"]) == 0
    assert json.loads(capsys.readouterr().out)["members"] == 1


def test_export_gives_what_leaves_as_files(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ensemble, shop = pipeline.load_run(trained)
    config, example = shop.config, shop.material.data.test.images[:4]
    plain = tmp_path / "member.safetensors"
    assert main(["export", str(trained), "--out", str(plain), "--format", "member:1"]) == 0
    assert plain.name in capsys.readouterr().out
    network = build_backbone(config.model.name, **{"num_classes": 10} | config.model.options)
    width = network.linear.in_features
    network.linear = torch.nn.Sequential(torch.nn.LayerNorm(width), torch.nn.Linear(width, 10))
    network.load_state_dict(load_file(plain))  # trained from scratch: with the paper's head
    network.eval()
    with torch.no_grad():
        torch.testing.assert_close(network(example), ensemble.eval()(example)[1])
    assert main(["export", str(trained), "--out", str(plain), "--format", "collapse"]) == 1
    assert "exists already" in capsys.readouterr().err
    program = tmp_path / "ens.pt2"
    assert main(["export", str(trained), "--out", str(program), "--format", "program"]) == 0
    answers = torch.export.load(program).module()(example)
    torch.testing.assert_close(answers["probs"], ensemble.predict(example).probs)
    for form, message in (("member:2", "0 to 1"), ("pickle", "onnx")):
        given = ["export", str(trained), "--out", str(tmp_path / "x"), "--format", form]
        assert main(given) == 2
        assert message in capsys.readouterr().err


def test_evaluate_writes_a_folder(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "again"
    assert main(["evaluate", str(trained), "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert "σN-Ens τ=0.5" in text
    assert {p.name for p in out.iterdir()} == {"config.yaml", "metrics.json", "report.html"}
    stored = read_metrics(out)
    assert stored["command"] == f"sigmanens evaluate {trained} --out {out}"
    (row,) = stored["rows"]
    assert row["nll"] == pytest.approx(read_metrics(trained)["rows"][-1]["nll"], rel=1e-5)
    assert read_config(out) == {"run": str(trained), "members": None}


def test_evaluate_refuses_what_is_no_trained_run(
    tmp_path: Path, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["evaluate", str(tmp_path / "gone"), "--out", str(tmp_path / "out")]
    assert "holds no run" in failure(arguments, capsys)
    line = failure(
        ["evaluate", str(trained), "--members=9", "--out", str(tmp_path / "out")], capsys
    )
    assert "members is 9; expected 1 to 2" in line
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "config.yaml").write_text("members: 4")  # as of a demo
    (tmp_path / "metrics.json").write_text('{"rows": []}')
    assert "no finished run of 'sigmanens train'" in failure(["evaluate", str(tmp_path)], capsys)


@pytest.mark.parametrize("command", ["train", "demo"])
def test_ctrl_c(
    command: str,
    root: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(work, "train_network", interrupt)
    options = {
        "train": ["--config", str(root / "config.yaml")],
        "demo": ["--workers=1", "--seeds=1"],
    }
    assert main([command, *options[command], "--out", str(tmp_path / "run")]) == 130
    assert capsys.readouterr().err == f"\nsigmanens {command}: interrupted\n"
    assert {p.name for p in tmp_path.rglob("*")} == {"run", "config.yaml"}


def test_a_reason_of_several_lines_becomes_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("a: [1")
    (tmp_path / "metrics.json").write_text("{}")
    line = failure(["evaluate", str(tmp_path)], capsys)
    assert "config.yaml cannot be read: while parsing" in line


def test_console_script(tmp_path: Path) -> None:
    script = Path(sys.executable).with_name("sigmanens")
    if not script.exists():
        pytest.skip("the package is not installed in this environment")
    source = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run(
        [script, "train", "--out", "run", "--data.source", "./gone"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": source},
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr == "sigmanens train: There is no data folder ./gone.\n"
    assert list(tmp_path.iterdir()) == []
