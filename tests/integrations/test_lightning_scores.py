"""What validation and testing log: the scores of the averaged distribution over all samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("lightning")

import lightning as L
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from tests.networks import apart, dense

import sigmanens as sn
from sigmanens.baselines import SeparateNetworks
from sigmanens.errors import InputError, NonFiniteError
from sigmanens.evaluation import summarize
from sigmanens.integrations.lightning import EnsembleModule
from sigmanens.integrations.scores import Scores

pytestmark = pytest.mark.filterwarnings(
    "ignore:The '.*_dataloader' does not have many workers:UserWarning",
    "ignore:The number of training batches:UserWarning",
    "ignore:The loaded checkpoint was produced with Lightning:UserWarning",
)

KEYS = ("nll", "accuracy", "ece", "jensen_gap")
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(43, 4, generator=GENERATOR)
Y = (X[:, 0] > 0).long() + (X[:, 1] > 0).long()


def loader(x: Tensor = X, y: Tensor = Y, batch: int = 8) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(TensorDataset(x, y), batch)


def ensemble(members: int = 3) -> sn.SigmaEnsemble:
    torch.manual_seed(0)
    return apart(sn.convert(dense(), members, init="normal"))


def trainer(epochs: int = 2, **options: Any) -> L.Trainer:
    quiet: dict[str, Any] = {
        "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
        "enable_model_summary": False, "accelerator": "cpu",
    }  # fmt: skip
    return L.Trainer(max_epochs=epochs, **(quiet | options))


def expected(model: nn.Module, x: Tensor = X, y: Tensor = Y) -> dict[str, float]:
    with torch.no_grad():
        row = summarize(model.eval()(x), y)
    return {key: row[key] for key in KEYS}


# -- sums --------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(
    members=st.integers(1, 4),
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    classes=st.integers(2, 5),
    spread=st.floats(0.1, 30.0),
    seed=st.integers(0, 99),
)
def test_batches_of_any_size_give_what_all_samples_give(
    members: int, sizes: list[int], classes: int, spread: float, seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(members, sum(sizes), classes, generator=draw, dtype=torch.double)
    logits *= spread
    labels = torch.randint(classes, (sum(sizes),), generator=draw)
    one, other = Scores(), Scores()
    parts = zip(logits.split(sizes, 1), labels.split(sizes), strict=True)
    for i, (z, y) in enumerate(parts):
        (one if i % 2 else other).update(z, y)  # as two processes would
    found = one.compute(lambda sums: sums + other.sums)
    row = summarize(logits, labels)
    assert list(found) == list(KEYS)
    assert found == pytest.approx({key: row[key] for key in KEYS}, rel=1e-5, abs=1e-6)
    assert members > 1 or found["jensen_gap"] == pytest.approx(0, abs=1e-12)


def test_the_temperature_acts_on_the_average_but_not_on_the_gap() -> None:
    logits, labels = 3 * torch.randn(3, 30, 4), torch.randint(4, (30,))
    plain, tempered = Scores(), Scores()
    plain.update(logits, labels)
    tempered.update(logits, labels, 2.5)
    a, b = plain.compute(), tempered.compute()
    row = summarize(logits, labels, temperature=2.5)
    assert (b["nll"], b["ece"]) == pytest.approx((row["nll_calibrated"], row["ece_calibrated"]))
    assert b["nll"] != pytest.approx(a["nll"])
    assert (b["accuracy"], b["jensen_gap"]) == (a["accuracy"], a["jensen_gap"])


def test_labels_per_token_and_ignored_ones() -> None:
    """Classes last or second, some labels ignored: as if the ignored were not there."""
    logits, labels = torch.randn(2, 5, 6, 3), torch.randint(3, (5, 6))
    labels[:, 4:] = -100
    kept = labels != -100
    row = summarize(logits[:, kept], labels[kept])
    last, second = Scores(class_dim=-1), Scores(class_dim=1)
    last.update(logits, labels)
    second.update(logits.movedim(-1, 2), labels)
    last.update(logits[:, :1], torch.full((1, 6), -100))
    for scores in (last, second):
        assert scores.compute() == pytest.approx({k: row[k] for k in KEYS}, rel=1e-5, abs=1e-6)


def test_nothing_seen_is_nothing_said() -> None:
    scores = Scores()
    assert scores.compute() == {}
    scores.update(torch.randn(2, 3, 4), torch.full((3,), -100))
    assert scores.compute() == {}


def test_what_cannot_be_scored_is_named() -> None:
    with pytest.raises(InputError, match=r"labels are torch.float32 \(3, 4\); .* of shape \(3,\)"):
        Scores().update(torch.randn(2, 3, 4), torch.rand(3, 4))
    with pytest.raises(InputError, match=r"labels are torch.float32 \(3,\)"):
        Scores().update(torch.randn(2, 3, 4), torch.rand(3))
    with pytest.raises(NonFiniteError):
        Scores().update(torch.full((2, 3, 4), torch.nan), torch.zeros(3).long())


# -- in a Trainer ------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["folded", "sequential"])
def test_validation_and_test_log_the_scores(schedule: str) -> None:
    model = ensemble()
    model.schedule = schedule
    module = EnsembleModule(model, sn.EnsembleLoss(), lr=0.02)
    run = trainer(2)
    run.fit(module, loader(), loader())
    logged = {k: float(v) for k, v in run.callback_metrics.items() if k.startswith("val_")}
    after = expected(model)
    assert logged == pytest.approx({f"val_{k}": v for k, v in after.items()}, rel=1e-4)
    assert after["jensen_gap"] > 1e-4
    assert [set(logged) <= set(entry) for entry in module.history] == [True, True]
    assert module.history[0]["val_nll"] != module.history[1]["val_nll"]
    assert module.history[-1]["val_nll"] == pytest.approx(after["nll"], rel=1e-4)
    (tested,) = run.test(module, loader(X[:9], Y[:9]), verbose=False)
    wanted = {f"test_{k}": v for k, v in expected(model, X[:9], Y[:9]).items()}
    assert tested == pytest.approx(wanted, rel=1e-4, abs=1e-6)


def test_the_stored_temperature_counts() -> None:
    model = ensemble()
    model.temperature.fill_(3.0)
    module = EnsembleModule(model, sn.EnsembleLoss(), lr=0.02)
    (found,) = trainer().validate(module, loader(), verbose=False)
    with torch.no_grad():
        row = summarize(model.eval()(X), Y, temperature=3.0)
    assert found["val_nll"] == pytest.approx(row["nll_calibrated"], rel=1e-5)
    assert found["val_nll"] != pytest.approx(row["nll"], rel=1e-2)


def test_a_transform_is_applied_in_validation_too() -> None:
    model = ensemble()
    module = EnsembleModule(model, sn.EnsembleLoss(), lr=0.02, transform=lambda x: 2 * x)
    (found,) = trainer().validate(module, loader(), verbose=False)
    assert found["val_nll"] == pytest.approx(expected(model, 2 * X)["nll"], rel=1e-5)


def test_several_loaders_have_their_own_scores() -> None:
    model = ensemble()
    module = EnsembleModule(model, sn.EnsembleLoss(), lr=0.02)
    run = trainer()
    run.validate(module, [loader(), loader(X[:7], Y[:7])], verbose=False)
    logged = {k: float(v) for k, v in run.callback_metrics.items()}
    assert logged["val_nll"] == pytest.approx(expected(model)["nll"], rel=1e-5)
    assert logged["val_nll_1"] == pytest.approx(expected(model, X[:7], Y[:7])["nll"], rel=1e-5)


def test_rivals_are_scored_alike() -> None:
    torch.manual_seed(0)
    rival = SeparateNetworks([dense(), dense()])
    module = EnsembleModule(rival, sn.EnsembleLoss(), lr=0.02)
    (found,) = trainer().validate(module, loader(), verbose=False)
    assert found["val_jensen_gap"] == pytest.approx(expected(rival)["jensen_gap"], rel=1e-4)


def test_the_best_epoch_is_kept_and_training_stops_early(tmp_path: Path) -> None:
    """The rate is so high that the first epochs are not the best and later ones do not improve."""
    model = ensemble()
    module = EnsembleModule(model, sn.EnsembleLoss(), lr=0.05, lr_schedule="constant")
    keep = ModelCheckpoint(tmp_path, monitor="val_nll", mode="min")
    stop = EarlyStopping("val_nll", patience=2)
    run = trainer(60, callbacks=[keep, stop], enable_checkpointing=True)
    run.fit(module, loader(X[:24], Y[:24]), loader(X[24:], Y[24:]))
    seen = [entry["val_nll"] for entry in module.history]
    best = min(range(len(seen)), key=seen.__getitem__)
    assert len(seen) < 60
    assert len(seen) == best + 1 + 2
    assert float(keep.best_model_score) == pytest.approx(seen[best], rel=1e-5)
    again = EnsembleModule.load_from_checkpoint(
        keep.best_model_path, network=ensemble(), loss_fn=sn.EnsembleLoss(), lr=0.05
    )
    found = expected(again.network, X[24:], Y[24:])
    assert found["nll"] == pytest.approx(seen[best], rel=1e-5)
