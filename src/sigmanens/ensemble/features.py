"""What the members' heads are given: the features that feature-based scores are fitted on.

The features of a member are the input of the last layer with weights in its head: the last Linear,
or the last convolution where there is no Linear. Under ``head="fresh"`` that is after the head's
own norm; in a head of several layers, after all but the last. Of a network with two heads (timm's
distilled ones), the first counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from sigmanens.conversion.heads import find_heads, head_lists, last_linear
from sigmanens.ensemble.inputs import Inputs, call_arguments, resolve_batch_dims
from sigmanens.errors import HeadNotFoundError, InputError
from sigmanens.passes.context import MemberAxis
from sigmanens.passes.modes import evaluating

__all__ = ["head_weights", "member_features"]


def member_features(network: nn.Module, x: Any, *, head_name: str | None = None) -> Tensor:
    """Features of every member in evaluation mode, without gradients: (M, B, D).

    The forward pass is the network's own, whatever its schedule, and its mode is restored. Features
    with further dimensions (maps, tokens) are averaged over them.

    Args:
        network: a :class:`~sigmanens.SigmaEnsemble`, an ensemble whose forward gives (M, B, …),
            such as separate networks, or a plain network (M = 1).
        x: a tensor, a tuple of positional or a mapping of keyword inputs, batch B.
        head_name: dotted name of the head, if it is not found by itself.

    Raises:
        HeadNotFoundError: if there is no head, or it holds neither Linear nor convolution.
        InputError: if a head runs another number of times than once for each member.
    """
    layers = _last_layers(network, head_name)
    members = _num_members(network)
    axis, plan = getattr(network, "axis", None), getattr(network, "plan", None)
    inner = network
    if isinstance(axis, MemberAxis):  # a σN-Ens, of which members may be chosen
        inner, chosen = network.get_submodule("network"), axis.chosen
        members = chosen.count
        layers = layers[chosen.members] if len(layers) > 1 else layers
    args, kwargs = call_arguments(x, inner)
    dims = resolve_batch_dims(inner, None if plan is None else plan.batch_dims)
    size = Inputs.of(args, kwargs, dims).size
    with evaluating(network), _inputs_of(layers) as seen:
        network(*args, **kwargs)
    parts = [p for found in seen for p in found]
    rows = sum(len(p) for p in parts)
    alone = len(layers) == 1 or all(len(found) == 1 for found in seen)
    if rows != members * size or not alone:
        raise InputError(
            f"the head was given {rows} rows in {len(parts)} calls for {size} samples and "
            f"{members} members; expected {members * size}, once for each member. Name the head "
            "with head_name=…"
        )
    return torch.cat(parts).unflatten(0, (members, size))


def head_weights(network: nn.Module, *, head_name: str | None = None) -> tuple[Tensor, Tensor]:
    """Weight (M, C, D) and bias (M, C) of each member's last layer; a missing bias is 0.

    Where nothing follows that layer, a member's logits are ``features @ weight.T + bias`` with the
    features of :func:`member_features`, whose arguments these are.

    Raises:
        HeadNotFoundError: if there is no head, or it holds neither Linear nor convolution.
        InputError: if its last layer is a convolution over more than one position.
    """
    layers = _last_layers(network, head_name)
    weights, biases = [], []
    for layer in layers:
        assert isinstance(layer, (nn.Linear, _ConvNd))
        weight = layer.weight.detach()
        if weight[0, 0].numel() != 1 or getattr(layer, "groups", 1) != 1:
            raise InputError(
                f"the head's last layer is {layer}; expected a Linear or a 1×1 convolution, whose "
                "output is a matrix times the features"
            )
        weights.append(weight.flatten(1))
        bias = layer.bias
        biases.append(weight.new_zeros(len(weight)) if bias is None else bias.detach())
    members = _num_members(network)
    weight, bias = torch.stack(weights), torch.stack(biases)
    return weight.expand(members, -1, -1).clone(), bias.expand(members, -1).clone()


def _num_members(network: nn.Module) -> int:
    return int(getattr(network, "num_members", 1))


def _last_layers(network: nn.Module, head_name: str | None) -> list[nn.Module]:
    """The last layer of each member's head, or the one that all members share."""
    networks = getattr(network, "networks", None)
    if isinstance(networks, nn.ModuleList):
        return [_last_layers(net, head_name)[0] for net in networks]
    wrapped = getattr(network, "network", None)
    inner = wrapped if hasattr(network, "num_members") and wrapped is not None else network
    if not isinstance(inner, nn.Module):
        raise HeadNotFoundError(f"{type(network).__name__} holds no network to find a head in")
    # Heads of the members' own, where a module holds one for each in a list called ``heads``.
    for name, heads in head_lists(inner, _num_members(network)):
        if name == (head_name or name):
            return [_last_layer(head) for head in heads]
    return [_last_layer(inner.get_submodule(find_heads(inner, head_name, "copy")[0]))]


def _last_layer(head: nn.Module) -> nn.Module:
    linear = last_linear(head)
    if linear is not None:
        return linear
    convolutions = [m for m in head.modules() if isinstance(m, _ConvNd)]
    if not convolutions:
        raise HeadNotFoundError(
            f"the head, a {type(head).__name__}, holds neither Linear nor convolution, so there is "
            "no layer whose input could be the features. Name another with head_name=…"
        )
    return convolutions[-1]


_collecting: ContextVar[object] = ContextVar("sigmanens_collecting", default=None)


@contextmanager
def _inputs_of(layers: Sequence[nn.Module]) -> Iterator[list[list[Tensor]]]:
    """Collect each layer's inputs (rows, D) in this thread and task, for the time of the block."""
    seen: list[list[Tensor]] = [[] for _ in layers]

    def collect(index: int) -> Any:
        def hook(layer: nn.Module, args: tuple[Any, ...]) -> None:
            if _collecting.get() is seen:
                x = args[0].detach()
                channels = 1 if isinstance(layer, _ConvNd) else x.dim() - 1
                middle = [d for d in range(1, x.dim()) if d != channels]
                seen[index].append(x.mean(middle) if middle else x.clone())

        return hook

    token = _collecting.set(seen)
    try:
        with ExitStack() as stack:
            for index, layer in enumerate(layers):
                stack.callback(layer.register_forward_pre_hook(collect(index)).remove)
            yield seen
    finally:
        _collecting.reset(token)
