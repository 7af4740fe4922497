"""Backbones by name, as a configuration file gives them."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable
from functools import partial
from types import ModuleType
from typing import Any

from torch import nn

from sigmanens.errors import ConfigError
from sigmanens.lab.backbones.cifar_resnet import cifar_resnet
from sigmanens.lab.backbones.efficientnet_lite import LITE0_CLASSES, efficientnet_lite0
from sigmanens.lab.backbones.resnet import resnet18, resnet50
from sigmanens.lab.backbones.small import digits_net
from sigmanens.lab.backbones.tokens import token_classifier
from sigmanens.lab.backbones.wide_resnet import wrn28_10

BACKBONES: dict[str, Callable[..., nn.Module]] = {
    "digits": digits_net,
    "resnet8": partial(cifar_resnet, 8),
    "resnet20": partial(cifar_resnet, 20),
    "resnet56": partial(cifar_resnet, 56),
    "resnet18": resnet18,
    "resnet50": resnet50,
    "wrn28_10": wrn28_10,
    "efficientnet_lite0": efficientnet_lite0,
}
"""Name to builder. Every builder takes the keywords ``num_classes`` and ``in_channels``."""


def build_backbone(name: str, **kwargs: Any) -> nn.Module:
    """Build a network by name.

    Args:
        name: a key of ``BACKBONES``, ``"timm/<name>"`` (``timm.create_model``),
            ``"torchvision/<name>"`` (``torchvision.models.get_model``) or ``"transformers/<name>"``
            (a sequence classifier by hub name or folder, or "minilm", on token numbers).
        kwargs: passed to the builder: ``num_classes``, ``in_channels``, ``width``, ``dropout`` and
            so on. The two libraries' networks also take ``pretrained`` (default False). timm takes
            ``in_channels`` under either that name or its own ``in_chans``.

    Returns:
        A network from pictures (B, in_channels, H, W) to logits (B, num_classes).

    Raises:
        ConfigError: if the name is unknown, an argument does not fit, or the library is not
            installed.
    """
    library, slash, model = name.partition("/")
    if slash and library == "timm":
        return _build_timm(model, **kwargs)
    if slash and library == "torchvision":
        return _build_torchvision(model, **kwargs)
    if slash and library == "transformers":
        _import_library("transformers")
        return token_classifier(model, **kwargs)
    if name not in BACKBONES:
        raise ConfigError(
            f"Unknown backbone {name!r}. Known: {', '.join(sorted(BACKBONES))}, timm/<name>, "
            f"torchvision/<name> and transformers/<name>.{_guess(name, BACKBONES)}"
        )
    builder = BACKBONES[name]
    accepted = inspect.signature(builder).parameters
    unknown = [key for key in kwargs if key not in accepted]
    if unknown:
        raise ConfigError(
            f"Backbone {name!r} takes no argument {unknown[0]!r}. It takes: {', '.join(accepted)}."
        )
    return builder(**kwargs)


def pretrained_classes(name: str) -> int | None:
    """In how many classes a network's pretrained weights answer; None: not known.

    Known are ``timm/`` models and "efficientnet_lite0".
    """
    if name == "efficientnet_lite0":
        return LITE0_CLASSES
    library, _, model = name.partition("/")
    if library != "timm":
        return None
    found = _import_library("timm").get_pretrained_cfg(model)
    return None if found is None else int(found.num_classes)


def _build_timm(model: str, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    timm = _import_library("timm")
    if not timm.is_model(model):
        known = timm.list_models()
        raise ConfigError(f"timm has no model {model!r}.{_guess(model, known)}")
    if "in_channels" in kwargs:
        kwargs["in_chans"] = kwargs.pop("in_channels")
    try:
        return timm.create_model(model, pretrained=pretrained, **kwargs)
    except TypeError as error:
        raise ConfigError(f"timm/{model} was built with a wrong argument: {error}.") from error


def _build_torchvision(model: str, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    models = _import_library("torchvision.models")
    known = models.list_models(module=models)
    if model not in known:
        raise ConfigError(f"torchvision has no model {model!r}.{_guess(model, known)}")
    try:
        return models.get_model(model, weights="DEFAULT" if pretrained else None, **kwargs)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"torchvision/{model} was built with a wrong argument: {error}"
        ) from error


def _import_library(name: str) -> ModuleType:
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"A backbone named {package}/<name> needs {package}: pip install {package}."
        ) from error


def _guess(name: str, known: Iterable[str]) -> str:
    """Return a sentence with the nearest known names, or nothing."""
    near = difflib.get_close_matches(name, known, n=3)
    return f" Did you mean {' or '.join(near)}?" if near else ""
