"""Random state of devices: drawn as torch.manual_seed has it, one thread at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from sigmanens.seeding import device_of, own_random_state, own_seed, seed_device


def test_it_draws_as_manual_seed_and_leaves_other_devices_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    before = torch.get_rng_state()
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    with own_random_state(torch.device("cpu")):
        seed_device(torch.device("cpu"), 5)
        assert torch.equal(torch.rand(3), expected)
    assert torch.equal(torch.get_rng_state(), before)
    assert not seeded
    torch.manual_seed(5)
    assert seeded == [5]  # which is what it does not do


def test_threads_take_turns() -> None:
    def draw(seed: int) -> Tensor:
        with own_seed(seed), own_random_state():  # blocks may be nested
            return torch.cat([torch.randn(2000) for _ in range(50)])

    expected = [draw(seed) for seed in range(8)]
    before = torch.get_rng_state()
    with ThreadPoolExecutor(4) as pool:
        for found, alone in zip(pool.map(draw, range(8)), expected, strict=True):
            assert torch.equal(found, alone)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_device_is_that_of_the_parameters() -> None:
    assert device_of(nn.Linear(2, 2, device="meta")).type == "meta"
    assert device_of(nn.ReLU()).type == "cpu"
