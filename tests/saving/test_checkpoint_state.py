"""Frozen statistics in a checkpoint, and checkpoints that are put into an ensemble in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.networks import Pictures, randomise
from torch import Tensor

import sigmanens as sn
from sigmanens.baselines import fixed_masks
from sigmanens.errors import CheckpointError
from sigmanens.saving.checkpoint import is_checkpoint


def base() -> Pictures:
    torch.manual_seed(5)
    return randomise(Pictures(3))


def pictures(rows: int = 6) -> Tensor:
    return torch.randn(rows, 1, 8, 8)


def converted(**options: Any) -> sn.SigmaEnsemble:
    return sn.convert(base(), 2, **options).train()


def train(ens: sn.SigmaEnsemble, steps: int = 2) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(sn.param_groups(ens, lr=0.01), momentum=0.9)
    go_on(ens, optimizer, steps)
    return optimizer


def go_on(ens: sn.SigmaEnsemble, optimizer: torch.optim.Optimizer, steps: int) -> None:
    draw = torch.Generator().manual_seed(1)
    for _ in range(steps):
        optimizer.zero_grad()
        x = torch.randn(6, 1, 8, 8, generator=draw)
        sn.EnsembleLoss()(ens(x), torch.arange(6) % 3).backward()
        optimizer.step()


def state(ens: sn.SigmaEnsemble) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in ens.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# -- frozen statistics -------------------------------------------------------------------------


@pytest.mark.parametrize("frozen", [False, True])
def test_statistics_that_were_frozen_stay_so_after_loading(frozen: bool, tmp_path: Path) -> None:
    ens = converted(layers="bn2", train="members").freeze_statistics(frozen)
    ens.save_pretrained(tmp_path)
    again = sn.load(tmp_path, base=base()).train()
    assert again.frozen_statistics is frozen
    before = state(again)
    train(again, 3)
    after = {k: v.expand_as(before[k]) for k, v in again.state_dict().items()}
    moved = {k for k, v in after.items() if not torch.equal(v, before[k])}
    statistics = {k for k in before if "running" in k or "tracked" in k}
    assert len(statistics) == 6  # of the converted norm and of the one that is kept
    own = {k for k in statistics if "bn2" in k}  # where only members train, bn1 stays the base's
    assert moved & statistics == (set() if frozen else own)
    assert moved - statistics


# -- frozen scales -----------------------------------------------------------------------------


def test_masks_stay_frozen_after_loading(tmp_path: Path) -> None:
    ens = fixed_masks(base(), 2, keep=1, layers="bn2")
    trained = {n: p.requires_grad for n, p in ens.named_parameters()}
    assert not all(trained.values())
    ens.save_pretrained(tmp_path)
    again = sn.load(tmp_path, base=base()).train()
    assert {n: p.requires_grad for n, p in again.named_parameters()} == trained
    before = state(again)
    train(again, 3)
    moved = {k for k, v in again.state_dict().items() if not torch.equal(v, before[k])}
    assert {n for n, p in again.named_parameters() if p.requires_grad} <= moved
    assert not moved & {n for n, wanted in trained.items() if not wanted}


def test_an_ensemble_frozen_as_a_whole_for_prediction_can_be_trained_after_loading(
    tmp_path: Path,
) -> None:
    ens = converted().requires_grad_(False)
    ens.save_pretrained(tmp_path)
    assert all(p.requires_grad for p in sn.load(tmp_path, base=base()).parameters())


# -- in place ----------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["members", "all"])
def test_a_state_is_put_back_in_place_and_training_goes_on(what: str, tmp_path: Path) -> None:
    ens = converted(train=what)
    optimizer = train(ens)
    ens.temperature.fill_(1.5)
    ens.save_pretrained(tmp_path)
    assert is_checkpoint(tmp_path)
    assert not is_checkpoint(tmp_path / "elsewhere")
    wanted, parameters = state(ens), list(ens.parameters())
    momentum = {k: v.clone() for k, v in enumerate_momentum(optimizer).items()}
    go_on(ens, optimizer, 2)
    expected = state(ens)
    ens.freeze_statistics()
    ens.temperature.fill_(3.0)
    assert not same(state(ens), wanted)
    ens.load_checkpoint(tmp_path)
    assert same(state(ens), wanted)
    assert ens.training
    assert not ens.frozen_statistics
    assert all(a is b for a, b in zip(ens.parameters(), parameters, strict=True))
    for k, buffer in enumerate_momentum(optimizer).items():
        buffer.copy_(momentum[k])
    go_on(ens, optimizer, 2)
    assert same(state(ens), expected)


def enumerate_momentum(optimizer: torch.optim.Optimizer) -> dict[int, Tensor]:
    return {i: s["momentum_buffer"] for i, s in enumerate(optimizer.state.values())}


def test_a_fresh_ensemble_converted_alike_takes_a_state(tmp_path: Path) -> None:
    ens = converted()
    train(ens)
    ens.save_pretrained(tmp_path)
    fresh = converted(generator=torch.Generator().manual_seed(9))
    fresh.load_checkpoint(tmp_path)
    assert same(fresh.state_dict(), ens.state_dict())
    fresh.save_pretrained(tmp_path / "again")  # what changed is still counted from the base
    assert same(sn.load(tmp_path / "again", base=base()).state_dict(), ens.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"members": 3}, "of another conversion: its members is 2, this ensemble's 3"),
        ({"layers": "bn1"}, r"its layers is \('bn1', 'bn2'.*\), this ensemble's \('bn1',\)"),
        ({"init": "normal", "head": "copy"}, "its init is 'preserve', this ensemble's 'normal'"),
        ({"head": "fresh"}, "its head is 'copy', this ensemble's 'fresh'"),
        ({"scale": "linear"}, "its scale is 'sigmoid', this ensemble's 'linear'"),
        ({"shift": True}, "its shift is None, this ensemble's True"),
    ],
)
def test_another_conversion_is_named_and_left_as_it_was(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    converted().save_pretrained(tmp_path)
    other = sn.convert(base(), **({"members": 2} | options))
    before = state(other)
    with pytest.raises(CheckpointError, match=message):
        other.load_checkpoint(tmp_path)
    assert same(other.state_dict(), before)


def test_another_base_is_named(tmp_path: Path) -> None:
    converted().save_pretrained(tmp_path)
    torch.manual_seed(6)
    other = sn.convert(randomise(Pictures(3)), 2)
    with pytest.raises(CheckpointError, match=r"not the base .*first: 'conv1\.weight'"):
        other.load_checkpoint(tmp_path)


def test_what_a_checkpoint_does_not_hold_cannot_be_put_back(tmp_path: Path) -> None:
    """Saved before the shared weights moved: they would stay as they are now."""
    ens = converted()
    ens.save_pretrained(tmp_path / "auto")
    ens.save_pretrained(tmp_path / "always", shared="always")
    start = state(ens)
    train(ens)
    moved = state(ens)
    with pytest.raises(
        CheckpointError, match=r"2 shared tensors of this Pictures have .*shared='always'"
    ):
        ens.load_checkpoint(tmp_path / "auto")
    assert same(state(ens), moved)
    ens.load_checkpoint(tmp_path / "always")
    assert same(state(ens), start)


def test_a_damaged_checkpoint_changes_nothing(tmp_path: Path) -> None:
    ens = converted()
    weights = ens.save_pretrained(tmp_path)
    train(ens)
    before = state(ens)
    weights.write_bytes(weights.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match="truncated or altered"):
        ens.load_checkpoint(tmp_path)
    assert same(state(ens), before)
