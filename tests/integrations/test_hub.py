"""Folders in the layout of the hub, and the model card in them."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from tests.networks import apart, dense
from torch import nn
from transformers import BertConfig, BertForSequenceClassification

import sigmanens as sn
from sigmanens.errors import CheckpointError, InputError
from sigmanens.integrations import hub
from sigmanens.integrations.hub import model_card, save_folder


def bert() -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=20, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=16, num_labels=3,
    )  # fmt: skip
    return BertForSequenceClassification(config)


class Processor:
    def save_pretrained(self, directory: str | Path) -> None:
        (Path(directory) / "vocabulary.txt").write_text("good\nbad\n")


def test_folder_has_all_that_is_needed_to_load(tmp_path: Path) -> None:
    base = bert()
    ens = apart(sn.convert(base, 2))
    ens.temperature.fill_(1.5)
    weights = save_folder(ens, tmp_path / "out", processor=Processor(), metrics={"nll": 0.25})
    assert {path.name for path in (tmp_path / "out").iterdir()} == {
        "README.md", "config.json", "sigmanens.json", "vocabulary.txt", weights.name,
    }  # fmt: skip
    # What the card tells a reader to do, but for the base's weights.
    config = BertConfig.from_pretrained(tmp_path / "out")
    assert config.num_labels == 3
    again = sn.load(tmp_path / "out", base)
    ids = torch.randint(1, 20, (4, 5))
    assert torch.equal(again.predict(ids).probs, ens.predict(ids).probs)


def test_networks_of_other_libraries_have_no_config(tmp_path: Path) -> None:
    ens = sn.convert(dense(), 2)
    weights = save_folder(ens, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert names == {"README.md", "sigmanens.json", weights.name}
    assert "base = Sequential(…)  # with its pretrained weights" in model_card(ens)


def test_the_card_is_one_that_the_hub_reads() -> None:
    ens = sn.convert(bert(), 4)
    loss_fn = sn.EnsembleLoss(diversity=sn.Diversity(tau=0.5, weight=1e-3))
    card = ModelCard(
        model_card(
            ens,
            base_model="google-bert/bert-base-uncased",
            license="apache-2.0",
            datasets=["stanfordnlp/sst2"],
            metrics={"accuracy": 0.91234, "ece": None},
            loss_fn=loss_fn,
        )
    )
    assert card.data.license == "apache-2.0"
    assert card.data.base_model == "google-bert/bert-base-uncased"
    assert card.data.datasets == ["stanfordnlp/sst2"]
    assert card.data.pipeline_tag == "text-classification"
    assert card.data.library_name == "sigmanens"
    assert {"ensemble", "uncertainty", "calibration"} <= set(card.data.tags)
    assert "# BertForSequenceClassification as an ensemble of 4" in card.text
    assert (
        'BertForSequenceClassification.from_pretrained("google-bert/bert-base-uncased"' in card.text
    )
    assert repr(loss_fn.diversity) in card.text
    assert "| | accuracy | ece |\n|---|---|---|\n| ensemble | 0.9123 |  |" in card.text
    assert f"{ens.report.added_parameters:,} are added by the members" in card.text


def test_several_rows_share_the_columns_they_have() -> None:
    rows = {"ours": {"accuracy": 0.9, "nll": 0.3}, "one network": {"nll": 0.4, "ece": 0.05}}
    card = model_card(sn.convert(dense(), 2), metrics=rows)
    assert (
        "| | accuracy | nll | ece |\n|---|---|---|---|\n"
        "| ours | 0.9 | 0.3 |  |\n| one network |  | 0.4 | 0.05 |"
    ) in card


def test_without_metrics_there_is_no_table() -> None:
    assert "## Metrics" not in model_card(sn.convert(dense(), 2))


@pytest.mark.parametrize(
    "metrics",
    [{"accuracy": "high"}, {"a": {"nll": "low"}}, {"ok": True}, {"a": {"nll": 1.0}, "nll": 2.0}],
)
def test_metrics_must_be_numbers(metrics: Any) -> None:
    with pytest.raises(InputError, match=r"metric '\w+' is .*; expected \{metric: number\}"):
        model_card(sn.convert(dense(), 2), metrics=metrics)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("google-bert/bert-base-uncased", "google-bert/bert-base-uncased"),
        ("gpt2", "gpt2"),
        ("", None),
        ("/data/models/mine", None),
        ("../mine", None),
        ("here/folder", None),
    ],
)
def test_only_hub_names_are_taken_for_the_base(
    name: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "here" / "folder").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    base = bert()
    base.config._name_or_path = name
    card = ModelCard(model_card(sn.convert(base, 2)))
    assert card.data.base_model == expected
    assert "/data/models" not in card.text


def test_a_card_that_cannot_be_written_is_a_named_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, payload: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hub, "write_atomic", full)
    with pytest.raises(CheckpointError, match="model card: No space left"):
        save_folder(sn.convert(dense(), 2), tmp_path)


def test_unchanged_bases_are_not_saved(tmp_path: Path) -> None:
    base: nn.Module = bert()
    weights = save_folder(sn.convert(base, 2), tmp_path, shared="never")
    assert weights.stat().st_size < 0.2 * sum(4 * p.numel() for p in base.parameters())
