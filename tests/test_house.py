"""The package as a thing that is installed, shipped, cited and imported."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import zipfile
from collections.abc import Callable
from importlib.metadata import metadata, version
from pathlib import Path

import pytest
import yaml

import sigmanens

ROOT = Path(__file__).resolve().parents[1]


def test_version_is_the_one_of_the_installed_package() -> None:
    assert sigmanens.__version__ == version("sigmanens")


def test_wheel_ships_the_type_marker_and_the_licence(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "sigmanens/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert {name.split("/")[0] for name in names} == {
        "sigmanens",
        f"sigmanens-{sigmanens.__version__}.dist-info",
    }


def test_core_depends_on_torch_and_safetensors_only() -> None:
    required = metadata("sigmanens").get_all("Requires-Dist") or []
    core = {re.split(r"[^\w-]", line)[0] for line in required if "extra ==" not in line}
    assert core == {"torch", "safetensors"}


def test_citation_names_the_paper() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == sigmanens.__version__
    paper = citation["preferred-citation"]
    assert paper["title"] == (
        "Controllable Diversity in Normalization-Based Implicit Ensembles "
        "via Softmax-Temperature Modulation"
    )
    assert paper["url"].endswith("2607.23860")
    authors = [(author["family-names"], author["given-names"]) for author in paper["authors"]]
    assert authors == [("Suteu", "M."), ("Serban", "O.")]


def test_no_file_names_a_folder_of_someones_machine() -> None:
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    if listing.returncode != 0:
        pytest.skip("not a git checkout, so there is no list of the project's files")
    files = [ROOT / name for name in listing.stdout.split("\0") if name]
    assert ROOT / "pyproject.toml" in files
    # An absolute path only: a relative one such as examples/work/ is preceded by a name or a dot.
    absolute = re.compile(rb"(?<![\w.-])/(?:work|root|home/\w+|Users/\w+)/")
    found = {
        str(path.relative_to(ROOT)): match.group().decode()
        for path in files
        if path.is_file() and (match := absolute.search(path.read_bytes()))
    }
    assert not found


CORE_ALONE = """
import sys

ABSENT = {
    "PIL", "datasets", "jsonargparse", "lightning", "pandas", "plotly", "pytorch_lightning",
    "rich", "scipy", "sklearn", "timm", "torchmetrics", "torchvision", "transformers", "yaml",
}


class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ABSENT:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Absent())

import torch
import sigmanens as sn
import sigmanens.evaluation

net = torch.nn.Sequential(
    torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 3)
)
ens = sn.convert(net, members=2)
loss_fn = sn.EnsembleLoss(diversity=sn.Diversity(tau=0.5, weight=1e-2))
loss_fn(ens(torch.randn(6, 4)), torch.tensor([0, 1, 2, 0, 1, 2]), ens).backward()
print(tuple(ens.predict(torch.randn(5, 4)).member_probs.shape))
"""


def test_core_and_evaluation_work_without_the_libraries_of_the_lab() -> None:
    result = subprocess.run([sys.executable, "-c", CORE_ALONE], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split("\n")[-2] == "(2, 5, 3)"


def _datagram() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.sendto(b"", ("192.0.2.1", 9))


@pytest.mark.parametrize(
    "attempt",
    [
        lambda: socket.create_connection(("192.0.2.1", 80), timeout=1),
        lambda: socket.create_connection(("example.invalid", 80), timeout=1),
        _datagram,
    ],
    ids=["connection", "look-up", "datagram"],
)
def test_the_network_is_out_of_reach(
    attempt: Callable[[], object], network_attempts: list[str]
) -> None:
    with pytest.raises(RuntimeError, match="tests may not use the network"):
        attempt()
    assert len(network_attempts) == 1
    network_attempts.clear()


def test_loopback_is_in_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("localhost", port), timeout=5) as client:
            assert client.getpeername()[1] == port
