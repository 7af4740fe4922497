"""torch-uncertainty's routine measures an ensemble through the adapter, and agrees with us."""

from __future__ import annotations

import warnings
from types import ModuleType
from typing import Any

import lightning
import pytest
import torch
from tests.consumers.conftest import MEMBERS, Fitted
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import sigmanens as sn
from sigmanens import evaluation
from sigmanens.integrations.torch_uncertainty import RoutineAdapter


@pytest.fixture(scope="module")
def routines() -> ModuleType:
    with warnings.catch_warnings():
        # A library that it imports scripts functions at import.
        warnings.filterwarnings("ignore", ".*torch.jit.script. is deprecated", FutureWarning)
        return pytest.importorskip("torch_uncertainty.routines")


def measured(routine: Any, *loaders: DataLoader[Any]) -> dict[str, float]:
    trainer = lightning.Trainer(
        accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not have many workers", category=UserWarning)
        trainer.test(routine, list(loaders), verbose=False)
    return {k: float(v) for k, v in trainer.callback_metrics.items()}


def loader(fitted: Fitted) -> DataLoader[Any]:
    # 511 samples in batches of 100: the last one is smaller.
    return DataLoader(TensorDataset(fitted.x, fitted.y), batch_size=100)


def test_the_routine_agrees_with_our_metrics(routines: ModuleType, fitted: Fitted) -> None:
    from torch_uncertainty.transforms import RepeatTarget

    adapter = RoutineAdapter(fitted.ensemble)
    assert adapter.num_estimators == MEMBERS
    routine = routines.ClassificationRoutine(
        adapter, num_classes=10, is_ensemble=True, format_batch_fn=RepeatTarget(MEMBERS)
    )
    theirs = measured(routine, loader(fitted))
    pred = fitted.ensemble.predict(fitted.x)
    ours = {
        "test/cls/Acc": evaluation.accuracy(pred.log_probs, fitted.y),
        "test/cls/NLL": evaluation.nll(pred.log_probs, fitted.y),
        "test/cls/Brier": evaluation.brier(pred.log_probs, fitted.y),
        "test/cal/ECE": evaluation.ece(pred.log_probs, fitted.y, bins=15),
        "test/ens_Disagreement": evaluation.disagreement(pred.member_log_probs),
        "test/ens_MI": float(pred.modulation.mean()),
        "test/ens_Entropy": float(pred.expected_entropy.mean()),
        "test/cls/Entropy": float(pred.entropy.mean()),
    }
    assert 0.5 < ours["test/cls/Acc"] < 0.99
    assert ours["test/ens_Disagreement"] > 0.01
    for name, value in ours.items():
        assert theirs[name] == pytest.approx(value, abs=1e-5), name
    assert theirs["test/cplx/params"] == sum(p.numel() for p in fitted.ensemble.parameters())


def test_members_come_in_the_order_the_routine_expects(
    routines: ModuleType, fitted: Fitted
) -> None:
    """A sample-major layout has the same shape, but mixes samples: the routine would not notice."""

    class SampleMajor(RoutineAdapter):
        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return self.ensemble(*args).transpose(0, 1).flatten(0, 1)

    found = {}
    for cls in (RoutineAdapter, SampleMajor):
        routine = routines.ClassificationRoutine(
            cls(fitted.ensemble), num_classes=10, is_ensemble=True
        )
        found[cls] = measured(routine, loader(fitted))["test/cls/Acc"]
    assert found[SampleMajor] < found[RoutineAdapter] - 0.3


@pytest.mark.filterwarnings("ignore:Metric `FPR95` will save all targets:UserWarning")
def test_ood_scores_of_the_routine_are_ours(routines: ModuleType, fitted: Fitted) -> None:
    odd = torch.rand(300, 64, generator=torch.Generator().manual_seed(5)) * 2 - 0.5
    routine = routines.ClassificationRoutine(
        RoutineAdapter(fitted.ensemble), num_classes=10, is_ensemble=True, eval_ood=True,
        ood_criterion="mutual_information",
    )  # fmt: skip
    outside = DataLoader(TensorDataset(odd, torch.zeros(300, dtype=torch.int64)), batch_size=100)
    theirs = measured(routine, loader(fitted), outside)
    inside, beyond = (fitted.ensemble.predict(x).modulation for x in (fitted.x, odd))
    assert theirs["ood/AUROC"] == pytest.approx(evaluation.auroc(inside, beyond), abs=1e-5)


def test_a_tempered_ensemble_is_averaged_by_the_adapter(
    routines: ModuleType, fitted: Fitted
) -> None:
    kept = fitted.ensemble.temperature.clone()
    try:
        fitted.ensemble.temperature.fill_(1.7)
        with pytest.raises(sn.errors.InputError, match=r"temperature of 1\.7.*average=True"):
            RoutineAdapter(fitted.ensemble)(fitted.x[:2])
        adapter = RoutineAdapter(fitted.ensemble, average=True)
        assert adapter.num_estimators == 1
        routine = routines.ClassificationRoutine(adapter, num_classes=10, ood_criterion="energy")
        theirs = measured(routine, loader(fitted))
        log_probs = fitted.ensemble.predict(fitted.x).log_probs
        assert theirs["test/cls/NLL"] == pytest.approx(
            evaluation.nll(log_probs, fitted.y), abs=1e-5
        )
        assert theirs["test/cal/ECE"] == pytest.approx(
            evaluation.ece(log_probs, fitted.y), abs=1e-5
        )
    finally:
        fitted.ensemble.temperature.copy_(kept)


def test_what_the_adapter_refuses() -> None:
    with pytest.raises(sn.errors.InputError, match="got a Linear in the place of the ensemble"):
        RoutineAdapter(nn.Linear(2, 2))  # type: ignore[arg-type]
    dense = sn.convert(nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)), 2, head="shared")
    with pytest.raises(sn.errors.InputError, match=r"shape \(2, 3, 2, 4, 4\)"):
        RoutineAdapter(dense)(torch.randn(3, 1, 4, 4))


def test_several_labels_are_refused() -> None:
    network = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))
    adapter = RoutineAdapter(sn.convert(network, 2, task="multilabel"), average=True)
    with pytest.raises(sn.errors.InputError, match="the task of the ensemble is multilabel"):
        adapter(torch.randn(2, 4))
