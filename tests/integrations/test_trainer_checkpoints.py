"""What the Trainer saves, goes on from, and leaves behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.texts import (
    VOCABULARY,
    MakeTrainer,
    assert_same,
    batch,
    bert,
    ensemble,
    sentences,
    weights,
)
from tests.networks import apart
from torch import Tensor
from transformers import (
    BartConfig,
    BartForSequenceClassification,
    EvalPrediction,
)

import sigmanens as sn
from sigmanens.errors import CheckpointError

RESUME = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "linear",
          "num_train_epochs": 2}  # fmt: skip


@pytest.mark.parametrize("small", [False, True], ids=["full", "small"])
def test_a_resumed_run_ends_like_an_uninterrupted_one(
    make_trainer: MakeTrainer, tmp_path: Path, small: bool
) -> None:
    loss_fn = sn.EnsembleLoss(diversity=sn.Diversity(tau=0.5, weight=1e-2))
    data = sentences(18)
    whole = ensemble(dropout=0.1)
    start = weights(whole)
    options: dict[str, Any] = {
        "loss_fn": loss_fn, "train_dataset": data, "small_checkpoints": small,
    }  # fmt: skip
    first = make_trainer(whole, RESUME, **options)
    first.train()
    names = {path.name for path in (tmp_path / "run" / "checkpoint-3").iterdir()}
    assert ("sigmanens.json" in names, "model.safetensors" in names) == (small, not small)
    assert {"optimizer.pt", "trainer_state.json", "training_args.bin", "tokenizer.json"} <= names
    resumed = ensemble(dropout=0.1)
    apart(resumed, seed=9)  # other scales, as another process would have drawn them
    second = make_trainer(resumed, RESUME | {"output_dir": str(tmp_path / "second")}, **options)
    second.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert second.state.global_step == 6
    assert_same(weights(resumed), weights(whole))
    assert not torch.equal(start["network.bert.pooler.dense.weight"],
                           weights(whole)["network.bert.pooler.dense.weight"])  # fmt: skip
    states = [t.optimizer.state_dict() for t in (first, second)]
    assert states[0]["param_groups"] == states[1]["param_groups"]
    torch.testing.assert_close(states[0]["state"], states[1]["state"], rtol=0, atol=0)


def test_a_penalty_that_moves_goes_on_where_it_was(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    """A late rising weight and a falling τ, across a resume."""

    def loss() -> sn.EnsembleLoss:
        weight = sn.diversity.Ramp(0.1, start=0.2, length=0.3)
        return sn.EnsembleLoss(diversity=sn.Diversity(lambda p: 1 - 0.9 * p, weight))

    whole, first_loss = ensemble(), loss()
    make_trainer(whole, RESUME, loss_fn=first_loss, train_dataset=sentences(18)).train()
    assert first_loss.diversity is not None
    assert first_loss.diversity.progress == 5 / 6
    resumed = ensemble()
    second = make_trainer(
        resumed, RESUME | {"output_dir": str(tmp_path / "second")}, loss_fn=loss(),
        train_dataset=sentences(18),
    )  # fmt: skip
    second.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert_same(weights(resumed), weights(whole))


def test_keys_of_checkpoints_have_no_name_that_is_renamed(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    ens = ensemble()
    make_trainer(ens, RESUME | {"max_steps": 3}, train_dataset=sentences(12)).train()
    saved = load_file(tmp_path / "run" / "checkpoint-3" / "model.safetensors")
    assert set(saved) == {f"ensemble.{key}" for key in ens.state_dict()}
    assert not [key for key in saved if "gamma" in key or "beta" in key]


@pytest.mark.parametrize("small", [False, True], ids=["full", "small"])
def test_the_best_checkpoint_is_loaded_at_the_end(
    make_trainer: MakeTrainer, tmp_path: Path, small: bool
) -> None:
    scores = iter([0.1, 0.9, 0.5])
    states: list[dict[str, Tensor]] = []
    ens = ensemble()

    def metrics(p: EvalPrediction) -> dict[str, float]:
        states.append(weights(ens))
        return {"score": next(scores)}

    args = {"max_steps": 3, "save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps",
            "eval_steps": 1, "load_best_model_at_end": True,
            "metric_for_best_model": "score"}  # fmt: skip
    data = sentences(12)
    make_trainer(
        ens, args, train_dataset=data, eval_dataset=data, compute_metrics=metrics,
        small_checkpoints=small,
    ).train()  # fmt: skip
    assert_same(weights(ens), states[1])
    assert not torch.equal(states[1]["network.classifier.heads.0.weight"],
                           states[2]["network.classifier.heads.0.weight"])  # fmt: skip


def test_networks_with_tied_weights_are_saved_and_resumed(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    config = BartConfig(
        vocab_size=len(VOCABULARY), d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=16,
        decoder_ffn_dim=16, max_position_embeddings=16, num_labels=3, pad_token_id=0,
        bos_token_id=2, eos_token_id=3, decoder_start_token_id=3, forced_eos_token_id=None,
    )  # fmt: skip
    base = BartForSequenceClassification(config)
    assert base.model.shared.weight is base.model.encoder.embed_tokens.weight
    ens = sn.convert(base, 2, schedule="sequential")  # it asks for as many <eos> in each row
    args = RESUME | {"max_steps": 3}
    options = {"train_dataset": sentences(12, length=4), "processing_class": None}
    make_trainer(ens, args, **options).train()
    other = sn.convert(base, 2, schedule="sequential")
    trainer = make_trainer(other, args, **options)
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    assert_same(weights(other), weights(ens))


@pytest.mark.filterwarnings("ignore:the members answer as one model")
def test_save_model_writes_what_load_reads(make_trainer: MakeTrainer, tmp_path: Path) -> None:
    base = bert()
    ens = sn.convert(base, 2, train="members")
    trainer = make_trainer(ens, train_dataset=sentences(8), eval_dataset=sentences(5))
    trainer.train()
    metrics = trainer.evaluate()
    folder = tmp_path / "final"
    trainer.save_model(str(folder))
    names = {path.name for path in folder.iterdir()}
    assert {"sigmanens.json", "config.json", "tokenizer.json", "README.md"} <= names
    assert "model.safetensors" not in names
    (file,) = folder.glob("*.safetensors")
    assert file.stat().st_size < 0.5 * sum(4 * p.numel() for p in base.parameters())
    x = batch(sentences(5, length=4))
    del x["labels"]
    again = sn.load(folder, base)
    assert torch.equal(again.eval()(**x).logits, ens.eval()(**x).logits)
    card = (folder / "README.md").read_text()
    assert f"{metrics['eval_loss']:.4g}" in card
    assert "runtime" not in card


def test_small_checkpoints_hold_the_members_and_want_the_same_base(
    make_trainer: MakeTrainer, tmp_path: Path
) -> None:
    base = bert()
    ens = sn.convert(base, 2, train="members")
    options: dict[str, Any] = {"train_dataset": sentences(12), "small_checkpoints": True}
    make_trainer(ens, RESUME, **options).train()
    folder = tmp_path / "run" / "checkpoint-3"
    (file,) = folder.glob("sigmanens-*.safetensors")
    assert file.stat().st_size < 0.5 * sum(4 * p.numel() for p in base.parameters())
    with torch.no_grad():
        base.bert.pooler.dense.weight[0, 0] += 1  # as another process might have drawn it
    other = make_trainer(sn.convert(base, 2, train="members"), RESUME, **options)
    with pytest.raises(CheckpointError, match=r"not the base .*bert\.pooler\.dense\.weight"):
        other.train(resume_from_checkpoint=str(folder))
