"""The Lightning module in a user's own Trainer, with a DataLoader of pairs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning")

import lightning as L
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from tests.networks import dense

from sigmanens import Diversity, EnsembleLoss, check_optimizer, convert, diversity, param_groups
from sigmanens.baselines import SeparateNetworks, film_ensemble
from sigmanens.errors import InputError
from sigmanens.integrations.lightning import EnsembleModule

pytestmark = pytest.mark.filterwarnings(
    # What Lightning advises somebody who writes a training; these sets are tiny on purpose.
    "ignore:The '.*_dataloader' does not have many workers:UserWarning",
    "ignore:The number of training batches:UserWarning",
    "ignore:You defined a `validation_step` but have no:UserWarning",
    "ignore:Be aware that when using `ckpt_path`, callbacks used to create:UserWarning",
)

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(40, 4, generator=GENERATOR)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()


def loader(batch: int = 8, shuffle: bool = False) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(X, Y), batch, shuffle=shuffle)


def ensemble(members: int = 2, batch_norm: bool = True, **options: Any) -> Any:
    torch.manual_seed(0)
    net = dense(batch_norm)
    generator = torch.Generator().manual_seed(0)
    return convert(net, members, init="normal", generator=generator, **options)


def penalised() -> EnsembleLoss:
    return EnsembleLoss(diversity=Diversity(tau=0.5, weight=1e-2, layers="all"))


def trainer(epochs: int = 2, **options: Any) -> Any:
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    return L.Trainer(max_epochs=epochs, **(quiet | options))


class Rates(Callback):
    """Learning rates by group, at every step."""

    def __init__(self) -> None:
        self.seen: list[dict[str, float]] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        groups = trainer.optimizers[0].param_groups
        self.seen.append({g["name"]: float(g["lr"]) for g in groups})


def by_hand(model: nn.Module, loss_fn: EnsembleLoss, epochs: int, lr: float) -> None:
    """The training that the module stands for, written out."""
    groups = param_groups(model, lr, 5e-4)
    optimizer = torch.optim.SGD(groups, momentum=0.9, nesterov=True)
    model.train()
    for _ in range(epochs):
        for x, y in loader():
            optimizer.zero_grad()
            loss_fn(model(x), y, model if loss_fn.diversity else None).backward()
            optimizer.step()


@pytest.mark.parametrize("schedule", ["folded", "sequential"])
def test_a_user_trains_with_his_own_trainer(schedule: str) -> None:
    model, oracle = ensemble(schedule=schedule), ensemble(schedule="folded")
    module = EnsembleModule(model, penalised(), lr=0.02, weight_decay=5e-4, lr_schedule="constant")
    trainer(3).fit(module, loader())
    by_hand(oracle, penalised(), 3, 0.02)
    exact = schedule == "folded"
    for (name, ours), theirs in zip(
        model.state_dict().items(), oracle.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(
            ours, theirs, rtol=0 if exact else 1e-3, atol=0 if exact else 1e-4, msg=name
        )
    assert [e["epoch"] for e in module.history] == [1, 2, 3]
    assert module.history[-1]["cosine"] == diversity.cosine(model)


def test_rivals_train_in_the_same_module() -> None:
    torch.manual_seed(0)
    rival = SeparateNetworks([dense(), dense()])
    torch.manual_seed(0)
    oracle = SeparateNetworks([dense(), dense()])
    module = EnsembleModule(
        rival, EnsembleLoss(), lr=0.05, weight_decay=5e-4, lr_schedule="constant"
    )
    trainer(2).fit(module, loader())
    by_hand(oracle, EnsembleLoss(), 2, 0.05)
    for ours, theirs in zip(rival.parameters(), oracle.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert set(module.history[0]) == {"epoch", "loss", "task", "lr"}
    assert module(X).shape == (2, 40, 3)


def test_a_film_ensemble_trains_without_owners() -> None:
    torch.manual_seed(0)
    module = EnsembleModule(film_ensemble(dense(), 2), EnsembleLoss(), lr=0.05)
    trainer(1).fit(module, loader())
    assert math.isnan(module.history[0]["owners"])
    assert math.isfinite(module.history[0]["cosine"])


def test_multistep_rates_fall_after_their_epochs() -> None:
    rates = Rates()
    module = EnsembleModule(
        ensemble(), EnsembleLoss(), lr=0.04, lr_schedule="multistep", milestones=[1, 3], gamma=0.5
    )
    trainer(4, callbacks=[rates]).fit(module, loader())
    per_epoch = len(rates.seen) // 4
    expected = [0.04] * per_epoch + [0.02] * 2 * per_epoch + [0.01] * per_epoch
    assert [step["no_decay"] for step in rates.seen] == pytest.approx(expected)
    scales = [step["scales_batch_norm"] for step in rates.seen]
    assert scales == pytest.approx([100 * rate for rate in expected])


@pytest.mark.parametrize("options", [{}, {"milestones": [0]}, {"milestones": [2], "gamma": 0.0}])
def test_multistep_needs_its_milestones(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match="milestones"):
        EnsembleModule(ensemble(), EnsembleLoss(), lr=0.1, lr_schedule="multistep", **options)


@pytest.mark.parametrize("schedule", ["folded", "sequential"])
def test_one_cycle_keeps_the_peak_of_each_group(schedule: str) -> None:
    model, rates = ensemble(schedule=schedule), Rates()
    module = EnsembleModule(model, EnsembleLoss(), lr=0.03, weight_decay=1e-3, rise=0.2)
    run = trainer(4, callbacks=[rates])
    run.fit(module, loader())
    assert len(rates.seen) == 20
    peaks = {name: max(step[name] for step in rates.seen) for name in rates.seen[0]}
    assert peaks == pytest.approx({"decay": 0.03, "no_decay": 0.03, "scales_batch_norm": 3.0})
    for step in rates.seen:
        assert step["scales_batch_norm"] == pytest.approx(100 * step["decay"])
    at = [step["decay"] for step in rates.seen]
    assert at.index(max(at)) == 3
    assert at[0] == pytest.approx(0.03 / 25)
    assert at[-1] < 1e-5
    assert check_optimizer(model, run.optimizers[0]) == []
    assert [e["lr"] for e in module.history] == [at[4], at[9], at[14], at[19]]


def test_the_factor_of_the_heads_can_be_said() -> None:
    rates = Rates()
    module = EnsembleModule(ensemble(), EnsembleLoss(), lr=0.1, head_lr_mult=3.0)
    trainer(1, callbacks=[rates]).fit(module, loader())
    assert all(
        step["heads_decay"] == pytest.approx(3 * step["decay"], abs=1e-12) for step in rates.seen
    )


@pytest.mark.parametrize("factor", [1.0, 7.0])
def test_the_factor_of_the_scales_can_be_said(factor: float) -> None:
    rates = Rates()
    module = EnsembleModule(
        ensemble(), EnsembleLoss(), lr=0.1, scale_lr_mult=factor, lr_schedule="constant"
    )
    trainer(1, callbacks=[rates]).fit(module, loader())
    assert all(
        step["scales_batch_norm"] == pytest.approx(factor * step["decay"]) for step in rates.seen
    )


def test_cosine_falls_from_the_peak_to_nothing() -> None:
    rates = Rates()
    module = EnsembleModule(ensemble(), EnsembleLoss(), lr=0.1, lr_schedule="cosine")
    trainer(4, callbacks=[rates]).fit(module, loader())
    at = [step["decay"] for step in rates.seen]
    expected = [0.05 * (1 + math.cos(math.pi * i / 20)) for i in range(20)]
    assert at == pytest.approx(expected)


@pytest.mark.parametrize(("batch", "rise"), [(40, 0.2), (20, 0.5), (8, 0.2), (4, 0.1), (8, 0.0)])
def test_short_trainings_have_rates(batch: int, rise: float) -> None:
    """One step, two, five, ten: also where the rise takes exactly one."""
    rates = Rates()
    module = EnsembleModule(ensemble(), EnsembleLoss(), lr=0.1, rise=rise)
    trainer(1, callbacks=[rates]).fit(module, loader(batch))
    assert len(rates.seen) == -(-40 // batch)
    assert all(0 < step["decay"] <= 0.1 for step in rates.seen)


@pytest.mark.parametrize(
    ("options", "kind", "momentum"),
    [
        ({"optimizer": "sgd", "momentum": 0.5}, torch.optim.SGD, 0.5),
        ({"optimizer": "sgd", "momentum": 0.0}, torch.optim.SGD, 0.0),
        ({"optimizer": "adam"}, torch.optim.Adam, None),
        ({"optimizer": "adamw"}, torch.optim.AdamW, None),
    ],
)
def test_optimizers(options: dict[str, Any], kind: type, momentum: float | None) -> None:
    run = trainer(1)
    model = ensemble()
    module = EnsembleModule(
        model, EnsembleLoss(), lr=1e-3, weight_decay=0.05, lr_schedule="constant", **options
    )
    run.fit(module, loader())
    (optimizer,) = run.optimizers
    assert type(optimizer) is kind
    groups = {g["name"]: g for g in optimizer.param_groups}
    assert {n: g["weight_decay"] for n, g in groups.items()} == {
        "decay": 0.05, "no_decay": 0.0, "scales_batch_norm": 0.0,
    }  # fmt: skip
    if momentum is not None:
        assert groups["decay"]["momentum"] == momentum
        assert groups["decay"]["nesterov"] is (momentum > 0)
    assert check_optimizer(model, optimizer) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "lamb"}, r"optimizer is 'lamb'; expected one of sgd, adam, adamw"),
        (
            {"lr_schedule": "step"},
            r"lr_schedule is 'step'; expected one of onecycle, cosine, multistep, constant",
        ),
        ({"momentum": 1.0}, r"momentum is 1\.0; expected a number in \[0, 1\)"),
        ({"rise": -0.1}, r"rise is -0\.1; expected a number in \[0, 1\)"),
    ],
)
def test_wrong_options_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        EnsembleModule(ensemble(), EnsembleLoss(), lr=0.1, **options)


def test_a_training_without_an_end_has_no_one_cycle() -> None:
    module = EnsembleModule(ensemble(), EnsembleLoss(), lr=0.1)
    with pytest.raises(InputError, match="max_epochs or max_steps"):
        trainer(-1).fit(module, loader())
    free = EnsembleModule(ensemble(), EnsembleLoss(), lr=0.1, lr_schedule="constant")
    trainer(-1, callbacks=[StopAfter(2)]).fit(free, loader())
    assert len(free.history) == 2


class StopAfter(Callback):
    def __init__(self, epochs: int) -> None:
        self.epochs = epochs

    def on_train_epoch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.current_epoch + 1 >= self.epochs


def test_batches_that_are_no_pairs_are_refused() -> None:
    dicts = DataLoader([{"x": x, "y": y} for x, y in zip(X, Y, strict=True)], 8)
    module = EnsembleModule(ensemble(), EnsembleLoss(), lr=0.1)
    with pytest.raises(InputError, match=r"gave a dict; expected pairs \(x, y\)"):
        trainer(1).fit(module, dicts)


def test_transform_sees_every_batch() -> None:
    seen: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        seen.append(x)
        return 2 * x

    model, oracle = ensemble(), ensemble()
    module = EnsembleModule(model, EnsembleLoss(), lr=0.1, lr_schedule="constant", transform=keep)
    trainer(1).fit(module, loader())
    doubled = DataLoader(TensorDataset(2 * X, Y), 8)
    trainer(1).fit(EnsembleModule(oracle, EnsembleLoss(), lr=0.1, lr_schedule="constant"), doubled)
    assert torch.equal(torch.cat(seen), X)
    assert all(
        torch.equal(a, b) for a, b in zip(model.parameters(), oracle.parameters(), strict=True)
    )


def test_accumulated_gradients_equal_one_large_batch() -> None:
    """With layer norms, so that the members' statistics do not depend on the batch."""
    small, large = ensemble(batch_norm=False), ensemble(batch_norm=False)
    options: dict[str, Any] = {"lr": 0.05, "lr_schedule": "onecycle"}
    trainer(4, accumulate_grad_batches=4).fit(
        EnsembleModule(small, penalised(), **options), loader(5)
    )
    rates = Rates()
    trainer(4, callbacks=[rates]).fit(EnsembleModule(large, penalised(), **options), loader(20))
    assert len(rates.seen) == 8
    for a, b in zip(small.parameters(), large.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("option", [{"accumulate_grad_batches": 2}, {"gradient_clip_val": 1.0}])
def test_what_one_member_at_a_time_cannot_do_is_refused(option: dict[str, Any]) -> None:
    module = EnsembleModule(ensemble(schedule="sequential"), EnsembleLoss(), lr=0.1)
    with pytest.raises(Exception, match="for manual optimization"):
        trainer(1, **option).fit(module, loader())
    folded = EnsembleModule(ensemble(schedule="folded"), EnsembleLoss(), lr=0.1)
    trainer(1, **option).fit(folded, loader())


@pytest.mark.parametrize("schedule", ["folded", "sequential"])
def test_a_checkpoint_restores_the_network_and_its_history(tmp_path: Path, schedule: str) -> None:
    whole = EnsembleModule(ensemble(schedule=schedule), penalised(), lr=0.05)
    keep = ModelCheckpoint(dirpath=tmp_path, filename="{epoch}", save_top_k=-1)
    trainer(3, callbacks=[keep], enable_checkpointing=True).fit(whole, loader())

    first = tmp_path / "epoch=0.ckpt"
    resumed = EnsembleModule(ensemble(schedule=schedule), penalised(), lr=0.05)
    trainer(3).fit(resumed, loader(), ckpt_path=first)
    assert resumed.history == whole.history
    for a, b in zip(resumed.state_dict().values(), whole.state_dict().values(), strict=True):
        assert torch.equal(a, b)

    loaded = EnsembleModule.load_from_checkpoint(
        tmp_path / "epoch=1.ckpt", network=ensemble(), loss_fn=penalised(), lr=0.05
    )
    assert loaded.history == whole.history[:2]
    assert loaded(X).shape == (2, 40, 3)


def test_frozen_statistics_stay_frozen() -> None:
    model = ensemble(train="members").freeze_statistics()
    before = {n: b.clone() for n, b in model.named_buffers()}
    weights = model.network[0].weight.clone()
    module = EnsembleModule(model, penalised(), lr=0.1)
    trainer(1).fit(module, loader())
    assert all(torch.equal(b, before[n]) for n, b in model.named_buffers())
    assert torch.equal(model.network[0].weight, weights)
    assert module.history[0]["loss"] > 0
    assert any(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in model.parameters())


def test_rows_of_their_own_are_for_a_sigma_ensemble() -> None:
    rival = SeparateNetworks([dense(True), dense(True)])
    with pytest.raises(InputError, match="split=True got a SeparateNetworks"):
        EnsembleModule(rival, EnsembleLoss(), lr=0.1, split=True)
