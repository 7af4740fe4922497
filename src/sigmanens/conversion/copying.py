"""A deep copy of a network, also where a module keeps a tensor that it has computed."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

__all__ = ["deep_copy"]

Network = TypeVar("Network", bound=nn.Module)


def deep_copy(network: Network) -> Network:
    """``copy.deepcopy``, for which computed tensors are values.

    ``torch.nn.utils.weight_norm``, pruning and many networks keep the tensor of their last call,
    with its graph, which ``copy.deepcopy`` refuses. The copy has its value.
    """
    known: dict[int, Any] = {}
    for module in network.modules():
        for tensor in _tensors(vars(module).values()):
            if not tensor.is_leaf:
                known[id(tensor)] = tensor.detach().clone()
    return copy.deepcopy(network, known)


def _tensors(values: Iterable[Any]) -> Iterable[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, Mapping):
            yield from _tensors(value.values())
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)
