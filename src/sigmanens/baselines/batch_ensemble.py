r"""BatchEnsemble (arXiv 2002.06715): one weight matrix, a rank-one factor for each member.

.. math:: y_m = \bigl((x \odot r_m) W^\top\bigr) \odot s_m + b_m

The layers are torch-uncertainty's, in the place of every convolution and linear layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sigmanens.baselines.base import (
    Rival,
    base_network,
    check_count,
    is_trained,
    repeated,
    unfolded,
)
from sigmanens.baselines.layers import (
    conv_sizes,
    first_layer,
    linear_sizes,
    replace_layers,
    uncertainty_layers,
)
from sigmanens.errors import InputError
from sigmanens.seeding import own_seed, seeded

__all__ = ["BatchEnsemble", "batchensemble"]

INITS = ("auto", "normal", "sign")


class BatchEnsemble(Rival):
    """M members with rank-one factors; made by :func:`batchensemble`."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Logits (M, B, C, …): every member sees the whole batch, in training too."""
        args, kwargs = repeated(self.network, args, kwargs, self.num_members)  # type: ignore[assignment]
        return unfolded(self.network(*args, **kwargs), self.num_members)

    def no_weight_decay(self) -> set[str]:
        """The factors r and s, which the authors' code does not decay."""
        return {n for n, _ in self.named_parameters() if n.endswith((".r_group", ".s_group"))}


def batchensemble(
    model_or_factory: nn.Module | Callable[[], nn.Module],
    members: int,
    *,
    init: str = "auto",
    std: float | None = None,
    generator: torch.Generator | None = None,
) -> BatchEnsemble:
    r"""Put torch-uncertainty's BatchEnsemble layers into a network (arXiv 2002.06715).

    The weights W are the base's, random or pretrained, and each member's bias starts as the base's.
    Norms stay shared: a BatchNorm takes its statistics over all members' rows, as in
    torch-uncertainty and the authors' code.

    Args:
        model_or_factory: a network, which is copied, or a function that makes one.
        members: M ≥ 1.
        init: of r and s: "normal" draws from N(1, std²), "sign" draws ±1; "auto" is "normal".
        std: standard deviation under "normal"; by default 0.5 (torch-uncertainty and the authors'
            code), or 0.05 where the norms of the base have been trained, so that its function is
            nearly kept. With 0 it is kept exactly, and the members are and stay equal.
        generator: source of r and s.

    Returns:
        a network from (B, …) to (M, B, C). Over the base it has M(in + out) parameters for each
        layer, and (M - 1)·out for each bias.

    Raises:
        MissingPackageError: without torch-uncertainty. ConversionError: if there is no layer to
        replace. InputError: for an argument out of its range.
    """
    check_count("members", members)
    if init not in INITS:
        raise InputError(f"init is {init!r}; expected one of {', '.join(map(repr, INITS))}")
    if std is not None and not std >= 0:
        raise InputError(f"std is {std!r}; expected a number ≥ 0, or None")
    network = base_network(model_or_factory)
    first_layer(network)
    if std is None:
        std = 0.05 if is_trained(network) else 0.5
    library = uncertainty_layers()

    def fill(layer: Any, source: Any) -> nn.Module:
        with torch.no_grad():
            if source.bias is not None:
                layer.bias.copy_(source.bias.expand(members, -1))
                source.bias = None  # the source itself is what the layer calls
            for factor in (layer.r_group, layer.s_group):
                drawn = torch.randn(factor.shape)
                factor.copy_(drawn.sign() if init == "sign" else 1 + std * drawn)
        return layer.to(source.weight.dtype)

    def conv(name: str, source: nn.Conv2d) -> nn.Module:
        layer = library.BatchConv2d(num_estimators=members, **conv_sizes(source))
        layer.conv = source
        return fill(layer, source)

    def linear(name: str, source: nn.Linear) -> nn.Module:
        layer = library.BatchLinear(num_estimators=members, **linear_sizes(source))
        layer.linear = source
        return fill(layer, source)

    with own_seed(seeded(generator)):
        replace_layers(network, {nn.Conv2d: conv, nn.Linear: linear})
    return BatchEnsemble(network, members)
