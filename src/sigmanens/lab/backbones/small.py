"""A network small enough to train in seconds on one CPU core."""

from __future__ import annotations

from sigmanens.lab.backbones.cifar_resnet import CifarResNet


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
