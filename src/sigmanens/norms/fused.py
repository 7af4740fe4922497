r"""Norms fused with dropout and activation, and those with synchronised statistics.

.. math:: y_m = \mathrm{act}(\mathrm{drop}(s_m \odot \mathrm{norm}_m(x) + b_m))

The submodules ``drop`` and ``act`` are those of the source, under the names they have there.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sigmanens.norms import synchronised
from sigmanens.norms.batchnorm import MemberBatchNorm, RunningStatistics, SigmaBatchNorm
from sigmanens.norms.samplewise import (
    SigmaChannelsFirstLayerNorm,
    SigmaGroupNorm,
    SigmaLayerNorm,
)
from sigmanens.norms.scales import Affine, SigmaNorm
from sigmanens.passes.context import MemberAxis

__all__ = [
    "MemberBatchNormAct",
    "MemberSyncBatchNorm",
    "SigmaBatchNormAct",
    "SigmaChannelsFirstLayerNormAct",
    "SigmaGroupNormAct",
    "SigmaLayerNormAct",
    "SigmaSyncBatchNorm",
]


class _Activated(SigmaNorm):
    """Mixin: what the source does after normalising, done after scale and shift."""

    def __init__(self, source: nn.Module, axis: MemberAxis, affine: Affine) -> None:
        super().__init__(source, axis, affine)  # type: ignore[arg-type, call-arg]
        self.adopt_tail(source)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise, scale and shift x per member, then drop out and activate."""
        return self.finish(super().forward(x))


class SigmaBatchNormAct(_Activated, SigmaBatchNorm):
    """σNorm over BatchNorm, then dropout and activation; x is (k·B, C, H, W)."""


class SigmaGroupNormAct(_Activated, SigmaGroupNorm):
    """σNorm over GroupNorm, then dropout and activation; x is (k·B, C, …)."""


class SigmaLayerNormAct(_Activated, SigmaLayerNorm):
    """σNorm over LayerNorm, then dropout and activation; x is (k·B, …, *normalized_shape)."""


class SigmaChannelsFirstLayerNormAct(_Activated, SigmaChannelsFirstLayerNorm):
    """σNorm over LayerNorm across dimension 1, then dropout and activation; x is (k·B, C, …)."""


class MemberBatchNormAct(MemberBatchNorm):
    """A kept BatchNorm with dropout and activation: affine shared, statistics per member."""

    def __init__(self, source: nn.Module, axis: MemberAxis, like: Tensor | None = None) -> None:
        super().__init__(source, axis, like)
        self.adopt_tail(source)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x per member by the shared affine, then drop out and activate."""
        return self.finish(super().forward(x))


class _Synchronised(RunningStatistics):
    """Mixin: statistics per member over all processes of a group, where there are several."""

    process_group: object = None

    def _check_count(self, x: Tensor) -> None:
        if _processes(self.process_group) == 1:  # else the values of all processes count
            super()._check_count(x)

    def _by_batch(
        self,
        x: Tensor,
        mean: Tensor | None,
        var: Tensor | None,
        scale: Tensor,
        shift: Tensor | None,
        factors: list[float],
    ) -> Tensor:
        if _processes(self.process_group) == 1:
            return super()._by_batch(x, mean, var, scale, shift, factors)
        return synchronised.batch_norm(
            x, mean, var, scale, shift, factors, self.eps, self.process_group
        )


class SigmaSyncBatchNorm(_Synchronised, SigmaBatchNormAct):
    """σNorm over SyncBatchNorm, with its dropout and activation if it has any."""

    def __init__(self, source: nn.Module, axis: MemberAxis, affine: Affine) -> None:
        super().__init__(source, axis, affine)
        self.process_group = source.process_group


class MemberSyncBatchNorm(_Synchronised, MemberBatchNormAct):
    """A kept SyncBatchNorm: affine shared, statistics per member."""

    def __init__(self, source: nn.Module, axis: MemberAxis, like: Tensor | None = None) -> None:
        super().__init__(source, axis, like)
        self.process_group = source.process_group


def _processes(group: object) -> int:
    """Number of processes that would share statistics; 1 without torch.distributed."""
    if torch.distributed.is_available() and dist.is_initialized():
        return dist.get_world_size(group)  # type: ignore[arg-type]
    return 1
