r"""Norms fused with dropout and activation, and those with synchronised statistics.

.. math:: y_m = \mathrm{act}(\mathrm{drop}(s_m \odot \mathrm{norm}_m(x) + b_m))

The submodules ``drop`` and ``act`` are those of the source, under the names they have there.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sigmanens.errors import UnsupportedNormError
from sigmanens.members import MemberAxis
from sigmanens.norms import (
    Affine,
    MemberBatchNorm,
    RunningStatistics,
    SigmaBatchNorm,
    SigmaChannelsFirstLayerNorm,
    SigmaGroupNorm,
    SigmaLayerNorm,
    SigmaNorm,
)

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
    """Mixin: refuses to train on several processes, where statistics would need synchronising."""

    process_group: object = None

    def forward(self, x: Tensor) -> Tensor:
        """As without synchronisation; raises where the base would synchronise.

        Raises:
            UnsupportedNormError: in training in a process group of more than one process.
        """
        if self.training and not self.frozen_statistics and _processes(self.process_group) > 1:
            raise UnsupportedNormError(
                f"σNorm layer '{self.where}' was a SyncBatchNorm, whose statistics cannot be "
                f"synchronised per member over {_processes(self.process_group)} processes yet. "
                "Train in one process, call ens.freeze_statistics(), or convert the base before "
                "convert_sync_batchnorm, for statistics of each process"
            )
        return super().forward(x)


class SigmaSyncBatchNorm(_Synchronised, SigmaBatchNormAct):
    """σNorm over SyncBatchNorm in one process, with its dropout and activation if it has any."""

    def __init__(self, source: nn.Module, axis: MemberAxis, affine: Affine) -> None:
        super().__init__(source, axis, affine)
        self.process_group = source.process_group


class MemberSyncBatchNorm(_Synchronised, MemberBatchNormAct):
    """A kept SyncBatchNorm in one process: affine shared, statistics per member."""

    def __init__(self, source: nn.Module, axis: MemberAxis, like: Tensor | None = None) -> None:
        super().__init__(source, axis, like)
        self.process_group = source.process_group


def _processes(group: object) -> int:
    """Number of processes that would share statistics; 1 without torch.distributed."""
    if torch.distributed.is_available() and dist.is_initialized():
        return dist.get_world_size(group)  # type: ignore[arg-type]
    return 1
