r"""σNorm layers: one shared normalisation, one scale vector per member.

For member :math:`m` and channel :math:`c` (arXiv 2607.23860)

.. math:: y_{m} = s_m \odot \mathrm{norm}_m(x) + b_m, \qquad
          s_m = k_m \odot \sigma(\gamma_m) + o_m .

``scale_logit`` holds :math:`\gamma`; the frozen carrier :math:`k` and offset :math:`o` are absent
(1 and 0) when training from scratch and carry the pretrained scales otherwise; the shift
:math:`b` is absent, shared and frozen, or one per member. With ``scale="linear"`` the parameter
``scale`` takes the place of :math:`\sigma(\gamma)` (FiLM-Ensemble, arXiv 2206.00050). Batch
normalisation keeps statistics per member, in training and in evaluation.

Every layer takes the members that are active in the pass, folded into dimension 0, member-major
(see :mod:`sigmanens.members`). Scales, shifts and statistics stay in float32 under autocast and
under ``.half()`` and ``.bfloat16()``; the result has the dtype of the normalised input.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sigmanens.errors import InputError
from sigmanens.members import MemberAxis

__all__ = [
    "Affine",
    "MemberBatchNorm",
    "MemberNorm",
    "SigmaBatchNorm",
    "SigmaChannelsFirstLayerNorm",
    "SigmaGroupNorm",
    "SigmaInstanceNorm",
    "SigmaLayerNorm",
    "SigmaNorm",
    "SigmaRMSNorm",
]


@dataclass
class Affine:
    """Initial scales and shifts of one σNorm layer with parameter shape ``S`` (``(C,)`` mostly).

    Attributes:
        logit: γ, or the factor itself under ``kind="linear"``: (M, *S), float32.
        carrier: frozen factor k, broadcastable to (M, *S), or None for 1.
        offset: frozen offset o (M, *S), or None for 0.
        shift: (M, *S) one per member and trained, (*S) shared and frozen, or None.
        kind: ``"sigmoid"`` or ``"linear"``.
    """

    logit: Tensor
    carrier: Tensor | None = None
    offset: Tensor | None = None
    shift: Tensor | None = None
    kind: str = "sigmoid"

    @property
    def per_member_shift(self) -> bool:
        """Whether each member has a trained shift of its own."""
        return self.shift is not None and self.shift.dim() == self.logit.dim()


class MemberNorm(nn.Module):
    """A normalisation layer that knows the member axis. Base of σNorms and of kept batch norms."""

    axis: MemberAxis
    where: str
    channels_last: bool = False  # parameters align with the trailing dimensions, not dimension 1

    def __init__(self, axis: MemberAxis) -> None:
        super().__init__()
        self.axis = axis
        self.where = type(self).__name__
        self._template: list[nn.Module] = []  # in a list, so that it is no submodule

    def remember(self, source: nn.Module) -> None:
        """Keep a copy of the source norm as the template of plain norms (see :meth:`plain`)."""
        hooks = source._forward_hooks, source._forward_pre_hooks
        source._forward_hooks, source._forward_pre_hooks = OrderedDict(), OrderedDict()
        try:
            self._template = [copy.deepcopy(source).cpu()]
        finally:
            source._forward_hooks, source._forward_pre_hooks = hooks

    @torch.no_grad()
    def plain(self, members: slice) -> nn.Module:
        """A norm of the source's own class with the affine and statistics of the given members.

        One member's are taken over exactly; those of several are averaged (see `export`).
        """
        if not self._template:
            raise InputError(f"layer '{self.where}' was not made by conversion: it has no plain form")
        scale = self.scales()
        norm = copy.deepcopy(self._template[0]).to(scale.device)
        old = getattr(norm, "weight", None)
        dtype = scale.dtype if old is None else old.dtype
        values = {"weight": scale[members].mean(0)}
        shift = self.shifts()
        if shift is not None:
            values["bias"] = (shift[members] if shift.shape[0] > 1 else shift).mean(0)
        elif getattr(norm, "bias", None) is not None:
            values["bias"] = torch.zeros_like(values["weight"])
        for key, value in values.items():
            trained = old is None or old.requires_grad
            setattr(norm, key, nn.Parameter(value.to(dtype).clone(), requires_grad=trained))
        for flag in ("affine", "elementwise_affine"):
            if hasattr(norm, flag):
                setattr(norm, flag, True)
        if getattr(self, "running_mean", None) is not None:
            self._plain_statistics(norm, members)
        return norm.train(self.training)

    def _plain_statistics(self, norm: nn.Module, members: slice) -> None:
        raise NotImplementedError

    def scales(self) -> Tensor:
        """Effective scales of all members, (M, *S), at least float32."""
        raise NotImplementedError

    def shifts(self) -> Tensor | None:
        """Shifts (M, *S) or shared (1, *S), or None."""
        raise NotImplementedError

    def affine(self) -> tuple[Tensor, Tensor | None]:
        """Scales (k, *S) and shifts (k or 1, *S) of the k members in this pass."""
        axis = self.axis
        scale, shift = self.scales(), self.shifts()
        if axis.probing:
            count = scale.numel()
            wave = torch.arange(count, device=scale.device, dtype=scale.dtype).mul(0.9).cos()
            scale = scale * (1 + 0.5 * wave.view_as(scale))
        if axis.active != axis.num_members:
            scale = scale[axis.start : axis.stop]
            if shift is not None and shift.shape[0] != 1:
                shift = shift[axis.start : axis.stop]
        return scale, shift

    def _scale_shift(self, y: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
        """``scale ⊙ y + shift`` with the members' rows of y (k·B, …) matched to (k, *S)."""
        k = self.axis.active
        rows = self._split(y)
        if self.channels_last:
            lead = rows.dim() - scale.dim()
            shape = (1,) * lead
            place = lambda t: t.view(t.shape[0], *shape, *t.shape[1:])  # noqa: E731
        else:
            shape = (1,) * (rows.dim() - 3)
            place = lambda t: t.view(t.shape[0], 1, t.shape[1], *shape)  # noqa: E731
        if shift is None:
            out = rows * place(scale)
        else:
            out = torch.addcmul(place(shift), rows, place(scale))
        if out.dtype != y.dtype:
            out = out.to(y.dtype)
        return out.flatten(0, 1) if k > 1 else out.squeeze(0)

    def _split(self, x: Tensor) -> Tensor:
        """(k·B, …) → (k, B, …), or an error that names the layer."""
        k = self.axis.active
        if x.shape[0] % k:
            raise InputError(
                f"σNorm layer '{self.where}' got {x.shape[0]} rows in dimension 0, which {k} "
                "folded members do not divide: the network moves its batch dimension. "
                "Use schedule='sequential'"
            )
        return x.unflatten(0, (k, x.shape[0] // k))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Follow device moves and casts to float64, but never drop below float32."""

        def keep(t: Tensor) -> Tensor:
            out = fn(t)
            if t.is_floating_point() and out.is_floating_point() and out.element_size() < 4:
                return t.to(out.device)
            return out

        return super()._apply(keep, recurse)


class SigmaNorm(MemberNorm):
    """Scales ``k_m ⊙ σ(γ_m) + o_m`` and shifts of M members; subclasses say how to normalise."""

    scale_logit: nn.Parameter
    scale: nn.Parameter
    carrier: Tensor | None
    offset: Tensor | None
    shift: Tensor | None

    def __init__(self, axis: MemberAxis, affine: Affine) -> None:
        super().__init__(axis)
        self.kind = affine.kind
        name = "scale_logit" if affine.kind == "sigmoid" else "scale"
        self.register_parameter(name, nn.Parameter(affine.logit))
        self.register_buffer("carrier", affine.carrier)
        self.register_buffer("offset", affine.offset)
        if affine.per_member_shift:
            assert affine.shift is not None
            self.register_parameter("shift", nn.Parameter(affine.shift))
        else:
            self.register_buffer("shift", affine.shift)

    @property
    def logit(self) -> nn.Parameter:
        """The trained scale parameter (M, *S): ``scale_logit``, or ``scale`` under "linear"."""
        return self.scale_logit if self.kind == "sigmoid" else self.scale

    def gates(self) -> Tensor:
        """σ(γ) (M, *S), the member's share of each channel; the plain factor under "linear"."""
        return torch.sigmoid(self.scale_logit) if self.kind == "sigmoid" else self.scale

    def scales(self) -> Tensor:
        scale = self.gates()
        if self.carrier is not None:
            scale = self.carrier * scale
        if self.offset is not None:
            scale = scale + self.offset
        return scale

    def shifts(self) -> Tensor | None:
        shift = self.shift
        if shift is None or shift.dim() == self.logit.dim():
            return shift
        return shift.unsqueeze(0)

    @property
    def weight(self) -> Tensor:
        """Effective scales (M, *S): for code that reads a norm's ``weight`` for device or dtype."""
        return self.scales()

    @property
    def bias(self) -> Tensor | None:
        """Shifts (M or 1, *S) or None: the counterpart of :attr:`weight`."""
        return self.shifts()

    def extra_repr(self) -> str:
        shift = "none" if self.shift is None else "shared"
        if isinstance(self.shift, nn.Parameter):
            shift = "member"
        shape = tuple(self.logit.shape[1:])
        return f"{shape}, members={self.axis.num_members}, scale={self.kind}, shift={shift}"


class _RunningStatistics(MemberNorm):
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
                value = value.detach()
                if value.is_floating_point():
                    value = value.to(torch.promote_types(value.dtype, torch.float32))
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
        assert self.running_mean is not None and self.running_var is not None
        means, variances = self.running_mean[members], self.running_var[members]
        norm.running_mean.copy_(means.mean(0))  # type: ignore[union-attr, operator]
        spread = means.var(0, correction=0) if means.shape[0] > 1 else 0.0
        norm.running_var.copy_(variances.mean(0) + spread)  # type: ignore[union-attr, operator]
        if self.num_batches_tracked is not None:
            norm.num_batches_tracked.copy_(self.num_batches_tracked[members].max())  # type: ignore[union-attr, operator]

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
        """Normalise x (k·B, C, …) by the statistics of each member's own rows, then scale and shift.

        Raises:
            InputError: if the shape does not fit, or one value per channel is left in training.
        """
        tracked = self.track_running_stats
        updates = self.training and not self.frozen_statistics
        batch_statistics = updates or not tracked
        self._check(x, batch_statistics)
        scale, shift = self.affine()
        if not batch_statistics:
            return self._by_running_statistics(x, scale, shift)
        factor = self._count_batch() if updates and tracked else [0.0] * self.axis.active
        rows = self._split(x)
        start = self.axis.start
        parts = []
        for i in range(self.axis.active):
            mean = var = None
            if tracked and updates:
                assert self.running_mean is not None and self.running_var is not None
                mean, var = self.running_mean[start + i], self.running_var[start + i]
            b = None if shift is None else shift[i if shift.shape[0] > 1 else 0]
            parts.append(self._by_batch(rows[i], mean, var, scale[i], b, factor[i]))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def _count_batch(self) -> list[float]:
        """Count the batch and return each active member's averaging factor."""
        k, start, stop = self.axis.active, self.axis.start, self.axis.stop
        if self.num_batches_tracked is not None:
            self.num_batches_tracked[start:stop] += 1
        if self.momentum is not None:
            return [self.momentum] * k
        assert self.num_batches_tracked is not None
        return [1.0 / n for n in self.num_batches_tracked[start:stop].tolist()]

    def _by_running_statistics(self, x: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
        assert self.running_mean is not None and self.running_var is not None
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


class SigmaBatchNorm(SigmaNorm, _RunningStatistics):
    """σNorm over BatchNorm1d/2d/3d: batch statistics and running buffers per member."""

    def __init__(self, source: nn.Module, axis: MemberAxis, affine: Affine) -> None:
        super().__init__(axis, affine)
        self._init_statistics(source, axis.num_members)


class MemberBatchNorm(_RunningStatistics):
    """A kept BatchNorm: its affine stays shared, its statistics are one set per member.

    ``weight`` and ``bias`` (C,) keep the names they have in the base.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, source: nn.Module, axis: MemberAxis) -> None:
        super().__init__(axis)
        self.register_parameter("weight", source.weight)  # type: ignore[arg-type]
        self.register_parameter("bias", source.bias)  # type: ignore[arg-type]
        self._init_statistics(source, axis.num_members)

    def scales(self) -> Tensor:
        members = self.axis.num_members
        if self.weight is not None:
            weight = self.weight.to(torch.promote_types(self.weight.dtype, torch.float32))
            return weight.expand(members, -1)
        like = self.running_mean
        return torch.ones(
            members, self.num_features, device=None if like is None else like.device
        )

    def shifts(self) -> Tensor | None:
        return None if self.bias is None else self.bias.unsqueeze(0)

    def extra_repr(self) -> str:
        return f"{self.num_features}, members={self.axis.num_members}, shared affine"


class SigmaInstanceNorm(SigmaNorm, _RunningStatistics):
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


class SigmaLayerNorm(SigmaNorm):
    """σNorm over LayerNorm with any ``normalized_shape``; x is (k·B, …, *normalized_shape)."""

    channels_last = True

    def __init__(self, source: nn.Module, axis: MemberAxis, affine: Affine) -> None:
        super().__init__(axis, affine)
        self.normalized_shape: tuple[int, ...] = tuple(source.normalized_shape)  # type: ignore[arg-type]
        self.eps: float = source.eps  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x over its trailing dimensions, then scale and shift per member."""
        y = F.layer_norm(x, self.normalized_shape, None, None, self.eps)
        return self._scale_shift(y, *self.affine())


class SigmaRMSNorm(SigmaNorm):
    """σNorm over RMSNorm; x is (k·B, …, *normalized_shape)."""

    channels_last = True

    def __init__(self, source: nn.Module, axis: MemberAxis, affine: Affine) -> None:
        super().__init__(axis, affine)
        self.normalized_shape: tuple[int, ...] = tuple(source.normalized_shape)  # type: ignore[arg-type]
        self.eps: float | None = source.eps  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        """Divide x by the root mean square over its trailing dimensions, then scale per member."""
        y = F.rms_norm(x, self.normalized_shape, None, self.eps)
        return self._scale_shift(y, *self.affine())


class SigmaGroupNorm(SigmaNorm):
    """σNorm over GroupNorm; x is (k·B, C, …)."""

    def __init__(self, source: nn.Module, axis: MemberAxis, affine: Affine) -> None:
        super().__init__(axis, affine)
        self.num_groups: int = source.num_groups  # type: ignore[assignment]
        self.eps: float = source.eps  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x over groups of channels, then scale and shift per member."""
        y = F.group_norm(x, self.num_groups, None, None, self.eps)
        return self._scale_shift(y, *self.affine())


class SigmaChannelsFirstLayerNorm(SigmaNorm):
    """σNorm over a LayerNorm across dimension 1 of x (k·B, C, …), as in ConvNeXt."""

    def __init__(self, source: nn.Module, axis: MemberAxis, affine: Affine) -> None:
        super().__init__(axis, affine)
        self.eps: float = source.eps  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x over its channels at each position, then scale and shift per member."""
        y = F.layer_norm(x.movedim(1, -1), (x.shape[1],), None, None, self.eps).movedim(-1, 1)
        return self._scale_shift(y, *self.affine())


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
