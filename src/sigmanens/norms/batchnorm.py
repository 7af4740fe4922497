"""Norms with running statistics: BatchNorm and InstanceNorm, one set of statistics per member."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sigmanens.errors import InputError
from sigmanens.norms import synchronised
from sigmanens.norms.kernels import State, batch_norm, each, is_large, writes_in_place
from sigmanens.norms.member import MemberNorm
from sigmanens.norms.scales import Affine, SigmaNorm
from sigmanens.passes.context import MemberAxis


class RunningStatistics(MemberNorm):
    """Normalisation by batch statistics with running buffers per member.

    Buffers: ``running_mean`` and ``running_var`` (M, C) float32, ``num_batches_tracked`` (M,).
    ``momentum``, ``track_running_stats`` and the mode act as they do on torch's norms.
    """

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None
    frozen_statistics: bool = False
    synchronised: bool  # statistics over all processes of the group, where it has several

    def _init_statistics(self, source: nn.Module, members: int) -> None:
        """Take over eps, momentum and buffers of a plain BatchNorm or InstanceNorm."""
        self.num_features: int = source.num_features  # type: ignore[assignment]
        self.eps: float = source.eps  # type: ignore[assignment]
        self.momentum: float | None = source.momentum  # type: ignore[assignment]
        tracks = getattr(source, "track_running_stats", True)
        self.track_running_stats: bool = bool(tracks) and source.running_mean is not None
        self.allowed_dims: tuple[int, ...] = _allowed_dims(source)
        self.synchronised = isinstance(source, nn.SyncBatchNorm)
        self.process_group: object = getattr(source, "process_group", None)
        for key in ("running_mean", "running_var", "num_batches_tracked"):
            value = getattr(source, key, None)
            if value is not None:
                value = _widened(value.detach())
                value = value.expand(members, *value.shape).clone()
            self.register_buffer(key, value)

    def _load_from_state_dict(self, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        # One set of statistics, of an ensemble that has found its shared prefix, is every member's.
        for key in ("running_mean", "running_var", "num_batches_tracked"):
            mine, value = getattr(self, key), state.get(prefix + key)
            if mine is not None and isinstance(value, Tensor) and value.dim() == mine.dim() - 1:
                state[prefix + key] = value.expand_as(mine)
        super()._load_from_state_dict(state, prefix, *rest)

    def freeze_statistics(self, frozen: bool = True) -> None:
        """Normalise by the running statistics in training too and leave them unchanged."""
        if frozen and self.running_mean is None:
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
        counts = getattr(norm, "num_batches_tracked", None) is not None
        if counts and self.num_batches_tracked is not None:
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
        members = self.axis.current.count
        values = x.numel() // (self.num_features * members)
        if values <= 1 and self._processes() == 1:
            raise InputError(
                f"σNorm layer '{self.where}' has {values} value per channel and member to take "
                f"batch statistics of (input {tuple(x.shape)}, {members} members). "
                "Use a larger batch, ens.eval(), or ens.freeze_statistics()"
            )

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (k·B, C, …) by the statistics of each member's rows, scale, shift, finish.

        Raises:
            InputError: if the shape does not fit, or one value per channel is left in training.
        """
        return self.finish(self._normalised(x))

    def _normalised(self, x: Tensor) -> Tensor:
        batch_statistics, tracked = self._what_to_use()
        self._check(x, batch_statistics)
        if not batch_statistics:
            return self._by_running_statistics(x)
        self._check_rows(x)
        affine = _matched(x, *self.scale_and_shift())
        if not tracked:
            return self._by_batch(x, (None, None, *affine), [0.0] * len(affine[0]))
        factors = self._averaging_factors()
        return self._by_batch(x, (*self._active_statistics(), *affine), factors)

    def _what_to_use(self) -> tuple[bool, bool]:
        """Whether to normalise by the batch, and whether to update the running statistics then."""
        trains = self.training and not self.frozen_statistics
        has_running = self.running_mean is not None
        return trains or not has_running, trains and has_running and self.track_running_stats

    def _averaging_factors(self) -> list[float]:
        """Count the batch and return the weight it has in each active member's running averages."""
        members = self.axis.current.members
        if self.num_batches_tracked is not None:
            self.num_batches_tracked[members] += 1
        if self.momentum is not None:
            return [self.momentum] * self.axis.current.count
        assert self.num_batches_tracked is not None
        return [1.0 / n for n in self.num_batches_tracked[members].tolist()]

    def _active_statistics(self) -> tuple[Tensor, Tensor]:
        """Running means and variances (k, C) of the members in this pass, as views."""
        assert self.running_mean is not None
        assert self.running_var is not None
        members = self.axis.current.members
        return self.running_mean[members], self.running_var[members]

    def _by_running_statistics(self, x: Tensor) -> Tensor:
        k = self.axis.current.count
        if writes_in_place(x) and x.numel() and is_large(x, k):
            self._check_rows(x)
            state = self.axis.recall(self, lambda: self._fixed(x), x.dtype)
            return batch_norm(x, state, False, [0.0] * k, self.eps)
        # One product and one sum per value, which compilers and other runtimes fuse.
        return self._scale_shift(x, *self.axis.recall(self, self._folded))

    def _fixed(self, x: Tensor) -> State:
        """Statistics and affine of the members in this pass, in a dtype for kernels on x."""
        scale, shift = _matched(x, *self.scale_and_shift())
        mean, var = self._active_statistics()
        return mean.to(scale.dtype), var.to(scale.dtype), scale, shift

    def _folded(self) -> tuple[Tensor, Tensor]:
        """Scale and shift per member that the running statistics are folded into: (k, C) each."""
        scale, shift = self.scale_and_shift()
        mean, var = self._active_statistics()
        a = scale * torch.rsqrt(var + self.eps)
        b = -mean * a
        return a, b if shift is None else b + shift

    def _by_batch(self, x: Tensor, state: State, factors: list[float]) -> Tensor:
        if self._processes() > 1:
            return synchronised.batch_norm(x, state, factors, self.eps, self.process_group)
        return batch_norm(x, state, True, factors, self.eps)

    def _processes(self) -> int:
        """Number of processes that share batch statistics."""
        return synchronised.processes(self.process_group) if self.synchronised else 1


class SigmaBatchNorm(SigmaNorm, RunningStatistics):
    """σNorm over BatchNorm1d/2d/3d and SyncBatchNorm: statistics and buffers per member."""

    def __init__(
        self, source: nn.Module, axis: MemberAxis, affine: Affine, tail: Sequence[str] = ()
    ) -> None:
        super().__init__(axis, affine, source, tail)
        self._init_statistics(source, axis.num_members)


class MemberBatchNorm(RunningStatistics):
    """A kept BatchNorm: its affine stays shared, its statistics are one set per member.

    ``weight`` and ``bias`` (C,) keep the names they have in the base.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None
    ones: Tensor | None

    def __init__(
        self,
        source: nn.Module,
        axis: MemberAxis,
        like: Tensor | None = None,
        tail: Sequence[str] = (),
    ) -> None:
        super().__init__(axis, source, tail)
        for key in ("weight", "bias"):
            self.register_parameter(key, getattr(source, key))
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

    def _what_to_use(self) -> tuple[bool, bool]:
        # As torch has it: running statistics are updated whenever those of the sample are used.
        has_running = self.running_mean is not None
        if self.frozen_statistics and has_running:
            return False, False
        by_sample = self.training or not self.track_running_stats
        return by_sample, by_sample and has_running

    def _averaging_factors(self) -> list[float]:
        # torch's InstanceNorm neither counts batches nor knows the cumulative average.
        return [self.momentum or 0.0] * self.axis.current.count

    def _by_batch(self, x: Tensor, state: State, factors: list[float]) -> Tensor:
        mean, var, scale, shift = state

        def norm(i: int, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            means, variances = (None, None) if mean is None or var is None else (mean[i], var[i])
            return F.instance_norm(rows, means, variances, weight, bias, True, factors[i], self.eps)

        return each(norm, x, scale, shift)


def _matched(x: Tensor, scale: Tensor, shift: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Scales and shifts in the dtype that the kernels take beside x."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return scale.to(dtype), None if shift is None else shift.to(dtype)


def _widened(t: Tensor) -> Tensor:
    """Floating tensors in float32 at least."""
    return t.to(torch.promote_types(t.dtype, torch.float32)) if t.is_floating_point() else t


def _allowed_dims(source: nn.Module) -> tuple[int, ...]:
    """Numbers of input dimensions a plain BatchNorm or InstanceNorm accepts, batch included."""
    known: tuple[tuple[Any, tuple[int, ...]], ...] = (
        (nn.BatchNorm1d, (2, 3)),
        (nn.InstanceNorm1d, (3,)),
        ((nn.BatchNorm2d, nn.InstanceNorm2d), (4,)),
        ((nn.BatchNorm3d, nn.InstanceNorm3d), (5,)),
    )
    return next((dims for kinds, dims in known if isinstance(source, kinds)), (2, 3, 4, 5))
