r"""Batch normalisation by the statistics of all ranks, per member.

.. math:: \mu_m = \frac{\sum_r \sum_{b} x_{rmb}}{\sum_r n_r}, \qquad
          v_m = \frac{\sum_r \sum_{b} (x_{rmb} - \mu_m)^2}{\sum_r n_r}

Gradients pass through the sums, as in ``torch.nn.SyncBatchNorm``, which works on CUDA only; this
needs nothing but an all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from sigmanens.errors import InputError
from sigmanens.norms.kernels import State, blocks


def processes(group: Any) -> int:
    """Number of processes that would share statistics; 1 without torch.distributed."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size(group)
    return 1


class _Total(torch.autograd.Function):
    """Sum over the ranks; the gradient of a rank's part is the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, group: Any) -> Tensor:
        ctx.group = group
        t = t.clone()
        dist.all_reduce(t, group=group)
        return t

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Total.apply(grad, ctx.group), None


def batch_norm(x: Tensor, state: State, factors: Sequence[float], eps: float, group: Any) -> Tensor:
    """Normalise x (k·B, C, …) by each member's statistics over the ranks of a group.

    Every rank must call it for the same members in the same order; B may differ between ranks.

    Raises:
        InputError: if one value per channel and member is left in all ranks together.
    """
    mean, var, scale, shift = state
    k, channels = scale.shape[0], x.shape[1]
    rows = torch.stack(blocks(x, k)).to(scale.dtype)
    dims = [d for d in range(1, rows.dim()) if d != 2]
    local = rows.new_full((1,), rows.numel() // (k * channels))
    sums = _Total.apply(torch.cat([rows.sum(dims).flatten(), local]), group)
    count = sums[-1].detach()
    if float(count) <= 1:
        raise InputError(
            f"{int(count)} value per channel and member on all ranks together is too few to take "
            "batch statistics of. Use a larger batch, ens.eval(), or ens.freeze_statistics()"
        )
    shape = (k, 1, channels, *(1,) * (rows.dim() - 3))
    mu = (sums[:-1] / count).view(shape)
    centred = rows - mu
    v = _Total.apply(centred.square().sum(dims), group) / count
    if mean is not None and var is not None:
        with torch.no_grad():
            weights = torch.tensor(factors, dtype=mean.dtype, device=mean.device)[:, None]
            mean.lerp_(mu.detach().view(k, channels).to(mean.dtype), weights)
            var.lerp_((v.detach() * count / (count - 1)).to(var.dtype), weights)
    y = centred * (scale * torch.rsqrt(v + eps)).view(shape)
    if shift is not None:
        y = y + shift.view(shift.shape[0], *shape[1:])
    return y.to(x.dtype).flatten(0, 1)
