"""The layer factory: put another library's layers into the place of a network's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from torch import nn

from sigmanens.baselines.base import import_library
from sigmanens.conversion.heads import find_heads
from sigmanens.errors import ConversionError, HeadNotFoundError

__all__ = [
    "conv_sizes",
    "first_layer",
    "last_layer",
    "linear_sizes",
    "plain_layers",
    "replace_layers",
    "uncertainty_layers",
]

Maker = Callable[[str, Any], nn.Module]


def uncertainty_layers() -> Any:
    """The module :mod:`sigmanens.baselines.uncertainty`, which needs torch-uncertainty.

    Raises:
        MissingPackageError: if that is not installed.
    """
    import_library("torch_uncertainty.layers", "torch-uncertainty")
    return import_module("sigmanens.baselines.uncertainty")


def plain_layers(network: nn.Module) -> dict[str, nn.Conv2d | nn.Linear]:
    """Convolutions and linear layers by dotted name, in the order of registration; tied ones once.

    The projection within an ``nn.MultiheadAttention``, which is never called, is none of them.
    """
    return {
        n: m
        for n, m in network.named_modules()
        if isinstance(m, (nn.Conv2d, nn.Linear)) and not _within_attention(network, n)
    }


def _within_attention(network: nn.Module, name: str) -> bool:
    parent = network.get_submodule(name.rpartition(".")[0])
    return isinstance(parent, nn.MultiheadAttention)


def first_layer(network: nn.Module, name: str | None = None) -> str:
    """Name of the layer that sees the input: the one given, or the first in registration order.

    Raises:
        ConversionError: if there is none, or the one given is none.
    """
    layers = plain_layers(network)
    if not layers:
        raise ConversionError(
            f"this {type(network).__name__} has no nn.Conv2d and no nn.Linear to replace"
        )
    if name is None:
        return next(iter(layers))
    if name not in layers:
        raise ConversionError(
            f"first_name={name!r} is no nn.Conv2d or nn.Linear of this {type(network).__name__}; "
            f"its first ones are {', '.join(list(layers)[:5])}"
        )
    return name


def last_layer(network: nn.Module, head_name: str | Sequence[str] | None = None) -> str:
    """Name of the one Linear that makes the logits.

    Raises:
        HeadNotFoundError: if there is none, or more than one.
    """
    names = find_heads(network, head_name, "fresh")
    if len({id(network.get_submodule(n)) for n in names}) != 1:
        raise HeadNotFoundError(
            f"this {type(network).__name__} has {len(names)} heads ({', '.join(names)}); expected "
            "one Linear. Name it with head_name"
        )
    if not isinstance(network.get_submodule(names[0]), nn.Linear):
        kind = type(network.get_submodule(names[0])).__name__
        raise HeadNotFoundError(f"head '{names[0]}' is a {kind}; expected an nn.Linear")
    return names[0]


def replace_layers(network: nn.Module, make: dict[type[nn.Module], Maker]) -> list[str]:
    """Replace modules of the given classes by what their makers return.

    Args:
        network: changed in place.
        make: from a class, subclasses included, to ``(name, module) -> module``. A tied module is
            replaced once, under all its names.

    Returns:
        names of the replaced modules; tied ones once.

    Raises:
        ConversionError: if a maker refuses a layer; the message names it.
    """
    classes: tuple[type[nn.Module], ...] = tuple(make)
    found = [
        (n, m)
        for n, m in network.named_modules(remove_duplicate=False)
        if isinstance(m, classes) and not _within_attention(network, n)
    ]
    made: dict[int, nn.Module] = {}
    replaced = []
    for name, module in found:
        if id(module) not in made:
            try:
                maker = next(f for cls, f in make.items() if isinstance(module, cls))
                new = maker(name, module)
            except ValueError as e:  # what the libraries raise for sizes that do not fit
                raise ConversionError(f"layer '{name}': {e}") from e
            tensors = [*module.parameters(), *module.buffers()]
            if tensors:
                new.to(tensors[0].device)
            made[id(module)] = new.train(module.training)
            replaced.append(name)
        parent, _, leaf = name.rpartition(".")
        if not leaf:
            raise ConversionError(
                f"the network is itself a {type(module).__name__}, which cannot be replaced: wrap "
                "it in nn.Sequential"
            )
        setattr(network.get_submodule(parent), leaf, made[id(module)])
    _disable_fused_paths(network)
    return replaced


def _disable_fused_paths(network: nn.Module) -> None:
    """Keep nn.TransformerEncoder(Layer) from reading the weights of layers that are replaced."""
    for module in network.modules():
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def conv_sizes(conv: nn.Conv2d) -> dict[str, Any]:
    """Arguments that torch-uncertainty's convolutions take over from a plain one."""
    return {
        "in_channels": conv.in_channels,
        "out_channels": conv.out_channels,
        "kernel_size": conv.kernel_size,
        "stride": conv.stride,
        "padding": conv.padding,
        "dilation": conv.dilation,
        "groups": conv.groups,
        "bias": conv.bias is not None,
    }


def linear_sizes(linear: nn.Linear) -> dict[str, Any]:
    """Arguments that torch-uncertainty's linear layers take over from a plain one."""
    return {
        "in_features": linear.in_features,
        "out_features": linear.out_features,
        "bias": linear.bias is not None,
    }
