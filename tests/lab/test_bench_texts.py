"""A study on texts, with a tiny transformer written to a folder: from parquet files to rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")
pytest.importorskip("datasets")
pytest.importorskip("transformers")

import datasets
import transformers

from sigmanens.conversion.config import ConversionConfig
from sigmanens.errors import ConfigError, DataError
from sigmanens.lab.backbones import build_backbone
from sigmanens.lab.bench.config import BenchConfig, MeasureConfig
from sigmanens.lab.bench.material import load_material
from sigmanens.lab.bench.runner import run_bench
from sigmanens.lab.bench.trials import Trial
from sigmanens.lab.bench.work import Workshop
from sigmanens.lab.config import DataConfig, DiversityConfig, ModelConfig, Recipe

WORDS = ["good", "fine", "great", "bad", "poor", "awful", "film", "plot", "cast", "the"]
NAMES = ["negative", "positive"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A folder with a tokenizer and weights, three sets of texts, and the cache of datasets."""
    root = tmp_path_factory.mktemp("texts")
    before = datasets.config.HF_DATASETS_CACHE
    datasets.config.HF_DATASETS_CACHE = root / "cache"
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (root / "bert").mkdir()
    (root / "bert" / "vocab.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    tokenizer = transformers.BertTokenizerFast(vocab_file=str(root / "bert" / "vocab.txt"))
    tokenizer.save_pretrained(root / "bert")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(vocabulary), hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=32, initializer_range=0.5,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(root / "bert")
    for name, split, count in (
        ("train", "train", 64), ("train", "validation", 32), ("train", "test", 40),
        ("shift", "test", 20),
    ):  # fmt: skip
        write(root / name, split, count)
    write(root / "other", "test", 24, labelled=False)
    yield root
    datasets.config.HF_DATASETS_CACHE = before


def write(folder: Path, split: str, count: int, labelled: bool = True) -> None:
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(count)
    texts, labels = [], []
    for i in range(count):
        label = i % 2
        mood = WORDS[:3] if label else WORDS[3:6]
        picks = torch.randint(0, 3, (4,), generator=generator).tolist()
        text = f"the {WORDS[6 + picks[0]]} {mood[picks[1]]} {mood[picks[2]]}"
        texts.append(text if labelled else "plot plot cast")
        labels.append(label)
    table = datasets.Dataset.from_dict({"text": texts, "label": labels})
    table = table.cast_column("label", datasets.ClassLabel(names=NAMES))
    table.to_parquet(str(folder / f"{split}-00000.parquet"))


def study(place: Path) -> BenchConfig:
    return BenchConfig(
        study="texts",
        data=DataConfig(
            source="hub/train", tokenizer=str(place / "bert"), length=16,
            validation_split="validation", ood={"other": "other"}, shift={"reviews": "hub/shift"},
        ),
        data_root=str(place),
        model=ModelConfig(f"transformers/{place / 'bert'}"),
        ensemble=ConversionConfig(members=2, init="preserve", head="copy"),
        diversity=DiversityConfig(weight=1e-3),
        recipe=Recipe(epochs=2, batch_size=16, optimizer="adamw", lr=1e-3),
        methods=["separate", "lora_ensemble", "sigmanens"],
        taus=[0.5],
        seeds=[0],
        measure=MeasureConfig(corruptions=["standard"], corruption_limit=8, resamples=50),
    )  # fmt: skip


def test_a_study_on_texts(place: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    found = run_bench(study(place), tmp_path / "run")
    assert found["failures"] == {}
    rows = {row["method"]: row for row in found["rows"]}
    assert set(rows) == {
        "single", "single_temperature", "deep_ensemble", "lora_ensemble", "sigmanens",
    }  # fmt: skip
    for row in rows.values():
        assert set(row["shift"]["reviews"]) >= {"accuracy", "nll", "ece", "nll_calibrated"}
        assert set(row["ood"]) == {"other"}
        assert {"character_noise", "word_drop", "length_cut"} <= set(row["corruption"])
        assert len(row["corruption"]["word_drop"]) == 5
    assert rows["single"]["params"] < rows["sigmanens"]["params"] < 2 * rows["single"]["params"]
    assert (found["data"]["train"], found["data"]["shift"]) == (64, {"reviews": 20})
    json.dumps(found, allow_nan=False)


def test_padding_does_not_change_an_answer(place: Path) -> None:
    network = build_backbone(f"transformers/{place / 'bert'}", num_classes=2).eval()
    tokens = torch.tensor([[2, 5, 11, 3, 0, 0], [2, 6, 12, 8, 9, 3]])
    with torch.no_grad():
        together = network(tokens)
        alone = network(tokens[:1, :4])
    torch.testing.assert_close(together[:1], alone, rtol=1e-4, atol=1e-6)


def test_other_classes_are_no_shift(place: Path) -> None:
    config = study(place)
    data = replace(config.data, shift={"other": "other"}, ood={})
    load_material(replace(config, data=data), 0)  # the same names
    table = datasets.Dataset.from_dict({"text": ["good", "bad"], "label": ["x", "y"]})
    (place / "third").mkdir(exist_ok=True)
    table.to_parquet(str(place / "third" / "test-00000.parquet"))
    data = replace(config.data, shift={"third": "third"}, ood={})
    with pytest.raises(DataError, match="third"):
        load_material(replace(config, data=data), 0)


def test_unknown_corruptions_and_weights_are_named(place: Path, tmp_path: Path) -> None:
    config = study(place)
    measure = replace(config.measure, corruptions=["rain"])
    with pytest.raises(ConfigError, match="rain"):
        load_material(replace(config, measure=measure), 0)
    with pytest.raises(ConfigError, match="cannot be loaded"):
        build_backbone(f"transformers/{tmp_path / 'nothing'}")


def test_texts_are_held_out_from_training(place: Path) -> None:
    """The test split stays whole; nothing is trained on and chosen on."""
    config = study(place)
    data = replace(config.data, validation_split=None, validation_from_train=20, limit=30)
    material = load_material(replace(config, data=data), 0)
    sizes = [len(part.labels) for part in (material.train, material.data.validation,
                                           material.data.test)]  # fmt: skip
    assert sizes == [30, 20, 40]
    longer = replace(data, limit=50)
    both = load_material(replace(config, data=replace(longer, validation_from_train=14)), 0)
    assert torch.equal(both.train.images[:30], material.train.images)
    assert torch.equal(both.train.images[30:50], material.data.validation.images)
    with pytest.raises(ConfigError, match="both given"):
        load_material(replace(config, data=replace(data, validation_split="validation")), 0)


def test_a_tokenizer_with_other_padding_is_refused(place: Path) -> None:
    config = study(place)
    material = load_material(config, 0)
    assert material.padding == 0
    shop = Workshop(config, Trial(0, "separate", 2), replace(material, padding=4))
    with pytest.raises(ConfigError, match="token 4"):
        shop.base()


def test_weights_of_other_classes_are_named(place: Path, tmp_path: Path) -> None:
    config = transformers.BertConfig.from_pretrained(place / "bert", num_labels=5)
    transformers.BertForSequenceClassification(config).save_pretrained(tmp_path / "five")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        build_backbone(f"transformers/{tmp_path / 'five'}", num_classes=2)
