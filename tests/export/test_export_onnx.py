"""The ensemble's prediction as an ONNX file, run in ONNX Runtime."""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.networks import Pictures, Recurrent, apart, dense, randomise, snapshot, unchanged
from torch import Tensor, nn

import sigmanens as sn
from sigmanens.errors import (
    ExportError,
    InputError,
    MissingPackageError,
    SigmaNensError,
    SigmaNensWarning,
)
from sigmanens.export import onnx as leaving
from sigmanens.export.program import OUTPUTS
from sigmanens.lab.backbones.cifar_resnet import cifar_resnet

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnxscript")

ROOT = Path(__file__).resolve().parents[2]


def trained(base: nn.Module, members: int = 3, sharpness: float = 1.0) -> sn.SigmaEnsemble:
    """Members that have parted, statistics included; in training mode; T = 1.7."""
    ens = apart(sn.convert(randomise(base).eval(), members))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for key, tensor in ens.network.state_dict().items():
            if key.endswith("running_mean"):
                tensor.add_(torch.randn(tensor.shape, generator=generator))
            elif key.endswith("running_var"):
                tensor.mul_(torch.rand(tensor.shape, generator=generator) + 0.5)
            elif ".heads." in key and sharpness != 1:
                tensor.mul_(sharpness * (1 + torch.rand(tensor.shape, generator=generator)))
    ens.temperature.fill_(1.7)
    return ens.train()


def serve(path: Path, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    results = session.run(None, {name: x.numpy() for name, x in inputs.items()})
    assert [o.name for o in session.get_outputs()] == list(OUTPUTS)
    return dict(zip(OUTPUTS, map(torch.from_numpy, results), strict=True))


def assert_predicts(result: dict[str, Tensor], prediction: sn.Prediction) -> None:
    for name in OUTPUTS:
        torch.testing.assert_close(result[name], getattr(prediction, name), rtol=0, atol=1e-4)
    if prediction.member_probs.shape[0] > 1:
        assert float(prediction.modulation.max()) > 1e-3  # there is something to get wrong


def resnet() -> nn.Module:
    return cifar_resnet(8, width=4)


def vit() -> nn.Module:
    timm = pytest.importorskip("timm")
    return timm.create_model("test_vit", num_classes=5, img_size=32, depth=2)


def group_norm() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(4, 3),
    )  # fmt: skip


@pytest.mark.case("S4")
@pytest.mark.parametrize(
    ("make", "name", "members", "sharpness", "layout"),
    [
        (resnet, "x", 3, 0.1, "fast"),
        (group_norm, "input", 1, 10, "fast"),
        pytest.param(resnet, "x", 3, 0.1, "small", marks=pytest.mark.slow),
        pytest.param(vit, "x", 2, 10, "fast", marks=pytest.mark.slow),
        pytest.param(vit, "x", 2, 10, "small", marks=pytest.mark.slow),
    ],
)
def test_onnx_runtime_predicts_what_the_ensemble_predicts(
    make: Callable[[], nn.Module],
    name: str,
    members: int,
    sharpness: float,
    layout: str,
    tmp_path: Path,
) -> None:
    ens = trained(make(), members, sharpness)
    before = snapshot(ens)
    example = torch.randn(2, 3, 32, 32)
    path = sn.export_onnx(ens, tmp_path / "new" / "ens.onnx", example, layout=layout)
    assert unchanged(ens, before)
    assert ens.schedule == "auto"
    assert [f.name for f in path.parent.iterdir()] == ["ens.onnx"]
    for size in (1, 5):
        x = torch.randn(size, 3, 32, 32)
        assert_predicts(serve(path, {name: x}), ens.predict(x))
    ens.backward(x, torch.arange(5) % 3, sn.EnsembleLoss())  # and training goes on
    assert all(p.grad is not None for n, p in ens.named_parameters() if "scale_logit" in n)


@pytest.mark.parametrize("layout", ["fast", pytest.param("small", marks=pytest.mark.slow)])
def test_a_bert_with_keyword_inputs_of_any_length(layout: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=50,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=16,
        num_labels=3,
    )
    ens = trained(transformers.BertForSequenceClassification(config), 2, sharpness=50)

    def draw(size: int, length: int = 7) -> dict[str, Tensor]:
        mask = torch.ones(size, length, dtype=torch.long)
        mask[0, 4:] = 0
        return {"input_ids": torch.randint(50, (size, length)), "attention_mask": mask}

    example = draw(3) | {"return_dict": True}
    path = sn.export_onnx(ens, tmp_path / "ens.onnx", example, length_dim=1, layout=layout)
    for size, length in ((1, 7), (5, 3), (5, 16)):
        inputs = draw(size, length)
        assert_predicts(serve(path, inputs), ens.predict(inputs))
    hidden = draw(1) | {"attention_mask": torch.tensor([[1, 0, 0, 0, 0, 0, 0]])}
    gap = serve(path, draw(1) | hidden)["probs"] - serve(path, hidden | draw(1))["probs"]
    assert gap.abs().max() > 1e-3  # the mask is an input, not a constant


def test_the_file_names_its_inputs_outputs_and_batch_and_nothing_of_this_machine(
    tmp_path: Path,
) -> None:
    base = randomise(Recurrent(True)).eval()
    ens = apart(sn.convert(base, 2, batch_dims={"state": 1}))

    def draw(size: int) -> tuple[Any, ...]:
        return torch.randn(size, 6, 4), (torch.randn(1, size, 5), torch.randn(1, size, 5))

    path = sn.export_onnx(ens, tmp_path / "ens.onnx", draw(2), opset=18)
    model = onnx.load(path)
    onnx.checker.check_model(model, full_check=True)
    assert {o.domain: o.version for o in model.opset_import}[""] == 18

    def shapes(values: Any) -> dict[str, list[Any]]:
        return {
            v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
            for v in values
        }

    assert shapes(model.graph.input) == {
        "x": ["batch", 6, 4],
        "state_0": [1, "batch", 5],
        "state_1": [1, "batch", 5],
    }
    assert shapes(model.graph.output) == {
        "probs": ["batch", 3],
        "member_probs": [2, "batch", 3],
        "entropy": ["batch"],
        "expected_entropy": ["batch"],
        "modulation": ["batch"],
    }
    assert b"site-packages" not in path.read_bytes()
    assert str(ROOT).encode() not in path.read_bytes()
    x, state = draw(4)
    result = serve(path, {"x": x, "state_0": state[0], "state_1": state[1]})
    for name in OUTPUTS:
        expected = getattr(ens.predict((x, state)), name)
        torch.testing.assert_close(result[name], expected, rtol=0, atol=1e-4)


@pytest.mark.case("S4")
def test_batch_norm_is_a_scale_and_a_shift_per_member(tmp_path: Path) -> None:
    ens = trained(Pictures())
    example = torch.randn(2, 1, 8, 8)
    path = sn.export_onnx(ens, tmp_path / "ens.onnx", example, members=2, layout="small")
    operators = {node.op_type for node in onnx.load(path).graph.node}
    assert "BatchNormalization" not in operators
    assert not operators & {"Sigmoid", "Rsqrt", "Sqrt", "Dropout"}  # folded into constants
    x = torch.randn(5, 1, 8, 8)
    result = serve(path, {"x": x})
    assert_predicts(result, ens.predict(x, members=2))
    for m in range(2):
        single = torch.softmax(ens.member(m).eval()(x), 1)
        torch.testing.assert_close(result["member_probs"][m], single, rtol=0, atol=1e-4)


def test_the_fast_layout_stores_and_computes_once_what_members_share(tmp_path: Path) -> None:
    base = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 64, 3), nn.BatchNorm2d(64), nn.ReLU(),
        nn.Conv2d(64, 64, 3), nn.BatchNorm2d(64), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 3),
    )  # fmt: skip
    x = torch.randn(2, 3, 12, 12)
    ens = sn.convert(randomise(base).eval(), 3, layers=["7"], head="fresh", example=x)
    assert ens.plan.prefix
    apart(ens)
    path = sn.export_onnx(ens, tmp_path / "ens.onnx", x)
    graph = onnx.load(path).graph
    counts = Counter(node.op_type for node in graph.node)
    assert counts["Conv"] == 3  # the members part after the third
    assert counts["BatchNormalization"] == 2 + 3
    weights = {tuple(w.dims) for w in graph.initializer if len(w.dims) == 4}
    assert weights == {(8, 3, 3, 3), (64, 8, 3, 3), (64, 64, 3, 3)}
    assert sum(len(w.dims) == 4 for w in graph.initializer) == 3
    assert_predicts(serve(path, {"input": x}), ens.predict(x))


class Writes(nn.Module):
    """Writes into its input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x.sub_(1.0)
        return self.head(self.norm(x.square()))


def test_every_member_gets_inputs_that_no_other_has_written_into(tmp_path: Path) -> None:
    ens = apart(sn.convert(randomise(Writes()).eval(), 3))
    path = sn.export_onnx(ens, tmp_path / "ens.onnx", torch.randn(2, 4))
    x = torch.randn(5, 4)
    assert_predicts(serve(path, {"x": x.clone()}), ens.predict(x))


@pytest.mark.parametrize("layout", leaving.LAYOUTS)
def test_a_network_of_one_length_is_told_apart(layout: str, tmp_path: Path) -> None:
    ens = sn.convert(Recurrent(True), 2, batch_dims={"state": 1})
    state = torch.randn(1, 2, 5), torch.randn(1, 2, 5)
    given = (torch.randn(2, 6, 4), state)
    with pytest.raises(ExportError, match=r"with length_dim=1: .* It passes at the example's len"):
        sn.export_onnx(ens, tmp_path / "ens.onnx", given, length_dim=1, layout=layout)


def test_members_without_a_plain_form_are_written_in_the_small_layout(tmp_path: Path) -> None:
    base = nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4), nn.Linear(4, 3))
    ens = apart(sn.convert(base, 2, shift=True))
    with torch.no_grad():
        ens.network[1].shift.fill_(0.5)
    x = torch.randn(2, 4)
    with pytest.warns(SigmaNensWarning, match=r"ens.onnx has layout 'small': members have no pla"):
        path = sn.export_onnx(ens, tmp_path / "ens.onnx", x)
    assert_predicts(serve(path, {"input": x}), ens.predict(x))


def test_members_that_are_sure_of_different_classes(tmp_path: Path) -> None:
    ens = trained(dense(), 2)
    with torch.no_grad():
        for m, head in enumerate(ens.network[6].heads):
            head.weight.zero_()
            head.bias.copy_(torch.tensor([[800.0, 0.0, -800.0], [-800.0, 0.0, 800.0]][m]))
    ens.temperature.fill_(1.0)
    path = sn.export_onnx(ens, tmp_path / "ens.onnx", torch.randn(2, 4))
    result = serve(path, {"input": torch.randn(3, 4)})
    torch.testing.assert_close(result["modulation"], torch.full((3,), 2.0).log())
    torch.testing.assert_close(result["expected_entropy"], torch.zeros(3))
    torch.testing.assert_close(result["probs"], torch.tensor([[0.5, 0.0, 0.5]]).expand(3, 3))


def test_large_weights_lie_beside_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "INLINE_BYTES", 1000)
    base = nn.Sequential(nn.Linear(4, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 3))
    ens = trained(base)
    path = sn.export_onnx(ens, tmp_path / "ens.onnx", torch.randn(2, 4))
    assert {f.name for f in tmp_path.iterdir()} == {"ens.onnx", "ens.onnx.data"}
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for file in ("ens.onnx", "ens.onnx.data"):
        shutil.move(tmp_path / file, moved / file)
    x = torch.randn(5, 4)
    assert_predicts(serve(moved / path.name, {"input": x}), ens.predict(x))


# -- the check -------------------------------------------------------------------------------------


def test_a_file_that_differs_does_not_replace_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ens.onnx"
    path.write_bytes(b"old")
    monkeypatch.setattr(leaving, "TOLERANCE", -1.0)
    with pytest.raises(ExportError, match=r"on a batch of 1, ONNX Runtime differs .* 'probs'"):
        sn.export_onnx(trained(dense()), path, torch.randn(2, 4))
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    assert sn.export_onnx(trained(dense()), path, torch.randn(2, 4), verify=False) == path
    assert path.read_bytes() != b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_what_onnx_runtime_cannot_run_is_refused_with_its_reason(tmp_path: Path) -> None:
    ens = trained(Pictures()).double()
    x = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    with pytest.raises(ExportError, match=r"does not load .* for Conv.*verify=False"):
        sn.export_onnx(ens, tmp_path / "ens.onnx", x)
    assert not list(tmp_path.iterdir())


def test_without_onnx_runtime_a_warning_says_that_nothing_was_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, "onnxruntime")
    ens = trained(dense())
    with pytest.warns(SigmaNensWarning, match=r"not compared .* onnxruntime is not installed"):
        path = sn.export_onnx(ens, tmp_path / "ens.onnx", torch.randn(2, 4))
    assert path.is_file()


# -- what cannot be exported -----------------------------------------------------------------------


def hide(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    found = leaving.find_spec
    monkeypatch.setattr(leaving, "find_spec", lambda n: None if n == package else found(n))


@pytest.mark.parametrize("package", ["onnx", "onnxscript"])
def test_a_missing_package_is_named_with_its_extra(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, package)
    with pytest.raises(MissingPackageError, match=rf"needs {package}: pip install 'sigmanens\[onn"):
        sn.export_onnx(trained(dense()), tmp_path / "ens.onnx", torch.randn(2, 4))
    assert issubclass(MissingPackageError, (SigmaNensError, ImportError))


class Decomposed(nn.Module):
    """Uses an operator that ONNX does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        outer = x[:, :, None] * x[:, None, :] + torch.eye(4)
        return self.head(self.norm(torch.linalg.svdvals(outer)))


def test_an_operator_that_onnx_lacks_is_named(tmp_path: Path) -> None:
    ens = sn.convert(Decomposed(), 2)
    with pytest.raises(ExportError) as caught:
        sn.export_onnx(ens, tmp_path / "ens.onnx", torch.randn(2, 4))
    text = str(caught.value)
    assert re.match(r"torch\.onnx failed for this Decomposed: No ONNX function .*svd", text)
    assert text.endswith("Decomposed of member 0 fails too: the cause is not the members")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_refused(dtype: torch.dtype, tmp_path: Path) -> None:
    ens = trained(dense()).to(dtype)
    with pytest.raises(InputError, match=rf"'0.weight' is {dtype}.*Export ens.float\(\)"):
        sn.export_onnx(ens, tmp_path / "ens.onnx", torch.randn(2, 4).to(dtype))


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    ens = trained(dense())
    with pytest.raises(InputError, match="is a folder; expected the path of the file"):
        sn.export_onnx(ens, tmp_path, torch.randn(2, 4))
    with pytest.raises(InputError, match="no input tensor with a batch dimension"):
        sn.export_onnx(ens, tmp_path / "ens.onnx", torch.tensor(1.0))
    with pytest.raises(InputError, match="members is 4; expected 1 to 3"):
        sn.export_onnx(ens, tmp_path / "ens.onnx", torch.randn(2, 4), members=4)
    with pytest.raises(InputError, match="layout is 'quick'; expected one of fast, small"):
        sn.export_onnx(ens, tmp_path / "ens.onnx", torch.randn(2, 4), layout="quick")
    with pytest.raises(InputError, match="length_dim is 2, but dimension 2 of every input"):
        sn.export_onnx(ens, tmp_path / "ens.onnx", torch.randn(2, 4), length_dim=2)
    with pytest.raises(ExportError, match="wrote operator set 18 instead of 99"):
        sn.export_onnx(ens, tmp_path / "ens.onnx", torch.randn(2, 4), opset=99)
    assert not list(tmp_path.iterdir())


# -- the document ----------------------------------------------------------------------------------


def test_the_examples_of_the_document_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / "export.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "export.md", "exec"), names)
    assert names["probs"].shape == (7, 10)
    assert names["result"]["modulation"].shape == (7,)
    printed = capsys.readouterr().out
    assert [line.split(" accuracy")[0].strip() for line in printed.splitlines()[-3:]] == [
        "ensemble",
        "collapsed",
        "member 0",
    ]
