"""MIMO (arXiv 2010.06610): one network with M inputs and M outputs, which trains M subnetworks.

The first layer takes M·C channels, the last gives M·K logits; the rest is the base's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from sigmanens.baselines.base import Rival, base_network, check_count
from sigmanens.baselines.layers import first_layer, last_layer
from sigmanens.ensemble.prediction import logits_of
from sigmanens.errors import ConversionError, InputError
from sigmanens.seeding import own_seed, seeded

__all__ = ["MIMO", "mimo"]


class MIMO(Rival):
    """M inputs, one network, M outputs; made by :func:`mimo`.

    Attributes:
        rho: probability that a row of the training batch is the same for all members.
        repetitions: how often each sample is in a training batch.
    """

    def __init__(
        self, network: nn.Module, members: int, rho: float = 1.0, repetitions: int = 1
    ) -> None:
        super().__init__(network, members)
        self.rho = rho
        self.repetitions = repetitions

    def forward(self, x: Tensor) -> Tensor:
        """Logits of x (B, C, …): (M, B, K) in evaluation, (M·repetitions, B, K) in training.

        In training each member sees the samples in an order of its own; its logits are put back
        into the order of x, so ``loss_fn(net(x), y)`` is right as it is.
        """
        if not self.training:
            return self.joint(x.repeat(1, self.num_members, *(1,) * (x.dim() - 2)))
        order = self.draw_order(len(x), x.device)
        inputs = torch.cat([x[rows % len(x)] for rows in order], 1)
        logits = self.joint(inputs)  # (M, repetitions·B, K)
        back = order.argsort(1)
        logits = torch.stack([z[rows] for z, rows in zip(logits, back, strict=True)])
        return logits.unflatten(1, (self.repetitions, len(x))).flatten(0, 1)

    def joint(self, inputs: Tensor) -> Tensor:
        """Logits (M, B, K) of M inputs side by side in dimension 1: (B, M·C, …)."""
        logits = logits_of(self.network(inputs))
        return logits.unflatten(1, (self.num_members, -1)).transpose(0, 1)

    def draw_order(
        self,
        size: int,
        device: torch.device | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Rows that each member sees, (M, repetitions·B): permutations that share ⌈ρ·rB⌉ places."""
        rows = size * self.repetitions
        common = torch.randperm(rows, device=device, generator=generator)
        apart = int(rows * (1.0 - self.rho))
        orders = []
        for _ in range(self.num_members):
            own = torch.randperm(apart, device=device, generator=generator)
            orders.append(torch.cat([common[:apart][own], common[apart:]]))
        return torch.stack(orders)


def mimo(
    model_or_factory: nn.Module | Callable[[], nn.Module],
    members: int,
    *,
    rho: float = 1.0,
    repetitions: int = 1,
    first_name: str | None = None,
    head_name: str | Sequence[str] | None = None,
    generator: torch.Generator | None = None,
) -> MIMO:
    """Widen a network's first and last layer for M inputs and outputs (arXiv 2010.06610).

    Args:
        model_or_factory: a network, which is copied, or a function that makes one. The two layers
            are drawn anew.
        members: M ≥ 1.
        rho: ρ in [0, 1]. With 1 all members always see the same sample; the authors use 0 on
            CIFAR and more where the network is small for the data.
        repetitions: how often a sample is in each training batch (the authors: 4 on CIFAR, with
            batches of a quarter of the size).
        first_name: the layer that sees the input, if it is not the first one registered.
        head_name: the Linear that makes the logits, if it is not found by itself.
        generator: source of the two layers' weights.

    Returns:
        a network from (B, C, …) to (M, B, K); in training its first dimension is M·repetitions.

    Raises:
        ConversionError: if the first layer has groups, or is also the last. HeadNotFoundError: if
        no head is found. InputError: for an argument out of its range.
    """
    check_count("members", members)
    check_count("repetitions", repetitions)
    if not 0 <= rho <= 1:
        raise InputError(f"rho is {rho!r}; expected a probability in [0, 1]")
    network = base_network(model_or_factory)
    first_name = first_layer(network, first_name)
    last_name = last_layer(network, head_name)
    first, last = network.get_submodule(first_name), network.get_submodule(last_name)
    if first is last:
        raise ConversionError(f"layer '{first_name}' is both the first and the last")
    assert isinstance(first, (nn.Conv2d, nn.Linear))
    assert isinstance(last, nn.Linear)
    if isinstance(first, nn.Conv2d) and first.groups != 1:
        raise ConversionError(
            f"the first layer '{first_name}' has {first.groups} groups, which would keep the "
            "members' inputs apart; expected 1"
        )
    with own_seed(seeded(generator)):
        _widen(first, members, 1)
        _widen(last, members, 0)
    return MIMO(network, members, rho, repetitions)


def _widen(layer: nn.Conv2d | nn.Linear, members: int, dim: int) -> None:
    """Make a layer M times as wide on its side ``dim`` (0: output, 1: input), drawn anew."""
    side = ("out", "in")[dim] + ("_channels" if isinstance(layer, nn.Conv2d) else "_features")
    setattr(layer, side, members * getattr(layer, side))
    device = layer.weight.device
    for name, p in list(layer.named_parameters(recurse=False)):
        shape = list(p.shape)
        if p.dim() > dim:
            shape[dim] *= members
        setattr(layer, name, nn.Parameter(torch.empty(shape, dtype=p.dtype)))
    layer.reset_parameters()  # on the CPU: the same numbers on every device
    layer.to(device)
