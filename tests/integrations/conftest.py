"""A tokenizer and a trainer for the tests with transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState
from tests.integrations.texts import VOCABULARY, MakeTrainer
from transformers import BertTokenizerFast, TrainingArguments

import sigmanens as sn
from sigmanens.integrations.transformers import EnsembleTrainer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> BertTokenizerFast:
    file = tmp_path_factory.mktemp("tokenizer") / "vocab.txt"
    file.write_text("\n".join(VOCABULARY))
    return BertTokenizerFast(str(file))


@pytest.fixture
def make_trainer(
    tmp_path: Path, tokenizer: BertTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeTrainer]:
    # Where the arguments of a training leave its precision for the next one.
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")

    def make(
        model: sn.SigmaEnsemble | None, args: dict[str, Any] | None = None, **options: Any
    ) -> EnsembleTrainer:
        defaults = {
            "output_dir": str(tmp_path / "run"), "use_cpu": True, "report_to": "none",
            "disable_tqdm": True, "dataloader_pin_memory": False, "save_strategy": "no",
            "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "max_steps": 2,
            "learning_rate": 1e-3, "logging_steps": 1, "lr_scheduler_type": "constant",
        }  # fmt: skip
        options.setdefault("processing_class", tokenizer)
        return EnsembleTrainer(model, TrainingArguments(**defaults | (args or {})), **options)

    yield make
    AcceleratorState._reset_state(reset_partial_state=True)
