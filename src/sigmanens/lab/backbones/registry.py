"""Backbones by name, as a configuration file gives them."""

from __future__ import annotations

import difflib
import importlib
import inspect
from collections.abc import Callable, Iterable
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import nn

from sigmanens.errors import ConfigError, DataError
from sigmanens.lab.backbones.cifar_resnet import cifar_resnet, digits_net
from sigmanens.lab.backbones.efficientnet_lite import LITE0_CLASSES, efficientnet_lite0
from sigmanens.lab.backbones.resnet import resnet18, resnet50
from sigmanens.lab.backbones.tokens import token_classifier
from sigmanens.lab.backbones.weights import load_weights
from sigmanens.lab.backbones.wide_resnet import wrn28_10
from sigmanens.lab.config import ModelConfig
from sigmanens.lab.plugins import imported, is_import

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
            (a sequence classifier by hub name or folder, or "minilm", on token numbers), or
            ``module:function`` of a file of your own.
        kwargs: passed to the builder: ``num_classes``, ``in_channels``, ``width``, ``dropout`` and
            so on. The networks of timm and torchvision also take ``pretrained`` (default False);
            under another number of classes than that of the weights their head is new. timm takes
            ``in_channels`` under either that name or its own ``in_chans``.

    Returns:
        A network from pictures (B, in_channels, H, W) to logits (B, num_classes).

    Raises:
        ConfigError: if the name is unknown, an argument does not fit, or the library is not
            installed. DataError: if pretrained weights cannot be loaded.
    """
    if is_import(name):
        return _own(imported(name, "model.name")(**kwargs), name)
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


def drawn_backbone(model: ModelConfig, classes: int, seed: int) -> nn.Module:
    """The network that a configuration names; what is random in it depends on the seed alone.

    Raises:
        ConfigError, DataError: as :func:`build_backbone`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_backbone(model.name, **({"num_classes": classes} | model.options))


def base_network(model: ModelConfig, classes: int, seed: int) -> nn.Module:
    """The network of :func:`drawn_backbone` with the weights that the configuration names.

    Raises:
        ConfigError, DataError: as :func:`build_backbone` and ``load_weights``.
    """
    network = drawn_backbone(model, classes, seed)
    return load_weights(network, model.weights) if model.weights else network


def _own(network: Any, name: str) -> nn.Module:
    if not isinstance(network, nn.Module):
        raise ConfigError(f"{name} returned a {type(network).__name__}; expected a torch module")
    return network


def pretrained_classes(name: str) -> int | None:
    """In how many classes a network's pretrained weights answer; None: not known.

    Known are ``timm/`` and ``torchvision/`` models and "efficientnet_lite0".
    """
    if name == "efficientnet_lite0":
        return LITE0_CLASSES
    library, _, model = name.partition("/")
    if library == "torchvision":
        return _torchvision_classes(model)
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
    except (OSError, RuntimeError) as error:
        if not pretrained:
            raise
        raise _unloaded(f"timm/{model}", error) from error


def _build_torchvision(model: str, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    models = _import_library("torchvision.models")
    known = models.list_models(module=models)
    if model not in known:
        raise ConfigError(f"torchvision has no model {model!r}.{_guess(model, known)}")
    classes = kwargs.get("num_classes")
    try:
        if not pretrained:
            return models.get_model(model, weights=None, **kwargs)
        if classes in (None, _torchvision_classes(model)):
            return models.get_model(model, weights="DEFAULT", **kwargs)
        others = {key: value for key, value in kwargs.items() if key != "num_classes"}
        network = models.get_model(model, weights="DEFAULT", **others)
        return _with_layers_of(models.get_model(model, weights=None, **kwargs), network)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"torchvision/{model} was built with a wrong argument: {error}"
        ) from error
    except (OSError, RuntimeError) as error:
        if not pretrained:
            raise
        raise _unloaded(f"torchvision/{model}", error) from error


def _unloaded(name: str, error: Exception) -> DataError:
    """What is said of weights that are not there, not reached or not whole."""
    reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
    return DataError(
        f"the weights of {name} cannot be loaded: {reason} Is the network reachable? A file of "
        "weights is given as model.weights"
    )


def _torchvision_classes(model: str) -> int | None:
    """Classes of the default weights; None: they have no list of classes, or there are none."""
    models = _import_library("torchvision.models")
    if model not in models.list_models(module=models):
        return None
    weights = getattr(models.get_model_weights(model), "DEFAULT", None)
    return None if weights is None else len(weights.meta.get("categories", ())) or None


def _with_layers_of(untrained: nn.Module, network: nn.Module) -> nn.Module:
    """The network, with the layers of an untrained one wherever their shapes differ: its heads."""
    fresh = dict(untrained.named_modules())
    for name, module in list(network.named_modules()):
        here = {key: value.shape for key, value in module.named_parameters(recurse=False)}
        other = fresh.get(name)
        if other is not None and here != {
            key: value.shape for key, value in other.named_parameters(recurse=False)
        }:
            parent, _, last = name.rpartition(".")
            setattr(network.get_submodule(parent), last, other)
    return network


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
