"""``weight`` and ``bias`` of a converted norm: read as tensors, written by name or not at all."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable

import pytest
import torch
from tests.backbones import flat
from tests.networks import dense, randomise
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

import sigmanens as sn
from sigmanens.errors import InputError

WRITES: dict[str, Callable[[nn.Module], object]] = {
    "init.zeros_": lambda n: nn.init.zeros_(n.weight),
    "init.normal_": lambda n: nn.init.normal_(n.weight),
    "data.mul_": lambda n: n.weight.data.mul_(torch.tensor([0.0, 1.0] * 3)),
    "data[mask]": lambda n: n.weight.data.__setitem__(slice(0, 2), 0.0),
    "detach().zero_": lambda n: n.weight.detach().zero_(),
    "view.fill_": lambda n: n.weight.view(-1)[1:].fill_(0),
    "rows": lambda n: next(iter(n.weight.unbind(0))).data.zero_(),
    "copy_": lambda n: n.weight.copy_(torch.zeros(6)),
    "+=": lambda n: n.weight.__iadd__(1.0),
    "out": lambda n: torch.mul(torch.ones(3, 6), 2, out=n.weight.data),
    "foreach": lambda n: torch._foreach_mul_([n.weight.data], 0.0),
    "data =": lambda n: setattr(n.weight, "data", torch.zeros(6)),
    "parameter": lambda n: setattr(n, "weight", nn.Parameter(torch.ones(6))),
    "tensor": lambda n: setattr(n, "weight", torch.ones(6)),
    "None": lambda n: setattr(n, "weight", None),
    "reset_parameters": lambda n: n.reset_parameters(),
    "gradient": lambda n: n.weight.grad.data.add_(1),
    "prune": lambda n: prune.l1_unstructured(n, "weight", 0.5),
}


@pytest.mark.parametrize("how", WRITES)
@pytest.mark.parametrize("batch_norm", [False, True], ids=["layer", "batch"])
def test_a_write_to_the_weight_raises_by_name(batch_norm: bool, how: str) -> None:
    ens = sn.convert(randomise(dense(batch_norm)), 3, init="preserve").eval()
    x = flat()
    before = ens(x)
    with torch.no_grad(), pytest.raises(InputError, match="σNorm layer '1'"):
        WRITES[how](ens.network[1])
    assert torch.equal(ens(x), before)


def test_the_message_says_where_to_write() -> None:
    norm = sn.convert(dense(), 3).network[1]
    with pytest.raises(InputError, match=r"computed .* 'scale_logit'. Write to norm.scale_logit"):
        norm.weight.zero_()
    with pytest.raises(InputError, match=r"which have no shift. Convert with shift=True"):
        norm.bias.zero_()
    norm = sn.convert(dense(), 3, init="preserve", scale="linear").network[1]
    with pytest.raises(InputError, match=r"Write to norm.scale \("):
        norm.weight.zero_()
    with pytest.raises(InputError, match=r"shared by all members. Write to norm.shift"):
        norm.bias.zero_()


def test_a_shift_per_member_is_the_parameter_itself() -> None:
    ens = sn.convert(randomise(dense()), 3, init="preserve", shift=True).eval()
    norm, before = ens.network[1], ens(flat(2))
    assert norm.bias is norm.shift
    norm.bias.data.add_(1.0)
    assert not torch.allclose(ens(flat(2)), before)


@pytest.mark.filterwarnings("error")
def test_reading_the_weight_gives_plain_tensors() -> None:
    norm = sn.convert(randomise(dense()), 3, init="preserve").network[1]
    weight = norm.weight
    assert isinstance(weight, nn.Parameter)
    assert (weight.device, weight.dtype) == (norm.scale_logit.device, torch.float32)
    assert (weight.shape, weight.numel(), len(weight)) == ((3, 6), 18, 3)
    results = (
        weight * 2, 2 * weight, weight + weight, weight.abs().sum(), weight.detach().clone(),
        torch.cat([weight]), weight.to(torch.float64), torch.ones(3, 6).mul(weight),
        copy.deepcopy(weight), norm.bias + 1,
    )  # fmt: skip
    assert all(type(r) is Tensor for r in results)
    torch.testing.assert_close(weight.detach().clone(), norm.scales().detach())
    torch.testing.assert_close(norm.bias.clone(), norm.shift.expand(3, 6))
    assert pickle.loads(pickle.dumps(weight)).shape == (3, 6)
    weight.abs().sum().backward()  # network slimming: a penalty on the scales
    assert norm.scale_logit.grad is not None


def test_freezing_the_weight_freezes_the_scales() -> None:
    norm = sn.convert(randomise(dense()), 3, init="preserve").network[1]
    norm.weight.requires_grad_(False)
    assert not norm.scale_logit.requires_grad
    assert not norm.weight.requires_grad
    norm.weight.requires_grad = True
    assert norm.scale_logit.requires_grad
    norm.requires_grad_(False)
    assert not norm.weight.requires_grad
    norm.bias.requires_grad = False  # the base's shift is frozen already
    assert not norm.bias.requires_grad
    with pytest.raises(InputError, match="the bias of σNorm layer '1'"):
        norm.bias.requires_grad_(True)


def test_a_norm_without_a_shift_in_the_base_has_none() -> None:
    def bias(norm: nn.Module) -> Tensor | None:
        return sn.convert(nn.Sequential(norm, nn.Linear(4, 3)), 2).network[0].bias

    assert bias(nn.LayerNorm(4, bias=False)) is None
    assert bias(nn.RMSNorm(4)) is None
    assert bias(nn.BatchNorm1d(4)).shape == (2, 4)


def test_parametrisations_of_the_scales() -> None:
    class Halved(nn.Module):
        def forward(self, t: Tensor) -> Tensor:
            return t / 2

    ens = sn.convert(randomise(dense()), 3, init="preserve").eval()
    x, norm = flat(), ens.network[1]
    scale = norm.scale_logit.detach().clone()
    parametrize.register_parametrization(norm, "scale_logit", Halved())
    halved, twin = ens(x), copy.deepcopy(ens)
    torch.testing.assert_close(twin(x), halved)
    parametrize.remove_parametrizations(norm, "scale_logit")
    torch.testing.assert_close(norm.scale_logit.detach(), scale / 2)
    torch.testing.assert_close(ens(x), halved)
    with pytest.raises(ValueError, match="'weight'"):
        parametrize.register_parametrization(norm, "weight", Halved())


# -- code inside the network ---------------------------------------------------------------------


class Careful(nn.Module):
    """Reads a norm's weight for its dtype, as networks of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x.to(self.norm.weight.dtype))
        return self.head(h) if self.norm.elementwise_affine else h


def test_code_in_the_network_reads_the_weight_in_every_way_of_running() -> None:
    ens = sn.convert(randomise(Careful()), 2, init="preserve").eval()
    x = torch.randn(5, 4)
    expected = ens(x)
    torch.testing.assert_close(torch.compile(ens, fullgraph=True, backend="eager")(x), expected)
    program = torch.export.export(ens, (x,))
    torch.testing.assert_close(program.module()(x), expected)
    state = {k: v.clone() for k, v in ens.state_dict().items()}
    torch.testing.assert_close(torch.func.functional_call(ens, state, (x,)), expected)
