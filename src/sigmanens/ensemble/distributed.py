r"""Several processes: gradients averaged, members spread over ranks, statistics synchronised.

A folded ensemble is trained by ``DistributedDataParallel`` like any network. What that cannot do is
here, on ``torch.distributed`` alone: one exchange after a step that took several backward passes,
ranks that run some of the members only, and batch statistics per member over all ranks.

With :math:`D` data ranks times :math:`J` member ranks, rank :math:`r = dJ + j` runs member block
:math:`j` on data shard :math:`d`; the mean of the ranks' gradients is the gradient of

.. math:: L = \frac{1}{DM} \sum_d \sum_m \mathrm{mean}_b\, \ell_{dmb} + L_\mathrm{div} .
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sigmanens.ensemble.ensemble import SigmaEnsemble
from sigmanens.errors import InputError
from sigmanens.norms.batchnorm import RunningStatistics
from sigmanens.norms.scales import is_sharded

__all__ = ["average_gradients", "average_statistics", "own_members"]

BUCKET_BYTES = 25 * 2**20


def average_gradients(
    ensemble: torch.nn.Module, group: Any = None, bucket_bytes: int = BUCKET_BYTES
) -> None:
    """Replace every gradient by its mean over the ranks; one that a rank lacks counts as 0 there.

    Call it after ``ens.backward`` (or several, when accumulating) and before clipping and the
    optimizer. Parameters without a gradient on any rank keep none.
    The ensemble may be wrapped. About ``bucket_bytes`` are exchanged at once.
    """
    parameters = [p for p in ensemble.parameters() if p.requires_grad]
    if not parameters:
        return
    world = dist.get_world_size(group)
    present = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32)
    present = present.to(parameters[0].device)
    dist.all_reduce(present, group=group)
    used = [p for p, n in zip(parameters, present.tolist(), strict=True) if n]
    for bucket in _buckets(used, bucket_bytes):
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
        flat = torch.cat([g.reshape(-1) for g in grads])
        dist.all_reduce(flat, group=group)
        flat /= world
        parts = flat.split([g.numel() for g in grads])
        for p, g, part in zip(bucket, grads, parts, strict=True):
            p.grad = g.copy_(part.view_as(g))


def _buckets(parameters: Sequence[Tensor], size: int) -> Iterator[list[Tensor]]:
    """Consecutive parameters of one dtype and device, about ``size`` bytes together."""
    bucket: list[Tensor] = []
    held = 0
    for p in parameters:
        if bucket and (held >= size or (p.dtype, p.device) != (bucket[0].dtype, bucket[0].device)):
            yield bucket
            bucket, held = [], 0
        bucket.append(p)
        held += p.numel() * p.element_size()
    if bucket:
        yield bucket


@contextmanager
def own_members(
    ensemble: SigmaEnsemble, member_ranks: int | None = None, group: Any = None
) -> Iterator[range]:
    """Restrict the passes in the block to this rank's members::

        with own_members(ens):
            loss = ens.backward(x, y, loss_fn)      # the mean of its own members' losses
        average_gradients(ens)
        optimizer.step()

    ``member_ranks`` is J, the number of ranks that divide the M members among themselves; all by
    default. Ranks with the same ``rank // J`` must be given the same batch.

    Raises:
        InputError: if J does not divide the number of ranks or M, a SyncBatchNorm would mix the
            statistics of ranks that run different members, or FSDP their gradients.
    """
    world = dist.get_world_size(group)
    ranks = world if member_ranks is None else member_ranks
    members = ensemble.num_members
    if ranks < 1 or world % ranks or members % ranks:
        raise InputError(
            f"member_ranks is {ranks}; expected a number that divides both the {world} processes "
            f"and the {members} members, so that every member weighs the same"
        )
    if is_sharded(ensemble) and ranks > 1:
        raise InputError(
            "parameters are divided over ranks (FSDP), which must run the same members then: their "
            "gradients have one sum. Divide the batch only, with member_ranks=1, or do not shard"
        )
    mixing = [n for n, m in ensemble.network.named_modules() if getattr(m, "synchronised", False)]
    if mixing and ranks > 1:
        raise InputError(
            f"layer '{mixing[0]}' was a SyncBatchNorm, whose statistics would mix those of ranks "
            "with other members. Convert the base without it, or use member_ranks=1"
        )
    size = members // ranks
    first = dist.get_rank(group) % ranks * size
    with ensemble.axis.choosing(start=first, stop=first + size):
        yield range(first, first + size)


def average_statistics(ensemble: SigmaEnsemble, member_ranks: int = 1, group: Any = None) -> None:
    """Give all ranks the same running statistics: of each member, the mean over those that ran it.

    Of norms that all members share it is the mean over all ranks.

    Call it before evaluating or saving, with the arguments of :func:`own_members`. With
    SyncBatchNorm and all members on every rank they are the same already.
    """
    data_ranks = dist.get_world_size(group) // member_ranks
    with own_members(ensemble, member_ranks, group) as own:
        for layer in ensemble.network.modules():
            if not isinstance(layer, RunningStatistics):
                continue
            for buffer in (layer.running_mean, layer.running_var, layer.num_batches_tracked):
                if buffer is not None:
                    mine = torch.zeros_like(buffer)
                    mine[own.start : own.stop] = buffer[own.start : own.stop]
                    dist.all_reduce(mine, group=group)
                    counts = not buffer.is_floating_point()
                    buffer.copy_(mine // data_ranks if counts else mine / data_ranks)
    for norm in ensemble.shared_norms():
        for buffer in norm.buffers(recurse=False):
            total = buffer.clone()
            dist.all_reduce(total, group=group)
            ranks = dist.get_world_size(group)
            buffer.copy_(total / ranks if buffer.is_floating_point() else total // ranks)
