"""Members, and their average, as plain networks with nothing of ours in them."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.networks import Encoder, Nested, Pictures, Recurrent, Tied, Words, dense, randomise
from tests.oracles.norms import member_networks
from torch import Tensor, nn

import sigmanens as sn
from sigmanens.errors import InputError


class Everything(nn.Module):
    """One norm of each class that ships, with and without parameters."""

    def __init__(self, affine: bool = True) -> None:
        super().__init__()
        self.norms = nn.Sequential(
            nn.BatchNorm1d(4, affine=affine),
            nn.BatchNorm1d(4, affine=affine, momentum=None),
            nn.GroupNorm(2, 4, affine=affine),
            nn.InstanceNorm1d(4, affine=affine),
            nn.InstanceNorm1d(4, affine=affine, track_running_stats=True),
            nn.LayerNorm(6, elementwise_affine=affine),
            nn.LayerNorm((4, 6), elementwise_affine=affine, bias=False),
            nn.RMSNorm(6, elementwise_affine=affine),
        )
        self.head = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norms(x).flatten(1))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], dict[str, Any]]] = {
    "pictures": (Pictures, lambda: torch.randn(5, 1, 8, 8), {}),
    "kept": (Pictures, lambda: torch.randn(5, 1, 8, 8), {"layers": "bn2"}),
    "words": (Words, lambda: torch.randint(11, (5, 4)), {}),
    "recurrent": (lambda: Recurrent(True), lambda: torch.randn(5, 4, 4), {}),
    "nested": (Nested, lambda: torch.randn(5, 4), {}),
    "tied": (Tied, lambda: torch.randn(5, 4), {}),
    "transformer": (lambda: Encoder(True), lambda: torch.randn(5, 4, 8), {}),
    "everything": (Everything, lambda: torch.randn(5, 4, 6), {}),
    "bare": (lambda: Everything(False), lambda: torch.randn(5, 4, 6), {"init": "preserve"}),
    "scratch": (Everything, lambda: torch.randn(5, 4, 6), {"init": "normal", "head": "fresh"}),
    "linear": (Pictures, lambda: torch.randn(5, 1, 8, 8), {"scale": "linear", "shift": True}),
    "shared_head": (Pictures, lambda: torch.randn(5, 1, 8, 8), {"head": "shared"}),
}


def trained(name: str) -> tuple[nn.Module, sn.SigmaEnsemble, Tensor]:
    """A base, an ensemble whose members have parted in everything, and inputs."""
    make, draw, options = NETWORKS[name]
    base = randomise(make()).eval()
    ens = sn.convert(base, 3, **options)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for key, tensor in ens.network.state_dict().items():
            leaf = key.rpartition(".")[2]
            if leaf in ("scale_logit", "scale", "running_mean") or ".heads." in key:
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
            elif leaf == "shift":
                tensor.add_(torch.randn(tensor.shape, generator=generator))
            elif leaf == "running_var":
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    x = draw()
    if name in ("everything", "scratch"):  # eight norms in a row magnify rounding
        return base.double(), ens.double(), x.double()
    return base, ens, x


def assert_plain(network: nn.Module, base: nn.Module) -> None:
    """No class of ours anywhere: in modules, in their state, in a pickle."""
    assert type(network) is type(base)
    for name, module in network.named_modules():
        assert not type(module).__module__.startswith("sigmanens"), name
        for key, value in vars(module).items():
            assert not type(value).__module__.startswith("sigmanens"), (name, key)
    assert b"sigmanens" not in pickle.dumps(network)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_member_is_a_plain_network_with_the_members_function(name: str) -> None:
    base, ens, x = trained(name)
    together = ens(x)
    for m in range(3):
        single = ens.member(m)
        assert_plain(single, base)
        torch.testing.assert_close(single(x), together[m], rtol=1e-5, atol=1e-5)
        with torch.no_grad():
            torch.testing.assert_close(single(x), together[m], rtol=1e-5, atol=1e-5)
        if ens.plan.head != "fresh" and name != "bare":
            assert single.state_dict().keys() == base.state_dict().keys()
        for own, other in zip(single.modules(), base.modules(), strict=ens.plan.head != "fresh"):
            if ens.plan.head != "fresh":
                assert type(own) is type(other)
    assert (together[0] - together[1]).abs().max() > 1e-2


def test_members_agree_with_networks_built_apart() -> None:
    base, ens, x = trained("pictures")
    for m, net in enumerate(member_networks(base, ens)):
        torch.testing.assert_close(ens.member(m)(x), net(x), rtol=1e-5, atol=1e-5)
        for key, value in ens.member(m).state_dict().items():
            torch.testing.assert_close(value, net.state_dict()[key], rtol=1e-5, atol=1e-6)


def test_a_member_is_a_copy_that_trains_like_the_base() -> None:
    _, ens, x = trained("pictures")
    ens.network.conv1.weight.requires_grad_(False)
    state = {k: v.clone() for k, v in ens.state_dict().items()}
    single = ens.train().member(1)
    assert single.training
    assert {n for n, p in single.named_parameters() if not p.requires_grad} == {"conv1.weight"}
    single(x).sum().backward()
    with torch.no_grad():
        for p in single.parameters():
            p.add_(1.0)
    assert all(torch.equal(v, state[k]) for k, v in ens.state_dict().items())
    assert all(p.grad is None for p in ens.parameters())


def test_a_member_takes_the_dtype_of_the_ensemble() -> None:
    _, ens, x = trained("bare")
    for dtype in (torch.float64, torch.bfloat16):
        cast = copy.deepcopy(ens).to(dtype)
        single = cast.member(0)
        assert {p.dtype for p in single.parameters()} == {dtype}
        torch.testing.assert_close(single(x.to(dtype)), cast(x.to(dtype))[0], rtol=0.1, atol=0.1)
    _, ens, x = trained("pictures")
    cast = ens.double()
    torch.testing.assert_close(cast.member(2)(x.double()), cast(x.double())[2])


def test_a_member_of_a_member_can_be_converted_again() -> None:
    _, ens, x = trained("pictures")
    again = sn.convert(ens.member(1), 2)
    torch.testing.assert_close(again(x)[0], ens(x)[1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("index", [-1, 3, True, 1.0, "0", None])
def test_a_member_that_is_not_there_is_named(index: object) -> None:
    _, ens, _ = trained("words")
    with pytest.raises(InputError, match=r"member\(.*\): expected an index from 0 to 2"):
        ens.member(index)  # type: ignore[arg-type]


def test_a_shift_that_the_plain_class_cannot_hold_is_refused_not_dropped() -> None:
    base = nn.Sequential(nn.Linear(4, 4), nn.RMSNorm(4), nn.Linear(4, 3)).eval()
    ens = sn.convert(base, 2, init="normal", shift=True)
    x = torch.randn(3, 4)
    torch.testing.assert_close(ens.member(0)(x), ens(x)[0])  # shifts of zero are no loss
    with torch.no_grad():
        ens.network[1].shift[1, 2] = 0.5
    torch.testing.assert_close(ens.member(0)(x), ens(x)[0])
    with pytest.raises(InputError, match="layer '1' has a shift per member, which a plain RMSNorm"):
        ens.member(1)


# -- the average -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [n for n in NETWORKS if n != "scratch"])
def test_the_average_of_equal_members_equals_them(name: str) -> None:
    base, ens, x = trained(name)
    with torch.no_grad():
        for module in ens.network.modules():
            if hasattr(module, "axis") and hasattr(module, "where"):
                for t in (*module.parameters(), *module.buffers()):
                    if t.shape[:1] == (3,):
                        t.copy_(t[:1].expand_as(t).clone())
        for heads in ens.member_heads().values():
            for head in heads.heads:
                head.load_state_dict(heads.heads[0].state_dict())
    together = ens(x)
    assert_plain(ens.collapse(), base)
    torch.testing.assert_close(together[2], together[0])
    torch.testing.assert_close(ens.collapse()(x), together[0], rtol=1e-5, atol=1e-5)


def test_the_average_is_taken_of_scales_shifts_heads_and_of_the_mixtures_statistics() -> None:
    _, ens, _ = trained("linear")
    single = ens.collapse()
    layer = ens.network.bn1
    torch.testing.assert_close(single.bn1.weight.detach(), layer.scales().mean(0).detach())
    torch.testing.assert_close(single.bn1.bias.detach(), layer.shift.mean(0).detach())
    heads = ens.network.fc.heads
    torch.testing.assert_close(
        single.fc.weight.detach(), torch.stack([h.weight for h in heads]).mean(0).detach()
    )
    mean, var = layer.running_mean, layer.running_var
    torch.testing.assert_close(single.bn1.running_mean, mean.mean(0))
    expected = (var + mean.square()).mean(0) - mean.mean(0).square()
    torch.testing.assert_close(single.bn1.running_var, expected)


def test_heads_of_different_structure_cannot_be_averaged() -> None:
    ens = sn.convert(dense(), 2)
    ens.network[6].heads[1] = nn.Linear(6, 3)
    with pytest.raises(InputError, match="heads differ in structure"):
        ens.collapse()
    assert isinstance(ens.member(1)[6], nn.Linear)


def test_equal_heads_are_averaged_without_rounding() -> None:
    base = randomise(dense()).eval()
    for members in (2, 3, 7):
        single = sn.convert(base, members).collapse()
        assert torch.equal(single[6].weight, base[6].weight)
        assert torch.equal(single[6].bias, base[6].bias)


def test_an_untouched_pretrained_network_collapses_to_itself(shared: Path) -> None:
    """ResNet-20 on pictures of CIFAR-10: the same labels, and logits up to rounding."""
    backbones = pytest.importorskip("sigmanens.lab.backbones")
    data_of = pytest.importorskip("sigmanens.lab.data")
    weights = shared / "weights" / "resnet20_cifar10.safetensors"
    base = backbones.load_weights(backbones.build_backbone("resnet20"), weights).eval()
    data = data_of.load_images(
        shared / "cifar10", "test", mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225), limit=200
    )
    x = data.normalized()
    single = sn.convert(base, 4, init="preserve").collapse()
    assert str(single) == str(base)
    for key, value in base.state_dict().items():
        torch.testing.assert_close(single.state_dict()[key], value, rtol=1e-6, atol=1e-7)
    with torch.no_grad():
        expected, got = base(x), single(x)
    assert torch.equal(got.argmax(1), expected.argmax(1))
    assert (expected.argmax(1) == data.labels).float().mean() > 0.85
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
