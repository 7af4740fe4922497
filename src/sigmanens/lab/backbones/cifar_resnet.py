"""The CIFAR ResNet of He et al. (arXiv 1512.03385, section 4.2), with parameter-free shortcuts."""

from __future__ import annotations

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from sigmanens.errors import ConfigError
from sigmanens.lab.backbones.checks import check_positive


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


class CifarResNet(nn.Module):
    """A 3x3 stem, stages of :class:`CifarBlock`, a global average pool and a linear head.

    Modules: ``conv1, bn1, layer{1,2,..}.{i}.{conv1,bn1,conv2,bn2}, linear``. Every stage after the
    first halves the picture and doubles the channels.

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
        super().__init__()
        for key, value, known in (
            ("shortcut", shortcut, ("pad", "conv")),
            ("init", init, ("he", "torch")),
        ):
            if value not in known:
                raise ConfigError(f"{key} must be one of {', '.join(known)}; got {value!r}.")
        check_positive(num_classes=num_classes, width=width, in_channels=in_channels)
        self.conv1 = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.num_stages = len(blocks)
        in_width = width
        for stage, count in enumerate(blocks):
            out_width = width * 2**stage
            layers = []
            for i in range(count):
                layers.append(_block(in_width, out_width, stage, i, shortcut))
                in_width = out_width
            self.add_module(f"layer{stage + 1}", nn.Sequential(*layers))
        self.linear = nn.Linear(in_width, num_classes)
        for module in self.modules():
            if init == "he" and isinstance(module, nn.Conv2d | nn.Linear):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Map pictures x (B, in_channels, H, W) to logits (B, num_classes)."""
        x = F.relu(self.bn1(self.conv1(x)))
        for stage in range(1, self.num_stages + 1):
            x = getattr(self, f"layer{stage}")(x)
        return self.linear(x.mean(dim=(2, 3)))


def _block(in_width: int, out_width: int, stage: int, i: int, shortcut: str) -> CifarBlock:
    stride = 2 if stage and not i else 1
    return CifarBlock(in_width, out_width, stride, projection=shortcut == "conv")


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
