"""Texts with labels as matrices of token numbers, from the same sources as pictures."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sigmanens.errors import ConfigError, DataError
from sigmanens.lab.backbones.tokens import pretrained_place
from sigmanens.lab.data.images import LabelledSet, check_labelled
from sigmanens.lab.data.sources import labelled_rows, open_split, pick_column


@dataclass(frozen=True, eq=False)
class TokenSet(LabelledSet):
    """Texts and labels in memory.

    Attributes:
        tokens: token numbers (N, L), int64, filled up with ``padding`` on the right.
        labels: class numbers (N,), int64 in [0, len(classes)).
        classes: the classes' names.
        padding: number of the padding token.
        name: what the set is called in messages and results.
        texts: what was encoded.
        column: where they stand in the split.
        positions: place of each text in the split that it comes from (N,), int64; None: not known.

    Raises:
        DataError: if the set is empty, or the tensors' shapes, dtypes or labels do not fit.
    """

    tokens: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    padding: int = 0
    name: str = "texts"
    texts: tuple[str, ...] = ()
    positions: Tensor | None = None
    column: str = "text"

    def __post_init__(self) -> None:
        tokens, labels = self.tokens, self.labels
        if tokens.dtype != torch.int64 or tokens.ndim != 2:
            raise DataError(
                f"{self.name}: tokens must be int64 of shape (N, L); got {tokens.dtype} of shape "
                f"{tuple(tokens.shape)}."
            )
        check_labelled(tokens, labels, len(self.classes), self.name)

    def subset(self, index: Tensor | Sequence[int] | slice) -> TokenSet:
        """The texts at the positions (or under the mask, or in the slice) ``index``."""
        rows = torch.arange(len(self))[index]
        texts = tuple(self.texts[i] for i in rows.tolist()) if self.texts else ()
        places = None if self.positions is None else self.positions[rows]
        return replace(
            self, tokens=self.tokens[rows], labels=self.labels[rows], texts=texts, positions=places
        )

    def normalized(self) -> Tensor:
        """The tokens as they are, which is how a network takes them."""
        return self.tokens


def load_tokenizer(name: str) -> Any:
    """A tokenizer of transformers by hub name or local folder, or "minilm".

    Raises:
        ConfigError: if there is none.
    """
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(pretrained_place(name))
    except (OSError, ValueError) as e:
        reason = str(e).strip().splitlines()[0]
        raise ConfigError(f"the tokenizer {name} cannot be loaded: {reason}") from e


def encode(texts: Sequence[str], tokenizer: Any, length: int) -> Tensor:
    """Token numbers (N, L) of texts, L ≤ length: longer texts are cut, shorter ones filled up."""
    padding = tokenizer.pad_token_id
    if padding is None:
        raise ConfigError(
            f"the tokenizer {type(tokenizer).__name__} has no padding token; set its pad_token"
        )
    rows = tokenizer(list(texts), truncation=True, max_length=length)["input_ids"]
    widest = max((len(row) for row in rows), default=1)
    tokens = torch.full((len(rows), widest), padding, dtype=torch.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row, dtype=torch.int64)
    return tokens


def load_texts(
    source: str | os.PathLike[str],
    split: str,
    *,
    tokenizer: Any,
    length: int = 128,
    text_column: str | None = None,
    label_column: str | None = None,
    limit: int | None = None,
    skip: int = 0,
    classes: int | None = None,
    seed: int = 0,
    stratify: bool = False,
) -> TokenSet:
    """Load one split of a labelled text set with ``datasets.load_dataset`` and encode it.

    Args:
        source: a hub name or a local folder.
        split: name of the split, such as "train".
        tokenizer: of transformers.
        length: at most so many tokens of a text.
        text_column: column of the texts. None: the only column of strings that is not the label.
        label_column: column of the labels, found as for pictures.
        limit: take only the first ``limit`` entries of a random permutation of the split.
        skip: leave out so many at its front.
        classes: take only the first so many classes.
        seed: seed of that permutation.
        stratify: whether these hold all classes in proportion.

    Returns:
        Token numbers (N, L) and labels (N,).

    Raises:
        ConfigError: if ``limit`` or ``length`` is out of range. DataError: if the source cannot be
            read, the split or a column is unknown, missing or ambiguous, or the set is empty.
    """
    if length < 2:
        raise ConfigError(f"length must be at least 2 tokens; got {length}.")
    splits, rows, name = open_split(source, split, limit)
    kinds = ("string", "large_string")
    strings = [c for c, f in rows.features.items() if str(getattr(f, "dtype", "")) in kinds]
    texts_in = text_column
    if texts_in is None:
        named = [c for c in strings if c in ("text", "sentence")]
        texts_in = pick_column("text", None, named or strings, list(rows.features), name)
    elif texts_in not in strings:
        raise DataError(f"{name}: column {texts_in!r} holds no texts; these do: {strings}.")
    places, labels, names = labelled_rows(
        splits, split, label_column, texts_in, name,
        limit=limit, skip=skip, classes=classes, seed=seed, stratify=stratify,
    )  # fmt: skip
    texts = rows.select(places.tolist())[texts_in][:]
    if None in texts:
        raise DataError(f"{name}: row {texts.index(None)} has no text.")
    return TokenSet(
        encode(texts, tokenizer, length), labels, names, tokenizer.pad_token_id, name,
        tuple(texts), places, texts_in,
    )  # fmt: skip
