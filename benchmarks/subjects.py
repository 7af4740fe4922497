"""The networks that are measured, with random weights, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sigmanens.lab.backbones.registry import build_backbone

__all__ = ["LATE", "MEMBERS", "SUBJECTS", "Subject"]

CLASSES = 10
LATE = "all but the last third"
MEMBERS = 4


@dataclass(frozen=True)
class Subject:
    """A network and what it is measured on.

    Attributes:
        make: builds it, in training mode.
        inputs: B → one batch, a tensor or a mapping of keyword inputs.
        train_batches: sizes B of a training step.
        predict_batches: sizes B of a prediction.
        stages: regexes of norms to convert for the compute dial, by what is shared then.
    """

    make: Callable[[], nn.Module]
    inputs: Callable[[int], Any]
    train_batches: tuple[int, ...]
    predict_batches: tuple[int, ...]
    stages: tuple[tuple[str, str], ...] = ()

    def labels(self, size: int) -> Tensor:
        """Class indices (B,)."""
        return torch.randint(CLASSES, (size,))


def _pictures(size: int) -> Callable[[int], Tensor]:
    return lambda batch: torch.randn(batch, 3, size, size)


def _vit() -> nn.Module:
    """A ViT of 6 blocks, 192 wide, for 64 patches of 4×4 pixels."""
    return build_backbone(
        "timm/vit_tiny_patch16_224", num_classes=CLASSES, img_size=32, patch_size=4, depth=6
    )


def _lite0() -> nn.Module:
    return build_backbone("timm/efficientnet_lite0", num_classes=CLASSES)


def _minilm() -> nn.Module:
    """BERT with MiniLM's sizes: 6 layers, 384 wide, 12 heads; dropout as it comes (0.1)."""
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(
        hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536
    )
    config.num_labels = CLASSES
    return BertForSequenceClassification(config)


def _sentences(batch: int) -> dict[str, Tensor]:
    return {
        "input_ids": torch.randint(1000, 30000, (batch, 32)),
        "attention_mask": torch.ones(batch, 32, dtype=torch.long),
    }


SUBJECTS: dict[str, Subject] = {
    "ResNet-20, 32×32": Subject(
        lambda: build_backbone("resnet20", num_classes=CLASSES),
        _pictures(32),
        (8, 64),
        (1, 8, 64, 256),
        (
            ("nothing", ""),
            ("stem and stage 1", r"layer[23]"),
            ("stem and stages 1–2", r"layer3"),
            ("all but the last block", r"layer3\.2"),
        ),
    ),
    "ResNet-18, 32×32": Subject(
        lambda: build_backbone("resnet18", num_classes=CLASSES), _pictures(32), (8,), (1, 8, 32)
    ),
    "EfficientNet-Lite0, 64×64": Subject(
        _lite0, _pictures(64), (8,), (1, 8, 32), (("nothing", ""), (LATE, r"blocks\.[56]|^bn2$"))
    ),
    "ViT, 6 blocks": Subject(_vit, _pictures(32), (8,), (1, 8, 64)),
    "MiniLM, 32 tokens": Subject(
        _minilm, _sentences, (8,), (1, 8, 64), (("nothing", ""), (LATE, r"layer\.[45]\."))
    ),
}
