"""Compiled networks: one graph for all members, and the numbers of the network as written."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.networks import apart, randomise
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import sigmanens as sn
from sigmanens.ensemble.compiled import alone, can_be_alone, is_compiled
from sigmanens.norms import SigmaLayerNorm
from sigmanens.norms.scales import Affine, SigmaNorm

# torch.compile asks inputs that are no leaves for .grad, and hides the warning of it from people,
# but not from those for whom warnings are errors.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")

MEMBERS = 10  # more than the compiler makes graphs of one function


class Block(nn.Module):
    """A residual block with a norm that has no affine of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(width, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm1d(width)
        self.plain = nn.LayerNorm(6, elementwise_affine=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.plain(self.norm(self.conv(x))))


def residual() -> nn.Module:
    """(B, 1, 6) → (B, 3); the stem comes before the first norm and could be shared."""
    stem = nn.Conv1d(1, 4, 3, padding=1), nn.Conv1d(4, 4, 1)
    head = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 3))
    return nn.Sequential(
        *stem, Block(4), Block(4), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 4), head
    )


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def ensemble(members: int = 3, **options: Any) -> sn.SigmaEnsemble:
    return apart(sn.convert(randomise(residual()), members, head_name="7", **options)).train()


def pair(ens: sn.SigmaEnsemble, backend: str = "eager") -> tuple[sn.SigmaEnsemble, Any]:
    """Compile an ensemble's network: a copy that is not compiled, and the counter of graphs."""
    twin = copy.deepcopy(ens)
    counter = CompileCounterWithBackend(backend)
    ens.network.compile(backend=counter, fullgraph=True)
    return twin, counter


def assert_alike(ens: nn.Module, twin: nn.Module) -> None:
    """Parameters, gradients and buffers."""
    theirs = dict(twin.named_parameters())
    assert [n for n, _ in ens.named_parameters()] == list(theirs)
    for name, p in ens.named_parameters():
        torch.testing.assert_close(p, theirs[name], rtol=1e-4, atol=1e-5, msg=name)
        expected = theirs[name].grad
        assert (p.grad is None) == (expected is None), name
        torch.testing.assert_close(p.grad, expected, rtol=1e-4, atol=1e-5, msg=name)
    for name, buffer in twin.named_buffers():
        torch.testing.assert_close(dict(ens.named_buffers())[name], buffer, msg=name)


def test_member_by_member_one_graph_serves_all() -> None:
    ens = ensemble(MEMBERS)
    twin, counter = pair(ens, "aot_eager")
    loss_fn = sn.EnsembleLoss(diversity=sn.Diversity(tau=0.5, weight=0.1, layers="all"))
    optimizers = [torch.optim.SGD(sn.param_groups(e, lr=0.01), momentum=0.9) for e in (ens, twin)]
    for _ in range(2):
        x, y = torch.randn(4, 1, 6), torch.randint(3, (4,))
        losses = []
        for e, optimizer in zip((ens, twin), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(e.backward(x, y, loss_fn))
            optimizer.step()
        torch.testing.assert_close(*losses)
        assert_alike(ens, twin)
    assert counter.frame_count == 1
    assert twin._runner._prefix is not None  # which the compiled one computes for every member


def test_the_compiled_ensemble_serves_all_members_by_one_graph_too() -> None:
    ens = ensemble(MEMBERS)
    twin = copy.deepcopy(ens)
    counter = CompileCounterWithBackend("eager")
    ens.compile(backend=counter, fullgraph=True)
    x, y = torch.randn(4, 1, 6), torch.randint(3, (4,))
    torch.testing.assert_close(*(e.backward(x, y, sn.EnsembleLoss()) for e in (ens, twin)))
    assert_alike(ens, twin)
    assert counter.frame_count == 1


@pytest.mark.parametrize("schedule", ["auto", pytest.param(2, marks=pytest.mark.slow)])
def test_schedules_give_the_numbers_of_the_network_as_written(schedule: Any) -> None:
    ens = ensemble(4, schedule=schedule)
    twin, counter = pair(ens)
    x, y = torch.randn(4, 1, 6), torch.randint(3, (4,))
    for e in (ens, twin):
        sn.EnsembleLoss()(e(x), y).backward()
    assert_alike(ens, twin)
    assert counter.frame_count == 1  # trials for folding are not compiled
    with ens.fixed(), twin.fixed():
        for options in ({}, {"chunk": 4}, {"members": 2}, {}, {"chunk": 4}, {"adaptive": True}):
            got, expected = (e.predict(x, **options).member_probs for e in (ens, twin))
            torch.testing.assert_close(got, expected, equal_nan=True)
    assert ens.schedule == schedule


def test_members_of_a_rank_are_its_own() -> None:
    ens = ensemble(4)
    twin, _ = pair(ens)
    x, y = torch.randn(4, 1, 6), torch.randint(3, (4,))
    for e in (ens, twin):
        with e.axis.choosing(start=2, stop=4):
            e.backward(x, y, sn.EnsembleLoss())
    assert_alike(ens, twin)
    assert not ens.member_heads()["7"].heads[0][1].weight.grad


def test_alone_members_are_all_there_is_and_write_to_the_ensemble() -> None:
    ens = ensemble(4)
    twin, x = copy.deepcopy(ens), torch.randn(4, 1, 6)
    norm = next(iter(ens.sigma_norms().values()))
    assert can_be_alone(ens.network, 4)
    with ens.axis.remembering(), alone(ens.network, ens.axis, 1, 3):
        assert ens.num_members == len(norm.logit) == 2
        assert ens.axis.chosen.memory is None
        with ens.axis.running(0, 2):
            got = ens.network(torch.cat([x, x]))
    with twin.axis.choosing(start=1, stop=3):
        torch.testing.assert_close(got.unflatten(0, (2, 4)), twin(x))
    assert isinstance(norm.logit, nn.Parameter)
    assert (ens.axis.num_members, ens.axis.chosen.start, ens.axis.chosen.stop) == (4, 0, 4)
    assert_alike(ens, twin)
    torch.testing.assert_close(ens.eval()(x), twin.eval()(x))


def test_all_members_are_back_after_an_error() -> None:
    ens = ensemble(4)
    before = {n: id(t) for n, t in ens.state_dict(keep_vars=True).items()}
    with (
        pytest.raises(RuntimeError),
        alone(ens.network, ens.axis, 1, 3),
        ens.axis.running(0, 2),
    ):
        ens.network(torch.randn(2, 7))
    assert {n: id(t) for n, t in ens.state_dict(keep_vars=True).items()} == before
    assert (ens.axis.num_members, ens.axis.chosen.start, ens.axis.chosen.stop) == (4, 0, 4)


class Biased(SigmaLayerNorm):
    """A norm of another author's that holds something of each member that is not known here."""

    def __init__(self, source: nn.Module, axis: Any, affine: Any) -> None:
        super().__init__(source, axis, affine)
        self.bonus = nn.Parameter(torch.arange(float(axis.num_members)))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.bonus[self.axis.current.members].mean()


def test_a_layer_that_holds_more_of_each_member_is_compiled_for_each() -> None:
    ens = ensemble(3)
    old = ens.network[3].plain
    assert isinstance(old, SigmaNorm)
    new = Biased(nn.LayerNorm(6), ens.axis, Affine(old.logit.detach().clone()))
    ens.network[3].plain = new
    twin, counter = pair(ens)
    assert not can_be_alone(ens.network, ens.axis)
    assert is_compiled(ens)
    assert not is_compiled(twin)
    x, y = torch.randn(4, 1, 6), torch.randint(3, (4,))
    torch.testing.assert_close(*(e.backward(x, y, sn.EnsembleLoss()) for e in (ens, twin)))
    assert_alike(ens, twin)
    assert counter.frame_count > 1
