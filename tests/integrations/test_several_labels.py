"""Multilabel ensembles in Lightning and transformers: the scores, outputs and files of the task."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.integrations.texts import MakeTrainer, bert, ensemble, sentences
from tests.networks import apart, dense
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sigmanens as sn
from sigmanens.baselines import SeparateNetworks
from sigmanens.errors import InputError, SigmaNensWarning
from sigmanens.integrations.diversity_callback import DiversityMonitor
from sigmanens.integrations.lightning import EnsembleModule

pytestmark = pytest.mark.filterwarnings(
    "ignore:The '.*_dataloader' does not have many workers:UserWarning",
    "ignore:The number of training batches:UserWarning",
)
X = torch.randn(43, 4, generator=torch.Generator().manual_seed(0))
Y = (X[:, :3] > 0).float()
BCE = nn.BCEWithLogitsLoss()


def loader(y: Tensor = Y) -> DataLoader[Any]:
    return DataLoader(TensorDataset(X, y), 8)


def trainer(**options: Any) -> L.Trainer:
    return L.Trainer(
        max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accelerator="cpu", **options,
    )  # fmt: skip


def networks() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "folded": apart(sn.convert(dense(), 3, init="normal", schedule="folded")),
        "sequential": apart(sn.convert(dense(), 3, init="normal", schedule="sequential")),
        "rival": SeparateNetworks([dense() for _ in range(3)]),
    }


@pytest.mark.parametrize("name", networks())
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_validation_scores_the_mean_of_sigmoids(name: str, dtype: torch.dtype) -> None:
    network = networks()[name].eval()
    module = EnsembleModule(network, sn.EnsembleLoss(BCE), lr=0.1)
    (found,) = trainer().validate(module, loader(Y.to(dtype)), verbose=False)
    with torch.no_grad():
        probs = network(X).sigmoid().double()
    mean = probs.mean(0)
    nll = float(F.binary_cross_entropy(mean, Y.double()))
    each = float(torch.stack([F.binary_cross_entropy(p, Y.double()) for p in probs]).mean())
    right = ((mean > 0.5) == (Y > 0.5)).double()
    confidence = torch.maximum(mean, 1 - mean)
    bins = (confidence * 15).ceil().long().clamp_min(1) - 1
    ece = sum(float((right - confidence)[bins == b].sum().abs()) for b in range(15)) / Y.numel()
    assert found["val_nll"] == pytest.approx(nll, rel=1e-5)
    assert found["val_accuracy"] == pytest.approx(float(right.mean()))
    assert found["val_jensen_gap"] == pytest.approx(each - nll, abs=1e-6)
    assert found["val_ece"] == pytest.approx(ece, abs=1e-5)


def test_training_keeps_the_task_and_is_watched() -> None:
    for name in ("folded", "sequential"):
        network = networks()[name]
        monitor = DiversityMonitor((X, Y))
        loss_fn = sn.EnsembleLoss(BCE)
        module = EnsembleModule(network, loss_fn, lr=0.1)
        trainer(callbacks=[monitor]).fit(module, loader(), loader())
        assert isinstance(network, sn.SigmaEnsemble)
        assert network.task == "multilabel"
        last = network.eval()(X).detach().sigmoid()
        apart_by = [(last[a] > 0.5) != (last[b] > 0.5) for a, b in ((0, 1), (0, 2), (1, 2))]
        expected = float(torch.stack(apart_by).double().mean())
        assert monitor.history[-1]["disagreement"] == pytest.approx(expected)


def test_labels_that_do_not_fit_the_task_are_named() -> None:
    module = EnsembleModule(networks()["folded"], sn.EnsembleLoss(BCE), lr=0.1)
    with pytest.raises(InputError, match=r"expected 0 \(absent\) or 1 \(present\)"):
        trainer().validate(module, loader(Y * 0.9), verbose=False)
    with pytest.raises(InputError, match=r"expected class indices of shape \(8, 3\)"):
        trainer().validate(module, loader(Y[:, 0]), verbose=False)
    with pytest.raises(InputError, match="the task of this ensemble is multilabel"):
        EnsembleModule(module.network, sn.EnsembleLoss(), lr=0.1)
    regression = EnsembleModule(networks()["folded"], sn.EnsembleLoss(F.mse_loss), lr=0.1)
    with pytest.raises(InputError, match="regression loss"):
        trainer().validate(regression, loader(), verbose=False)


# -- transformers --------------------------------------------------------------------------------


def texts(count: int) -> Any:
    data = sentences(count)
    rows = [[float(word in row) for word in (5, 6, 7)] for row in data["input_ids"]]
    return data.remove_columns("labels").add_column("labels", rows)


@pytest.mark.parametrize("by", ["model", "model_init"])
def test_the_problem_type_of_the_base_decides(
    by: str, make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    def make() -> sn.SigmaEnsemble:
        return apart(sn.convert(bert(problem_type="multi_label_classification"), 2))

    assert make().task == "multilabel"
    model, options = (make(), {}) if by == "model" else (None, {"model_init": make})
    data = texts(8)
    run = make_trainer(model, train_dataset=data, eval_dataset=data, **options)
    assert run.loss_fn.stated_task == "multilabel"
    run.train()
    found = run.predict(data)
    probs = 1 / (1 + np.exp(-found.predictions))
    own = run.ensemble.eval()
    inputs = {k: torch.tensor(data[:1][k]) for k in ("input_ids", "attention_mask")}
    np.testing.assert_allclose(probs[:1], own.predict(inputs).probs.numpy(), rtol=1e-4, atol=1e-6)
    y = np.array(data["labels"])
    each = [
        F.binary_cross_entropy_with_logits(z, torch.tensor(y[:1], dtype=torch.float32))
        for z in own(**inputs).logits
    ]
    single = run.evaluate(data.select([0]))["eval_loss"]
    assert single == pytest.approx(float(torch.stack(each).detach().mean()), rel=1e-4)
    run.save_model(str(tmp_path / "saved"))
    base = bert(problem_type="multi_label_classification")
    assert sn.load(tmp_path / "saved", base=base).task == "multilabel"


def test_a_loss_for_another_task_is_refused(make_trainer: MakeTrainer) -> None:
    several = sn.convert(bert(problem_type="multi_label_classification"), 2)
    with pytest.raises(InputError, match=r"task of this ensemble is multilabel, .*cross_entropy"):
        make_trainer(several, loss_fn=sn.EnsembleLoss())
    with pytest.raises(InputError, match="the task of the ensemble is regression"):
        make_trainer(sn.convert(bert(problem_type="regression"), 2))
    stated = ensemble(task="multilabel")
    assert make_trainer(stated).loss_fn.stated_task == "multilabel"


def test_members_that_answer_as_one_model_are_told_of(make_trainer: MakeTrainer) -> None:
    base = bert(problem_type="multi_label_classification")
    same = sn.convert(base, 2, head="copy", generator=torch.Generator().manual_seed(5))
    with pytest.warns(SigmaNensWarning, match="answer as one model: disagreement 0.0000"):
        make_trainer(same).predict(texts(6))
