"""The task: stated once or learnt from the loss; what predictions and files make of it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tests.networks import Pictures, apart, dense
from tests.oracles.prediction import multilabel
from torch import Tensor, nn

import sigmanens as sn
from sigmanens import evaluation
from sigmanens.errors import CheckpointError, InputError

M, B, C = 3, 6, 4
Train = Callable[[sn.SigmaEnsemble, Tensor, Tensor, sn.EnsembleLoss], None]
FIGURES = ("entropy", "expected_entropy", "modulation")


def base(classes: int = C) -> nn.Module:
    torch.manual_seed(0)
    return dense(classes=classes)


def ensemble(task: str | None = "multilabel", classes: int = C, **options: Any) -> sn.SigmaEnsemble:
    return apart(sn.convert(base(classes), M, init="normal", task=task, **options)).eval()


def inputs(size: int = B) -> Tensor:
    return torch.randn(size, 4, generator=torch.Generator().manual_seed(1))


# -- predictions ---------------------------------------------------------------------------------


@given(
    members=st.integers(1, 4),
    size=st.integers(1, 3),
    labels=st.integers(1, 4),
    spread=st.sampled_from([0.1, 1.0, 5.0]),
    temperature=st.sampled_from([0.3, 1.0, 4.0]),
    seed=st.integers(0, 10**6),
)
def test_several_labels_equal_brute_force(
    members: int, size: int, labels: int, spread: float, temperature: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    z = spread * torch.randn(members, size, labels, generator=generator, dtype=torch.float64)
    p = sn.Prediction.from_logits(z, temperature, task="multilabel")
    expected = {k: torch.tensor(v).double() for k, v in multilabel(z, temperature).items()}
    close = {"rtol": 1e-7, "atol": 1e-10}
    torch.testing.assert_close(p.probs, expected["probs"], **close)
    torch.testing.assert_close(p.logits.sigmoid(), expected["probs"], **close)
    torch.testing.assert_close(p.member_probs, z.sigmoid())
    assert torch.equal(p.labels, (p.probs > 0.5).long())
    torch.testing.assert_close(p.confidence, torch.maximum(p.probs, 1 - p.probs))
    assert p.per_label is not None
    for name in FIGURES:
        torch.testing.assert_close(getattr(p.per_label, name), expected[name], **close)
        torch.testing.assert_close(getattr(p, name), expected[name].sum(1), **close)
    torch.testing.assert_close(p.entropy, p.expected_entropy + p.modulation)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_extreme_logits_of_labels_stay_finite(dtype: torch.dtype) -> None:
    z = torch.tensor([[[1e4, -1e4, 0.0]], [[1e4, 1e4, -1e4]]], dtype=dtype)
    p = sn.Prediction.from_logits(z, 2.0, task="multilabel")
    for name in ("log_probs", "logits", "member_log_probs", *FIGURES):
        assert torch.isfinite(getattr(p, name)).all(), name
    assert p.probs[0].tolist() == pytest.approx([1.0, 0.5, (1 / 3) ** 0.5 / (1 + (1 / 3) ** 0.5)])


def test_labels_may_lie_in_any_dimension_and_at_positions() -> None:
    z = torch.randn(M, B, C, 5, 2)
    p = sn.Prediction.from_logits(z, 2.0, task="multilabel")
    last = sn.Prediction.from_logits(z.movedim(2, -1), 2.0, class_dim=-1, task="multilabel")
    one = sn.Prediction.from_logits(z[..., 3, 1], 2.0, task="multilabel")
    assert p.probs.shape == p.labels.shape == p.confidence.shape == (B, C, 5, 2)
    assert p.entropy.shape == (B, 5, 2)
    torch.testing.assert_close(last.probs, p.probs)
    torch.testing.assert_close(one.probs, p.probs[..., 3, 1])
    torch.testing.assert_close(one.modulation, p.modulation[..., 3, 1])


def test_parts_of_several_labels_are_joined_and_reordered() -> None:
    ens, x = ensemble(), inputs()
    whole, parts = ens.predict(x), ens.predict(x, chunk=4)
    order = torch.tensor([3, 0, 5])
    for name in ("probs", "logits", "member_probs", *FIGURES):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name))
        dim = 1 if name == "member_probs" else 0
        picked = getattr(whole, name).index_select(dim, order)
        assert torch.equal(getattr(whole.reordered(order), name), picked)
    assert parts.task == whole.reordered(order).task == "multilabel"


@pytest.mark.parametrize("schedule", ["folded", "sequential", 2])
def test_predict_takes_the_mean_of_sigmoids(schedule: str | int) -> None:
    ens, x = ensemble(schedule=schedule), inputs()
    for members in (1, M):
        got = ens.predict(x, members=members)
        torch.testing.assert_close(got.probs, ens(x)[:members].sigmoid().mean(0))
    ens.temperature.fill_(2.0)
    torch.testing.assert_close(ens.predict(x).logits, torch.logit(ens(x).sigmoid().mean(0)) / 2)


def test_one_logit_is_a_binary_task_if_it_is_said_so() -> None:
    ens, x = ensemble(None, classes=1), inputs()
    with pytest.raises(InputError, match=r"have one class.*ens\.task = 'multilabel'"):
        ens.predict(x)
    ens.task = "multilabel"
    p = ens.predict(x)
    torch.testing.assert_close(p.probs, ens(x).sigmoid().mean(0))
    assert p.labels.shape == (B, 1)


def test_adaptive_stopping_of_several_labels_is_refused() -> None:
    for adaptive in (True, 0.05):
        with pytest.raises(InputError, match=r"adaptive stopping .* multilabel"):
            ensemble().predict(inputs(), adaptive=adaptive)


def test_rows_are_what_evaluation_takes() -> None:
    z, y = torch.randn(M, B, C, 2), torch.randint(2, (B, C, 2))
    p = sn.Prediction.from_logits(z, task="multilabel")
    log_probs, target, members = p.rows(y.float())
    probs = z.sigmoid().mean(0)
    assert evaluation.nll(log_probs, target) == pytest.approx(
        float(F.binary_cross_entropy(probs, y.float())), rel=1e-5
    )
    assert evaluation.accuracy(log_probs, target) == pytest.approx(
        float(((probs > 0.5) == (y > 0.5)).double().mean())
    )
    assert members.shape == (M, B * C * 2, 2)
    y[0] = -100
    assert len(p.rows(y)[1]) == (B - 1) * C * 2
    # Of classes: positions are samples.
    classes = sn.Prediction.from_logits(z)
    log_probs, target, members = classes.rows(torch.tensor([[0, -100]] * B))
    assert torch.equal(log_probs, classes.log_probs[..., 0])
    assert torch.equal(members, classes.member_log_probs[..., 0])
    assert not target.any()
    for bad in (torch.full((B, C, 2), 2), torch.full((B, C, 2), 0.5)):
        with pytest.raises(InputError, match=r"expected 0 \(absent\) or 1 \(present\)"):
            p.rows(bad)
    with pytest.raises(InputError, match=r"expected class indices of shape \(6, 4, 2\)"):
        p.rows(torch.zeros(B, 2).long())


def test_a_temperature_of_labels_is_that_of_their_averaged_logit() -> None:
    z = 5 * torch.randn(M, 400, C)
    y = torch.bernoulli((z.mean(0) / 3).sigmoid())
    p = sn.Prediction.from_logits(z, task="multilabel")
    log_probs, target, _ = p.rows(y)
    fitted = evaluation.fit_temperature(log_probs, target)
    assert fitted != pytest.approx(1, abs=0.05)

    def loss(temperature: float) -> float:
        again = sn.Prediction.from_logits(z, temperature, task="multilabel")
        return float(F.binary_cross_entropy(again.probs, y))

    assert loss(fitted) < min(loss(fitted * 0.98), loss(fitted * 1.02))


# -- stated or learnt ----------------------------------------------------------------------------


def train_whole(ens: sn.SigmaEnsemble, x: Tensor, y: Tensor, loss_fn: sn.EnsembleLoss) -> None:
    loss_fn(ens(x), y, ens)


def train_memberwise(ens: sn.SigmaEnsemble, x: Tensor, y: Tensor, loss_fn: sn.EnsembleLoss) -> None:
    ens.backward(x, y, loss_fn)


def several(size: int = B) -> Tensor:
    return (torch.arange(size * C).view(size, C) % 3 == 0).float()


@pytest.mark.parametrize("train", [train_whole, train_memberwise])
def test_the_loss_says_what_was_not_stated(train: Train) -> None:
    ens, x, loss_fn = ensemble(None), inputs(), sn.EnsembleLoss(nn.BCEWithLogitsLoss())
    assert ens.task is None
    assert "task        multiclass, unless the loss says otherwise" in str(ens.report)
    for _ in range(2):
        train(ens, x, several(), loss_fn)
    assert ens.task == "multilabel"
    told = [note for note in ens.report.notes if "BCEWithLogitsLoss" in note]
    assert told == ["task multilabel: the loss is BCEWithLogitsLoss"]
    torch.testing.assert_close(ens.predict(x).probs, ens.eval()(x).sigmoid().mean(0))


@pytest.mark.parametrize("train", [train_whole, train_memberwise])
def test_labels_say_it_where_a_loss_of_ones_own_does_not(train: Train) -> None:
    def loss(z: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(z, y.float())

    for y in (several(), several().long(), several().bool()):
        ens, x, loss_fn = ensemble(None), inputs(), sn.EnsembleLoss(loss)
        with pytest.warns(sn.SigmaNensWarning, match="taken to be multilabel: labels are 0 and 1"):
            train(ens, x, y, loss_fn)
        assert ens.task == "multilabel"
        ens = ensemble("multiclass")  # stated: the labels are the user's affair
        loss_fn(ens(x), y, ens)
        assert ens.task == "multiclass"
    ens, loss_fn = ensemble(None), sn.EnsembleLoss(loss)
    loss_fn(ens(inputs()), F.one_hot(torch.arange(B) % C, C), ens)
    assert ens.task is None  # exactly one per row may be either


@pytest.mark.parametrize("train", [train_whole, train_memberwise])
def test_a_loss_that_contradicts_the_task_is_refused(train: Train) -> None:
    hard = torch.zeros(B).long()
    for task, loss, y, other in (
        ("multiclass", nn.BCEWithLogitsLoss(), several(), "for a multilabel task"),
        ("multilabel", F.cross_entropy, hard, "for a multiclass task"),
    ):
        ens, loss_fn = ensemble(task), sn.EnsembleLoss(loss)
        with pytest.raises(InputError, match=f"the task of this ensemble is {task}, .*{other}"):
            train(ens, inputs(), y, loss_fn)
        assert ens.task == task
        assert all(p.grad is None for p in ens.parameters())
        loss_fn = sn.EnsembleLoss(lambda z, y, loss=loss: loss(z, y))  # the way out it names
        loss_fn(ens(inputs()), y, ens)


def test_after_a_regression_predict_refuses_unless_the_task_is_stated() -> None:
    x, y = inputs(), torch.randn(B, C)
    for loss in (F.mse_loss, nn.L1Loss(), nn.HuberLoss()):
        ens, loss_fn = ensemble(None), sn.EnsembleLoss(loss)
        loss_fn(ens(x), y, ens)
        with pytest.raises(InputError, match=r"regression loss.*ens\.task = 'multiclass'"):
            ens.predict(x)
        ens.task = "multiclass"
        loss_fn(ens(x), y, ens)  # the squared error of one-hot labels, say
        assert ens.predict(x).task == "multiclass"
    ens = ensemble(None)
    sn.EnsembleLoss(F.mse_loss)(ens(x), y, ens)
    sn.EnsembleLoss()(ens(x), torch.zeros(B).long(), ens)  # first distilled, then fine-tuned
    assert ens.task == "multiclass"


def test_unknown_tasks_are_named() -> None:
    with pytest.raises(InputError, match="task is 'multi-label'; expected one of 'multiclass'"):
        sn.convert(base(), M, task="multi-label")
    ens = ensemble()
    with pytest.raises(InputError, match="task is 3; expected"):
        ens.task = 3
    assert ens.task == "multilabel"


def test_copies_keep_the_task() -> None:
    ens = ensemble()
    for twin in (copy.deepcopy(ens), pickle.loads(pickle.dumps(ens))):
        assert twin.task == "multilabel"
        twin.task = "multiclass"
    assert ens.task == "multilabel"
    assert ens.report.plan.task == "multilabel"


# -- files ---------------------------------------------------------------------------------------


def test_checkpoints_keep_the_task(tmp_path: Path) -> None:
    ens, x = ensemble(None), inputs()
    sn.EnsembleLoss(nn.BCEWithLogitsLoss())(ens(x), several(), ens)
    ens.save_pretrained(tmp_path)
    again = sn.load(tmp_path, base()).eval()
    assert again.task == "multilabel"
    assert "task        multilabel" in str(again.report)
    assert torch.equal(again.predict(x).probs, ens.predict(x).probs)
    other = ensemble(None)
    other.load_checkpoint(tmp_path)
    assert other.task == "multilabel"
    with pytest.raises(CheckpointError, match="its task is 'multilabel', this ensemble's 'multicl"):
        ensemble("multiclass").load_checkpoint(tmp_path)


@pytest.mark.parametrize("network", ["table", "pictures"])
def test_programs_predict_labels(network: str) -> None:
    x, model = (inputs(), base()) if network == "table" else (torch.randn(B, 1, 8, 8), Pictures(C))
    ens = apart(sn.convert(model, M, init="normal", task="multilabel")).eval()
    ens.temperature.fill_(1.7)
    found = sn.export_program(ens, x[:2]).module()(x)
    expected = ens.predict(x)
    for name, value in found.items():
        torch.testing.assert_close(value, getattr(expected, name), rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_onnx_predicts_labels(tmp_path: Path) -> None:
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    runtime = pytest.importorskip("onnxruntime")
    ens, x = ensemble(), inputs()
    ens.temperature.fill_(1.7)
    path = sn.export_onnx(ens, tmp_path / "ens.onnx", x[:2])
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (name,) = (node.name for node in session.get_inputs())
    names = [node.name for node in session.get_outputs()]
    found = dict(zip(names, session.run(names, {name: x.numpy()}), strict=True))
    expected = ens.predict(x)
    for key, value in found.items():
        wanted = getattr(expected, key)
        torch.testing.assert_close(torch.from_numpy(value), wanted, rtol=1e-3, atol=1e-4)


def test_a_regression_is_not_exported() -> None:
    with pytest.raises(InputError, match="regression loss"):
        sn.export_program(ensemble("regression"), inputs(2))
