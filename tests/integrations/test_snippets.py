"""The programs in docs/integrations.md and in examples/ run, at a tiny size."""

from __future__ import annotations

import importlib.util
import re
import warnings
from pathlib import Path
from types import ModuleType

import datasets
import pytest
import torch
from transformers import BertConfig, BertForSequenceClassification, BertTokenizerFast

import sigmanens as sn

ROOT = Path(__file__).resolve().parents[2]


def programs() -> dict[str, str]:
    """The code of each section, by heading."""
    text = (ROOT / "docs" / "integrations.md").read_text(encoding="utf-8")
    sections = re.split(r"^## ", text, flags=re.MULTILINE)[1:]
    found = {}
    for section in sections:
        blocks = re.findall(r"^```python\n(.*?)^```", section, flags=re.MULTILINE | re.DOTALL)
        found[section.partition("\n")[0]] = "\n".join(blocks)
    return found


def test_every_section_has_a_program() -> None:
    names = [
        "A plain loop",
        "Threads and servers",
        "Code that looks for norms",
        "Lightning",
        "Hugging Face Trainer",
    ]
    assert list(programs()) == names
    assert all("sn.convert(" in code for code in programs().values())


@pytest.mark.parametrize("section", programs())
def test_the_document_runs(section: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    space: dict[str, object] = {}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*does not have many workers", category=UserWarning)
        exec(compile(programs()[section], section, "exec"), space)
    ens = space["ens"]
    assert isinstance(ens, sn.SigmaEnsemble)
    if section == "Hugging Face Trainer":
        again = space["again"]
        assert isinstance(again, sn.SigmaEnsemble)
        ids = torch.randint(1, 20, (3, 5))
        assert torch.equal(again.eval()(ids).logits, ens.eval()(ids).logits)


@pytest.fixture
def example() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "text_classification", ROOT / "examples" / "text_classification.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.filterwarnings("ignore:the members answer as one model")
@pytest.mark.filterwarnings("ignore:the .* samples set no temperature")
def test_the_text_example_runs(
    example: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    words = ["good", "bad", "film", "a", "very", "dull", "fine", "the", "plot", "is"]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    model = tmp_path / "model"
    model.mkdir()
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(str(tmp_path / "vocab.txt")).save_pretrained(model)
    BertForSequenceClassification(
        BertConfig(
            vocab_size=len(vocabulary), hidden_size=32, num_hidden_layers=2, intermediate_size=32,
            num_attention_heads=2, max_position_embeddings=64,
        )
    ).save_pretrained(model)  # fmt: skip
    data = tmp_path / "data"
    data.mkdir()
    for split, size in (("train", 24), ("validation", 20)):
        rows = [" ".join(words[(i + k) % 10] for k in range(2 + i % 5)) for i in range(size)]
        labels = [i % 2 for i in range(size)]
        table = datasets.Dataset.from_dict({"sentence": rows, "label": labels, "idx": labels})
        table.to_parquet(data / f"{split}.parquet")
    out = tmp_path / "out"
    found = example.main(
        [
            "--data", str(data), "--model", str(model), "--members", "2", "--train", "24",
            "--calibration", "8", "--test", "11", "--epochs", "1", "--batch-size", "8",
            "--out", str(out),
        ]
    )  # fmt: skip
    assert set(found) == {
        f"{who}, {how}"
        for who in ("one network", "ensemble of 2")
        for how in ("raw", "with temperature")
    }
    for row in found.values():
        assert 0 <= row["accuracy"] <= 1
        assert 0 <= row["ece"] <= 1
        assert 0 < row["nll"] < 3
    printed = capsys.readouterr().out
    assert f"{found['one network, raw']['nll']:.3f}" in printed
    base = BertForSequenceClassification.from_pretrained(model)
    ens = sn.load(out, base)
    assert float(ens.temperature) == pytest.approx(
        found["ensemble of 2, with temperature"]["temperature"]
    )
    assert "| one network, raw |" in (out / "README.md").read_text()
