"""What a training costs, counted by hand."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
import torch
from torch import nn

pytest.importorskip("lightning")
pytest.importorskip("sklearn")

from rich.console import Console
from tests.lab.test_bench import TINY

from sigmanens import convert
from sigmanens.baselines import SeparateNetworks
from sigmanens.lab.bench.config import Variant
from sigmanens.lab.bench.cost import cost_of, cost_table


def network() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.Flatten(),
        nn.Linear(4 * 64, 10),
    )  # fmt: skip


X, Y = torch.randn(2, 1, 8, 8), torch.tensor([1, 2])


def test_one_network_by_hand() -> None:
    cost = cost_of(SeparateNetworks([network()]), X, Y, steps=7)
    assert cost.params == 4 * 9 + 8 + 4 * 64 * 10 + 10
    assert cost.multiply_adds == 4 * 64 * 9 + 4 * 64 * 10
    assert cost.state_bytes == 3 * 4 * cost.params
    # Kept for one picture: the input, what enters the norm, and what enters the linear layer.
    assert cost.saved_bytes >= 4 * (64 + 4 * 64 + 4 * 64)
    assert cost.steps == 7


def test_members_multiply_what_is_computed_and_kept_but_not_the_parameters() -> None:
    base = network()
    one = cost_of(SeparateNetworks([base]), X, Y, 1)
    four = cost_of(convert(base, 4, init="normal", head="copy", schedule="folded"), X, Y, 1)
    stem = 4 * 64 * 9  # computed once for all members
    assert four.multiply_adds == 4 * one.multiply_adds - 3 * stem
    assert 3 < four.saved_bytes / one.saved_bytes < 5
    heads = 4 * 64 * 10 + 10
    assert four.params == one.params + 3 * heads + 4 * 4 - 8


def test_what_is_kept_is_neither_the_weights_nor_the_whole_training_set() -> None:
    base = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 10, bias=False))
    whole = torch.randn(1000, 5, 64)  # sequences, for which weights are kept as their transposes

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = base

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x).mean(1)

    cost = cost_of(SeparateNetworks([Mean()]), whole[:2], Y, 1)
    row = 4 * 5 * 64  # bytes of one sequence: the input, and what enters the second layer
    assert 2 * row <= cost.saved_bytes <= 3 * row + 4 * 200


def test_the_network_is_left_alone() -> None:
    ensemble = convert(network(), 2, init="normal", head="copy")
    before = {k: v.clone() for k, v in ensemble.state_dict().items()}
    ensemble.train()
    cost_of(ensemble, X, Y, 1)
    assert ensemble.training
    assert all(torch.equal(v, before[k]) for k, v in ensemble.state_dict().items())
    assert all(p.grad is None for p in ensemble.parameters())


def test_the_table_has_a_line_for_every_training() -> None:
    config = replace(TINY, variants={"slow": Variant(change={"recipe.scale_lr_mult": 1.0})})
    said = io.StringIO()
    Console(width=160, file=said).print(cost_table(config))
    text = said.getvalue()
    for name in ("one network of the separate ones", "FiLM", "λ=0", "τ=0.5", "τ=2", "(slow)"):
        assert name in text
    assert "× 2 networks" in text
