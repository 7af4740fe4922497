"""Wide residual networks (Zagoruyko and Komodakis, arXiv 1605.07146), norm after the addition."""

from __future__ import annotations

from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from sigmanens.errors import ConfigError
from sigmanens.lab.backbones.checks import check_positive
from sigmanens.lab.backbones.staged import StagedNet


class WideBlock(nn.Module):
    """Two 3x3 convolutions, the second with the stride; the second norm follows the addition.

    ``y = ReLU(bn2(conv2(ReLU(bn1(dropout(conv1(x))))) + shortcut(x)))``, where the shortcut is the
    identity, or a 1x1 convolution without a norm where the shapes differ.

    Args:
        in_width: channels of the input.
        width: channels of the output.
        stride: stride of ``conv2`` and of the shortcut.
        dropout: probability of dropping a channel after ``conv1``.
        conv_bias: whether the convolutions have biases.
    """

    def __init__(
        self, in_width: int, width: int, stride: int, dropout: float, conv_bias: bool
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_width, width, 3, padding=1, bias=conv_bias)
        self.dropout = nn.Dropout2d(dropout)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=conv_bias)
        self.shortcut = nn.Sequential()
        if stride != 1 or in_width != width:
            self.shortcut.append(nn.Conv2d(in_width, width, 1, stride=stride, bias=conv_bias))
        self.bn2 = nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, in_width, H, W) to (B, width, ceil(H / stride), ceil(W / stride))."""
        out = F.relu(self.bn1(self.dropout(self.conv1(x))))
        out = self.conv2(out) + self.shortcut(x)
        return F.relu(self.bn2(out))


class WideResNet(StagedNet):
    """A :class:`StagedNet` with a stem of 16 channels and three stages of :class:`WideBlock`.

    The structure and initialisation follow the CIFAR style of torch-uncertainty, which the
    published σN-Ens numbers were made with; the original network puts the norms before the
    convolutions.

    Args:
        depth: number of layers, 6n + 4 with n >= 1 blocks a stage.
        widen_factor: the stages have 16, 32 and 64 times this many channels.
        num_classes: number of logits.
        in_channels: channels of the picture.
        dropout: probability of dropping, in every block and before the head.
        conv_bias: whether the convolutions have biases (they do in torch-uncertainty).

    Raises:
        ConfigError: if the depth is not 6n + 4, a size is not a positive integer, or the dropout is
            not in [0, 1).
    """

    def __init__(
        self,
        depth: int,
        widen_factor: int,
        num_classes: int = 10,
        in_channels: int = 3,
        dropout: float = 0.0,
        conv_bias: bool = True,
    ) -> None:
        check_positive(widen_factor=widen_factor)
        blocks, rest = divmod(depth - 4, 6)
        if rest or blocks < 1:
            raise ConfigError(f"A wide ResNet has depth 6n + 4 (10, 16, 28, 40); got {depth}.")
        super().__init__(
            partial(WideBlock, dropout=dropout, conv_bias=conv_bias), (blocks,) * 3,
            [n * widen_factor for n in (16, 32, 64)], 1, 16, num_classes, in_channels, dropout,
            conv_bias,
        )  # fmt: skip


def wrn28_10(
    num_classes: int = 10, in_channels: int = 3, dropout: float = 0.0, conv_bias: bool = True
) -> WideResNet:
    """WRN-28-10 for 32x32 pictures: 36,489,290 parameters at 10 classes, 36,546,980 at 100.

    Zagoruyko and Komodakis, arXiv 1605.07146; 10,096 of the parameters are biases of convolutions.
    See :class:`WideResNet` for the arguments, the module names and what is raised; the published
    single network uses dropout 0.3. Maps (B, in_channels, H, W) to (B, num_classes).
    """
    return WideResNet(28, 10, num_classes, in_channels, dropout, conv_bias)
