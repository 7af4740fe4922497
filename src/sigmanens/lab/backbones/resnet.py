"""ResNet-18 and ResNet-50 (He et al., arXiv 1512.03385) in the form used on 32x32 pictures."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from sigmanens.lab.backbones.staged import StagedNet


def _projection(in_width: int, out_width: int, stride: int) -> nn.Sequential:
    """Identity where the shapes agree, else a 1x1 convolution and a norm ("option B")."""
    if stride == 1 and in_width == out_width:
        return nn.Sequential()
    return nn.Sequential(
        nn.Conv2d(in_width, out_width, 1, stride=stride, bias=False), nn.BatchNorm2d(out_width)
    )


class BasicBlock(nn.Module):
    """Two 3x3 convolutions: ``y = ReLU(bn2(conv2(ReLU(bn1(conv1(x))))) + shortcut(x))``.

    Args:
        in_width: channels of the input.
        width: channels of both convolutions, and of the output.
        stride: stride of ``conv1`` and of the shortcut.
        dropout: probability of dropping a channel after ``bn1``.
    """

    expansion = 1

    def __init__(self, in_width: int, width: int, stride: int, dropout: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_width, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.dropout = nn.Dropout2d(dropout)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.shortcut = _projection(in_width, width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, in_width, H, W) to (B, width, ceil(H / stride), ceil(W / stride))."""
        out = F.relu(self.dropout(self.bn1(self.conv1(x))))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.shortcut(x))


class Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride) and 1x1 convolutions; the output is four times as wide.

    Args:
        in_width: channels of the input.
        width: channels of the first two convolutions.
        stride: stride of ``conv2`` and of the shortcut.
        dropout: probability of dropping a channel after ``bn2``.
    """

    expansion = 4

    def __init__(self, in_width: int, width: int, stride: int, dropout: float) -> None:
        super().__init__()
        out_width = self.expansion * width
        self.conv1 = nn.Conv2d(in_width, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.dropout = nn.Dropout2d(dropout)
        self.conv3 = nn.Conv2d(width, out_width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_width)
        self.shortcut = _projection(in_width, out_width, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, in_width, H, W) to (B, 4 width, ceil(H / stride), ceil(W / stride))."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.dropout(self.bn2(self.conv2(out))))
        out = self.bn3(self.conv3(out))
        return F.relu(out + self.shortcut(x))


class ResNet(StagedNet):
    """A :class:`StagedNet` of four stages, for 32x32 pictures.

    Blocks have the modules ``conv1,bn1,conv2,bn2[,conv3,bn3],shortcut.{0,1}``. The structure, names
    and initialisation follow the CIFAR style of torch-uncertainty, which the published σN-Ens
    numbers were made with.

    Args:
        block: :class:`BasicBlock` or :class:`Bottleneck`.
        blocks: number of blocks of each of the four stages.
        num_classes: number of logits.
        width: channels of the stem; stage i has width * 2**i (times the block's expansion).
        in_channels: channels of the picture.
        dropout: probability of dropping, in every block and before the head.
    """

    def __init__(
        self,
        block: type[BasicBlock] | type[Bottleneck],
        blocks: Sequence[int],
        num_classes: int = 10,
        width: int = 64,
        in_channels: int = 3,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(
            partial(block, dropout=dropout), blocks, [width * 2**i for i in range(len(blocks))],
            block.expansion, width, num_classes, in_channels, dropout,
        )  # fmt: skip


def resnet18(
    num_classes: int = 10, width: int = 64, in_channels: int = 3, dropout: float = 0.0
) -> ResNet:
    """ResNet-18 for 32x32 pictures: 11,173,962 parameters at 10 classes, 11,220,132 at 100.

    He et al., arXiv 1512.03385, with the CIFAR stem. See :class:`ResNet` for the arguments, the
    module names and what is raised. Maps (B, in_channels, H, W) to (B, num_classes).
    """
    return ResNet(BasicBlock, (2, 2, 2, 2), num_classes, width, in_channels, dropout)


def resnet50(
    num_classes: int = 10, width: int = 64, in_channels: int = 3, dropout: float = 0.0
) -> ResNet:
    """ResNet-50 for 32x32 pictures: 23,520,842 parameters at 10 classes, 23,705,252 at 100.

    He et al., arXiv 1512.03385, with the CIFAR stem. See :class:`ResNet` for the arguments, the
    module names and what is raised. Maps (B, in_channels, H, W) to (B, num_classes).
    """
    return ResNet(Bottleneck, (3, 4, 6, 3), num_classes, width, in_channels, dropout)
