"""Masksembles (arXiv 2012.08334): fixed binary masks with a chosen overlap before every layer.

The layers are torch-uncertainty's; the first layer stays plain, as in its networks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sigmanens.baselines.base import Rival, base_network, check_count, repeated, unfolded
from sigmanens.baselines.layers import (
    conv_sizes,
    first_layer,
    linear_sizes,
    replace_layers,
    uncertainty_layers,
)
from sigmanens.errors import ConversionError, InputError
from sigmanens.seeding import own_seed, seeded

__all__ = ["Masksembles", "draw_masks", "masksembles"]

_SMALLEST = 10  # channels, below which torch-uncertainty refuses
_DRAWS = 5_000  # of masks with a wanted number of channels, after which there are taken to be none
_HALVINGS = 60  # of the interval in which the scale lies, likewise


class Masksembles(Rival):
    """M members, each with its own masks; made by :func:`masksembles`."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Logits (M, B, C, …): every member sees the whole batch, in training too."""
        args, kwargs = repeated(self.network, args, kwargs, self.num_members)  # type: ignore[assignment]
        return unfolded(self.network(*args, **kwargs), self.num_members)


def masksembles(
    model_or_factory: nn.Module | Callable[[], nn.Module],
    members: int,
    *,
    scale: float = 2.0,
    first_name: str | None = None,
    generator: torch.Generator | None = None,
) -> Masksembles:
    """Put torch-uncertainty's Masksembles layers into a network (arXiv 2012.08334).

    All convolutions and linear layers but the first have the channels of their input masked. The
    weights are the base's. Norms are shared: a BatchNorm takes its statistics over all members'
    rows.

    Args:
        model_or_factory: a network, which is copied, or a function that makes one.
        members: M ≥ 1.
        scale: in [1, 6]; 1 makes all masks equal (one network), larger ones overlap less.
        first_name: the layer that sees the input, if it is not the first one registered.
        generator: source of the masks.

    Returns:
        a network from (B, …) to (M, B, C) with the parameters of the base; masks are buffers.

    Raises:
        MissingPackageError: without torch-uncertainty. ConversionError: if a layer has fewer than
        10 input channels, or a number of them for which M and the scale give no masks, or there is
        no layer to mask. InputError: for an argument out of its range.
    """
    check_count("members", members)
    if not 1 <= scale <= 6:
        raise InputError(f"scale is {scale!r}; expected a number from 1 to 6")
    network = base_network(model_or_factory)
    first = network.get_submodule(first_layer(network, first_name))
    library = uncertainty_layers()

    def masks_for(source: Any, channels: int) -> Tensor:
        # Before the library's layer is made, which draws masks too, and knows no end.
        return draw_masks(channels, members, scale).to(source.weight.dtype)

    def conv(name: str, source: nn.Conv2d) -> nn.Module:
        if source is first:
            return source
        masks = masks_for(source, source.in_channels)
        layer = library.MaskedConv2d(num_estimators=members, scale=scale, **conv_sizes(source))
        layer.conv = source
        layer.set_masks(masks)
        return layer

    def linear(name: str, source: nn.Linear) -> nn.Module:
        if source is first:
            return source
        masks = masks_for(source, source.in_features)
        layer = library.MaskedLinear(num_estimators=members, scale=scale, **linear_sizes(source))
        layer.linear = source
        layer.set_masks(masks)
        return layer

    with own_seed(seeded(generator)):
        replaced = replace_layers(network, {nn.Conv2d: conv, nn.Linear: linear})
    if len(replaced) < 2:
        raise ConversionError(
            f"this {type(network).__name__} has one layer only, which stays plain: nothing is "
            "masked"
        )
    return Masksembles(network, members)


def draw_masks(channels: int, members: int, scale: float) -> Tensor:
    """Masks (M, C) of ones and zeros by the authors' procedure, from torch's generator.

    Each mask has the same number of ones, every channel is in at least one mask, and ``scale`` is
    adjusted until C channels come out. torch-uncertainty draws likewise, but from a source that
    cannot be seeded, and for ever where no scale gives C channels.

    Raises:
        ConversionError: for fewer than 10 channels, or if the procedure finds no masks.
    """
    if channels < _SMALLEST:
        raise ConversionError(
            f"it has {channels} input channels, where Masksembles needs {_SMALLEST} or more. Use a "
            "wider network"
        )
    kept = 1 - (1 - 1 / scale) ** members  # expected share of positions in any mask
    active = int(channels / (scale * kept))
    low, high = max(0.2 * scale, 1.0), 4 * scale
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        masks = _masks_of(active, members, middle)
        if masks is None:
            break
        if masks.shape[1] == channels:
            return masks
        low, high = (middle, high) if masks.shape[1] < channels else (low, middle)
    raise ConversionError(
        f"the procedure of Masksembles finds no {members} masks for {channels} input channels at "
        f"scale={scale:g}. Use another scale or fewer members"
    )


def _masks_of(active: int, members: int, scale: float) -> Tensor | None:
    """M masks with ``active`` ones over the positions that any of them uses.

    None if the number of these never is the expected one, which is rounded down.
    """
    positions = int(active * scale)
    expected = int(active * scale * (1 - (1 - 1 / scale) ** members))
    for _ in range(_DRAWS):
        masks = torch.zeros(members, positions)
        for row in masks:
            row[torch.randperm(positions)[:active]] = 1.0
        masks = masks[:, masks.any(0)]
        if masks.shape[1] == expected:
            return masks
    return None
