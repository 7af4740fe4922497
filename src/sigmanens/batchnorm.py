"""Norms with running statistics: BatchNorm and InstanceNorm, one set of statistics per member."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sigmanens.errors import InputError
from sigmanens.members import MemberAxis
from sigmanens.scales import Affine, MemberNorm, SigmaNorm

__all__ = ["MemberBatchNorm", "RunningStatistics", "SigmaBatchNorm", "SigmaInstanceNorm"]


class RunningStatistics(MemberNorm):
    """Normalisation by batch statistics with running buffers per member.

    Buffers: ``running_mean`` and ``running_var`` (M, C) float32, ``num_batches_tracked`` (M,).
    """

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    frozen_statistics: bool = False

    def _init_statistics(self, source: nn.Module, members: int) -> None:
        """Take over eps, momentum and buffers of a plain BatchNorm or InstanceNorm."""
        self.num_features: int = source.num_features  # type: ignore[assignment]
        self.eps: float = source.eps  # type: ignore[assignment]
        self.momentum: float | None = source.momentum  # type: ignore[assignment]
        self.track_running_stats: bool = source.running_mean is not None
        self.allowed_dims: tuple[int, ...] = _allowed_dims(source)
        for key in ("running_mean", "running_var", "num_batches_tracked"):
            value = getattr(source, key, None)
            if value is not None:
                value = _widened(value.detach())
                value = value.expand(members, *value.shape).clone()
            self.register_buffer(key, value)

    def freeze_statistics(self, frozen: bool = True) -> None:
        """Normalise by the running statistics in training too and leave them unchanged."""
        if frozen and not self.track_running_stats:
            raise InputError(
                f"σNorm layer '{self.where}' has no running statistics to freeze "
                "(track_running_stats=False)"
            )
        self.frozen_statistics = frozen

    def _plain_statistics(self, norm: nn.Module, members: slice) -> None:
        """Mean of the members' means; variance of their mixture; the batches counted."""
        if self.running_mean is None or self.running_var is None:
            return
        means, variances = self.running_mean[members], self.running_var[members]
        norm.running_mean.copy_(means.mean(0))  # type: ignore[operator]
        spread = means.var(0, correction=0) if means.shape[0] > 1 else 0.0
        norm.running_var.copy_(variances.mean(0) + spread)  # type: ignore[operator]
        if self.num_batches_tracked is not None:
            norm.num_batches_tracked.copy_(self.num_batches_tracked[members].max())  # type: ignore[operator]

    def _check(self, x: Tensor, batch_statistics: bool) -> None:
        if x.dim() not in self.allowed_dims or x.shape[1] != self.num_features:
            raise InputError(
                f"σNorm layer '{self.where}' got shape {tuple(x.shape)}; expected "
                f"{' or '.join(f'{d}-D' for d in self.allowed_dims)} with {self.num_features} "
                "channels in dimension 1"
            )
        if batch_statistics:
            self._check_count(x)

    def _check_count(self, x: Tensor) -> None:
        values = x.numel() // (self.num_features * self.axis.active)
        if values <= 1:
            raise InputError(
                f"σNorm layer '{self.where}' has {values} value per channel and member to take "
                f"batch statistics of (input {tuple(x.shape)}, {self.axis.active} members). "
                "Use a larger batch, ens.eval(), or ens.freeze_statistics()"
            )

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (k·B, C, …) by the statistics of each member's rows, then scale and shift.

        Raises:
            InputError: if the shape does not fit, or one value per channel is left in training.
        """
        updates = self.training and not self.frozen_statistics
        batch_statistics = updates or not self.track_running_stats
        self._check(x, batch_statistics)
        scale, shift = self.affine()
        if not batch_statistics:
            return self._by_running_statistics(x, scale, shift)
        scale = scale.to(torch.promote_types(x.dtype, torch.float32))
        shift = None if shift is None else shift.to(scale.dtype)
        tracked = updates and self.track_running_stats
        factor = self._averaging_factors() if tracked else [0.0] * self.axis.active
        rows = self._split(x)
        parts = []
        for i in range(self.axis.active):
            mean = var = None
            if tracked:
                assert self.running_mean is not None
                assert self.running_var is not None
                member = self.axis.start + i
                mean, var = self.running_mean[member], self.running_var[member]
            b = None if shift is None else shift[i if shift.shape[0] > 1 else 0]
            parts.append(self._by_batch(rows[i], mean, var, scale[i], b, factor[i]))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _averaging_factors(self) -> list[float]:
        """Count the batch and return the weight it has in each active member's running averages."""
        k, start, stop = self.axis.active, self.axis.start, self.axis.stop
        if self.num_batches_tracked is not None:
            self.num_batches_tracked[start:stop] += 1
        if self.momentum is not None:
            return [self.momentum] * k
        assert self.num_batches_tracked is not None
        return [1.0 / n for n in self.num_batches_tracked[start:stop].tolist()]

    def _by_running_statistics(self, x: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
        assert self.running_mean is not None
        assert self.running_var is not None
        start, stop = self.axis.start, self.axis.stop
        a = scale * torch.rsqrt(self.running_var[start:stop] + self.eps)
        b = -self.running_mean[start:stop] * a
        return self._scale_shift(x, a, b if shift is None else b + shift)

    def _by_batch(
        self,
        x: Tensor,
        mean: Tensor | None,
        var: Tensor | None,
        scale: Tensor,
        shift: Tensor | None,
        factor: float,
    ) -> Tensor:
        return F.batch_norm(x, mean, var, scale, shift, True, factor, self.eps)


class SigmaBatchNorm(SigmaNorm, RunningStatistics):
    """σNorm over BatchNorm1d/2d/3d: batch statistics and running buffers per member."""

    def __init__(self, source: nn.Module, axis: MemberAxis, affine: Affine) -> None:
        super().__init__(axis, affine)
        self._init_statistics(source, axis.num_members)


class MemberBatchNorm(RunningStatistics):
    """A kept BatchNorm: its affine stays shared, its statistics are one set per member.

    ``weight`` and ``bias`` (C,) keep the names they have in the base.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    ones: Tensor | None

    def __init__(self, source: nn.Module, axis: MemberAxis, like: Tensor | None = None) -> None:
        super().__init__(axis)
        self.register_parameter("weight", source.weight)  # type: ignore[arg-type]
        self.register_parameter("bias", source.bias)  # type: ignore[arg-type]
        self._init_statistics(source, axis.num_members)
        ones = None
        if self.weight is None:
            like = self.running_mean if like is None else like
            ones = torch.ones(self.num_features, device=None if like is None else like.device)
        self.register_buffer("ones", ones, persistent=False)

    def scales(self) -> Tensor:
        """The shared weight for all members, (M, C), at least float32."""
        weight = self.ones if self.weight is None else self.weight
        assert weight is not None
        return _widened(weight).expand(self.axis.num_members, -1)

    def shifts(self) -> Tensor | None:
        """The shared bias (1, C), at least float32, or None."""
        return None if self.bias is None else _widened(self.bias).unsqueeze(0)

    def _plain_affine(self, members: slice) -> dict[str, Tensor]:
        pairs = (("weight", self.weight), ("bias", self.bias))
        return {key: value.detach() for key, value in pairs if value is not None}

    def extra_repr(self) -> str:
        return f"{self.num_features}, members={self.axis.num_members}, shared affine"


class SigmaInstanceNorm(SigmaNorm, RunningStatistics):
    """σNorm over InstanceNorm1d/2d/3d; running buffers per member where the base tracks them."""

    def __init__(self, source: nn.Module, axis: MemberAxis, affine: Affine) -> None:
        super().__init__(axis, affine)
        self._init_statistics(source, axis.num_members)

    def _check_count(self, x: Tensor) -> None:
        if x.shape[2:].numel() <= 1:
            raise InputError(
                f"σNorm layer '{self.where}' has one value per channel and sample to normalise "
                f"(input {tuple(x.shape)}); instance normalisation needs more than one"
            )

    def _averaging_factors(self) -> list[float]:
        # torch's InstanceNorm neither counts batches nor knows the cumulative average.
        return [self.momentum or 0.0] * self.axis.active

    def _by_batch(
        self,
        x: Tensor,
        mean: Tensor | None,
        var: Tensor | None,
        scale: Tensor,
        shift: Tensor | None,
        factor: float,
    ) -> Tensor:
        return F.instance_norm(x, mean, var, scale, shift, True, factor, self.eps)


def _widened(t: Tensor) -> Tensor:
    """Floating tensors in float32 at least."""
    return t.to(torch.promote_types(t.dtype, torch.float32)) if t.is_floating_point() else t


def _allowed_dims(source: nn.Module) -> tuple[int, ...]:
    """Numbers of input dimensions a plain BatchNorm or InstanceNorm accepts, batch included."""
    for cls, dims in (
        (nn.BatchNorm1d, (2, 3)),
        (nn.BatchNorm2d, (4,)),
        (nn.BatchNorm3d, (5,)),
        (nn.InstanceNorm1d, (3,)),
        (nn.InstanceNorm2d, (4,)),
        (nn.InstanceNorm3d, (5,)),
    ):
        if isinstance(source, cls):
            return dims
    return (2, 3, 4, 5)
