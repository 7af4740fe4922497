"""However the members are run, the numbers are those of separate networks."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.networks import Pictures, Recurrent, apart, dense, randomise
from tests.oracles.norms import member_networks
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

import sigmanens as sn
from sigmanens.errors import InputError, SigmaNensWarning


def close(a: Any, b: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def grads(ens: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in ens.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("network", [Pictures, lambda n: dense(classes=n)], ids=["conv", "dense"])
def test_every_schedule_gives_the_numbers_of_separate_networks(
    network: Callable[[int], nn.Module], training: bool
) -> None:
    base = randomise(network(3))
    ens = apart(sn.convert(base, 3)).train(training)
    x = torch.randn(6, 4) if isinstance(base, nn.Sequential) else torch.randn(6, 1, 8, 8)
    y = torch.randint(3, (6,))
    separate = [net.train(training) for net in member_networks(base, ens)]
    expected = torch.stack([net(x) for net in separate])
    loss = torch.stack([F.cross_entropy(e, y) for e in expected]).mean()
    loss.backward()
    for schedule in ("folded", "sequential", 2, "auto"):
        twin = copy.deepcopy(ens)
        twin.schedule = schedule
        logits = twin(x)
        close(logits, expected)
        ours = sn.EnsembleLoss()(logits, y)
        close(ours, loss)
        ours.backward()
        for name, gradient in grads(twin.network).items():
            if "scale_logit" not in name and "heads" not in name:
                close(gradient, sum(net.get_parameter(name).grad for net in separate), 1e-4)
        for m, net in enumerate(separate):
            for name, layer in twin.sigma_norms().items():
                close(layer.running_mean[m], net.get_submodule(name).running_mean)
                close(layer.running_var[m], net.get_submodule(name).running_var)
        assert twin.schedule == schedule


@pytest.mark.case("T10")
def test_members_whose_features_have_very_different_scales() -> None:
    base = randomise(Pictures(3))
    ens = sn.convert(base, 3).train()
    with torch.no_grad():
        for layer in ens.sigma_norms().values():
            layer.carrier.mul_(torch.tensor([1e-3, 1.0, 1e3])[:, None])
    separate = [net.train() for net in member_networks(base, ens)]
    for training in (True, True, False):
        x = torch.randn(5, 1, 8, 8)
        for got, net in zip(ens.train(training)(x).detach(), separate, strict=True):
            expected = net.train(training)(x).detach()
            close(got, expected, 1e-4 * float(expected.abs().max()))
    for m, net in enumerate(separate):
        for name, layer in ens.sigma_norms().items():
            torch.testing.assert_close(layer.running_var[m], net.get_submodule(name).running_var)
    last = ens.network.bn2.running_mean.abs().mean(1)
    assert last[2] > 20 * last[0]


@pytest.mark.case("T2")
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("schedule", ["auto", "sequential", 2])
def test_every_batch_size_up_to_twice_the_members(schedule: Any, training: bool) -> None:
    base = randomise(Pictures(3))
    ens = apart(sn.convert(base, 3, schedule=schedule)).train(training)
    for size in range(1, 8):
        x = torch.randn(size, 1, 8, 8)
        separate = [net.train(training) for net in member_networks(base, ens)]
        close(ens(x), torch.stack([net(x) for net in separate]), 1e-4)


@pytest.mark.case("T2")
def test_a_batch_too_small_for_its_statistics_names_the_layer() -> None:
    ens = sn.convert(dense(), 3).train()
    with pytest.raises(InputError, match="'1' has 1 value per channel and member"):
        ens(torch.randn(1, 4))
    assert ens.eval()(torch.randn(1, 4)).shape == (3, 1, 3)
    assert ens.freeze_statistics().train()(torch.randn(1, 4)).shape == (3, 1, 3)


@pytest.mark.parametrize("schedule", ["seq", 4, 0, True, None])
def test_a_schedule_that_is_none_is_refused_also_later(schedule: Any) -> None:
    ens = sn.convert(dense(), 3)
    with pytest.raises(InputError, match="expected 'auto', 'folded', 'sequential' or a number"):
        ens.schedule = schedule
    ens.schedule = 2
    assert ens.schedule == 2
    assert "schedule    2" in str(ens.report)


def test_a_time_major_network_falls_back_to_one_member_at_a_time() -> None:
    base = randomise(Recurrent(batch_first=False)).eval()
    ens = apart(sn.convert(base, 3))
    x = torch.randn(6, 4, 4)
    with pytest.warns(SigmaNensWarning, match="running sequentially") as caught:
        got = ens(x)
    assert caught[0].filename == __file__
    close(got, torch.stack([net(x) for net in member_networks(base, ens)]))
    assert ens.schedule == "sequential"
    assert "schedule    sequential" in str(ens.report)
    assert "folding members into the batch changes results" in str(ens.report)
    close(ens(x), got)


def test_a_time_major_network_is_refused_when_folding_was_asked_for() -> None:
    base = randomise(Recurrent(batch_first=False))
    for schedule in ("folded", 2):
        ens = sn.convert(base, 3, schedule=schedule)
        with pytest.raises(InputError, match="folds members into the batch, which this network"):
            ens(torch.randn(6, 4, 4))
    with pytest.raises(InputError, match="Use schedule='sequential' or 'auto'"):
        sn.convert(base, 3, schedule="folded", example=torch.randn(6, 4, 4))


class Running(nn.Module):
    """Mixes the rows of a batch: each sees those before it."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4, bias=False)
        self.head = nn.Linear(4, 3, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(x).cumsum(0))


@pytest.mark.parametrize("value", [0.0, float("nan")])
@pytest.mark.parametrize("bias", [False, True])
def test_a_first_batch_that_cannot_tell_is_not_taken_for_a_proof(bias: bool, value: float) -> None:
    ens = apart(sn.convert(Running(bias).eval(), 2, init="normal", head="shared"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ens(torch.full((3, 4), value)).shape == (2, 3, 3)
    with pytest.warns(SigmaNensWarning, match="running sequentially"):
        ens(torch.randn(3, 4))


def _counting(forward: Any, rows: list[int]) -> Any:
    def counted(self: nn.Module, x: Tensor) -> Tensor:
        rows.append(len(x))
        return forward(self, x)

    return counted


def test_the_checks_run_once_change_nothing_and_cost_few_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ens = apart(sn.convert(randomise(Pictures()), 3)).train()
    ens.network.bn2.eval()
    rows: list[int] = []
    ens.network.conv1.register_forward_pre_hook(lambda m, a: rows.append(len(a[0])))
    tried: list[int] = []
    monkeypatch.setattr(Pictures, "forward", _counting(Pictures.forward, tried))
    state = {k: v.clone() for k, v in ens.state_dict().items()}
    ens.freeze_statistics()
    ens(torch.randn(5, 1, 8, 8))
    assert rows == [5]  # hooks see no trial, and the convolution runs once for all members
    assert tried[-6:] == [4, 4, 4, 12, 5, 15]
    assert max(tried[:-6]) == 4  # two samples and two members, for what runs before the members
    rows.clear()
    tried.clear()
    ens(torch.randn(5, 1, 8, 8))
    assert rows == [5]
    assert tried == [5, 15]
    assert all(torch.equal(v, state[k]) for k, v in ens.state_dict().items())
    assert ens.network.bn1.training
    assert not ens.network.bn2.training


def test_a_network_that_asserts_its_batch_size_falls_back() -> None:
    class Strict(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            if len(x) > 2:
                raise KeyError("two rows at most")
            return self.head(self.norm(x))

    ens = sn.convert(Strict(), 3)
    with pytest.warns(SigmaNensWarning, match="two rows at most"):
        assert ens(torch.randn(2, 4)).shape == (3, 2, 3)


@pytest.mark.case("T7")
def test_dropout_differs_between_members() -> None:
    base = randomise(Pictures(dropout=0.5))
    ens = sn.convert(base, 3).train()  # preserved: members equal but for their masks
    ens.freeze_statistics()
    logits = ens(torch.randn(4, 1, 8, 8))
    for a in range(3):
        for b in range(a):
            assert (logits[a] - logits[b]).abs().max() > 1e-3
    close(*ens.eval()(torch.randn(4, 1, 8, 8))[:2])


def test_one_member_is_the_base() -> None:
    base = randomise(Pictures()).eval()
    ens = sn.convert(base, 1)
    x = torch.randn(4, 1, 8, 8)
    close(ens(x)[0], base(x))
    prediction = ens.predict(x)
    close(prediction.probs, base(x).softmax(-1))
    assert torch.equal(prediction.modulation, torch.zeros(4))
    assert torch.equal(prediction.entropy, prediction.expected_entropy)


def test_an_empty_batch_passes_in_evaluation() -> None:
    ens = sn.convert(dense(), 3).eval()
    assert ens(torch.randn(0, 4)).shape == (3, 0, 3)


# -- compilation -------------------------------------------------------------------------------


@pytest.mark.case("S5")
def test_the_ensemble_is_one_graph_in_training_and_evaluation() -> None:
    torch._dynamo.reset()
    norms = nn.BatchNorm1d(6), nn.LayerNorm(6)
    base = randomise(nn.Sequential(nn.Linear(4, 6), norms[0], nn.ReLU(), norms[1], nn.Linear(6, 3)))
    ens = apart(sn.convert(base, 3)).train()
    twin = copy.deepcopy(ens)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ens, backend=counter, fullgraph=True)
    y = torch.randint(3, (8,))
    x = torch.randn(8, 4)
    a, b = compiled(x), twin(x)
    close(a, b)
    sn.EnsembleLoss()(a, y).backward()
    sn.EnsembleLoss()(b, y).backward()
    for name, gradient in grads(twin).items():
        close(grads(ens)[name], gradient, 1e-4)
    for name, buffer in twin.named_buffers():
        close(dict(ens.named_buffers())[name], buffer)
    for size in (5, 6, 7):
        x = torch.randn(size, 4)
        close(compiled(x), twin(x))
    assert counter.frame_count <= 2  # one more for batches of another size
    ens.eval()
    twin.eval()
    with torch.no_grad():
        close(compiled(x), twin(x))
    torch._dynamo.reset()
