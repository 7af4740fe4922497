"""A row of the matrix, and inputs for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

CLASSES = 5
Example = Callable[[int], Any]


@dataclass(frozen=True)
class Entry:
    """One row of the matrix.

    Attributes:
        name: the model's name in its library.
        library: where it comes from.
        build: makes it, untrained, in training mode or not.
        example: ``batch -> input``: a tensor, or a mapping of keyword inputs.
        options: what ``convert`` is told besides the number of members.
        class_dim: dimension of the classes in the base's logits.
        refused: name of the error that conversion must raise; "" if it must succeed.
        kept: classes of norms that are known to stay shared, for the reason that is reported.
        core: whether it is one of the few that every run of the tests covers.
    """

    name: str
    library: str
    build: Callable[[], nn.Module]
    example: Example
    options: Mapping[str, Any] = field(default_factory=dict)
    class_dim: int = 1
    refused: str = ""
    kept: tuple[str, ...] = ()
    core: bool = False

    @property
    def id(self) -> str:
        """``"library/name"``."""
        return f"{self.library}/{self.name}"


def noise(*shape: int, batch_dim: int = 0) -> Example:
    """Standard normal inputs; the first rows do not depend on the batch size."""

    def draw(batch: int) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        rows = [torch.randn(shape, generator=generator) for _ in range(batch)]
        return torch.stack(rows, batch_dim)

    return draw


def picture(size: int, key: str = "") -> Example:
    draw = noise(3, size, size)
    return (lambda batch: {key: draw(batch)}) if key else draw


def text(length: int = 7, vocabulary: int = 40) -> Example:
    """Token ids and a mask that hides the end of the first row."""

    def draw(batch: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        ids = torch.stack(
            [torch.randint(3, vocabulary, (length,), generator=generator) for _ in range(batch)]
        )
        mask = torch.ones_like(ids)
        mask[0, -2:] = 0
        ids[0, -2:] = 0
        return {"input_ids": ids, "attention_mask": mask}

    return draw
