"""What Lightning calls besides ``fit``: prediction, rate finder, evaluation, checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

pytest.importorskip("lightning")

import lightning as L
from lightning.pytorch.callbacks import LearningRateFinder, ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from tests.networks import dense

from sigmanens import Diversity, EnsembleLoss, convert
from sigmanens.errors import InputError
from sigmanens.integrations.lightning import EnsembleModule

pytestmark = pytest.mark.filterwarnings(
    "ignore:The '.*_dataloader' does not have many workers:UserWarning",
    "ignore:The number of training batches:UserWarning",
    "ignore:You defined a `validation_step` but have no:UserWarning",
    "ignore:Checkpoint directory .* exists and is not empty:UserWarning",
    "ignore:Be aware that when using `ckpt_path`, callbacks used to create:UserWarning",
    "ignore:Found .* module.* in eval mode at the start of training:UserWarning",
)

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(40, 4, generator=GENERATOR)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()
SCHEDULES = ("auto", "folded", "sequential", 2)


def pairs(batch: int = 8) -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, Y), batch)


def ensemble(schedule: str | int = "auto") -> Any:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    return convert(dense(True), 3, init="normal", schedule=schedule, generator=generator)


def shifted(x: Tensor) -> Tensor:
    return (x - 0.5) * 2


def module(passes: str | int = "auto", **options: Any) -> EnsembleModule:
    loss_fn = EnsembleLoss(diversity=Diversity(tau=0.5, weight=1e-2, layers="all"))
    return EnsembleModule(ensemble(passes), loss_fn, **({"lr": 0.01} | options))


def trainer(**options: Any) -> Any:
    quiet = {
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    return L.Trainer(**(quiet | options))


# -- prediction ----------------------------------------------------------------------------------


class Alone(Dataset[Any]):
    """Samples made by a function of the row."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, row: int) -> Any:
        return self.make(row)


BATCHES: dict[str, Dataset[Any]] = {
    "pairs": TensorDataset(X, Y),
    "x in a list": TensorDataset(X),
    "x alone": Alone(lambda row: X[row]),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("transform", [None, shifted])
@pytest.mark.parametrize("kind", BATCHES)
def test_predict_gives_member_logits_of_the_transformed_inputs(
    kind: str, transform: Any, schedule: str | int
) -> None:
    made = module(schedule, transform=transform)
    found = torch.cat(trainer().predict(made, DataLoader(BATCHES[kind], 16)), 1)
    inputs = X if transform is None else transform(X)
    with torch.no_grad():
        expected = made.network.eval()(inputs)
    torch.testing.assert_close(found, expected)


def test_predict_takes_a_mapping_of_inputs() -> None:
    made = module()
    data = Alone(lambda row: {"input": X[row]})
    found = torch.cat(trainer().predict(made, DataLoader(data, 16)), 1)
    with torch.no_grad():
        torch.testing.assert_close(found, made.network.eval()(X))


def test_predict_refuses_a_tuple_of_three() -> None:
    with pytest.raises(InputError, match="list of 3; expected pairs"):
        trainer().predict(module(), DataLoader(TensorDataset(X, Y, Y), 16))


# -- the learning-rate finder --------------------------------------------------------------------


class Watched(EnsembleModule):
    """Keeps the rates of every step; the finder would put a callback aside."""

    def configure_optimizers(self) -> Any:
        made = super().configure_optimizers()
        optimizer = made["optimizer"] if isinstance(made, dict) else made
        self.rates_used: list[list[float]] = []

        def note(optimizer: Any, *_: Any) -> None:
            self.rates_used.append([g["lr"] / g["lr_mult"] for g in optimizer.param_groups])

        optimizer.register_step_post_hook(note)
        return made


def watched(schedule: str | int, rates: str) -> Watched:
    return Watched(ensemble(schedule), EnsembleLoss(), lr=0.5, lr_schedule=rates)


def assert_one_base_rate(steps: list[list[float]]) -> None:
    assert steps
    for rates in steps:
        assert rates == pytest.approx([rates[0]] * len(rates))


@pytest.mark.parametrize("schedule", ["folded", "sequential"])
def test_rate_finder_keeps_the_multiples_of_the_groups(schedule: str, tmp_path: Path) -> None:
    made = watched(schedule, "onecycle")
    start = {k: v.clone() for k, v in made.state_dict().items()}
    host = trainer(default_root_dir=tmp_path, max_epochs=10)
    finder = Tuner(host).lr_find(
        made, pairs(), min_lr=1e-5, max_lr=1e-2, num_training=20, early_stop_threshold=None
    )
    assert len(made.rates_used) == 20
    assert_one_base_rate(made.rates_used)
    assert made.lr == finder.suggestion() != 0.5
    for key, value in made.state_dict().items():
        assert torch.equal(value, start[key]), key
    host.fit(made, pairs())
    assert_one_base_rate(made.rates_used)
    peak = max(rates[0] for rates in made.rates_used)
    assert peak == pytest.approx(made.lr, rel=0.05)


@pytest.mark.parametrize("rates", ["onecycle", "constant", "cosine"])
def test_what_a_finder_among_the_callbacks_found_is_what_trains(rates: str, tmp_path: Path) -> None:
    made = watched("folded", rates)
    finder = LearningRateFinder(1e-5, 1e-2, 20, early_stop_threshold=None)
    trainer(default_root_dir=tmp_path, max_epochs=10, callbacks=[finder]).fit(made, pairs())
    assert made.lr == finder.optimal_lr.suggestion() != 0.5
    assert_one_base_rate(made.rates_used)
    peak = max(rates[0] for rates in made.rates_used)
    assert peak == pytest.approx(made.lr, rel=0.05)
    assert [entry["epoch"] for entry in made.history] == list(range(1, 11))


# -- evaluation, accumulation and checkpoints ----------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_validate_and_test_measure_what_predict_says(schedule: str | int) -> None:
    made = module(schedule, transform=shifted)
    prediction = made.network.predict(shifted(X))
    accuracy = float((prediction.labels == Y).double().mean())
    assert trainer().validate(made, pairs(), verbose=False)[0]["val_accuracy"] == pytest.approx(
        accuracy
    )
    assert trainer().test(made, pairs(), verbose=False)[0]["test_accuracy"] == pytest.approx(
        accuracy
    )


@pytest.mark.parametrize("schedule", ["folded", 2])
def test_accumulated_batches_are_one_step(schedule: str | int) -> None:
    made = module(schedule, lr_schedule="constant", optimizer="adam")
    host = trainer(max_epochs=1, accumulate_grad_batches=5, gradient_clip_val=1.0)
    host.fit(made, pairs())
    assert host.global_step == 1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_load_from_checkpoint_gives_the_trained_ensemble(
    schedule: str | int, tmp_path: Path
) -> None:
    made = module(schedule)
    best = ModelCheckpoint(tmp_path, monitor="val_nll", save_top_k=-1, save_last=True)
    host = trainer(enable_checkpointing=True, callbacks=[best], default_root_dir=tmp_path)
    host.fit(made, pairs(), pairs())
    path = best.last_model_path
    back = EnsembleModule.load_from_checkpoint(
        path, network=ensemble(schedule), loss_fn=made.loss_fn, lr=0.01
    )
    with torch.no_grad():
        torch.testing.assert_close(back.network.eval()(X), made.network.eval()(X))
    assert back.history == made.history
    fresh = module(schedule)
    found = trainer().test(fresh, pairs(), ckpt_path=path, verbose=False, weights_only=True)
    expected = float((made.network.predict(X).labels == Y).double().mean())
    assert found[0]["test_accuracy"] == pytest.approx(expected)
