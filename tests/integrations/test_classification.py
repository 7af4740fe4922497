"""Ensembles with inputs by name, and what the Trainer collects of their outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.integrations.texts import (
    MakeTrainer,
    batch,
    bert,
    ensemble,
    sentences,
)
from torch import Tensor, nn
from transformers import (
    BertTokenizerFast,
    DataCollatorWithPadding,
    EvalPrediction,
)

import sigmanens as sn
from sigmanens.errors import InputError
from sigmanens.integrations.classification import EnsembleForClassification, EnsembleOutput

# -- the adapter -------------------------------------------------------------------------------


def test_output_agrees_with_predict_and_has_samples_first() -> None:
    ens = ensemble(members=3).eval()
    ens.temperature.fill_(1.7)
    data = batch(sentences(5, length=4))
    labels = data.pop("labels")
    out = EnsembleForClassification(ens).eval()(labels=labels, **data)
    expected = ens.predict(data)
    assert isinstance(out, EnsembleOutput)
    assert out.logits.shape == (5, 3)
    assert out.member_logits.shape == (5, 3, 3)
    torch.testing.assert_close(out.logits, expected.log_probs)
    torch.testing.assert_close(
        out.member_logits.log_softmax(2), expected.member_log_probs.transpose(0, 1)
    )
    for key in ("entropy", "expected_entropy", "modulation"):
        torch.testing.assert_close(out[key], getattr(expected, key))
    assert float(out.modulation.min()) > 1e-3, "the members must differ, or this test sees nothing"


def test_loss_has_the_penalty_in_training_only() -> None:
    ens = ensemble()
    diversity = sn.Diversity(tau=0.5, weight=1e-2)
    data = batch(sentences(4, length=4))
    adapter = EnsembleForClassification(ens, sn.EnsembleLoss(diversity=diversity))
    members = torch.stack([ens.member(i).eval()(**data).loss for i in range(2)])
    torch.testing.assert_close(adapter.eval()(**data).loss, members.mean())
    torch.testing.assert_close(adapter.train()(**data).loss, members.mean() + diversity(ens))


def test_only_the_loss_carries_gradients_when_there_are_labels() -> None:
    data = batch(sentences(4, length=4))
    adapter = EnsembleForClassification(ensemble()).train()
    out = adapter(**data)
    assert out.loss.requires_grad
    assert not out.logits.requires_grad
    del data["labels"]
    assert adapter.eval()(**data).logits.requires_grad, "saliency maps need this"


def test_training_without_labels_is_refused() -> None:
    data = batch(sentences(4, length=4))
    del data["labels"]
    with pytest.raises(InputError, match="training needs labels"):
        EnsembleForClassification(ensemble()).train()(**data)


def test_bases_without_probabilities_are_refused() -> None:
    with pytest.raises(InputError, match="the task of the ensemble is regression"):
        EnsembleForClassification(sn.convert(bert(problem_type="regression"), 2))


def test_labels_per_token_are_refused() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(4)
            self.head = nn.Linear(4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.norm(x))

    adapter = EnsembleForClassification(sn.convert(Tagger(), 2)).eval()
    with pytest.raises(InputError, match=r"\(2, 5, 6, 3\); expected \(M, B, C\)"):
        adapter(x=torch.randn(5, 6, 4))


def test_a_plain_network_is_refused() -> None:
    with pytest.raises(InputError, match="got a BertForSequenceClassification"):
        EnsembleForClassification(bert())  # type: ignore[arg-type]


# -- evaluation --------------------------------------------------------------------------------


@pytest.mark.case("T5")
def test_rows_of_logits_are_rows_of_labels_when_batches_do_not_divide(
    make_trainer: MakeTrainer,
) -> None:
    ens = ensemble(members=3)
    data = sentences(11)
    seen: list[EvalPrediction] = []

    def metrics(p: EvalPrediction) -> dict[str, float]:
        seen.append(p)
        return {"accuracy": float((p.predictions.argmax(-1) == p.label_ids).mean())}

    trainer = make_trainer(ens, eval_dataset=data, compute_metrics=metrics)
    result = trainer.evaluate()
    (p,) = seen
    assert p.predictions.shape == (11, 3)
    assert p.label_ids.tolist() == data["labels"][:]
    rows, losses = [], []
    for row in data:
        x = {k: torch.tensor([row[k]]) for k in ("input_ids", "attention_mask")}
        rows.append(ens.predict(x).log_probs[0])
        logits = ens.eval()(**x).logits[:, 0].detach()
        losses.append(F.cross_entropy(logits, torch.full((3,), row["labels"])))
    np.testing.assert_allclose(p.predictions, torch.stack(rows).numpy(), rtol=1e-4, atol=1e-5)
    right = [int(r.argmax()) == y for r, y in zip(rows, data["labels"], strict=True)]
    assert result["eval_accuracy"] == pytest.approx(np.mean(right))
    # The Trainer's own mean repeats each batch's loss for as many rows as a full batch has.
    means = [torch.stack(losses[i : i + 4]).mean() for i in (0, 4, 8)]
    expected = (means[0] * 4 + means[1] * 4 + means[2] * 3) / 11
    assert result["eval_loss"] == pytest.approx(float(expected), rel=1e-4)


def test_predict_collects_the_fields_asked_for(make_trainer: MakeTrainer) -> None:
    ens = ensemble(members=3)
    trainer = make_trainer(ens, collect=("modulation", "member_logits"))
    data = sentences(7, length=4)
    member_logits, modulation = trainer.predict(data).predictions
    assert member_logits.shape == (7, 3, 3)
    assert modulation.shape == (7,)
    again = sn.Prediction.from_logits(torch.from_numpy(member_logits).transpose(0, 1))
    torch.testing.assert_close(again.modulation, torch.from_numpy(modulation))
    x = batch(data)
    del x["labels"]
    torch.testing.assert_close(again.log_probs, ens.predict(x).log_probs)


def test_predict_works_without_labels(make_trainer: MakeTrainer) -> None:
    data = sentences(6)
    trainer = make_trainer(ensemble())
    with_labels = trainer.predict(data)
    without = trainer.predict(data.remove_columns("labels"))
    assert without.label_ids is None
    np.testing.assert_array_equal(without.predictions, with_labels.predictions)


def test_ignore_keys_still_rule(make_trainer: MakeTrainer) -> None:
    kept = make_trainer(ensemble()).predict(sentences(6), ignore_keys=["member_logits"]).predictions
    assert [a.shape for a in kept] == [(6, 3), (6,), (6,), (6,)]


@pytest.mark.parametrize("collect", ["logits", (), ("probs",)])
def test_unknown_fields_are_refused(make_trainer: MakeTrainer, collect: Any) -> None:
    with pytest.raises(InputError, match=r"collect is .*; expected some of logits, member_logits"):
        make_trainer(ensemble(), collect=collect)


def test_collator_of_another_length_per_batch(
    make_trainer: MakeTrainer, tokenizer: BertTokenizerFast
) -> None:
    """Evaluation batches padded to different lengths: only the logits are joined."""
    collator = DataCollatorWithPadding(tokenizer)
    trainer = make_trainer(ensemble(), data_collator=collator)
    assert trainer.predict(sentences(9)).predictions.shape == (9, 3)
