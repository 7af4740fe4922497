"""Masksembles: masks folded into weights, torch-uncertainty's own masks and network."""

from __future__ import annotations

import importlib

import pytest
import torch
from tests.baselines.rivals import X, count, digits, generator, trained_statistics
from tests.oracles.rivals import masked_member
from torch import nn

from sigmanens.baselines import masksembles
from sigmanens.baselines.masked_ensemble import draw_masks
from sigmanens.errors import ConversionError, InputError
from sigmanens.lab.backbones import WideResNet
from sigmanens.seeding import own_seed


def test_members_are_plain_networks_with_masked_weights() -> None:
    base = digits()
    net = masksembles(base, 4, generator=generator())
    trained_statistics(net)
    for name, module in base.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            module.load_state_dict(net.network.get_submodule(name).state_dict())
    base.eval()
    found = net(X)
    for m in range(4):
        expected = masked_member(net, base, m)(X)
        torch.testing.assert_close(found[m], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("channels", "members", "scale"), [(16, 4, 2.0), (64, 3, 3.0), (10, 2, 1)])
def test_masks_are_drawn_as_torch_uncertainty_draws_them(
    channels: int, members: int, scale: float
) -> None:
    library = importlib.import_module("torch_uncertainty.layers.masksembles")
    theirs = torch.from_numpy(library.generation_wrapper(channels, members, scale))
    with own_seed(3):
        ours = draw_masks(channels, members, scale)
    assert ours.shape == theirs.shape == (members, channels)
    assert ours.sum(1).tolist() == theirs.sum(1).tolist()
    assert bool(ours.any(0).all())
    assert set(ours.unique().tolist()) <= {0.0, 1.0}
    with own_seed(3):
        assert torch.equal(draw_masks(channels, members, scale), ours)
    with own_seed(4):
        assert scale == 1 or not torch.equal(draw_masks(channels, members, scale), ours)


def test_equals_the_network_of_torch_uncertainty() -> None:
    module = importlib.import_module("torch_uncertainty.models.classification.wideresnet.masked")
    theirs = module._MaskedWideResNet(
        depth=10, widen_factor=1, in_channels=1, num_classes=10, num_estimators=4,
        conv_bias=True, dropout_rate=0.0, scale=2.0, style="cifar",
    )  # fmt: skip
    ours = masksembles(WideResNet(10, 1, in_channels=1), 4)
    state = theirs.state_dict()
    ours.network.load_state_dict({k: v.float() for k, v in state.items()})
    for mode in (True, False):
        ours.train(mode), theirs.train(mode)
        torch.testing.assert_close(ours(X).flatten(0, 1), theirs(X))


def test_parameters_are_those_of_one_network() -> None:
    """arXiv 2012.08334: nothing is added but fixed masks, which move and are saved with it."""
    base = digits()
    net = masksembles(base, 4)
    assert count(net) == count(base)
    assert all(p.requires_grad for p in net.parameters())
    masks = {n: b for n, b in net.named_buffers() if n.endswith("masks")}
    assert len(masks) == 5  # all layers but the first
    assert all(m.dtype == torch.float32 for m in masks.values())
    assert not any(n.startswith("network.conv1.") for n in masks)
    assert net.double().eval()(X.double()).dtype == torch.float64


def test_refusals() -> None:
    with pytest.raises(ConversionError, match=r"layer 'layer1.0.conv1': it has 8 input channels"):
        masksembles(digits(8), 4)
    with pytest.raises(ConversionError, match="nothing is masked"):
        masksembles(nn.Sequential(nn.Linear(12, 3)), 4)
    with pytest.raises(InputError, match=r"scale is 0\.5"):
        masksembles(digits(), 4, scale=0.5)


@pytest.mark.parametrize(("channels", "members", "scale"), [(10, 1, 6), (12, 2, 5), (16, 8, 1)])
def test_where_the_procedure_knows_no_end_it_is_refused(
    channels: int, members: int, scale: float
) -> None:
    """Too few ones to cover the channels, or a rounded-down expectation that never comes true."""
    with pytest.raises(ConversionError, match=f"no {members} masks for {channels} input channels"):
        draw_masks(channels, members, scale)
    net = nn.Sequential(nn.Linear(4, channels), nn.ReLU(), nn.Linear(channels, 3))
    with pytest.raises(ConversionError, match=r"layer '2': the procedure of Masksembles"):
        masksembles(net, members, scale=scale)
