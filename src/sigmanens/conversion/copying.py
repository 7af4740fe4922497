"""A deep copy of a network, and a module put into the place of another."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

Network = TypeVar("Network", bound=nn.Module)


def deep_copy(network: Network) -> Network:
    """``copy.deepcopy``, for which computed tensors are values.

    ``torch.nn.utils.weight_norm``, pruning and many networks keep the tensor of their last call,
    with its graph, which ``copy.deepcopy`` refuses. The copy has its value.
    """
    known: dict[int, Any] = {}
    for module in network.modules():
        for tensor in _tensors(vars(module)):
            if not tensor.is_leaf:
                known[id(tensor)] = tensor.detach().clone()
    return copy.deepcopy(network, known)


def _tensors(value: Any) -> Iterable[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (Mapping, list, tuple)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(item)


def put(network: nn.Module, name: str, module: nn.Module) -> nn.Module:
    """Put a module at a dotted name; the network is returned, or the module for the root's ""."""
    if not name:
        return module
    parent, _, leaf = name.rpartition(".")
    setattr(network.get_submodule(parent), leaf, module)
    return network
