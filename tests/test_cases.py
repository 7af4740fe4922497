"""Faults that users of comparable tools reported, and that each of them has a test here.

A test that stands for a row carries ``@pytest.mark.case("C8")``; ``pytest -m case`` runs them all.
Rows of prediction and evaluation (P1 … P9) and of several processes (T8) are marked alike.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest
import torch
from tests.networks import Pictures, randomise
from torch import nn

import sigmanens as sn
from sigmanens.errors import ConversionError, NoNormError, UnsupportedNormError
from sigmanens.passes.modes import evaluating

ROOT = Path(__file__).resolve().parents[1]

ROWS = {
    "C1": "nested containers of any kind: as many norms replaced as were counted",
    "C2": "fused norms keep activation and dropout; every test network of timm",
    "C3": "a norm class that is not known is wrapped by a rule or refused by name",
    "C4": "a network that is itself a norm",
    "C5": "a second conversion is refused and changes nothing",
    "C6": "a selection that matches nothing is an error that lists the norms",
    "C7": "the base keeps its outputs and every tensor",
    "C8": "mode, device, dtype, requires_grad and memory format are kept",
    "C9": "norms called as functions are found and reported",
    "C10": "the fused path of nn.TransformerEncoderLayer does not bypass scales",
    "C11": "code that reads or folds norm weights works or is refused",
    "C12": "pretrained tensors outside norms and heads are identical",
    "C13": "odd shapes and norms without affine, bias or running statistics",
    "C14": "pretrained scales of any sign and size, zero included",
    "T1": "members see the whole batch, or by request a share of their own",
    "T2": "batches of any size, divisible by the members or not",
    "T3": "frozen statistics stay frozen through train()",
    "T4": "weight decay does not reach the scales unnoticed",
    "T5": "Hugging Face Trainer with a data set that batches do not divide",
    "T6": "low precision: scales and statistics stay in float32",
    "T7": "dropout masks and running statistics of each member's own",
    "T9": "soft labels and mixup",
    "T10": "members with features of different size do not share statistics",
    "S1": "a small checkpoint on a fresh base gives bit-equal outputs",
    "S2": "checkpoints that are damaged, of another base, version or device",
    "S3": "no key has a name that transformers renames",
    "S4": "exported statistics are each member's, in evaluation",
    "S5": "one compiled graph, at most one more for a last, smaller batch",
    "S6": "no upper bounds on requirements",
}
OTHERS = {*(f"P{i}" for i in range(1, 10)), "T8"}


@cache
def marked() -> list[tuple[str, str]]:
    """Rows and the tests that are marked with them."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef) or not node.name.startswith("test_"):
                continue
            for mark in node.decorator_list:
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.case":
                    rows = [ast.literal_eval(row) for row in mark.args]
                    found += [(row, f"{path.name}::{node.name}") for row in rows]
    return found


def test_every_row_has_a_test() -> None:
    found = {row for row, _ in marked()}
    assert set(ROWS) - found == set()


def test_marks_name_rows_that_there_are() -> None:
    odd = {test: row for row, test in marked() if row not in ROWS and row not in OTHERS}
    assert not odd


# -- rows that need no file of their own -------------------------------------------------------


@pytest.mark.slow
@pytest.mark.case("C2")
def test_every_test_network_of_timm_is_preserved_or_refused() -> None:
    """At step 0 each member answers as the base does; norms and statistics are not constant."""
    timm = pytest.importorskip("timm")
    names = timm.list_models("test_*")
    refused = {}
    for name in names:
        base = randomise(timm.create_model(name, num_classes=3)).eval()
        size = base.default_cfg.get("test_input_size") or base.default_cfg["input_size"]
        x = torch.randn(2, *size)
        try:
            ens = sn.convert(base, 2, init="preserve")
        except ConversionError as error:
            refused[name] = type(error)
            continue
        with evaluating(base):
            expected = base(x)
        with evaluating(ens):
            torch.testing.assert_close(
                ens(x), expected.expand(2, -1, -1), rtol=1e-3, atol=1e-4, msg=name
            )
    assert len(names) >= 15
    assert refused == {
        "test_efficientnet_evos": UnsupportedNormError,
        "test_nfnet": NoNormError,
    }


@pytest.mark.case("C8")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_device_dtype_and_memory_format_are_kept(device: str, dtype: torch.dtype) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    base = randomise(Pictures(3)).to(device, dtype, memory_format=torch.channels_last)  # type: ignore[call-overload]
    base.conv2.eval()
    ens = sn.convert(base, 2)
    for name, theirs in base.named_parameters():
        ours = dict(ens.network.named_parameters()).get(name)
        if ours is not None:
            assert (ours.dtype, ours.device) == (dtype, theirs.device)
            assert ours.stride() == theirs.stride()
    own = [*ens.network.bn1.parameters(), *ens.network.bn1.buffers()]
    assert {t.device.type for t in own} == {device}
    assert {t.dtype for t in own if t.is_floating_point()} == {
        torch.promote_types(dtype, torch.float32)
    }
    assert not ens.network.conv2.training
    x = torch.randn(3, 1, 8, 8, device=device, dtype=dtype)
    assert (ens(x).dtype, ens(x).device) == (dtype, x.device)


@pytest.mark.case("S2")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")
def test_a_checkpoint_from_a_gpu_loads_on_the_cpu(tmp_path: Path) -> None:
    base = randomise(Pictures()).eval()
    ens = sn.convert(base, 2).cuda()
    ens.save_pretrained(tmp_path)
    again = sn.load(tmp_path, base=base)
    assert {t.device.type for t in again.state_dict().values()} == {"cpu"}
    x = torch.randn(3, 1, 8, 8)
    torch.testing.assert_close(again(x), ens(x.cuda()).cpu(), rtol=1e-4, atol=1e-4)


@pytest.mark.case("T1")
def test_scales_of_a_member_depend_on_its_share_alone() -> None:
    base = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.ReLU(), nn.Linear(6, 3))
    ens = sn.convert(base, 3, init="normal")
    x, y = torch.randn(12, 4), torch.arange(12) % 3

    def gradients() -> torch.Tensor:
        ens.zero_grad()
        sn.EnsembleLoss()(ens(x, split=True), y, split=True).backward()
        found = ens.network[1].scale_logit.grad
        assert found is not None
        return found.clone()

    before = gradients()
    x[4:8] += 1.0  # the share of member 1
    after = gradients()
    torch.testing.assert_close(after[[0, 2]], before[[0, 2]], rtol=0, atol=0)
    assert not torch.allclose(after[1], before[1])


@pytest.mark.case("S6")
def test_no_requirement_has_an_upper_bound() -> None:
    """The oldest torch that is allowed cannot be had beside the current one: that is CI's part."""
    tomllib = pytest.importorskip("tomllib")  # from Python 3.11
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    bounded = {line for lines in groups.values() for line in lines if re.search(r"<|==|~=", line)}
    assert not bounded
    assert "<" not in project["requires-python"]
    torch_line = next(line for line in project["dependencies"] if line.startswith("torch"))
    lowest = re.fullmatch(r"torch>=(\d+)\.(\d+)", torch_line)
    assert lowest is not None
    current = tuple(map(int, torch.__version__.split("+")[0].split(".")[:2]))
    assert current >= (int(lowest[1]), int(lowest[2]))
