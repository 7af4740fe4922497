"""A small BERT, an ensemble of it, and sentences of random words to train them on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import datasets
import numpy as np
import torch
from tests.networks import apart, randomise
from torch import Tensor
from transformers import BertConfig, BertForSequenceClassification

import sigmanens as sn
from sigmanens.integrations.transformers import EnsembleTrainer

MakeTrainer = Callable[..., EnsembleTrainer]

WORDS = ["good", "bad", "film", "a", "very", "dull", "fine", "the", "plot", "is"]
VOCABULARY = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]


def bert(dropout: float = 0.0, **options: Any) -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=len(VOCABULARY), hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout, num_labels=3,
        initializer_range=0.3, **options,
    )  # fmt: skip
    torch.manual_seed(3)
    return randomise(BertForSequenceClassification(config))


def ensemble(dropout: float = 0.0, members: int = 2, **options: Any) -> sn.SigmaEnsemble:
    generator = torch.Generator().manual_seed(5)
    return apart(sn.convert(bert(dropout), members, generator=generator, **options))


def sentences(count: int, seed: int = 0, length: int | None = None) -> datasets.Dataset:
    """Sentences of 2 to 8 words with a label that one word decides; a column no model takes."""
    draw = np.random.default_rng(seed)
    ids, labels = [], []
    for _ in range(count):
        words = draw.integers(5, len(VOCABULARY), length or int(draw.integers(2, 9)))
        ids.append([2, *words.tolist(), 3])
        labels.append(int(words[0]) % 3)
    mask = [[1] * len(row) for row in ids]
    return datasets.Dataset.from_dict(
        {"input_ids": ids, "attention_mask": mask, "note": ["…"] * count, "labels": labels}
    )


def batch(data: datasets.Dataset) -> dict[str, Tensor]:
    """All rows of a data set of sentences of one length."""
    keys = ("input_ids", "attention_mask", "labels")
    return {k: torch.tensor(data[k][:]) for k in keys}


def weights(ens: sn.SigmaEnsemble) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in ens.state_dict().items()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor], tolerance: float = 0.0) -> None:
    assert a.keys() == b.keys()
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
