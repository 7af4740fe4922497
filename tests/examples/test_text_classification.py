"""examples/text_classification.py with sentences of another kind, on data made here.

The run without them is in tests/integrations/test_snippets.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import datasets
import pytest
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

WORDS = ["good", "bad", "film", "a", "very", "dull", "fine", "the", "plot", "is", "why", "where"]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    folder = tmp_path / "model"
    BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(folder)
    BertForSequenceClassification(
        BertConfig(
            vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=2, intermediate_size=32,
            num_attention_heads=2, max_position_embeddings=64,
        )
    ).save_pretrained(folder)  # fmt: skip
    return folder


def _table(words: list[str], size: int, classes: int, seed: int) -> datasets.Dataset:
    draw = random.Random(seed)
    rows = [" ".join(draw.choices(words, k=2 + i % 5)) for i in range(size)]
    return datasets.Dataset.from_dict(
        {"sentence": rows, "label": [i % classes for i in range(size)]}
    )


@pytest.mark.filterwarnings("ignore:the .* samples set no temperature")
def test_other_sentences_are_scored_without_their_labels(
    model: Path,
    tmp_path: Path,
    example: Callable[[str], ModuleType],
    capsys: pytest.CaptureFixture[str],
) -> None:
    data, other = tmp_path / "data", tmp_path / "other"
    data.mkdir()
    other.mkdir()
    for split, size in (("train", 24), ("validation", 12), ("test", 15)):
        _table(WORDS[:10], size, 2, size).to_parquet(data / f"{split}.parquet")
    _table(WORDS[9:], 9, 6, 1).to_parquet(other / "test.parquet")  # six classes, not two
    found = example("text_classification").main(
        [
            "--data", str(data), "--model", str(model), "--members", "2", "--train", "24",
            "--calibration", "12", "--test", "15", "--test-split", "test", "--epochs", "1",
            "--batch-size", "8", "--ood", str(other),
        ]
    )  # fmt: skip
    assert len(found) == 4
    printed = capsys.readouterr().out
    scores = {
        line.partition(":")[0]: float(line.rpartition(" ")[2])
        for line in printed.splitlines()
        if line.startswith("out of distribution by ")
    }
    assert set(scores) == {
        "out of distribution by entropy, one network",
        "out of distribution by entropy, ensemble of 2",
        "out of distribution by modulation, ensemble of 2",
    }
    assert all(0 <= auroc <= 1 for auroc in scores.values())
