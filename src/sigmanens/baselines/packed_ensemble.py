r"""Packed-Ensembles (arXiv 2210.09184): M narrow networks as the groups of one wide network.

Every layer is α times as wide and split into M·γ groups, so a layer of :math:`w` weights has
:math:`w α^2 / (M γ)`. The layers are torch-uncertainty's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sigmanens.baselines.base import Rival, base_network, check_count, unfolded
from sigmanens.baselines.layers import (
    conv_sizes,
    first_layer,
    last_layer,
    linear_sizes,
    replace_layers,
    uncertainty_layers,
)
from sigmanens.errors import ConversionError, InputError
from sigmanens.seeding import own_seed, seeded

__all__ = ["Packed", "packed"]


class Packed(Rival):
    """M subnetworks in the groups of one network; made by :func:`packed`."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Logits (M, B, C); one pass over B rows."""
        return unfolded(self.network(*args, **kwargs), self.num_members)


def packed(
    model_or_factory: nn.Module | Callable[[], nn.Module],
    members: int,
    *,
    alpha: float = 2.0,
    gamma: int = 2,
    smallest_group: int = 64,
    first_name: str | None = None,
    head_name: str | Sequence[str] | None = None,
    generator: torch.Generator | None = None,
) -> Packed:
    """Make a network's Packed-Ensemble from torch-uncertainty's layers (arXiv 2210.09184).

    Takes networks of ``nn.Conv2d``, ``nn.Linear`` and BatchNorm whose ``forward`` treats all
    channels alike; ResNets with parameter-free shortcuts are known. All weights are new, drawn as
    torch-uncertainty does.

    Args:
        model_or_factory: a network, which is copied, or a function that makes one; a template.
        members: M ≥ 1.
        alpha: factor on the width; α·width must be divisible by M.
        gamma: γ ≥ 1, further groups within a member, in the layers where torch-uncertainty has
            them: not in the first and last layer, nor in the first convolution of a residual block
            (but of a wide one), nor where a group would have fewer than ``smallest_group`` input
            channels.
        smallest_group: see above; torch-uncertainty's default.
        first_name: the layer that sees the input, if it is not the first one registered.
        head_name: the Linear that makes the logits, if it is not found by itself.
        generator: source of the weights.

    Returns:
        a network from (B, …) to (M, B, C).

    Raises:
        MissingPackageError: without torch-uncertainty. ConversionError: if the widths do not
        divide, or a layer with parameters is of another kind. HeadNotFoundError: if no head is
        found. InputError: for an argument out of its range.
    """
    check_count("members", members)
    check_count("gamma", gamma)
    if not alpha > 0:
        raise InputError(f"alpha is {alpha!r}; expected a number > 0")
    network = base_network(model_or_factory)
    first = network.get_submodule(first_layer(network, first_name))
    last = network.get_submodule(last_layer(network, head_name))
    _check_kinds(network)
    library = uncertainty_layers()
    groups = {"alpha": alpha, "num_estimators": members}

    def conv(name: str, source: nn.Conv2d) -> nn.Module:
        return library.PackedConv2d(
            **groups,
            **conv_sizes(source),
            padding_mode=source.padding_mode,
            gamma=1 if source is first or _opens_block(network, name) else gamma,
            minimum_channels_per_group=smallest_group,
            first=source is first,
        )

    def linear(name: str, source: nn.Linear) -> nn.Module:
        return library.PackedLinear(
            **groups,
            **linear_sizes(source),
            gamma=1 if source is first or source is last else gamma,
            first=source is first,
            last=source is last,
        )

    def norm(name: str, source: Any) -> nn.Module:
        return type(source)(
            int(source.num_features * alpha),
            source.eps,
            source.momentum,
            source.affine,
            source.track_running_stats,
        )

    make = {nn.Conv2d: conv, nn.Linear: linear, nn.BatchNorm1d: norm, nn.BatchNorm2d: norm}
    dtype = next(network.parameters()).dtype
    with own_seed(seeded(generator)):
        replace_layers(network, make)  # type: ignore[arg-type]
    for module in network.modules():
        _pad_by_member(module, alpha, members)
    return Packed(network.to(dtype), members)


def _check_kinds(network: nn.Module) -> None:
    """Refuse layers whose channels cannot be told apart by member."""
    known = (nn.Conv2d, nn.Linear, nn.BatchNorm1d, nn.BatchNorm2d)
    for name, module in network.named_modules():
        if next(module.parameters(recurse=False), None) is not None and type(module) not in known:
            raise ConversionError(
                f"layer '{name}' is a {type(module).__name__}; Packed-Ensembles are made of "
                "nn.Conv2d, nn.Linear, BatchNorm1d and BatchNorm2d only"
            )


def _opens_block(network: nn.Module, name: str) -> bool:
    """Whether a layer is the first convolution of a residual block that is no wide one."""
    parent, _, leaf = name.rpartition(".")
    block = network.get_submodule(parent)
    wide = "wide" in type(block).__name__.lower()
    return leaf == "conv1" and hasattr(block, "conv2") and not wide


@dataclass
class _ShortcutByMember:
    """A parameter-free shortcut: subsampling, and zeros around each member's channels."""

    stride: int
    padding: tuple[int, int]
    members: int

    def __call__(self, x: Tensor) -> Tensor:
        """Map x (B, M·c, H, W) to (B, M·(before + c + after), …)."""
        x = x[:, :, :: self.stride, :: self.stride].unflatten(1, (self.members, -1))
        return F.pad(x, (0, 0, 0, 0, *self.padding)).flatten(1, 2)


def _pad_by_member(block: nn.Module, alpha: float, members: int) -> None:
    """Let a block that pads its shortcut with zero channels do so for each member."""
    padding = getattr(block, "channel_padding", None)
    if padding is None or not any(padding):
        return
    missing = sum(padding) * alpha / members
    if missing != int(missing):
        raise ConversionError(
            f"a shortcut pads {sum(padding)} channels, whose {alpha} fold {members} members do not "
            "divide"
        )
    before = int(missing) // 2
    shortcut = _ShortcutByMember(block.stride, (before, int(missing) - before), members)  # type: ignore[arg-type]
    vars(block)["shortcut"] = shortcut  # before the method of the class
