"""Loading without the base: the checkpoint holds all tensors and says how the network is made."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.networks import randomise
from torch import Tensor, nn

import sigmanens as sn
from sigmanens.errors import CheckpointError, InputError
from sigmanens.saving import checkpoint
from sigmanens.saving.source import Source


class Wide(nn.Module):
    def __init__(self, width: int = 6, drop: float = 0.0) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(drop))
        self.head = nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def make_wide(width: int = 6) -> nn.Module:
    return Wide(width)


def unannotated():  # type: ignore[no-untyped-def]
    raise AssertionError("called")


def bert(**options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=20, hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=16, num_labels=5, **options,
    )  # fmt: skip
    network: nn.Module = transformers.BertForSequenceClassification(config)
    return network


def timm(name: str, **options: Any) -> nn.Module:
    network: nn.Module = pytest.importorskip("timm").create_model(name, **options)
    return network


def torchvision(name: str, **options: Any) -> nn.Module:
    models = pytest.importorskip("torchvision.models")
    network: nn.Module = models.get_model(name, weights=None, **options)
    return network


def zeroed(network: nn.Module) -> nn.Module:
    """With a channel of scale 0 in the first norm."""
    norm = next(m for m in network.modules() if isinstance(m, nn.BatchNorm2d))
    nn.init.zeros_(norm.weight[:1])
    return network


def pictures(channels: int = 3, size: int = 32) -> Tensor:
    return torch.randn(2, channels, size, size)


BASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Any], dict[str, Any]]] = {
    "timm cnn": (lambda: timm("resnet10t", num_classes=7), pictures, {}),
    "timm grey": (lambda: timm("resnet10t", num_classes=2, in_chans=1), lambda: pictures(1), {}),
    "timm fresh heads": (
        lambda: timm("resnet10t", num_classes=7), pictures, {"init": "normal", "head": "fresh"},
    ),
    "timm transformer": (
        lambda: timm("vit_tiny_patch16_224", num_classes=4, img_size=32), pictures, {},
    ),
    "timm bfloat16": (
        lambda: timm("resnet10t", num_classes=7).bfloat16(), lambda: pictures().bfloat16(), {},
    ),
    "transformers": (bert, lambda: {"input_ids": torch.randint(20, (2, 6))}, {}),
    "transformers eager": (
        lambda: bert(attn_implementation="eager"),
        lambda: {"input_ids": torch.randint(20, (2, 6))},
        {"train": "members"},
    ),
    "torchvision": (lambda: torchvision("resnet18", num_classes=6), pictures, {}),
    "torchvision mobile": (
        lambda: torchvision("mobilenet_v3_small", num_classes=6),
        pictures,
        {"layers": "features.1"},
    ),
    "zero scales": (lambda: zeroed(timm("resnet10t", num_classes=7)), pictures, {}),
}  # fmt: skip


LARGE = ("torchvision mobile", "timm bfloat16")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in LARGE else []) for n in BASES]
)
def test_the_base_is_made_anew(name: str, tmp_path: Path) -> None:
    make, inputs, options = BASES[name]
    base = make() if name == "zero scales" else randomise(make())
    ens = sn.convert(base.eval(), 2, **({"init": "preserve"} | options))
    ens.temperature.fill_(1.5)
    ens.save_pretrained(tmp_path, shared="always")
    state = torch.get_rng_state()
    back = sn.load(tmp_path)
    back.save_pretrained(tmp_path / "again", shared="always")
    assert torch.equal(torch.get_rng_state(), state)
    assert not back.training
    assert type(back.network) is type(ens.network)
    assert back.plan == ens.plan
    x = inputs()
    assert torch.equal(back.predict(x).member_probs, ens.predict(x).member_probs)
    assert [p.requires_grad for p in back.parameters()] == [
        p.requires_grad for p in ens.parameters()
    ]
    found, expected = back.member(1).state_dict(), ens.member(1).state_dict()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype, key
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize(
    "factory",
    [
        f"{__name__}:make_wide",
        f"{__name__}:Wide",
        Source(f"{__name__}:make_wide", {"width": 8}),
    ],
    ids=["function", "class", "options"],
)
def test_a_factory_that_is_named(factory: Any, tmp_path: Path) -> None:
    width = 8 if isinstance(factory, Source) else 6
    ens = sn.convert(randomise(Wide(width)).eval(), 3)
    ens.save_pretrained(tmp_path, "always", factory)
    x = torch.randn(4, 4)
    assert torch.equal(sn.load(tmp_path)(x), ens(x))


def test_a_factory_of_another_network_is_refused(tmp_path: Path) -> None:
    for network, message in (
        (Wide(7), "tensor|settings"),
        (Wide(drop=0.1), "settings of 'body.2'"),
    ):
        ens = sn.convert(network, 2)
        with pytest.raises(CheckpointError, match=f"makes another network: .*({message})"):
            ens.save_pretrained(tmp_path / "folder", "always", f"{__name__}:make_wide")
    assert not (tmp_path / "folder").exists()


def test_what_is_no_factory_is_refused(tmp_path: Path) -> None:
    ens = sn.convert(Wide(), 2)
    for name, error in (
        ("os:system", CheckpointError),
        (f"{__name__}:unannotated", CheckpointError),
        (f"{__name__}:absent", CheckpointError),
        ("make_wide", InputError),
        ("__main__:make", InputError),
    ):
        with pytest.raises(error, match="factory"):
            ens.save_pretrained(tmp_path / "folder", "always", name)
    with pytest.raises(InputError, match="expected 'always'"):
        ens.save_pretrained(tmp_path / "folder", factory=f"{__name__}:make_wide")
    assert not (tmp_path / "folder").exists()


@pytest.mark.parametrize(
    "source",
    [
        Source("os:getcwd"),
        Source(f"{__name__}:unannotated"),
        Source("hf-hub:owner/name", {}, "timm"),
        Source("AutoConfig", {"config": {}, "attention": None}, "transformers"),
        Source("BertModel", {"config": {}, "attention": "owner/kernels"}, "transformers"),
        Source("resnet10t", {"checkpoint_path": "weights.pth"}, "timm"),
        Source("list_models", {}, "torchvision"),
        Source("fcn_resnet50", {"weights_backbone": "DEFAULT"}, "torchvision"),
        Source("fcn_resnet50", {}, "torchvision"),
        Source("anything", {}, "pickle"),
    ],
    ids=str,
)
def test_a_file_cannot_name_what_may_not_be_called(source: Source, tmp_path: Path) -> None:
    """As if somebody had written the file with a source of their own, checksum and all."""
    if source.kind not in ("factory", "pickle"):
        pytest.importorskip(source.kind)
    ens = sn.convert(Wide(), 2)
    ens.save_pretrained(tmp_path, "always", f"{__name__}:make_wide")
    path = tmp_path / "sigmanens.json"
    meta = json.loads(path.read_text())
    meta["source"] = asdict(source) | {"dtype": "float32"}
    meta["checksum"] = checkpoint._checksum(meta)
    path.write_text(json.dumps(meta))
    with pytest.raises(CheckpointError):
        sn.load(tmp_path)


def test_without_a_base_what_is_not_there_is_named(tmp_path: Path) -> None:
    ens = sn.convert(Wide(), 2)
    ens.save_pretrained(tmp_path / "small")
    with pytest.raises(
        CheckpointError, match=r"does not hold 2 of the base's tensors\. Give base="
    ):
        sn.load(tmp_path / "small")
    ens.save_pretrained(tmp_path / "whole", shared="always")
    with pytest.raises(CheckpointError, match=r"does not say how to make the .*Wide"):
        sn.load(tmp_path / "whole")
    x = torch.randn(4, 4)
    assert torch.equal(sn.load(tmp_path / "whole", Wide().train(ens.training))(x), ens(x))


def test_a_network_with_other_settings_is_not_taken_for_the_known_one(tmp_path: Path) -> None:
    network: Any = timm("resnet10t", num_classes=7)
    network.layer1[0].act1 = nn.GELU()
    sn.convert(network, 2).save_pretrained(tmp_path, shared="always")
    with pytest.raises(CheckpointError, match="does not say how to make"):
        sn.load(tmp_path)
