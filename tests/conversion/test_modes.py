"""The mode of every norm after ``train()`` is that of the base, however the base decides it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.backbones import NETWORKS, logits, statistics
from tests.networks import Pictures, dense, randomise
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

import sigmanens as sn


def by_class(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, (_BatchNorm, nn.LayerNorm)):
            module.eval()


def by_exact_class(network: nn.Module) -> None:
    for module in network.modules():
        if type(module) in (nn.BatchNorm1d, nn.BatchNorm2d, nn.LayerNorm):
            module.eval()


def by_class_name(network: nn.Module) -> None:
    for module in network.modules():
        if type(module).__name__.endswith(("BatchNorm2d", "BatchNormAct2d", "LayerNorm")):
            module.eval()


def with_its_affine(network: nn.Module) -> None:
    for module in network.modules():
        if isinstance(module, _BatchNorm):
            module.eval()
            module.weight.requires_grad = False
            module.bias.requires_grad = False


def the_first(network: nn.Module) -> None:
    next(m for m in network.modules() if isinstance(m, _BatchNorm)).eval()


def overriding(network: nn.Module, change: Callable[[nn.Module], None]) -> nn.Module:
    """The network with a ``train`` that changes modes, as detection backbones have it."""

    def train(self: nn.Module, mode: bool = True) -> nn.Module:
        super(kind, self).train(mode)
        if mode:
            change(self)
        return self

    kind: type[nn.Module] = type("NormEval", (type(network),), {"train": train})
    network.__class__ = kind
    return network


@pytest.mark.parametrize(
    "change", [by_class, by_exact_class, by_class_name, with_its_affine, the_first]
)
@pytest.mark.parametrize("name", NETWORKS)
def test_modes_after_train_are_those_of_the_base(
    name: str, change: Callable[[nn.Module], None]
) -> None:
    base = overriding(randomise(NETWORKS[name][0]()), change)
    before = {n: m.training for n, m in base.named_modules()}
    values = {k: v.clone() for k, v in base.state_dict().items()}
    ens = sn.convert(base, 2, init="preserve", head="copy")
    assert {n: m.training for n, m in base.named_modules()} == before
    assert all(torch.equal(v, values[k]) for k, v in base.state_dict().items())
    for mode in (True, False, True):
        ens.train(mode)
        base.train(mode)
        ours = dict(ens.network.named_modules())
        assert all(ours[n].training == m.training for n, m in base.named_modules() if n in ours)
    x = NETWORKS[name][1]()
    start = {k: v.clone() for k, v in statistics(ens.network).items()}
    expected, result = logits(base(x)), logits(ens(x))
    torch.testing.assert_close(result[1], expected, rtol=1e-3, atol=1e-3)
    stays = {n for n, m in base.named_modules() if not m.training}
    for key, value in statistics(ens.network).items():
        if key.rpartition(".")[0] in stays:
            assert torch.equal(value, start[key])


def test_norms_found_by_their_exact_class_are_reported_and_can_be_let_go() -> None:
    ens = sn.convert(overriding(dense(), by_exact_class), 2)
    assert "keeps 2 norms in evaluation mode by their exact class (first: '1')" in str(ens.report)
    ens.network[1].always_evaluates = False
    assert ens.train().network[1].training
    assert not ens.network[4].training
    assert "exact class" not in str(sn.convert(overriding(dense(), by_class), 2).report)


def test_a_train_that_needs_values_is_left_to_itself() -> None:
    def change(network: nn.Module) -> None:
        if float(network[0].weight.sum()) > -1e9:
            network[1].eval()

    ens = sn.convert(overriding(dense(), change), 2).train()
    assert not ens.network[1].training


def test_modes_before_conversion_are_kept() -> None:
    base = Pictures().train()
    base.bn1.eval()
    ens = sn.convert(base, 2)
    assert (ens.network.bn1.training, ens.network.bn2.training) == (False, True)
    assert ens.train().network.bn1.training  # as base.train() would
