"""What the residual networks for small pictures have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from sigmanens.lab.backbones.checks import check_positive, check_rate


class StagedNet(nn.Module):
    """A 3x3 stem of stride 1 without max pool, stages of blocks, average pool and linear head.

    Modules: ``conv1, bn1, layer{1,2,..}.{i}, linear``. Every stage after the first halves the
    picture. Weights start as PyTorch draws them.

    Args:
        block: from the channels of its input, its width and its stride to a block.
        blocks: number of blocks of each stage.
        widths: what the blocks of each stage are told.
        expansion: channels of a block's output, as a multiple of its width.
        stem: channels of the stem.
        num_classes: number of logits.
        in_channels: channels of the picture.
        dropout: probability of dropping before the head.
        bias: whether the stem has biases.

    Raises:
        ConfigError: if a size is not a positive integer or the dropout is not in [0, 1).
    """

    def __init__(
        self,
        block: Callable[[int, int, int], nn.Module],
        blocks: Sequence[int],
        widths: Sequence[int],
        expansion: int,
        stem: int,
        num_classes: int,
        in_channels: int,
        dropout: float = 0.0,
        bias: bool = False,
    ) -> None:
        super().__init__()
        check_positive(num_classes=num_classes, width=stem, in_channels=in_channels)
        check_rate("dropout", dropout)
        self.conv1 = nn.Conv2d(in_channels, stem, 3, padding=1, bias=bias)
        self.bn1 = nn.BatchNorm2d(stem)
        self.num_stages = len(blocks)
        before = stem
        for stage, (count, width) in enumerate(zip(blocks, widths, strict=True)):
            layers = nn.Sequential()
            for i in range(count):
                layers.append(block(before, width, 2 if stage and not i else 1))
                before = width * expansion
            self.add_module(f"layer{stage + 1}", layers)
        self.final_dropout = nn.Dropout(dropout)
        self.linear = nn.Linear(before, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map pictures x (B, in_channels, H, W) to logits (B, num_classes)."""
        x = F.relu(self.bn1(self.conv1(x)))
        for stage in range(1, self.num_stages + 1):
            x = getattr(self, f"layer{stage}")(x)
        logits: Tensor = self.linear(self.final_dropout(x.mean(dim=(2, 3))))
        return logits
