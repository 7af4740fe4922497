"""Packed-Ensembles: M narrow networks with the slices, torch-uncertainty's own networks."""

from __future__ import annotations

import importlib

import pytest
import torch
from tests.baselines.rivals import X, count, digits, generator, trained_statistics
from tests.oracles.rivals import packed_member
from torch import nn

from sigmanens.baselines import packed
from sigmanens.errors import ConversionError, InputError
from sigmanens.lab.backbones import WideResNet, build_backbone


@pytest.mark.parametrize(("members", "alpha"), [(4, 2.0), (2, 1.5), (1, 1.0)])
def test_members_are_narrow_networks(members: int, alpha: float) -> None:
    net = packed(digits(16), members, alpha=alpha, generator=generator())
    trained_statistics(net)
    narrow = digits(int(16 * alpha / members))
    found = net(X)
    for m in range(members):
        expected = packed_member(net, narrow, m).eval()(X)
        torch.testing.assert_close(found[m], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gamma", [1, 2])
def test_no_member_sees_another(gamma: int) -> None:
    net = packed(digits(16), 4, gamma=gamma, smallest_group=1, generator=generator()).eval()
    for m in range(4):
        net.zero_grad()
        net(X)[m].square().sum().backward()
        for name, p in net.named_parameters():
            reached = p.grad if p.dim() == 3 else torch.stack(list(p.grad.chunk(4)))
            touched = [bool(part.any()) for part in reached]
            assert touched == [i == m for i in range(4)], name


@pytest.mark.parametrize("gamma", [1, 2])
def test_equals_the_networks_of_torch_uncertainty(gamma: int) -> None:
    library = "torch_uncertainty.models.classification"
    resnet = importlib.import_module(f"{library}.resnet.packed").packed_resnet(
        in_channels=1, num_classes=10, arch=18, num_estimators=4, alpha=2, gamma=gamma,
        width_multiplier=0.25, style="cifar",
    )  # fmt: skip
    wide = importlib.import_module(f"{library}.wideresnet.packed")._PackedWideResNet(
        depth=10, widen_factor=2, in_channels=1, num_classes=10, conv_bias=True, dropout_rate=0.0,
        num_estimators=4, alpha=2, gamma=gamma, style="cifar",
    )  # fmt: skip
    for base, theirs in (
        (build_backbone("resnet18", width=16, in_channels=1), resnet),
        (WideResNet(10, 2, in_channels=1), wide),
    ):
        ours = packed(base, 4, gamma=gamma)
        ours.network.load_state_dict(theirs.state_dict())
        for mode in (True, False):
            ours.train(mode), theirs.train(mode)
            torch.testing.assert_close(ours(X).flatten(0, 1), theirs(X))


def test_parameters() -> None:
    """Layers of w weights have w α² / (M γ); the first α w, the last α w."""
    net = packed(digits(16), 4, alpha=2, gamma=2, smallest_group=1)
    w = 16
    inner_first = w * w * 9 + w * 2 * w * 9  # each block's first convolution: γ = 1
    inner_second = w * w * 9 + 4 * w * w * 9
    norms = 2 * 2 * (w + w + w + 2 * w + 2 * w)
    convs = 2 * w * 9 + inner_first * 4 // 4 + inner_second * 4 // (4 * 2)
    assert count(net) == convs + norms + 2 * 2 * w * 10 + 4 * 10


@pytest.mark.parametrize(
    ("name", "options", "millions"),
    [
        ("resnet18", {}, 8.18),
        ("resnet50", {}, 14.55),
        ("wrn28_10", {"conv_bias": False}, 19.35),
    ],
)
def test_parameters_of_the_published_networks(name: str, options: dict, millions: float) -> None:
    """M = 4, α = 2, γ = 2, 10 classes (table 1 of arXiv 2210.09184)."""
    net = packed(lambda: build_backbone(name, **options), 4, alpha=2, gamma=2)
    assert round(count(net) / 1e6, 2) == millions


def test_a_plain_network_with_a_hidden_linear_layer() -> None:
    base = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 8),
        nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3),
    )  # fmt: skip
    net = packed(base, 2, generator=generator())
    logits = net(X)
    assert logits.shape == (2, 6, 3)
    logits[0].sum().backward()
    first, second = net.network[4].weight.grad.chunk(2)  # of (members * groups, out, in)
    assert bool(first.any())
    assert not bool(second.any())


def test_refusals() -> None:
    with pytest.raises(ConversionError, match=r"layer 'conv1'.*not divisible"):
        packed(digits(16), 3)
    with pytest.raises(ConversionError, match="is a LayerNorm; Packed-Ensembles are made of"):
        packed(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)), 2)
    with pytest.raises(ConversionError, match="first_name='stem' is no"):
        packed(digits(), 4, first_name="stem")
    with pytest.raises(InputError, match="alpha is 0"):
        packed(digits(), 4, alpha=0)
    with pytest.raises(InputError, match=r"gamma is 1\.5"):
        packed(digits(), 4, gamma=1.5)  # type: ignore[arg-type]
