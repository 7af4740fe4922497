"""Random state of one device: drawn as torch.manual_seed has it, without seeding other devices."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from sigmanens.seeding import device_of, own_random_state, seed_device


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


def test_the_device_is_that_of_the_parameters() -> None:
    assert device_of(nn.Linear(2, 2, device="meta")).type == "meta"
    assert device_of(nn.ReLU()).type == "cpu"
