"""Features are what each member's last layer is given, under every schedule."""

from __future__ import annotations

import pytest
import torch
from tests.networks import Pictures, Words, apart, dense
from torch import Tensor, nn

import sigmanens as sn
from sigmanens.baselines import SeparateNetworks, heads_only, mc_dropout
from sigmanens.ensemble.features import head_weights, member_features
from sigmanens.errors import HeadNotFoundError, InputError

X = torch.randn(5, 1, 8, 8, generator=torch.Generator().manual_seed(0))


class ConvHead(nn.Module):
    """A head that is a 1×1 convolution, averaged over positions afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Conv2d(1, 6, 3)
        self.norm = nn.BatchNorm2d(6)
        self.classifier = nn.Conv2d(6, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.relu(self.norm(self.body(x)))).mean((2, 3))


class TwiceHead(nn.Module):
    """A head that is run on two views of the sample."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.fc = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.norm(x)) + self.fc(x)


def penultimate(network: nn.Module, x: Tensor, layer: nn.Module) -> Tensor:
    """The input of a layer of a plain network, by a hook."""
    seen: list[Tensor] = []
    handle = layer.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        network.eval()(x)
    handle.remove()
    (found,) = seen
    return found


def reproduces(network: nn.Module, x: Tensor) -> None:
    """The weights of the heads turn the features into the members' logits."""
    weight, bias = head_weights(network)
    found = member_features(network, x)
    logits = torch.einsum("mbd,mcd->mbc", found, weight) + bias[:, None]
    with torch.no_grad():
        torch.testing.assert_close(logits, network.eval()(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("head", ["fresh", "copy", "shared"])
def test_each_schedule_gives_what_the_members_alone_give(head: str) -> None:
    ens = apart(sn.convert(Pictures().eval(), members=3, head=head, init="normal"))
    found = {}
    for schedule in ("folded", "sequential", 2, "auto"):
        ens.schedule = schedule
        found[schedule] = member_features(ens, X)
        assert found[schedule].shape == (3, 5, 8)
        torch.testing.assert_close(found[schedule], found["folded"])
        reproduces(ens, X)
    for m in range(3):
        alone = ens.member(m)
        layer = [module for module in alone.modules() if isinstance(module, nn.Linear)][-1]
        expected = penultimate(alone, X, layer)
        torch.testing.assert_close(found["folded"][m], expected)
    assert not torch.allclose(found["folded"][0], found["folded"][1], atol=1e-2)


def test_fresh_heads_are_read_after_their_own_norm() -> None:
    ens = sn.convert(Pictures().eval(), members=2, head="fresh", init="normal")
    found = member_features(ens, X)
    torch.testing.assert_close(found.mean(-1), torch.zeros(2, 5), rtol=0, atol=1e-5)


def test_separate_and_plain_networks() -> None:
    networks = [Pictures().eval() for _ in range(2)]
    found = member_features(SeparateNetworks(networks), X)
    for m, network in enumerate(networks):
        torch.testing.assert_close(found[m], penultimate(network, X, network.fc))
        torch.testing.assert_close(member_features(network, X), found[m : m + 1])
    reproduces(SeparateNetworks(networks), X)
    assert head_weights(networks[0])[0].shape == (1, 10, 8)


def test_rivals_with_heads_of_their_own_and_with_samples() -> None:
    several = heads_only(Pictures(), 3)
    assert member_features(several, X).shape == (3, 5, 8)
    reproduces(several, X)
    sampled = mc_dropout(Pictures(dropout=0.5), 4)
    found = member_features(sampled, X)
    assert found.shape == (4, 5, 8)
    plain = member_features(sampled.network, X)
    dropped = (found == 0) & (plain > 0)
    raised = (found / plain)[~dropped & (plain > 0)]  # dropout scales what it keeps
    assert raised[0] > 1
    torch.testing.assert_close(raised, raised[:1].expand_as(raised))
    assert not torch.equal(dropped[0], dropped[1])


def test_modes_gradients_and_hooks_are_left_as_they_were() -> None:
    ens = sn.convert(Pictures(dropout=0.5), members=2, init="normal")
    ens.train()
    ens.network.bn1.eval()
    modes = [m.training for m in ens.modules()]
    before = {k: v.clone() for k, v in ens.state_dict().items() if isinstance(v, Tensor)}
    first = member_features(ens, X)
    assert not first.requires_grad
    assert [m.training for m in ens.modules()] == modes
    assert all(torch.equal(v, before[k]) for k, v in ens.state_dict().items() if k in before)
    assert not any(m._forward_pre_hooks for m in ens.modules())
    assert torch.equal(member_features(ens, X), first)


def test_the_first_members_only() -> None:
    ens = apart(sn.convert(Pictures().eval(), members=3, init="normal"))
    every = member_features(ens, X)
    with ens.axis.choosing(start=0, stop=2):
        torch.testing.assert_close(member_features(ens, X), every[:2])


def test_maps_and_several_inputs_are_averaged_and_read() -> None:
    network = ConvHead().eval()
    maps = torch.relu(network.norm(network.body(X)))
    found = member_features(network, X, head_name="classifier")
    torch.testing.assert_close(found[0], maps.mean((2, 3)).detach())
    ens = sn.convert(network, members=2, head="copy", head_name="classifier", init="normal")
    found = member_features(ens, X)
    weight, bias = head_weights(ens)
    logits = torch.einsum("mbd,mcd->mbc", found, weight) + bias[:, None]
    torch.testing.assert_close(logits, ens.eval()(X).detach())
    words = sn.convert(Words().eval(), members=2, init="normal")
    ids, mask = torch.arange(12).view(3, 4) % 11, torch.ones(3, 4)
    found = member_features(words, {"ids": ids, "mask": mask})
    assert found.shape == (2, 3, 8)
    torch.testing.assert_close(member_features(words, (ids, mask)), found)


def test_under_autocast_features_have_the_type_that_the_head_was_given() -> None:
    ens = sn.convert(Pictures().eval(), members=2, init="normal")
    with torch.autocast("cpu", torch.bfloat16):
        half = member_features(ens, X)
    torch.testing.assert_close(half.float(), member_features(ens, X), rtol=0.05, atol=0.05)


def test_a_head_that_is_not_there_or_runs_twice_is_named() -> None:
    twice = TwiceHead()
    with pytest.raises(InputError, match="10 rows in 2 calls for 5 samples and 1 members"):
        member_features(twice, torch.randn(5, 4))
    with pytest.raises(HeadNotFoundError, match="neither Linear nor convolution"):
        member_features(Pictures(), X, head_name="bn2")
    with pytest.raises(HeadNotFoundError, match="head_name='nowhere'"):
        member_features(Pictures(), X, head_name="nowhere")
    with pytest.raises(InputError, match="1×1 convolution"):
        head_weights(Pictures(), head_name="conv2")
    bare = dense()
    bare[-1] = nn.Linear(6, 3, bias=False)
    assert torch.equal(head_weights(bare)[1], torch.zeros(1, 3))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_cuda_and_cpu_agree() -> None:
    ens = apart(sn.convert(Pictures().eval(), members=2, init="normal"))
    here = member_features(ens, X)
    there = member_features(ens.cuda(), X.cuda())
    assert there.is_cuda
    torch.testing.assert_close(there.cpu(), here, rtol=1e-3, atol=1e-3)
