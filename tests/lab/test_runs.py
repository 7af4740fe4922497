"""Run folders: never overwritten, never half-written, and silent about the machine."""

from __future__ import annotations

import getpass
import json
import math
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

pytest.importorskip("yaml")

from sigmanens.errors import ConfigError, RunError
from sigmanens.lab.runs import Run, environment, read_config, read_metrics, write_tensors

CONFIG: dict[str, Any] = {"name": "σ", "recipe": {"lr": 0.1, "epochs": 2}, "taus": [0.1, 0.5]}


def test_a_run_is_written_and_read(tmp_path: Path) -> None:
    folder = tmp_path / "runs" / "first"
    run = Run(folder, CONFIG)
    assert read_config(folder) == CONFIG
    assert "σ" in (folder / "config.yaml").read_text(encoding="utf-8")
    write_tensors(
        run.path("predictions.safetensors"),
        {"a": torch.arange(6).reshape(2, 3).T, "b": torch.ones(2)},
    )
    run.write_metrics({"rows": [{"nll": 0.123456789012345, "n": 3, 4: "τ"}]})
    assert torch.equal(
        load_file(folder / "predictions.safetensors")["a"], torch.arange(6).reshape(2, 3).T
    )
    assert read_metrics(folder) == {"rows": [{"nll": 0.123456789, "n": 3, "4": "τ"}]}
    assert run.path("checkpoint") == folder / "checkpoint"
    assert {p.name for p in folder.iterdir()} == {
        "config.yaml", "metrics.json", "predictions.safetensors",
    }  # fmt: skip


def test_numbers_that_are_not_finite_become_null(tmp_path: Path) -> None:
    run = Run(tmp_path, CONFIG)
    run.write_metrics(
        {"a": math.nan, "b": [math.inf, 1.0, -math.inf], "c": {"d": (math.nan, 2)}, "e": True}
    )
    text = (tmp_path / "metrics.json").read_text(encoding="utf-8")
    assert "NaN" not in text
    assert "Infinity" not in text
    assert json.loads(text) == {
        "a": None, "b": [None, 1.0, None], "c": {"d": [None, 2]}, "e": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("present", "message"),
    [
        ("metrics.json", r"holds a run already \(metrics\.json\)\. Give another --out$"),
        ("config.yaml", r"holds an unfinished run already \(config\.yaml\).*--resume"),
        ("predictions.safetensors", "unfinished run"),
        ("report.html", "unfinished run"),
        ("checkpoint", "unfinished run"),
    ],
)
def test_a_folder_with_a_run_is_refused(tmp_path: Path, present: str, message: str) -> None:
    (tmp_path / present).write_text("mine")
    with pytest.raises(RunError, match=message):
        Run(tmp_path, CONFIG)
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [(present, "mine")]


def test_a_folder_with_other_things_is_taken(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    Run(tmp_path, CONFIG)
    assert {p.name for p in tmp_path.iterdir()} == {"notes.txt", "config.yaml"}


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("mine")
    for resume in (True, False):
        with pytest.raises(RunError, match="is a file; expected a folder"):
            Run(tmp_path / "out", CONFIG, resume)


def test_resuming(tmp_path: Path) -> None:
    Run(tmp_path, CONFIG, resume=True)  # nothing there yet: a run like any other
    Run(tmp_path, CONFIG, resume=True)
    Run(tmp_path, {**CONFIG, "recipe": {"epochs": 2.0, "lr": 0.1}}, resume=True)  # equal numbers
    other = {**CONFIG, "name": "other"}
    with pytest.raises(RunError, match=r"another configuration; resume it with --config .*yaml"):
        Run(tmp_path, other, resume=True)
    assert read_config(tmp_path)["name"] == "σ"
    Run(tmp_path, CONFIG, resume=True).write_metrics({"rows": []})
    with pytest.raises(RunError, match="is finished: there is nothing to resume"):
        Run(tmp_path, CONFIG, resume=True)


def test_a_configuration_of_an_older_release_is_completed(tmp_path: Path) -> None:
    Run(tmp_path, CONFIG)
    newer = {**CONFIG, "new_key": 1}
    with pytest.raises(RunError, match="another configuration"):
        Run(tmp_path, newer, resume=True)
    Run(tmp_path, newer, resume=True, complete=lambda stored: {"new_key": 1, **stored})
    assert read_config(tmp_path) == newer


def test_some_keys_may_change_when_a_run_is_extended(tmp_path: Path) -> None:
    Run(tmp_path, {**CONFIG, "seeds": [0]}).write_metrics({"rows": []})
    Run(tmp_path, {**CONFIG, "seeds": [0, 1]}, resume=True, extendable=("seeds",))
    assert read_config(tmp_path)["seeds"] == [0, 1]
    assert (tmp_path / "metrics.json").exists()  # until there are new ones
    other = {**CONFIG, "recipe": {"epochs": 3}, "seeds": [0, 1]}
    with pytest.raises(RunError, match="another configuration"):
        Run(tmp_path, other, resume=True, extendable=("seeds",))


def test_discarding_takes_back_what_was_written(tmp_path: Path) -> None:
    Run(tmp_path / "new", CONFIG).discard()
    assert list(tmp_path.iterdir()) == []
    folder = tmp_path / "mine"
    folder.mkdir()
    Run(folder, CONFIG).discard()
    assert list(folder.iterdir()) == []
    Run(tmp_path / "used", CONFIG)
    (tmp_path / "used" / "training").mkdir()
    Run(tmp_path / "used", CONFIG, resume=True).discard()
    assert {p.name for p in (tmp_path / "used").iterdir()} == {"config.yaml", "training"}
    run = Run(tmp_path / "begun", CONFIG)
    (tmp_path / "begun" / "training").mkdir()
    run.discard()
    assert [p.name for p in (tmp_path / "begun").iterdir()] == ["training"]


def test_a_configuration_of_other_things_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="numbers, strings, lists and dicts"):
        Run(tmp_path / "out", {"source": tmp_path})
    assert list(tmp_path.iterdir()) == []


def test_reading_names_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"holds no run: it has no metrics\.json"):
        read_metrics(tmp_path)
    with pytest.raises(RunError, match=r"holds no run: it has no config\.yaml"):
        read_config(tmp_path / "nowhere")
    Run(tmp_path, CONFIG)
    with pytest.raises(RunError, match=r"holds an unfinished run: it has no metrics\.json"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.json").write_text('{"rows": [')
    with pytest.raises(RunError, match=r"metrics\.json cannot be read"):
        read_metrics(tmp_path)
    (tmp_path / "metrics.json").write_text("[1, 2]")
    with pytest.raises(RunError, match="does not hold a mapping"):
        read_metrics(tmp_path)
    (tmp_path / "config.yaml").write_text("a: [1")
    with pytest.raises(RunError, match=r"config\.yaml cannot be read"):
        read_config(tmp_path)
    (tmp_path / "config.yaml").write_bytes(b"a: \xff\xfe")
    with pytest.raises(RunError, match=r"config\.yaml cannot be read"):
        read_config(tmp_path)


FULL_DISK = """
import resource, sys
from pathlib import Path

import torch

from sigmanens.errors import RunError
from sigmanens.lab.runs import Run, write_tensors

folder = Path(sys.argv[1])
run = Run(folder, {"a": 1}, resume=True)
write_tensors(run.path("predictions.safetensors"), {"x": torch.zeros(3)})
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
for write in (
    lambda: write_tensors(run.path("predictions.safetensors"), {"x": torch.zeros(5000)}),
    lambda: run.write_metrics({"rows": list(range(5000))}),
):
    try:
        write()
    except RunError as e:
        print(e)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="limits of a process are Unix's")
def test_a_full_disk_leaves_the_old_files_whole(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith(f"could not write {tmp_path / 'predictions.safetensors'}: ")
    assert second.startswith(f"could not write {tmp_path / 'metrics.json'}: ")
    assert "before are unchanged" in first
    assert {p.name for p in tmp_path.iterdir()} == {"config.yaml", "predictions.safetensors"}
    kept = load_file(tmp_path / "predictions.safetensors")
    assert torch.equal(kept["x"], torch.zeros(3))


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(RunError, match="could not write"):
        Run(tmp_path / "file" / "run", CONFIG)


def test_environment_says_nothing_of_host_user_or_path() -> None:
    found = environment()
    assert found["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()
    text = json.dumps(found)
    words = {w.strip('",') for w in text.split()}
    for secret in (socket.gethostname(), getpass.getuser(), str(Path.home()), os.getcwd()):
        assert secret not in words
    assert "/" not in text.replace(found["cpu"], "")
