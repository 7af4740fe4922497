"""Backbones: plain PyTorch networks with plain norms, by name.

``build_backbone("resnet20", num_classes=10)`` builds one of ours; ``"timm/<name>"`` and
``"torchvision/<name>"`` build from these libraries.
"""

from sigmanens.lab.backbones.cifar_resnet import CifarBlock, CifarResNet, cifar_resnet, digits_net
from sigmanens.lab.backbones.registry import BACKBONES, build_backbone
from sigmanens.lab.backbones.resnet import resnet18, resnet50
from sigmanens.lab.backbones.weights import load_weights
from sigmanens.lab.backbones.wide_resnet import WideBlock, WideResNet

__all__ = [
    "BACKBONES",
    "CifarBlock",
    "CifarResNet",
    "WideBlock",
    "WideResNet",
    "build_backbone",
    "cifar_resnet",
    "digits_net",
    "load_weights",
    "resnet18",
    "resnet50",
]
