"""Options of Hugging Face's Trainer: it trains, and evaluates as the ensemble predicts."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest
import torch
from tests.integrations.texts import MakeTrainer, batch, ensemble, sentences, weights
from tests.networks import dense
from torch import Tensor
from transformers import EarlyStoppingCallback, TrainingArguments

import sigmanens as sn
from sigmanens.errors import InputError
from sigmanens.integrations.classification import EnsembleForClassification

KNOWN = {f.name for f in fields(TrainingArguments)}


def accuracy(found: Any) -> dict[str, float]:
    hits = np.asarray(found.predictions).argmax(-1) == np.asarray(found.label_ids)
    return {"accuracy": float(hits.mean())}


class Batched:
    """Metrics batch by batch."""

    def __init__(self) -> None:
        self.hits: list[Tensor] = []

    def __call__(self, found: Any, compute_result: bool = False) -> dict[str, float]:
        self.hits.append(found.predictions.argmax(-1) == found.label_ids)
        if not compute_result:
            return {}
        hits, self.hits = torch.cat(self.hits), []
        return {"accuracy": float(hits.float().mean())}


CHECKPOINTING = (
    "activation_checkpointing" if "activation_checkpointing" in KNOWN else "gradient_checkpointing"
)

# Arguments of the training, of the trainer, of the conversion.
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "eval_accumulation_steps": ({"eval_accumulation_steps": 1}, {}, {}),
    "batch_eval_metrics": ({"batch_eval_metrics": True}, {"compute_metrics": Batched()}, {}),
    "group_by_length": (
        {"train_sampling_strategy": "group_by_length"}
        if "train_sampling_strategy" in KNOWN
        else {"group_by_length": True},
        {},
        {},
    ),
    "neftune": ({"neftune_noise_alpha": 0.1}, {}, {}),
    "neftune, sequential": ({"neftune_noise_alpha": 0.1}, {}, {"schedule": "sequential"}),
    "adafactor": ({"optim": "adafactor"}, {}, {}),
    "plateau and early stopping": (
        {
            "lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch",
            "save_strategy": "epoch", "load_best_model_at_end": True,
            "metric_for_best_model": "accuracy", "num_train_epochs": 2, "max_steps": -1,
        },
        {"callbacks": [EarlyStoppingCallback(1)]},
        {},
    ),
    "inputs": ({"include_for_metrics": ["inputs", "loss"]}, {}, {}),
    "auto batch": ({"auto_find_batch_size": True}, {}, {}),
    "bfloat16": ({"bf16": True}, {}, {}),
    "tokens seen": ({"include_num_input_tokens_seen": True}, {}, {}),
    "accumulation, two members a pass": (
        {"gradient_accumulation_steps": 3, "bf16": True}, {}, {"schedule": 2},
    ),
    "checkpointing": ({CHECKPOINTING: True}, {}, {}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("name", OPTIONS)
def test_evaluation_is_what_the_ensemble_predicts(make_trainer: MakeTrainer, name: str) -> None:
    args, options, conversion = OPTIONS[name]
    ens = ensemble(members=3, **conversion)
    before = weights(ens)
    trainer = make_trainer(
        ens, args, train_dataset=sentences(12), eval_dataset=sentences(14, seed=1, length=5),
        **({"compute_metrics": accuracy} | options),
    )  # fmt: skip
    trainer.train()
    unmoved = [k for k, p in ens.named_parameters() if torch.equal(p, before[k])]
    assert not [k for k in unmoved if "position_embeddings" not in k]
    data = batch(sentences(14, seed=1, length=5))
    labels = data.pop("labels")
    expected = float((ens.predict(data).labels == labels).double().mean())
    assert trainer.evaluate()["eval_accuracy"] == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["folded", "sequential"])
def test_neftune_adds_noise_in_training_alone(make_trainer: MakeTrainer, schedule: str) -> None:
    found = {}
    for alpha in (None, 5.0):
        ens = ensemble(schedule=schedule)
        args = {"neftune_noise_alpha": alpha, "max_steps": 1}
        trainer = make_trainer(ens, args, train_dataset=sentences(4))
        trainer.train()
        found[alpha] = weights(ens)
        network: Any = ens.network
        assert not network.get_input_embeddings()._forward_hooks
    key = "network.bert.embeddings.word_embeddings.weight"
    assert not torch.equal(found[None][key], found[5.0][key])


def test_neftune_without_embeddings_is_refused() -> None:
    adapted = EnsembleForClassification(sn.convert(dense(True), 2))
    with pytest.raises(InputError, match="no get_input_embeddings"):
        adapted.get_input_embeddings()
