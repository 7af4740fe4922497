"""Small backbones of several libraries with batch norms, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from tests.networks import Pictures, dense
from torch import Tensor, nn

STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def flat(rows: int = 12) -> Tensor:
    return torch.randn(rows, 4) * 2 + 1


def pictures(rows: int = 6) -> Tensor:
    return torch.randn(rows, 1, 8, 8) * 2 + 1


def cumulative() -> nn.Module:
    network = dense()
    network[1].momentum = None
    return network


def timm_resnet() -> nn.Module:
    return pytest.importorskip("timm").create_model("test_resnet", num_classes=3, in_chans=1)


def torchvision_shufflenet() -> nn.Module:
    models = pytest.importorskip("torchvision.models")
    return models.ShuffleNetV2([1, 1, 1], [4, 8, 8, 8, 8], num_classes=3)


def transformers_resnet() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(
        num_channels=1, embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic"
    )
    return transformers.ResNetForImageClassification(config)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "dense": (dense, flat),
    "cumulative": (cumulative, flat),
    "pictures": (Pictures, pictures),
    "timm": (timm_resnet, lambda: torch.randn(4, 1, 32, 32)),
    "torchvision": (torchvision_shufflenet, lambda: torch.randn(4, 3, 32, 32)),
    "transformers": (transformers_resnet, lambda: torch.randn(4, 1, 16, 16)),
}


def statistics(network: nn.Module) -> dict[str, Tensor]:
    """What its batch norms have counted and averaged, by name."""
    return {k: v for k, v in network.state_dict().items() if k.endswith(STATISTICS)}


def logits(result: object) -> Tensor:
    return getattr(result, "logits", result)  # type: ignore[return-value]
