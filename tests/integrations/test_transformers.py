"""Training ensembles of small text and image classifiers with the Trainer of transformers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.integrations.texts import (
    MakeTrainer,
    assert_same,
    batch,
    bert,
    ensemble,
    sentences,
    weights,
)
from torch import Tensor
from transformers import (
    PreTrainedModel,
    ResNetConfig,
    ResNetForImageClassification,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTForImageClassification,
)

import sigmanens as sn
from sigmanens.errors import InputError, NonFiniteError, SigmaNensWarning
from sigmanens.integrations.classification import EnsembleForClassification

# -- the optimizer -----------------------------------------------------------------------------


def test_scales_are_fast_and_never_decayed(make_trainer: MakeTrainer) -> None:
    ens = ensemble()
    trainer = make_trainer(ens, {"weight_decay": 0.1, "learning_rate": 2e-3})
    optimizer = trainer.create_optimizer()
    assert type(optimizer) is torch.optim.AdamW
    scales = {id(m.scale_logit) for m in ens.sigma_norms().values()}
    for group in optimizer.param_groups:
        mine = {id(p) for p in group["params"]}
        if mine & scales:
            assert mine == scales
            assert (group["lr"], group["weight_decay"]) == (2e-2, 0.0)
        else:
            assert group["lr"] == 2e-3
            assert group["weight_decay"] == (0.1 if group["name"] == "decay" else 0.0)
    assert sum(len(g["params"]) for g in optimizer.param_groups) == len(list(ens.parameters()))


def test_the_rate_of_scales_can_be_given(make_trainer: MakeTrainer) -> None:
    optimizer = make_trainer(ensemble(), scale_lr_mult=100.0).create_optimizer()
    assert max(g["lr"] for g in optimizer.param_groups) == pytest.approx(0.1)


def test_the_rate_of_heads_can_be_given(make_trainer: MakeTrainer) -> None:
    optimizer = make_trainer(ensemble(), head_lr_mult=4.0).create_optimizer()
    rates = {g["name"]: g["lr"] for g in optimizer.param_groups}
    assert rates["heads_decay"] == pytest.approx(4e-3) == 4 * rates["decay"]


def test_plain_trainer_would_decay_the_scales(tmp_path: Path) -> None:
    """What the class is for: without it, the Trainer's rule by names decays some scales."""
    adapter = EnsembleForClassification(ensemble())
    args = TrainingArguments(str(tmp_path), use_cpu=True, weight_decay=0.1, report_to="none")
    optimizer = Trainer(adapter, args).create_optimizer()
    with pytest.warns(SigmaNensWarning) as record:
        problems = sn.check_optimizer(adapter.ensemble, optimizer)
    assert len(record) == len(problems)
    assert any("same learning rate" in p for p in problems)


@pytest.mark.parametrize("kind", ["linear", "cosine", "constant_with_warmup"])
def test_schedulers_keep_the_ratio_of_the_rates(make_trainer: MakeTrainer, kind: str) -> None:
    trainer = make_trainer(ensemble(), {"lr_scheduler_type": kind, "warmup_steps": 2})
    trainer.create_optimizer_and_scheduler(10)
    for _ in range(7):
        trainer.optimizer.step()
        trainer.lr_scheduler.step()
        rates = {g["name"]: g["lr"] for g in trainer.optimizer.param_groups}
        assert rates["scales"] == pytest.approx(10 * rates["decay"])
        assert rates["decay"] > 0


def test_a_given_optimizer_is_used_and_checked(make_trainer: MakeTrainer) -> None:
    ens = ensemble()
    good = torch.optim.SGD(sn.param_groups(ens, lr=0.01))
    trainer = make_trainer(ens, train_dataset=sentences(4), optimizers=(good, None))
    trainer.train()
    assert trainer.optimizer.optimizer is good

    bad = torch.optim.SGD(ens.parameters(), lr=0.01, weight_decay=0.1)
    trainer = make_trainer(ens, train_dataset=sentences(4), optimizers=(bad, None))
    with pytest.warns(SigmaNensWarning) as record:
        trainer.train()
    said = "\n".join(str(w.message) for w in record)
    assert "weight decay 0.1 reaches the scales" in said
    assert "same learning rate" in said


def test_optimizers_with_groups_of_their_own_are_refused(make_trainer: MakeTrainer) -> None:
    ens = ensemble()
    own = (torch.optim.SGD, {"lr": 0.1, "params": list(ens.parameters())})
    with pytest.raises(InputError, match="SGD makes its own parameter groups"):
        make_trainer(ens, optimizer_cls_and_kwargs=own).create_optimizer()


# -- training ----------------------------------------------------------------------------------


def plain_loop(ens: sn.SigmaEnsemble, data: datasets.Dataset, loss_fn: sn.EnsembleLoss) -> None:
    """One SGD step on all rows."""
    x = batch(data)
    y = x.pop("labels")
    optimizer = torch.optim.SGD(sn.param_groups(ens, lr=0.01))
    ens.train()
    loss_fn(ens(**x).logits, y, ens).backward()
    optimizer.step()


SGD = {"optim": "sgd", "learning_rate": 0.01, "max_steps": 1, "max_grad_norm": 0.0}


def test_a_step_is_the_step_of_a_plain_loop(make_trainer: MakeTrainer) -> None:
    ens, loss_fn = ensemble(), sn.EnsembleLoss(diversity=sn.Diversity(tau=0.5, weight=1e-2))
    data = sentences(4, length=5)
    reference, before = copy.deepcopy(ens), weights(ens)
    trainer = make_trainer(ens, SGD, loss_fn=loss_fn, train_dataset=data)
    trainer.train()
    plain_loop(reference, data, loss_fn)
    assert not torch.equal(before["network.classifier.heads.0.weight"],
                           ens.state_dict()["network.classifier.heads.0.weight"])  # fmt: skip
    assert_same(weights(ens), weights(reference), 1e-6)


@pytest.mark.case("T5")
def test_accumulated_unequal_batches_are_one_large_batch(make_trainer: MakeTrainer) -> None:
    ens, loss_fn = ensemble(), sn.EnsembleLoss(diversity=sn.Diversity(tau=0.5, weight=1e-2))
    data = sentences(7, length=4)
    reference = copy.deepcopy(ens)
    args = SGD | {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3}
    trainer = make_trainer(ens, args, loss_fn=loss_fn, train_dataset=data)
    trainer.train()
    plain_loop(reference, data, loss_fn)
    assert_same(weights(ens), weights(reference), 1e-6)


def test_label_smoothing_reaches_every_member(make_trainer: MakeTrainer) -> None:
    ens, diversity = ensemble(), sn.Diversity(tau=0.5, weight=1e-2)
    data = sentences(4, length=5)
    reference = copy.deepcopy(ens)
    args = SGD | {"label_smoothing_factor": 0.2}
    loss_fn = sn.EnsembleLoss(diversity=diversity)
    make_trainer(ens, args, loss_fn=loss_fn, train_dataset=data).train()

    def smoothed(logits: Tensor, y: Tensor) -> Tensor:
        log_p = logits.log_softmax(1)
        return -(0.8 * log_p.gather(1, y[:, None]).mean() + 0.2 * log_p.mean())

    plain_loop(reference, data, sn.EnsembleLoss(smoothed, diversity))
    assert_same(weights(ens), weights(reference), 1e-6)


def test_label_smoothing_of_an_own_loss_is_refused(make_trainer: MakeTrainer) -> None:
    loss_fn = sn.EnsembleLoss(F.multi_margin_loss)
    with pytest.raises(InputError, match="label_smoothing_factor is for cross-entropy"):
        make_trainer(ensemble(), {"label_smoothing_factor": 0.1}, loss_fn=loss_fn)


def test_plain_trainer_with_label_smoothing_is_stopped(tmp_path: Path) -> None:
    args = TrainingArguments(
        str(tmp_path), use_cpu=True, report_to="none", label_smoothing_factor=0.1, max_steps=1,
        remove_unused_columns=False, disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    data = sentences(4, length=4).remove_columns("note")
    with pytest.raises(InputError, match="training needs labels"):
        Trainer(EnsembleForClassification(ensemble()), args, train_dataset=data).train()


def test_losses_of_the_average_are_refused(make_trainer: MakeTrainer) -> None:
    with pytest.raises(InputError, match="compute_loss_func would see the averaged prediction"):
        make_trainer(ensemble(), compute_loss_func=lambda out, y, num_items_in_batch: out.loss)


def test_several_gpus_in_one_process_are_refused(
    make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainingArguments, "n_gpu", property(lambda self: 2))
    with pytest.raises(InputError, match="2 GPUs in one process"):
        make_trainer(ensemble())


def test_a_plain_network_is_refused_by_the_trainer(make_trainer: MakeTrainer) -> None:
    with pytest.raises(InputError, match="got a BertForSequenceClassification"):
        make_trainer(bert())  # type: ignore[arg-type]


def test_model_init_makes_the_ensemble(make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(None, model_init=lambda: ensemble(), train_dataset=sentences(8))
    before = trainer.ensemble
    trainer.train()
    assert trainer.ensemble is not before, "the Trainer makes a fresh one for each training"
    assert trainer.ensemble.num_members == 2


def test_training_in_bfloat16_keeps_the_scales_in_float32(make_trainer: MakeTrainer) -> None:
    ens = ensemble()
    loss_fn = sn.EnsembleLoss(diversity=sn.Diversity(tau=0.5, weight=1e-2))
    before = weights(ens)
    trainer = make_trainer(ens, {"bf16": True}, loss_fn=loss_fn, train_dataset=sentences(8))
    assert math.isfinite(trainer.train().training_loss)
    assert trainer.evaluate(sentences(5))["eval_loss"] > 0
    for name, norm in ens.sigma_norms().items():
        assert norm.scale_logit.dtype == torch.float32
        assert not torch.equal(norm.scale_logit, before[f"network.{name}.scale_logit"])


def test_activation_checkpointing_gives_the_same_step(make_trainer: MakeTrainer) -> None:
    plain, checkpointed = ensemble(), ensemble()
    data = sentences(4, length=5)
    make_trainer(plain, SGD, train_dataset=data).train()
    key = "activation_checkpointing"  # transformers 5
    if key not in {f.name for f in fields(TrainingArguments)}:
        key = "gradient_checkpointing"
    make_trainer(checkpointed, SGD | {key: True}, train_dataset=data).train()
    assert getattr(checkpointed.network, f"is_{key}")
    assert_same(weights(plain), weights(checkpointed), 1e-6)


def test_the_log_has_the_parts_of_the_loss_and_the_cosine(make_trainer: MakeTrainer) -> None:
    ens, diversity = ensemble(), sn.Diversity(tau=0.5, weight=1e-2)
    trainer = make_trainer(
        ens, {"max_steps": 3}, loss_fn=sn.EnsembleLoss(diversity=diversity),
        train_dataset=sentences(12), eval_dataset=sentences(4),
    )  # fmt: skip
    first = diversity(ens).item()
    trainer.train()
    steps = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(steps) == 3
    for entry in steps:
        assert entry["loss"] == pytest.approx(entry["task_loss"] + entry["penalty"], abs=2e-4)
    assert steps[0]["penalty"] == pytest.approx(first, rel=1e-5)
    assert steps[-1]["cosine"] == sn.diversity.cosine(ens, "auto")
    trainer.evaluate()
    assert "cosine" not in trainer.state.log_history[-1]


def test_nan_is_reported_as_the_library_does(make_trainer: MakeTrainer) -> None:
    ens = ensemble()
    with torch.no_grad():
        ens.network.bert.pooler.dense.bias.fill_(torch.nan)
    with pytest.raises(NonFiniteError, match="NaN or infinite logits in members"):
        make_trainer(ens, train_dataset=sentences(4)).train()


IMAGES: dict[str, Callable[[], PreTrainedModel]] = {
    "vit": lambda: ViTForImageClassification(
        ViTConfig(
            hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
            image_size=8, patch_size=4, num_labels=3,
        )
    ),
    "resnet": lambda: ResNetForImageClassification(
        ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", IMAGES)
def test_image_classifiers(make_trainer: MakeTrainer, name: str) -> None:
    draw = np.random.default_rng(0)
    data = datasets.Dataset.from_dict(
        {
            "pixel_values": draw.normal(size=(10, 3, 8, 8)).astype(np.float32),
            "labels": draw.integers(0, 3, 10),
        }
    ).with_format("torch")
    ens = sn.convert(IMAGES[name](), 2)
    loss_fn = sn.EnsembleLoss(diversity=sn.Diversity(tau=0.5, weight=1e-3))
    trainer = make_trainer(
        ens, {"max_steps": 40, "learning_rate": 1e-2, "logging_steps": 100}, loss_fn=loss_fn,
        train_dataset=data, processing_class=None,
    )  # fmt: skip
    trainer.train()
    predicted = trainer.predict(data)
    assert (predicted.predictions.argmax(-1) == predicted.label_ids).mean() > 0.8


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_columns_of_a_base_wrapped_by_peft(make_trainer: MakeTrainer) -> None:
    peft = pytest.importorskip("peft")
    # Without a task its forward has *args and **kwargs only.
    wrapped = peft.get_peft_model(bert(), peft.LoraConfig(r=2, target_modules=["query"]))
    ens = sn.convert(wrapped, 2)
    trainer = make_trainer(ens, train_dataset=sentences(8))
    assert math.isfinite(trainer.train().training_loss)


# -- inputs ------------------------------------------------------------------------------------


def test_as_many_sentences_as_words_are_no_riddle() -> None:
    """Without a warning (an error here), by name and by position, with masks of any kind."""
    ens = ensemble(members=3).eval()
    ids = torch.randint(5, 15, (6, 6))
    mask = (torch.arange(6) < torch.arange(1, 7)[:, None]).long()
    with torch.no_grad():
        for args, kwargs in (
            ((), {"input_ids": ids, "attention_mask": mask, "token_type_ids": ids % 2}),
            ((ids, mask), {"position_ids": torch.arange(6)[None]}),
            ((ids,), {"attention_mask": mask[None, None].float().log()}),
        ):
            expected = [ens.member(m)(*args, **kwargs).logits for m in range(3)]
            got = ens(*args, **kwargs).logits
            torch.testing.assert_close(got, torch.stack(expected), rtol=1e-5, atol=1e-5)


# -- members that are one model ----------------------------------------------------------------


def test_members_that_answer_as_one_model_are_told_of_once(make_trainer: MakeTrainer) -> None:
    same = sn.convert(bert(), 2, head="copy", generator=torch.Generator().manual_seed(5))
    trainer = make_trainer(same, eval_dataset=sentences(10))
    with pytest.warns(SigmaNensWarning, match="answer as one model: disagreement 0.0000"):
        trainer.evaluate()
    trainer.evaluate()  # a second warning would be an error here


def test_the_first_steps_of_a_training_are_not_judged(make_trainer: MakeTrainer) -> None:
    same = sn.convert(bert(), 2, head="copy", generator=torch.Generator().manual_seed(5))
    data = sentences(8)
    args = {"eval_strategy": "steps", "eval_steps": 1, "eval_on_start": True}
    make_trainer(same, args, train_dataset=data, eval_dataset=data).train()


def test_disagreement_is_that_of_all_samples(make_trainer: MakeTrainer) -> None:
    """Also where the last batch is smaller."""
    ens = ensemble()
    data = sentences(10)
    trainer = make_trainer(ens, eval_dataset=data, collect=("member_logits",))
    seen: list[Tensor] = []
    trainer._judge = seen.append  # type: ignore[method-assign]
    members = torch.from_numpy(trainer.predict(data).predictions).transpose(0, 1)
    prediction = sn.Prediction.from_logits(members)
    n, *sums = seen[0].tolist()
    assert n == 10
    expected = [
        float((members[0].argmax(1) != members[1].argmax(1)).float().sum()),
        float(prediction.modulation.sum()),
        float(prediction.entropy.sum()),
    ]
    assert sums == pytest.approx(expected, abs=1e-4)
