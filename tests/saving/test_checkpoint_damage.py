"""Checkpoints that do not fit, are damaged, or cannot be written."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.networks import dense, randomise
from torch import nn

import sigmanens as sn
from sigmanens.errors import CheckpointError, InputError
from sigmanens.saving.checkpoint import write_atomic


def meta(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "sigmanens.json").read_text())


# -- damage ------------------------------------------------------------------------------------


def good_base() -> nn.Module:
    torch.manual_seed(5)
    return randomise(dense()).eval()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    sn.convert(good_base(), 2).save_pretrained(tmp_path)
    return tmp_path


def other_weights() -> nn.Module:
    base = good_base()
    with torch.no_grad():
        base[3].weight[0, 0] += 1e-6
    return base


def wider() -> nn.Module:
    return randomise(dense(width=7)).eval()


def deeper() -> nn.Module:
    return nn.Sequential(*good_base(), nn.Linear(3, 3))


def without_norms() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))


def half() -> nn.Module:
    return good_base().half()


@pytest.mark.case("S2")
@pytest.mark.parametrize(
    ("base", "message"),
    [
        (other_weights, r"not the base .*1 of 4 shared tensors differ \(first: '3\.weight'\)"),
        (wider, "not the base the checkpoint was made on"),
        (deeper, "not the base the checkpoint was made on"),
        (without_norms, "does not fit this Sequential: .*no normalisation layer"),
        (half, "not the base the checkpoint was made on"),
        (lambda: sn.convert(good_base(), 2), "does not fit this SigmaEnsemble: .*already"),
        (lambda: sn.convert(good_base(), 2).network, "does not fit this Sequential: .*already"),
    ],
)
def test_a_wrong_base_is_named(base: Callable[[], nn.Module], message: str, folder: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        sn.load(folder, base=base())
    assert sn.load(folder, base=good_base()).num_members == 2


def test_a_wrong_base_whose_norms_differ_in_size_is_named(tmp_path: Path) -> None:
    sn.convert(nn.Sequential(nn.LayerNorm(4)), 2, head="shared").save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"'0\.scale_logit' has shape \(2, 4\).*\(2, 5\)"):
        sn.load(tmp_path, base=nn.Sequential(nn.LayerNorm(5)))
    with pytest.raises(CheckpointError, match="do not fit this Sequential"):
        sn.load(tmp_path, base=nn.Sequential(nn.BatchNorm1d(4)))


def alter(folder: Path, **changes: Any) -> None:
    (folder / "sigmanens.json").write_text(json.dumps(meta(folder) | changes))


def rewrite(folder: Path, **changes: Any) -> None:
    """As a sigmanens of another release might have written it: altered, with its own checksum."""
    content = {k: v for k, v in meta(folder).items() if k != "checksum"} | changes
    checksum = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    (folder / "sigmanens.json").write_text(json.dumps(content | {"checksum": checksum}))


def truncated_json(folder: Path) -> None:
    path = folder / "sigmanens.json"
    path.write_text(path.read_text()[:-20])


def without_json(folder: Path) -> None:
    (folder / "sigmanens.json").unlink()


def not_json_object(folder: Path) -> None:
    (folder / "sigmanens.json").write_text("[1, 2]")


def binary_json(folder: Path) -> None:
    (folder / "sigmanens.json").write_bytes(b"\xff\xfe\x00")


def truncated_weights(folder: Path) -> None:
    path = folder / meta(folder)["weights"]
    path.write_bytes(path.read_bytes()[:-4])


def altered_weights(folder: Path) -> None:
    path = folder / meta(folder)["weights"]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


def without_weights(folder: Path) -> None:
    (folder / meta(folder)["weights"]).unlink()


@pytest.mark.case("S2")
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_json, "no sigmanens.json in .*: expected a folder written by save_pretrained"),
        (truncated_json, "sigmanens.json cannot be read"),
        (binary_json, "sigmanens.json cannot be read"),
        (not_json_object, "is not a sigmanens checkpoint"),
        (lambda f: alter(f, format="peft"), "is not a sigmanens checkpoint"),
        (
            lambda f: alter(f, version=99),
            "format version 99; expected 4",
        ),
        (lambda f: alter(f, temperature=-1.0), "was altered after save_pretrained wrote it"),
        (lambda f: alter(f, plan=meta(f)["plan"] | {"members": 3}), "was altered"),
        (lambda f: alter(f, weights="../other.safetensors"), "was altered"),
        (lambda f: alter(f, sha256="0" * 64), "was altered"),
        (lambda f: alter(f, base={}), "was altered"),
        (
            lambda f: rewrite(f, plan={"members": 2}),
            "does not fit .*config is not resolved",
        ),
        (
            lambda f: rewrite(f, plan=meta(f)["plan"] | {"new": 1}),
            "cannot be read: .*config has unknown keys: new",
        ),
        (
            lambda f: rewrite(f, plan=meta(f)["plan"] | {"head_name": ["9"]}),
            "does not fit this Sequential: .*'9'",
        ),
        (truncated_weights, "does not have the digest .*truncated or altered"),
        (altered_weights, "does not have the digest"),
        (without_weights, r"the weights .*\.safetensors cannot be read: No such file"),
    ],
)
def test_damage_is_named(damage: Callable[[Path], None], message: str, folder: Path) -> None:
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        sn.load(folder, base=good_base())
    assert issubclass(CheckpointError, (sn.SigmaNensError, RuntimeError))


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no sigmanens.json in .*nowhere"):
        sn.load(tmp_path / "nowhere", base=good_base())


# -- writing that fails ------------------------------------------------------------------------


def test_an_unknown_option_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="shared is 'yes'; expected 'auto', 'never' or 'always'"):
        sn.convert(dense(), 2).save_pretrained(tmp_path, shared="yes")


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(CheckpointError, match=r"could not save to .*taken: File exists"):
        sn.convert(dense(), 2).save_pretrained(tmp_path / "taken")
    assert (tmp_path / "taken").read_text() == "mine"


# Run apart, for the limit is the process's own: the OS refuses to let a file grow beyond it.
FULL_DISK = """
import resource, sys
import torch
import sigmanens as sn
from torch import nn

folder, limit, padding = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
base = nn.Sequential(nn.Linear(4, 64), nn.LayerNorm(64), nn.Linear(64, 3)).eval()
x = torch.randn(5, 4)
old, new = (sn.convert(base, 2, init="normal") for _ in range(2))
old.save_pretrained(folder)
new.base_fingerprint |= {f"padding_{i}": i for i in range(padding)}  # makes the JSON long
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
for target in (folder, folder + "/new"):
    try:
        new.save_pretrained(target)
    except sn.errors.CheckpointError as e:
        print(e)
    else:
        print("saved")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
assert torch.equal(sn.load(folder, base=base)(x), old(x))
"""


@pytest.mark.parametrize(
    ("limit", "padding"), [(100, 0), (20_000, 10_000)], ids=["weights", "description"]
)
def test_a_full_disk_leaves_the_old_checkpoint_whole_and_nothing_else(
    limit: int, padding: int, tmp_path: Path
) -> None:
    pytest.importorskip("resource")
    folder = tmp_path / "checkpoint"
    result = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(folder), str(limit), str(padding)],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(sn.__file__).parents[1])},
    )
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert len(lines) == 2
    for line in lines:
        assert "could not save to" in line
        assert "File too large" in line
        assert "What was there before is unchanged" in line
    weights, description = sorted(p.name for p in folder.iterdir())
    assert weights == meta(folder)["weights"]
    assert description == "sigmanens.json"


def test_atomic_writing_replaces_whole_files(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomic(path, b"old")
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    with pytest.raises(OSError, match="No such file"):
        write_atomic(tmp_path / "nowhere" / "file", b"new")
