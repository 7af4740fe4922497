"""A file holds the ensemble, and not the larger memory that parts of it are views of."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sigmanens as sn

LARGE = torch.zeros(1 << 20)  # 4 MiB, of which everything below is a view
LIMIT = 1 << 19


def view(*shape: int) -> Tensor:
    size = torch.Size(shape).numel()
    return LARGE[:size].view(shape)


class Views(nn.Module):
    """A parameter, buffers, a plain attribute and a list of tensors that are views."""

    def __init__(self, recurrent: bool) -> None:
        super().__init__()
        self.first = nn.GRU(4, 6, batch_first=True) if recurrent else nn.Linear(4, 6)
        self.norm = nn.LayerNorm(6)
        self.second = nn.Linear(6, 6)
        self.second.weight = nn.Parameter(view(6, 6))
        self.register_buffer("offset", view(6))
        self.register_buffer("unsaved", view(6), persistent=False)
        self.attribute = view(6)
        self.several = [view(6), view(6)]
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        found = self.first(x)
        x = self.norm(found[0][:, -1] if isinstance(found, tuple) else found)
        x = self.second(x) + self.offset + self.unsaved + self.attribute + self.several[1]
        return self.head(x)


EXAMPLES: dict[str, tuple[bool, Callable[[], Any]]] = {
    "slice": (False, lambda: view(1000, 4)[:4]),
    "transposed": (False, lambda: view(4, 1000).T[:4]),
    "expanded": (False, lambda: view(1, 4).expand(4, 4)),
    "mapping": (False, lambda: {"x": view(1000, 4)[2:6]}),
    "sequences": (True, lambda: (view(1000, 5, 4)[:4],)),
}


def made(recurrent: bool) -> sn.SigmaEnsemble:
    torch.manual_seed(0)
    return sn.convert(Views(recurrent).eval(), 2)


def size(path: Path) -> int:
    return sum(f.stat().st_size for f in path.parent.iterdir())


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_program_is_small(name: str, tmp_path: Path) -> None:
    recurrent, example = EXAMPLES[name]
    file = tmp_path / "ens.pt2"
    torch.export.save(sn.export_program(made(recurrent), example()), file)
    assert size(file) < LIMIT
    x = torch.randn(3, 5, 4) if recurrent else torch.randn(3, 4)
    inputs = {"x": x} if name == "mapping" else {}
    found = torch.export.load(file).module()(*(() if inputs else (x,)), **inputs)
    torch.testing.assert_close(found["probs"], made(recurrent).predict(x).probs)


@pytest.mark.skipif(find_spec("onnxscript") is None, reason="needs onnxscript")
@pytest.mark.parametrize("name", ["slice", "mapping"])
def test_an_onnx_file_is_small(name: str, tmp_path: Path) -> None:
    recurrent, example = EXAMPLES[name]
    file = sn.export_onnx(made(recurrent), tmp_path / "ens.onnx", example())
    assert size(file) < LIMIT


@pytest.mark.parametrize("shared", ["auto", "always"])
def test_a_checkpoint_is_small(shared: str, tmp_path: Path) -> None:
    ens = made(False)
    with torch.no_grad():
        ens.network.second.weight.set_(view(6, 6))  # type: ignore[union-attr,operator]
        ens.network.offset = LARGE[6:12]
    assert size(ens.save_pretrained(tmp_path / "folder", shared)) < LIMIT
