"""Trials change nothing, and every doubt about folding means one member after the other."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.networks import apart, randomise
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import sigmanens as sn
from sigmanens.errors import InputError


class Base(nn.Module):
    """Linear, norm, head; subclasses say what else happens to the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Any) -> Tensor:
        return self.head(self.mixed(torch.relu(self.norm(self.body(x)))))

    def mixed(self, h: Tensor) -> Tensor:
        return h


class Writes(Base):
    def forward(self, x: Any) -> Tensor:
        return super().forward(x.sub_(2.0).div_(4.0))


class WritesInTraining(Base):
    def forward(self, x: Any) -> Tensor:
        return super().forward(x.mul_(0.5) if self.training else x)


class WritesNested(Base):
    def forward(self, x: dict[str, list[Tensor]]) -> Tensor:
        return super().forward(x["parts"][0].add_(1.0))


class Rolls(Base):
    """Every sample takes half of the one before it."""

    def mixed(self, h: Tensor) -> Tensor:
        return 0.5 * (h + h.roll(1, 0)) if self.training else h


class Shuffles(Base):
    """MixStyle and manifold mixup: another sample's share, by a permutation that is drawn."""

    def mixed(self, h: Tensor) -> Tensor:
        return 0.7 * h + 0.3 * h[torch.randperm(len(h))] if self.training else h


class Seldom(Shuffles):
    """Mixes where a number that is drawn says so."""

    def __init__(self, draw: Callable[[], float]) -> None:
        super().__init__()
        self.draw = draw

    def mixed(self, h: Tensor) -> Tensor:
        return super().mixed(h) if self.draw() < 0.5 else h


class Centres(Base):
    def mixed(self, h: Tensor) -> Tensor:
        return h - h.mean(0)


class Initialises(Base):
    """A layer that takes its offset from the first batch it sees, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.zeros(8))
        self.register_buffer("seen", torch.tensor(0))
        self.known = False

    def mixed(self, h: Tensor) -> Tensor:
        if not self.known:
            self.offset, self.known = h.detach().mean(0), True
        self.seen += 1
        return h - self.offset


class Sized(Base):
    """Holds a state for every sample of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("state", torch.linspace(0, 1, 7).unsqueeze(1))

    def mixed(self, h: Tensor) -> Tensor:
        return h + self.state


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag, self.norm, self.head = nn.EmbeddingBag(20, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, text: Tensor, offsets: Tensor) -> Tensor:
        return self.head(self.norm(self.bag(text, offsets)))


class Graphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor, edges: Tensor, graph: Tensor) -> Tensor:
        h = self.norm(self.body(x.index_add(0, edges[1], x[edges[0]])))
        return self.head(h.new_zeros(int(graph.max()) + 1, 8).index_add(0, graph, h))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.norm, self.head = nn.LSTM(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x: PackedSequence) -> Tensor:
        return self.head(self.norm(self.lstm(x)[1][0][-1]))


class Sparse(Base):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to_dense())


def rows() -> tuple[Any, ...]:
    return (torch.randn(7, 6),)


GRAPH = (
    torch.randn(11, 6),
    torch.randint(11, (2, 20)),
    torch.tensor([0] * 4 + [1] * 3 + [2] * 4),
)
CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Any, ...]]]] = {
    "plain": (Base, rows),
    "writes to its input": (Writes, rows),
    "writes in training": (WritesInTraining, rows),
    "writes to a nested input": (WritesNested, lambda: ({"parts": [torch.randn(7, 6)]},)),
    "mixes neighbours": (Rolls, rows),
    "centres the batch": (Centres, rows),
    "state of the batch": (Sized, rows),
    "bag of words": (Bag, lambda: (torch.randint(20, (23,)), torch.tensor([0, 4, 9, 15]))),
    "graphs": (Graphs, lambda: GRAPH),
    "packed": (Packed, lambda: (pack_sequence([torch.randn(n, 6) for n in (5, 3, 2)]),)),
    "sparse": (Sparse, lambda: (torch.randn(7, 6).relu().to_sparse(),)),
}


def copied(arguments: Any) -> Any:
    if isinstance(arguments, Tensor):
        return arguments.clone()
    if isinstance(arguments, PackedSequence):
        return arguments
    if isinstance(arguments, dict):
        return {k: copied(v) for k, v in arguments.items()}
    return type(arguments)(copied(a) for a in arguments)


@pytest.mark.filterwarnings("ignore::sigmanens.errors.SigmaNensWarning")
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("schedule", ["auto", "sequential"])
@pytest.mark.parametrize("case", CASES)
def test_members_answer_as_plain_networks_do(case: str, schedule: str, training: bool) -> None:
    make, inputs = CASES[case]
    ens = apart(sn.convert(randomise(make()), 3, schedule=schedule, head="copy")).train(training)
    arguments = inputs()
    members = [ens.member(m).train(training) for m in range(3)]
    expected = torch.stack([net(*copied(arguments)) for net in members])
    for _ in range(2):
        got = ens(*copied(arguments))
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    if not training:
        parts = [] if case == "centres the batch" else [{"chunk": 3}]
        with torch.no_grad():
            for options in ({}, {"members": 2}, *parts):
                probs = ens.predict(copied(arguments), **options).member_probs
                want = expected.softmax(2)[: options.get("members", 3)]
                torch.testing.assert_close(probs, want, rtol=1e-4, atol=1e-5)
    assert len([n for n in ens.report.notes if "sequentially" in n]) <= 1


# Functions, for a copy of a bound method has a generator of its own.
DRAWS = {
    "torch": lambda: float(torch.rand(())),
    "python": lambda: random.random(),
    "numpy": lambda: float(np.random.rand()),
    "always": lambda: 0.0,
}


@pytest.mark.parametrize("draw", DRAWS)
def test_a_network_that_mixes_the_batch_by_chance_runs_one_member_at_a_time(draw: str) -> None:
    ens = sn.convert(randomise(Seldom(DRAWS[draw])), 3).train()
    with pytest.warns(sn.SigmaNensWarning, match="folding members into the batch changes results"):
        ens(torch.randn(7, 6))
    assert ens.schedule == "sequential"
    folded = sn.convert(randomise(Seldom(DRAWS[draw])), 3, schedule="folded").train()
    with pytest.raises(InputError, match="schedule='folded' folds members into the batch"):
        folded(torch.randn(7, 6))


class OfTorch(Seldom):
    def __init__(self) -> None:
        super().__init__(float)
        self.generator = torch.Generator().manual_seed(121)

    def mixed(self, h: Tensor) -> Tensor:
        kept = float(torch.rand((), generator=self.generator)) >= 0.5
        return h if kept else Shuffles.mixed(self, h)


# Each would first draw eight numbers that do not mix: unseeded, the trial would see nothing.
OWN = {
    "python": lambda: Seldom(random.Random(479).random),
    "numpy, older": lambda: Seldom(np.random.RandomState(154).rand),
    "numpy": lambda: Seldom(np.random.default_rng(45).random),
    "torch": OfTorch,
}


@pytest.mark.parametrize("make", OWN.values(), ids=OWN)
def test_a_generator_of_the_networks_own_is_seeded_for_the_trial(
    make: Callable[[], Seldom],
) -> None:
    base = randomise(make())
    ens = sn.convert(base, 3).train()
    with pytest.warns(sn.SigmaNensWarning, match="folding members into the batch changes results"):
        ens(torch.randn(7, 6))
    assert ens.schedule == "sequential"


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), nn.AlphaDropout(0.3), nn.RReLU()])
def test_noise_that_keeps_samples_apart_does_not_count_as_a_difference(layer: nn.Module) -> None:
    base = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), layer, nn.Linear(8, 3))
    ens = sn.convert(base, 3).train()
    ens(torch.randn(7, 6))
    assert ens.schedule == "auto"


def test_a_trial_leaves_everything_as_it_was() -> None:
    ens = sn.convert(randomise(Initialises()), 3).train()
    seen: list[int] = []
    ens.network.body.register_forward_hook(lambda m, a, y: seen.append(len(y)))
    x = torch.randn(7, 6)
    kept, buffers = x.clone(), {n: b.clone() for n, b in ens.named_buffers()}
    torch.manual_seed(1)
    random.seed(1)
    np.random.seed(1)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with pytest.warns(sn.SigmaNensWarning, match="running sequentially"):
        ens._runner.settle(ens.network, ens._inputs((x,), {}))
    assert torch.equal(x, kept)
    assert not seen
    assert not ens.network.known
    assert all(torch.equal(b, buffers[n]) for n, b in ens.named_buffers())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert np.random.get_state()[1].tolist() == states[2]


class Branches(Base):
    """What all samples have in common decides for each."""

    def mixed(self, h: Tensor) -> Tensor:
        return 2 * h if h.mean() > 0.9 else h  # on the batch of the trial nearly never


class ReadsInputs(Base):
    """Reads of what no member has computed, and whole numbers that find rows, as experts do."""

    def forward(self, x: Any) -> Tensor:
        h = torch.relu(self.norm(self.body(x)))
        if (x != 0).all() and h.argmax(1).max().item() >= 0:
            h = 2 * h
        return self.head(h)


@pytest.mark.parametrize("training", [False, True])
def test_a_forward_that_branches_on_members_numbers_runs_them_one_by_one(training: bool) -> None:
    ens = sn.convert(randomise(Branches()), 3, init="normal", head="fresh").train(training)
    alone = copy.deepcopy(ens)
    alone.schedule = "sequential"
    with pytest.warns(sn.SigmaNensWarning, match="reads a number that a member has computed"):
        ens(torch.randn(5, 6))
    alone(torch.randn(5, 6))
    alone.load_state_dict(ens.state_dict())
    for _ in range(20):
        x = 3 * torch.randn(5, 6)
        assert torch.equal(ens(x), alone(x))


def test_reads_that_no_member_decides_leave_members_folded() -> None:
    ens = sn.convert(randomise(ReadsInputs()), 3, init="normal", head="fresh").eval()
    ens(torch.randn(5, 6))
    assert "3 of 3 members in a pass" in " ".join(ens.report.notes)


def test_hooks_see_all_members_for_all_samples() -> None:
    base = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 4),
    )  # fmt: skip
    ens = sn.convert(base, 4, init="normal").eval()
    plain = [ens.member(m)[:5] for m in range(4)]
    found: dict[str, Tensor] = {}
    ens.network[4].register_forward_hook(lambda m, a, y: found.update(last=y.detach()))
    for size in (1, 8, 600):
        x = torch.randn(size, 3, 16, 16)
        ens.predict(x)
        expected = torch.cat([net(x) for net in plain])
        torch.testing.assert_close(found["last"], expected, rtol=1e-4, atol=1e-5)


def test_a_converted_layer_refuses_a_call_from_outside() -> None:
    ens = sn.convert(randomise(Base()), 3).eval()
    other = sn.convert(randomise(Base()), 2).eval()
    x = torch.randn(4, 8)
    for layer in (ens.network.norm, ens.network.head, ens.network.norm):
        with pytest.raises(sn.errors.OutsidePassError, match=r"ens\.features\(x\)"):
            layer(x)
    ens.network.norm = other.network.norm
    with pytest.raises(sn.errors.OutsidePassError):
        ens(torch.randn(4, 6))


def test_a_copied_layer_takes_part_in_the_passes_of_its_ensemble() -> None:
    ens = apart(sn.convert(randomise(Base()), 3)).eval()
    x = torch.randn(5, 6)
    expected = ens(x)
    ens.network.norm = copy.deepcopy(ens.network.norm)
    for schedule in ("folded", "sequential", 2):
        ens.schedule = schedule
        torch.testing.assert_close(ens(x), expected)
