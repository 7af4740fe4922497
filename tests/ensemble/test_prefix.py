"""What comes before the first converted norm is computed once for all members, or not at all."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.networks import Pictures, Recurrent, Words, apart, randomise
from tests.oracles.norms import member_networks
from timm.layers import DropPath
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import sigmanens as sn
from sigmanens.errors import InputError


def shared_names(ens: sn.SigmaEnsemble) -> list[str]:
    """Dotted names of the modules in the shared prefix."""
    assert ens._runner._prefix is not None
    assert ens.plan.prefix == tuple(ens._runner._prefix.modules)
    return list(ens._runner._prefix.modules)


class Residual(nn.Module):
    """Blocks that hand the batch's rows past their norms, and a mask of the batch at last."""

    def __init__(self, dropout: float = 0.0, classes: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"norm": nn.BatchNorm1d(6), "linear": nn.Linear(6, 6)}) for _ in range(3)
        )
        self.act = nn.ReLU()
        self.dropout = dropout
        self.head = nn.Linear(6, classes)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = first = F.dropout(self.stem(x), self.dropout, self.training)
        for block in self.blocks:
            x = x + block["linear"](self.act(block["norm"](x)))
        x = self.act(x) + first
        return self.head(x if mask is None else x * mask)


def close(a: Any, b: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


def rows_of(ens: sn.SigmaEnsemble, name: str) -> list[int]:
    """Rows that a module sees from now on, call by call."""
    rows: list[int] = []
    module = ens.network.get_submodule(name)
    module.register_forward_pre_hook(lambda m, a: rows.append(len(a[0])))
    return rows


def train_step(
    ens: sn.SigmaEnsemble, x: Any, y: Tensor, schedule: str | int
) -> tuple[Tensor, dict[str, Tensor]]:
    """Loss and gradients of one step."""
    loss_fn = sn.EnsembleLoss()
    if schedule == "backward":
        loss = ens.backward(x, y, loss_fn)
    else:
        ens.schedule = schedule
        loss = loss_fn(ens(*x) if isinstance(x, tuple) else ens(x), y)
        loss.backward()
    gradients = {n: p.grad for n, p in ens.network.named_parameters() if p.grad is not None}
    return loss.detach(), gradients


PARTS = ("norm", "act", "linear")
CASES: dict[str, tuple[Callable[[], nn.Module], str, list[str], Callable[[], Any]]] = {
    "conv, all norms": (lambda: Pictures(3), "", ["conv1"], lambda: torch.randn(6, 1, 8, 8)),
    "conv, last norm": (
        lambda: Pictures(3), "bn2", ["conv1", "bn1", "conv2"], lambda: torch.randn(6, 1, 8, 8)
    ),
    "residual and mask": (
        Residual,
        "blocks.2",
        ["stem", *(f"blocks.{i}.{n}" if n != "act" else n for i in (0, 1) for n in PARTS)],
        lambda: (torch.randn(6, 4), torch.rand(6, 1)),
    ),
    "attention": (
        Words, "norm2", [], lambda: (torch.randint(11, (6, 5)), torch.ones(6, 5))
    ),
}  # fmt: skip


@pytest.mark.parametrize("schedule", ["folded", "sequential", 2, "auto", "backward"])
@pytest.mark.parametrize("case", CASES)
def test_values_gradients_and_buffers_are_those_of_separate_networks(
    case: str, schedule: str | int
) -> None:
    make, layers, names, inputs = CASES[case]
    base = randomise(make())
    ens = apart(sn.convert(base, 3, layers=layers or None)).train()
    x, y = inputs(), torch.randint(3, (6,))
    separate = [net.train() for net in member_networks(base, ens)]
    arguments = x if isinstance(x, tuple) else (x,)
    loss = torch.stack([F.cross_entropy(net(*arguments), y) for net in separate]).mean()
    loss.backward()
    got, gradients = train_step(ens, x, y, schedule)
    close(got, loss.detach())
    if case == "attention":  # an embedding is no work worth sharing
        assert ens._runner._prefix is None
    else:
        assert ens._runner._prefix is not None
        assert sorted(shared_names(ens)) == sorted(set(names))
        assert "computed once for all members" in str(ens.report)
    for name, gradient in gradients.items():
        if "scale_logit" not in name and "heads" not in name:
            close(gradient, sum(net.get_parameter(name).grad for net in separate), 1e-4)
    for m, net in enumerate(separate):
        for name, buffer in net.named_buffers():
            mine = ens.network.get_buffer(name)
            close(mine if mine.shape == buffer.shape else mine[m], buffer)
            before = shared_names(ens) if ens._runner._prefix else []
            assert (mine.shape == buffer.shape) == (name.rpartition(".")[0] in before)
    ens.eval()
    for net, logits in zip(separate, ens(*arguments), strict=True):
        close(logits, net.eval()(*arguments), 1e-4)


def test_the_prefix_runs_once_and_hooks_see_it_once() -> None:
    ens = apart(sn.convert(randomise(Pictures(3)), 4, layers="bn2")).eval()
    x = torch.randn(5, 1, 8, 8)
    ens(x)
    before, after = rows_of(ens, "conv2"), rows_of(ens, "bn2")
    for schedule, passes in (("folded", [20]), ("sequential", [5] * 4), (3, [15, 5])):
        ens.schedule = schedule
        ens(x)
        assert before == [5]
        assert after == passes
        before.clear()
        after.clear()


def test_a_second_call_of_a_shared_module_is_computed() -> None:
    base = randomise(Residual()).eval()
    ens = apart(sn.convert(base, 3, layers="blocks.2"))
    x = torch.randn(5, 4)
    ens(x)
    rows = rows_of(ens, "act")
    close(ens(x), torch.stack([net(x) for net in member_networks(base, ens)]), 1e-4)
    assert rows == [5, 5, 15, 15]


def test_a_module_that_another_calls_too_is_recorded_where_it_is_outermost() -> None:
    class Reusing(Residual):
        def __init__(self) -> None:
            super().__init__()
            self.both = nn.Sequential(nn.Linear(4, 4), self.act)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return super().forward(self.act(self.both(x) - 0.1), mask)

    base = randomise(Reusing()).eval()
    ens = apart(sn.convert(base, 3, layers="blocks.2", head_name="head"))
    x = torch.randn(5, 4)
    close(ens(x), torch.stack([net(x) for net in member_networks(base, ens)]), 1e-4)
    assert ens._runner._prefix is not None
    assert shared_names(ens)[:3] == ["both", "act", "stem"]


@pytest.mark.parametrize("schedule", ["folded", "backward"])
def test_a_result_that_the_network_writes_into_is_not_shared(schedule: str) -> None:
    class Writing(Residual):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            h = self.blocks[0]["norm"](self.stem(x))
            h += 1
            return self.head(self.blocks[2]["norm"](F.relu(h, inplace=True)))

    base = randomise(Writing())
    ens = apart(sn.convert(base, 2, layers="blocks.2")).train()
    x, y = torch.randn(4, 4), torch.randint(3, (4,))
    separate = [net.train() for net in member_networks(base, ens)]
    torch.stack([F.cross_entropy(net(x), y) for net in separate]).mean().backward()
    _, gradients = train_step(ens, x, y, schedule)
    close(gradients["stem.weight"], sum(net.stem.weight.grad for net in separate), 1e-4)
    assert ens._runner._prefix is None
    assert "writes into a result" in str(ens.report)


class Dropped(nn.Module):
    """Random layers before the members part, and one behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.drop = nn.Linear(4, 6), nn.Dropout(0.5)
        self.first, self.path, self.body = nn.BatchNorm1d(6), DropPath(0.3), nn.Linear(6, 6)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(self.drop(self.stem(x)))
        return self.head(self.norm(x + self.path(self.body(x))))


@pytest.mark.parametrize("schedule", ["folded", "sequential", 2, "auto", "backward"])
def test_random_layers_draw_once_for_all_members(schedule: str | int) -> None:
    ens = sn.convert(randomise(Dropped()), 3, layers="^norm", head="shared", init="preserve")
    ens.train()
    seen: list[Tensor] = []
    ens.network.norm.register_forward_pre_hook(lambda m, a: seen.append(a[0].detach()))
    x, y = torch.randn(6, 4), torch.randint(3, (6,))
    rows = rows_of(ens, "stem")
    for _ in range(3):
        train_step(ens, x, y, schedule)
    assert rows == [6] * 3
    for step in torch.cat(seen).view(3, 3, 6, 6):
        close(step, step[:1].expand(3, 6, 6))
    assert type(ens.network.first) is nn.BatchNorm1d
    assert ens.network.first.num_batches_tracked == 7 + 3


def test_statistics_that_differ_are_not_shared() -> None:
    base = randomise(Pictures(3))
    ens = apart(sn.convert(base, 3, layers="bn2")).eval()
    ens.network.bn1.running_mean[1] += 1
    x = torch.randn(5, 1, 8, 8)
    close(ens(x), torch.stack([net.eval()(x) for net in member_networks(base, ens)]))
    assert ens.plan.prefix == ()
    assert "nothing is shared before 'bn2': the members' statistics differ" in str(ens.report)
    rows = rows_of(ens, "conv1")
    ens(x)
    assert rows == [15]


class Fickle(Residual):
    """Takes another path, in front of the members part or behind it, when it is told to."""

    skip = late = False

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = super().forward(torch.tanh(x) if self.skip else x + self.stem(x)[:, :4], mask)
        return y + self.blocks[0]["norm"](self.stem(x))[:, :1] if self.late else y


def fickle(training: bool) -> tuple[nn.Module, sn.SigmaEnsemble, Tensor]:
    """Such a network, its ensemble in a mode and after its first batch, and that batch."""
    base, x = randomise(Fickle()), torch.randn(5, 4)
    ens = apart(sn.convert(base, 3, layers="blocks.2")).train(training)
    ens(x)
    return base, ens, x


def test_another_path_in_front_of_the_members_is_followed() -> None:
    base, ens, x = fickle(training=False)
    base.skip = ens.network.skip = True
    rows = rows_of(ens, "stem")
    close(ens(x), torch.stack([net.eval()(x) for net in member_networks(base, ens)]), 1e-4)
    assert rows == [5]


def test_a_plain_norm_behind_the_members_is_refused_in_training() -> None:
    base, ens, x = fickle(training=True)
    base.late = ens.network.late = True
    with pytest.raises(InputError, match="BatchNorm1d with batch statistics ran before"):
        ens(x)
    close(ens.eval()(x), torch.stack([net.eval()(x) for net in member_networks(base, ens)]), 1e-4)
    again = apart(sn.convert(base, 3, layers="blocks.2")).train()
    again(x)  # a first batch that shows it leaves the norm, and all behind it, to the members
    assert shared_names(again) == ["stem"]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # as in evaluation
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_in_the_prefix_keeps_the_gradients(reentrant: bool) -> None:
    """Reentrant checkpointing takes gradients past what is shared: so nothing is."""

    class Saving(Residual):
        saves = True

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            if self.saves and reentrant:  # which needs an input that wants a gradient
                x = x.clone().requires_grad_(torch.is_grad_enabled())
            x = checkpoint(self.first, x, use_reentrant=reentrant) if self.saves else self.first(x)
            return self.head(self.blocks[2]["norm"](x))

        def first(self, x: Tensor) -> Tensor:
            return self.blocks[0]["norm"](self.stem(x))

    base = randomise(Saving())
    ens = apart(sn.convert(base, 2, layers="blocks.2")).train()
    x, y = torch.randn(4, 4), torch.randint(3, (4,))
    separate = [net.train() for net in member_networks(base, ens)]
    torch.stack([F.cross_entropy(net(x), y) for net in separate]).mean().backward()
    for schedule in ("folded", "backward"):
        twin = copy.deepcopy(ens)
        _, gradients = train_step(twin, x, y, schedule)
        assert (twin._runner._prefix is None) is reentrant
        assert ("within an autograd Function" in str(twin.report)) is reentrant
        close(gradients["stem.weight"], sum(net.stem.weight.grad for net in separate), 1e-4)
    ens.network.saves = False
    ens(x)  # decides that the prefix is shared
    ens.network.saves = True
    if reentrant:
        with pytest.raises(InputError, match="gradients would be lost"):
            ens(x)
    else:
        ens(x)


def test_a_time_major_network_shares_its_prefix_one_member_at_a_time() -> None:
    base = randomise(Recurrent(batch_first=False)).eval()
    ens = apart(sn.convert(base, 3, layers="last", schedule="sequential"))
    x = torch.randn(6, 4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = ens(x)
    close(got, torch.stack([net(x) for net in member_networks(base, ens)]))
    assert ens._runner._prefix is not None
    assert shared_names(ens) == ["norm", "lstm"]


def test_a_split_batch_shares_nothing() -> None:
    ens = apart(sn.convert(randomise(Pictures(3)), 3, layers="bn2")).eval()
    rows = rows_of(ens, "conv1")
    ens(torch.randn(6, 1, 8, 8), split=True)
    assert rows[-1] == 6


def test_frozen_weights_before_the_members_need_no_gradient() -> None:
    ens = apart(sn.convert(randomise(Pictures(3)), 3, train="members")).train()
    ens.backward(torch.randn(5, 1, 8, 8), torch.randint(3, (5,)), sn.EnsembleLoss())
    assert ens._runner._prefix is not None
    assert ens.network.conv1.weight.grad is None
    assert ens.network.bn1.scale_logit.grad is not None


def test_inference_mode_shares_the_prefix_too() -> None:
    """Tensors made in inference mode count no writes; Lightning validates in it."""
    base = nn.Sequential(
        nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)
    )
    ensemble = sn.convert(base, 3, init="normal", head="copy").eval()
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        inside = ensemble(x)
    with torch.no_grad():
        outside = sn.convert(base, 3, init="normal", head="copy", schedule="sequential").eval()
        outside.load_state_dict(ensemble.state_dict())
        torch.testing.assert_close(inside.clone(), outside(x))
