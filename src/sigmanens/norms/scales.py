r"""What is member-specific in a normalisation layer: the scales and shifts of M members.

For member :math:`m` and channel :math:`c` (arXiv 2607.23860)

.. math:: y_{m} = s_m \odot \mathrm{norm}_m(x) + b_m, \qquad
          s_m = k_m \odot \sigma(\gamma_m) + o_m .

``scale_logit`` holds :math:`\gamma`; the frozen carrier :math:`k` and offset :math:`o` are absent
(1 and 0) when training from scratch and carry the pretrained scales otherwise; the shift
:math:`b` is absent, shared and frozen, or one per member. With ``scale="linear"`` the parameter
``scale`` takes the place of :math:`\sigma(\gamma)` (FiLM-Ensemble, arXiv 2206.00050).

Every layer takes the members that are active in the pass, folded into dimension 0, member-major
(see :mod:`sigmanens.passes.trees`). Scales, shifts and statistics stay in float32 under autocast
and under ``.half()`` and ``.bfloat16()``; the result has the dtype of the normalised input.
"""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from sigmanens.errors import ExportError, InputError
from sigmanens.norms.kernels import each, scales_in_kernel
from sigmanens.passes.context import MemberAxis

__all__ = [
    "HOOKS",
    "Affine",
    "MemberNorm",
    "SigmaNorm",
    "adopt_hooks",
    "is_sharded",
    "whole",
    "without_hooks",
]

HOOKS = (
    "_forward_hooks",
    "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
    "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs",
    "_backward_hooks",
    "_backward_pre_hooks",
)


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


def whole(t: Tensor) -> Tensor:
    """A parameter that is divided over ranks (FSDP), gathered; any other as it is."""
    gather = None if torch.compiler.is_compiling() else getattr(t, "full_tensor", None)
    return t if gather is None else gather()


def is_sharded(module: nn.Module) -> bool:
    """Whether parameters are divided over ranks (FSDP) and whole only while a module runs."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    names = ("FSDPModule", "FullyShardedDataParallel")
    kinds = tuple(getattr(fsdp, name) for name in names if hasattr(fsdp, name))
    return any(isinstance(m, kinds) for m in module.modules()) or any(
        hasattr(p, "full_tensor") for p in module.parameters()
    )


def adopt_hooks(new: nn.Module, source: nn.Module) -> None:
    """Let ``new`` call the hooks that were registered on ``source``; their handles keep working."""
    for key in HOOKS:
        setattr(new, key, getattr(source, key))
    new._is_full_backward_hook = source._is_full_backward_hook


def without_hooks(module: nn.Module) -> nn.Module:
    """A deep copy of a norm that calls none of its hooks."""
    bare = copy.copy(module)
    for key in HOOKS:
        setattr(bare, key, OrderedDict())
    return copy.deepcopy(bare)


class MemberNorm(nn.Module):
    """A normalisation layer that knows the member axis. Base of σNorms and of kept batch norms.

    A source that drops out and activates what it has normalised hands its submodules for that
    over (:meth:`adopt_tail`); they keep their names and are applied last.
    """

    axis: MemberAxis
    where: str
    channels_last: bool = False  # parameters align with the trailing dimensions, not dimension 1
    tail: tuple[str, ...] = ()  # submodules applied after scale and shift, in this order

    def __init__(self, axis: MemberAxis) -> None:
        super().__init__()
        self.axis = axis
        self.where = type(self).__name__
        self._template: list[nn.Module] = []  # in a list, so that it is no submodule

    def remember(self, source: nn.Module, like: Tensor | None = None) -> None:
        """Keep a copy of the source norm, without its hooks, as the template of plain norms.

        Args:
            source: the norm that this layer replaces.
            like: a tensor with the dtype and device of the network, for norms without tensors.
        """
        self._template = [without_hooks(source)]

    def adopt_tail(self, source: nn.Module, names: Sequence[str] = ("drop", "act")) -> None:
        """Take over the submodules that the source applies last; absent ones are passed over."""
        found = [n for n in names if isinstance(getattr(source, n, None), nn.Module)]
        for name in found:
            self.add_module(name, getattr(source, name))
        self.tail = tuple(found)

    def finish(self, y: Tensor) -> Tensor:
        """Apply the source's dropout and activation to the scaled y."""
        for name in self.tail:
            y = getattr(self, name)(y)
        return y

    @torch.no_grad()
    def plain(self, members: slice) -> nn.Module:
        """A norm of the source's own class with the affine and statistics of the given members.

        One member's are taken over exactly; those of several are averaged (see `export`).

        Raises:
            InputError: if the source's class has no ``weight`` or ``bias`` to take them over.
        """
        if not self._template:
            raise InputError(
                f"layer '{self.where}' was not made by conversion: it has no plain form"
            )
        norm = self._blank()
        values = self._plain_affine(members)
        for key, value in values.items():
            old = getattr(norm, key, None)
            if isinstance(old, Tensor):
                old.copy_(value)
            elif hasattr(norm, key):
                like = getattr(norm, "weight", None)
                dtype = like.dtype if isinstance(like, Tensor) else value.dtype
                setattr(norm, key, nn.Parameter(value.to(dtype).clone()))
            elif bool((value != (1.0 if key == "weight" else 0.0)).any()):
                raise InputError(
                    f"layer '{self.where}' has a {'scale' if key == 'weight' else 'shift'} per "
                    f"member, which a plain {type(norm).__name__} cannot carry: it has no '{key}'"
                )
        if values:
            for flag in ("affine", "elementwise_affine"):
                if hasattr(norm, flag):
                    setattr(norm, flag, True)
        self._plain_statistics(norm, members)
        norm.training = self.training
        return norm

    def _blank(self) -> nn.Module:
        """A fresh copy of the template, its dropout and activation as they are now."""
        norm = copy.deepcopy(self._template[0])
        for name in self.tail:
            setattr(norm, name, copy.deepcopy(getattr(self, name)))
        return norm

    def _plain_affine(self, members: slice) -> dict[str, Tensor]:
        """Weight and bias of the plain norm: means over the members."""
        scale, shift = self.scales(), self.shifts()
        values = {"weight": scale[members].mean(0)}
        if shift is not None:
            values["bias"] = (shift[members] if shift.shape[0] > 1 else shift).mean(0)
        elif getattr(self._template[0], "bias", None) is not None:
            values["bias"] = torch.zeros_like(values["weight"])
        return values

    def _plain_statistics(self, norm: nn.Module, members: slice) -> None:
        """Put running statistics into the plain norm, where this layer has any."""

    def scales(self) -> Tensor:
        """Effective scales of all members, (M, *S), at least float32."""
        raise NotImplementedError

    def shifts(self) -> Tensor | None:
        """Shifts (M, *S) or shared (1, *S), at least float32, or None."""
        raise NotImplementedError

    def affine(self) -> tuple[Tensor, Tensor | None]:
        """Scales (k, *S) and shifts (k or 1, *S) of the k members in this pass."""
        axis = self.axis
        made = axis.current
        scale, shift = self.scales(), self.shifts()
        if made.perturbed and isinstance(self, SigmaNorm):
            count = scale.numel()
            wave = torch.arange(count, device=scale.device, dtype=scale.dtype).mul(0.9).cos()
            scale = scale * (1 + 0.5 * wave.view_as(scale))
        if made.stop - made.start != made.held:
            scale = scale[made.start : made.stop]
            if shift is not None and shift.shape[0] != 1:
                shift = shift[made.start : made.stop]
        return scale, shift

    def _normalise(
        self, x: Tensor, norm: Callable[[Tensor, Tensor | None, Tensor | None], Tensor]
    ) -> Tensor:
        """``norm(rows, scale, shift)`` of each member's rows of x, by the faster of two ways.

        Args:
            x: (k·B, …).
            norm: normalises sample by sample, with the affine it is given.
        """
        scale, shift = self.axis.recall(self, self.affine)
        self._check_rows(x)
        if scales_in_kernel(x, scale):
            return each(lambda _, rows, weight, bias: norm(rows, weight, bias), x, scale, shift)
        return self._scale_shift(norm(x, None, None), scale, shift)

    def _scale_shift(self, y: Tensor, scale: Tensor, shift: Tensor | None) -> Tensor:
        """``scale ⊙ y + shift`` with the members' rows of y (k·B, …) matched to (k, *S)."""
        rows = self._split(y)
        if shift is None:
            out = rows * self._placed(scale, rows)
        else:
            out = torch.addcmul(self._placed(shift, rows), rows, self._placed(scale, rows))
        return out.to(y.dtype).flatten(0, 1)

    def _placed(self, t: Tensor, rows: Tensor) -> Tensor:
        """View t (k, *S) so that it broadcasts over rows (k, B, …)."""
        if self.channels_last:
            return t.view(t.shape[0], *(1,) * (rows.dim() - t.dim()), *t.shape[1:])
        return t.view(t.shape[0], 1, t.shape[1], *(1,) * (rows.dim() - 3))

    def _split(self, x: Tensor) -> Tensor:
        """(k·B, …) → (k, B, …), or an error that names the layer."""
        self._check_rows(x)
        k = self.axis.active
        return x.unflatten(0, (k, x.shape[0] // k))

    def _check_rows(self, x: Tensor) -> None:
        """Raise an error that names the layer if the k members do not divide the rows of x."""
        k = self.axis.active
        if x.shape[0] % k:
            raise InputError(
                f"σNorm layer '{self.where}' got {x.shape[0]} rows in dimension 0, which {k} "
                "folded members do not divide: the network moves its batch dimension. "
                "Use schedule='sequential'"
            )

    def __prepare_scriptable__(self) -> NoReturn:
        """What ``torch.jit.script`` calls first."""
        raise ExportError(
            f"torch.jit.script does not compile layer '{self.where}', whose members are chosen "
            "call by call. Use sigmanens.export_program(ens, example), torch.jit.trace(ens, "
            "example), or script a plain network: ens.member(i)"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Follow device moves and casts to float64, but never drop below float32."""

        def keep(t: Tensor) -> Tensor:
            out = fn(t)
            if t.is_floating_point() and out.is_floating_point() and out.element_size() < 4:
                return t.to(out.device)
            return out

        # Plain norms, activations and wrapped norms have the dtype they would have in the base.
        for module in (*self._template, *(self.children() if recurse else ())):
            module._apply(fn)
        return super()._apply(keep, recurse=False)


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

    def remember(self, source: nn.Module, like: Tensor | None = None) -> None:
        super().remember(source, like)
        template = self._template[0]
        if hasattr(template, "weight") and template.weight is None:
            like = self.logit if like is None else like
            ones = torch.ones(self.logit.shape[1:], dtype=like.dtype, device=like.device)
            template.weight = nn.Parameter(ones)

    @property
    def logit(self) -> nn.Parameter:
        """The trained scale parameter (M, *S): ``scale_logit``, or ``scale`` under "linear"."""
        return self.scale_logit if self.kind == "sigmoid" else self.scale

    def gates(self) -> Tensor:
        """σ(γ) (M, *S), the member's share of each channel; the plain factor under "linear"."""
        logit = whole(self.logit)
        return torch.sigmoid(logit) if self.kind == "sigmoid" else logit

    def scales(self) -> Tensor:
        """Effective scales of all members, (M, *S), at least float32."""
        scale = self.gates()
        if self.carrier is not None:
            scale = self.carrier * scale
        if self.offset is not None:
            scale = scale + self.offset
        return scale

    def shifts(self) -> Tensor | None:
        """Shifts (M, *S) or shared (1, *S), at least float32, or None."""
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
