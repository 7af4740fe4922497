"""The CIFAR ResNet of He et al. (arXiv 1512.03385, section 4.2), with parameter-free shortcuts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from sigmanens.errors import ConfigError
from sigmanens.lab.backbones.staged import StagedNet


class CifarBlock(nn.Module):
    """Two 3x3 convolutions around a shortcut.

    ``y = ReLU(bn2(conv2(ReLU(bn1(conv1(x))))) + shortcut(x))``. Where the block halves the picture,
    the shortcut has no parameters ("option A": every second pixel, the missing channels padded with
    zeros, half on either side) or is a 1x1 convolution with a norm ("option B").

    Args:
        in_width: channels of the input.
        out_width: channels of the output, at least ``in_width``.
        stride: stride of ``conv1`` and of the shortcut.
        projection: option B.
    """

    def __init__(
        self, in_width: int, out_width: int, stride: int = 1, projection: bool = False
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_width, out_width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_width)
        self.conv2 = nn.Conv2d(out_width, out_width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_width)
        self.stride = stride
        missing = 0 if projection else out_width - in_width
        self.channel_padding = (missing // 2, missing - missing // 2)
        self.downsample: nn.Module | None = None
        if projection and (in_width != out_width or stride != 1):
            self.downsample = nn.Sequential(
                nn.Conv2d(in_width, out_width, 1, stride=stride, bias=False),
                nn.BatchNorm2d(out_width),
            )

    def forward(self, x: Tensor) -> Tensor:
        """Map x (B, in_width, H, W) to (B, out_width, ceil(H / stride), ceil(W / stride))."""
        out = F.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.shortcut(x))

    def shortcut(self, x: Tensor) -> Tensor:
        """Return x itself, or x in the block's output shape."""
        if self.downsample is not None:
            out: Tensor = self.downsample(x)
            return out
        if self.stride != 1:
            # Every second pixel; unlike a slice, its gradient keeps the memory format.
            x = F.avg_pool2d(x, 1, self.stride)
        if any(self.channel_padding):
            x = F.pad(x, (0, 0, 0, 0, *self.channel_padding))
        return x


class CifarResNet(StagedNet):
    """A :class:`StagedNet` of :class:`CifarBlock`; later stages double the channels.

    Args:
        blocks: number of blocks of each stage.
        num_classes: number of logits.
        width: channels of the first stage.
        in_channels: channels of the picture.
        shortcut: "pad" or "conv", see :class:`CifarBlock`.
        init: "he": weights of convolutions and of the head start from He et al.'s normal
            distribution (fan-in); "torch": from PyTorch's default.

    Raises:
        ConfigError: if a size is not a positive integer, or another word is unknown.
    """

    def __init__(
        self,
        blocks: Sequence[int],
        num_classes: int = 10,
        width: int = 16,
        in_channels: int = 3,
        shortcut: str = "pad",
        init: str = "he",
    ) -> None:
        for key, value, known in (
            ("shortcut", shortcut, ("pad", "conv")),
            ("init", init, ("he", "torch")),
        ):
            if value not in known:
                raise ConfigError(f"{key} must be one of {', '.join(known)}; got {value!r}.")
        super().__init__(
            partial(CifarBlock, projection=shortcut == "conv"), blocks,
            [width * 2**i for i in range(len(blocks))], 1, width, num_classes, in_channels,
        )  # fmt: skip
        for module in self.modules():
            if init == "he" and isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)


def cifar_resnet(
    depth: int,
    num_classes: int = 10,
    width: int = 16,
    in_channels: int = 3,
    shortcut: str = "pad",
    init: str = "he",
) -> CifarResNet:
    """ResNet of ``depth = 6n + 2`` layers for 32x32 pictures: three stages of n blocks.

    He et al., arXiv 1512.03385. With width 16 and 10 classes: ResNet-8 has 75,290 parameters,
    ResNet-20 269,722, ResNet-56 853,018.

    Args:
        depth: 8, 14, 20, 32, 44, 56, 110: any 6n + 2 with n >= 1.
        num_classes: number of logits.
        width: channels of the first stage; the stages are width, 2 width and 4 width wide.
        in_channels: channels of the picture.
        shortcut: "pad" (the paper's option A) or "conv" (option B).
        init: "he" or "torch".

    Returns:
        A network from (B, in_channels, H, W) to (B, num_classes).

    Raises:
        ConfigError: if the depth is not 6n + 2, or a size is not a positive integer.
    """
    blocks, rest = divmod(depth - 2, 6)
    if rest or blocks < 1:
        raise ConfigError(
            f"A CIFAR ResNet has depth 6n + 2 (8, 14, 20, 32, 44, 56, 110); got {depth}."
        )
    return CifarResNet((blocks,) * 3, num_classes, width, in_channels, shortcut, init)


def digits_net(width: int = 16, num_classes: int = 10, in_channels: int = 1) -> CifarResNet:
    """Residual network for 8x8 grey digits: the CIFAR ResNet cut down to two stages of one block.

    ``conv1, bn1`` at 8x8, ``layer1.0`` (width channels, 8x8), ``layer2.0`` (2 width channels, 4x4),
    global average pool, ``linear``. After He et al., arXiv 1512.03385. It has 19,130
    parameters at width 16.

    Args:
        width: channels of the first stage.
        num_classes: number of logits.
        in_channels: channels of the picture.

    Returns:
        A network from (B, in_channels, H, W), H and W at least 2, to (B, num_classes).

    Raises:
        ConfigError: if a size is not a positive integer.
    """
    return CifarResNet((1, 1), num_classes, width, in_channels)
