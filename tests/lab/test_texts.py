"""Texts from parquet files to token numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("datasets")

import datasets

from sigmanens.baselines import SeparateNetworks
from sigmanens.errors import ConfigError, DataError, InputError
from sigmanens.lab.backbones.tokens import TokenClassifier, length_order
from sigmanens.lab.data.texts import TokenSet, encode, load_texts, load_tokenizer
from sigmanens.lab.ood_scores import feature_reader
from sigmanens.lab.rows import member_logits

WORDS = ["[PAD]", "bad", "good", "very", "film"]
TEXTS = ["good film", "very bad film", "bad", "very very good film"]
LABELS = [1, 0, 0, 1]


class Tokenizer:
    """Words by their place in a list; what of transformers' interface is used."""

    pad_token_id: int | None = 0

    def __call__(self, texts: list[str], truncation: bool, max_length: int) -> Any:
        assert truncation
        return {"input_ids": [[WORDS.index(w) for w in t.split()][:max_length] for t in texts]}


def write(folder: Path, **columns: Sequence[Any]) -> Path:
    folder.mkdir(exist_ok=True)
    table = datasets.Dataset.from_dict(dict(columns))
    if "label" in columns:
        table = table.cast_column("label", datasets.ClassLabel(names=["negative", "positive"]))
    table.to_parquet(str(folder / "train-00000.parquet"))
    return folder


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The cache of datasets in a folder of the tests."""
    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = tmp_path_factory.mktemp("cache")
    yield
    datasets.config.HF_DATASETS_CACHE = before


def test_texts_become_tokens(tmp_path: Path) -> None:
    folder = write(tmp_path / "set", sentence=TEXTS, label=LABELS)
    found = load_texts(folder, "train", tokenizer=Tokenizer())
    assert found.tokens.tolist() == [
        [2, 4, 0, 0], [3, 1, 4, 0], [1, 0, 0, 0], [3, 3, 2, 4],
    ]  # fmt: skip
    assert found.labels.tolist() == LABELS
    assert found.classes == ("negative", "positive")
    assert found.texts == tuple(TEXTS)
    cut = load_texts(folder, "train", tokenizer=Tokenizer(), length=2)
    assert torch.equal(cut.tokens, found.tokens[:, :2])


def test_a_limit_draws_by_the_seed(tmp_path: Path) -> None:
    folder = write(tmp_path / "set", text=TEXTS, label=LABELS)
    order = torch.randperm(4, generator=torch.Generator().manual_seed(3))[:2].tolist()
    found = load_texts(folder, "train", tokenizer=Tokenizer(), limit=2, seed=3)
    assert found.texts == tuple(TEXTS[i] for i in order)
    assert found.labels.tolist() == [LABELS[i] for i in order]


def test_parts_keep_texts_with_their_labels(tmp_path: Path) -> None:
    folder = write(tmp_path / "set", text=TEXTS, label=LABELS)
    whole = load_texts(folder, "train", tokenizer=Tokenizer())
    first, second = whole.split(0.5)
    assert sorted(first.texts + second.texts) == sorted(TEXTS)
    for part in (first, second):
        assert sorted(part.labels.tolist()) == [0, 1]
        for text, label in zip(part.texts, part.labels.tolist(), strict=True):
            assert LABELS[TEXTS.index(text)] == label
    with pytest.raises(InputError, match="fraction"):
        whole.split(1.0)
    assert whole.subset(slice(1, 3)).texts == tuple(TEXTS[1:3])


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"a": TEXTS, "b": TEXTS, "label": LABELS}, {}, "several columns could hold texts"),
        ({"label": LABELS}, {}, "no text column"),
        ({"text": [*TEXTS[:3], None], "label": LABELS}, {}, "row 3 has no text"),
        ({"text": TEXTS, "label": LABELS}, {"text_column": "label"}, "holds no texts"),
        ({"text": TEXTS, "label": LABELS}, {"split": "test"}, "no split 'test'"),
        ({"text": TEXTS, "label": LABELS}, {"limit": 0}, "limit"),
        ({"text": TEXTS, "label": LABELS}, {"length": 1}, "length"),
    ],
)
def test_what_cannot_be_read_is_named(
    tmp_path: Path, columns: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    folder = write(tmp_path / "set", **columns)
    with pytest.raises((DataError, ConfigError), match=message):
        load_texts(folder, **{"split": "train", "tokenizer": Tokenizer()} | options)


def test_a_tokenizer_without_padding_is_refused() -> None:
    with pytest.raises(ConfigError, match="padding"):
        encode(["good"], SimpleNamespace(pad_token_id=None), 4)


def test_a_missing_tokenizer_is_named(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load_tokenizer(str(tmp_path / "nothing"))


def test_token_sets_are_checked() -> None:
    tokens, labels = torch.zeros(2, 3, dtype=torch.int64), torch.tensor([0, 1])
    TokenSet(tokens, labels, ("a", "b"))
    for wrong, what in (
        ((tokens.float(), labels, ("a", "b")), "int64"),
        ((tokens, labels[:1], ("a", "b")), "labels"),
        ((tokens[:0], labels[:0], ("a", "b")), "empty"),
        ((tokens, labels, ("a",)), "outside"),
    ):
        with pytest.raises(DataError, match=what):
            TokenSet(*wrong)


class Counting(nn.Module):
    """Gives the sum of each row's tokens, and keeps the shapes it was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.classifier = nn.Linear(1, 2, bias=False)
        self.classifier.weight.data = torch.tensor([[1.0], [-1.0]])
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> SimpleNamespace:
        self.shapes.append(tuple(input_ids.shape))
        total = (input_ids * attention_mask).sum(1, keepdim=True) * self.scale
        return SimpleNamespace(logits=self.classifier(total))


def test_texts_are_evaluated_by_length_and_answered_in_their_order() -> None:
    model = Counting()
    network = SeparateNetworks([TokenClassifier(model, padding=0)])
    lengths = [9, 2, 7, 1, 8, 2, 9, 3]
    tokens = torch.zeros(len(lengths), 12, dtype=torch.int64)
    for i, n in enumerate(lengths):
        tokens[i, :n] = i + 1
    totals = [float((i + 1) * n) for i, n in enumerate(lengths)]
    for read in (member_logits(network, batch=2), feature_reader(network, batch=2)):
        assert read(tokens)[0, :, 0].tolist() == totals
        assert model.shapes == [(2, 2), (2, 3), (2, 8), (2, 9)]
        model.shapes.clear()
    assert length_order(nn.Linear(2, 2), torch.randn(4, 2)) is None
