"""BatchEnsemble: a loop over members with explicit weights, torch-uncertainty's own network."""

from __future__ import annotations

import importlib

import pytest
import torch
import torch.nn.functional as F
from tests.baselines.rivals import X, count, digits, generator, trained_statistics
from tests.oracles.rivals import batch_ensemble_member
from torch import Tensor, nn

from sigmanens import EnsembleLoss
from sigmanens.baselines import batchensemble, masksembles, mimo
from sigmanens.errors import ConversionError, InputError
from sigmanens.lab.backbones import WideResNet, build_backbone


class Grouped(nn.Module):
    """Biases, a depthwise and a grouped convolution, a Linear on (B, T, F)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 6, 3, padding=1)
        self.depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.grouped = nn.Conv2d(6, 4, 1, groups=2, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.mix = nn.Linear(4, 5)
        self.head = nn.Linear(5, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.grouped(torch.relu(self.depthwise(self.stem(x)))))
        return self.head(torch.relu(self.mix(x.flatten(2).mT)).mean(1))


@pytest.mark.parametrize("build", [digits, Grouped])
def test_members_are_plain_networks_with_weights_of_rank_one(build) -> None:
    base = build()
    net = batchensemble(base, 3, generator=generator())
    with torch.no_grad():  # biases as training parts them
        for key, p in net.named_parameters():
            if key.endswith("bias") and p.dim() == 2:
                p.normal_(generator=generator(7))
    trained_statistics(net)
    found = net(X)
    for m in range(3):
        expected = batch_ensemble_member(net, base, m).eval()(X)
        torch.testing.assert_close(found[m], expected, rtol=1e-4, atol=1e-4)


def test_gradients_are_those_of_the_loop() -> None:
    base = Grouped().eval()
    net = batchensemble(base, 2, generator=generator()).eval()
    y = torch.arange(6)
    EnsembleLoss()(net(X), y).backward()
    slow = [batch_ensemble_member(net, base, m) for m in range(2)]
    sum(F.cross_entropy(plain(X), y) / 2 for plain in slow).backward()
    for name in ("stem", "depthwise", "grouped"):
        weights = [plain.get_submodule(name).weight for plain in slow]
        theirs = net.network.get_submodule(name)
        groups, out = theirs.conv.groups, len(weights[0])
        shared = torch.zeros_like(weights[0])
        for m, weight in enumerate(weights):
            r = theirs.r_group[m].view(groups, 1, -1, 1, 1).expand(-1, out // groups, -1, 1, 1)
            factor = theirs.s_group[m].view(-1, 1, 1, 1) * r.flatten(0, 1)
            shared += weight.grad * factor
            by_s = (weight.grad * theirs.conv.weight * r.flatten(0, 1)).sum((1, 2, 3))
            torch.testing.assert_close(theirs.s_group.grad[m], by_s, rtol=1e-3, atol=1e-6)
        torch.testing.assert_close(theirs.conv.weight.grad, shared, rtol=1e-3, atol=1e-6)


def test_equals_the_network_of_torch_uncertainty() -> None:
    module = importlib.import_module("torch_uncertainty.models.classification.wideresnet.batched")
    theirs = module._BatchWideResNet(
        depth=10, widen_factor=1, in_channels=1, num_classes=10, num_estimators=4,
        conv_bias=True, dropout_rate=0.0, style="cifar",
    )  # fmt: skip
    ours = batchensemble(WideResNet(10, 1, in_channels=1), 4)
    ours.network.load_state_dict(theirs.state_dict())
    for mode in (True, False):
        ours.train(mode), theirs.train(mode)
        torch.testing.assert_close(ours(X).flatten(0, 1), theirs(X))


def test_parameters() -> None:
    """Over one network: M(in + out) for each layer, (M - 1)·out for each bias (2002.06715)."""
    base, members = Grouped(), 5
    sizes = [(1, 6), (6, 6), (6, 4), (4, 5), (5, 10)]
    more = members * sum(a + b for a, b in sizes) + (members - 1) * (6 + 6 + 5 + 10)
    assert count(batchensemble(base, members)) == count(base) + more


def test_parameters_of_the_published_resnet18() -> None:
    """11.21 M with M = 4 (table 1 of arXiv 2210.09184)."""
    net = batchensemble(lambda: build_backbone("resnet18"), 4)
    assert round(count(net) / 1e6, 2) == 11.21


def test_factors_start_as_said() -> None:
    def factors(**options: object) -> Tensor:
        net = batchensemble(digits(64), 4, generator=generator(), **options)
        return torch.cat([p.detach().flatten() for n, p in net.named_parameters() if "_group" in n])

    drawn = factors()
    assert float(drawn.mean()) == pytest.approx(1, abs=0.03)
    assert float(drawn.std()) == pytest.approx(0.5, rel=0.05)
    signs = factors(init="sign")
    assert set(signs.tolist()) == {-1.0, 1.0}
    assert float(factors(std=0.1).std()) == pytest.approx(0.1, rel=0.05)


def test_a_trained_base_is_nearly_or_exactly_kept() -> None:
    base = trained_statistics(digits())
    expected = base(X)
    for member in batchensemble(base, 3, std=0.0)(X):
        torch.testing.assert_close(member, expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        near = batchensemble(base, 3, generator=generator())(X) - expected
        far = batchensemble(base, 3, std=0.5, generator=generator())(X) - expected
    assert 0 < float(near.norm()) < 0.5 * float(far.norm())


def test_what_a_subclass_adds_is_kept() -> None:
    """Padding in ``forward`` as in TensorFlow-like networks, and by mode."""

    class Same(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(F.pad(x, (0, 1, 0, 1)))

    base = nn.Sequential(
        Same(1, 12, 3), nn.BatchNorm2d(12), nn.Conv2d(12, 12, 3, padding=1, padding_mode="reflect"),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, 3),
    )  # fmt: skip
    expected = base.eval()(X)
    for member in batchensemble(base, 2, std=0.0)(X):
        torch.testing.assert_close(member, expected)
    for member in masksembles(base, 2, scale=1.0)(X):
        torch.testing.assert_close(member, expected)
    assert mimo(base, 2).eval()(X).shape == (2, 6, 3)


def test_attention_in_one_module_is_left_shared() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    base = nn.Sequential(nn.Linear(4, 8), layer, nn.Linear(8, 3)).eval()
    x = torch.randn(5, 7, 4)
    with torch.no_grad():  # where PyTorch would take a fused path past the layers
        for member in batchensemble(base, 2, std=0.0)(x):
            torch.testing.assert_close(member, base(x), rtol=1e-4, atol=1e-5)
    names = {n for n, _ in batchensemble(base, 2).named_parameters() if "r_group" in n}
    assert names == {f"network.{n}.r_group" for n in ("0", "1.linear1", "1.linear2", "2")}


def test_factors_are_named_as_not_decayed() -> None:
    net = batchensemble(digits(), 2)
    named = net.no_weight_decay()
    assert named == {n for n, _ in net.named_parameters() if n.endswith("_group")}
    assert len(named) == 12


def test_refusals() -> None:
    with pytest.raises(ConversionError, match=r"no nn\.Conv2d and no nn\.Linear"):
        batchensemble(nn.LayerNorm(4), 2)
    with pytest.raises(ConversionError, match=r"itself a Linear.*wrap it in nn\.Sequential"):
        batchensemble(nn.Linear(3, 2), 2)
    with pytest.raises(InputError, match="init is 'ones'"):
        batchensemble(digits(), 2, init="ones")
    with pytest.raises(InputError, match="std is -1"):
        batchensemble(digits(), 2, std=-1)
