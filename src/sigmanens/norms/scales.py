r"""What is member-specific in a normalisation layer: the scales and shifts of M members.

For member :math:`m` and channel :math:`c` (arXiv 2607.23860)

.. math:: y_{m} = s_m \odot \mathrm{norm}_m(x) + b_m, \qquad
          s_m = k_m \odot \sigma(\gamma_m) + o_m .

``scale_logit`` holds :math:`\gamma`. The frozen carrier :math:`k` and offset :math:`o` carry
pretrained scales and are absent from scratch. With ``scale="linear"`` the parameter ``scale`` takes
the place of :math:`\sigma(\gamma)` (FiLM-Ensemble, arXiv 2206.00050).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sigmanens.errors import ConversionError, InputError
from sigmanens.norms.computed import computed
from sigmanens.norms.kernels import is_eager
from sigmanens.norms.member import MemberNorm
from sigmanens.passes.context import MemberAxis

_REBUILDING = ("torch.nn.utils.fusion", "torch.nn.utils.weight_norm")


@dataclass
class Affine:
    """Initial scales and shifts of one σNorm layer with parameter shape ``S`` (``(C,)`` mostly).

    Attributes:
        logit: γ, or the factor itself under ``kind="linear"``: ``(M, *S)``, float32.
        carrier: frozen factor k, broadcastable to ``(M, *S)``, or None for 1.
        offset: frozen offset o ``(M, *S)``, or None for 0.
        shift: ``(M, *S)`` one per member and trained, ``(*S)`` shared and frozen, or None.
        kind: ``"sigmoid"`` or ``"linear"``.
    """

    logit: Tensor
    carrier: Tensor | None = None
    offset: Tensor | None = None
    shift: Tensor | None = None
    kind: str = "sigmoid"


def whole(t: Tensor) -> Tensor:
    """A parameter that is divided over ranks (FSDP), gathered; any other as it is."""
    gather = None if torch.compiler.is_compiling() else getattr(t, "full_tensor", None)
    return t if gather is None else gather()


def is_sharded(module: nn.Module) -> bool:
    """Whether parameters are divided over ranks (FSDP) and whole only while a module runs."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return False
    fsdp = sys.modules.get("torch.distributed.fsdp")
    names = ("FSDPModule", "FullyShardedDataParallel")
    kinds = tuple(getattr(fsdp, name) for name in names if hasattr(fsdp, name))
    return any(isinstance(m, kinds) for m in module.modules()) or any(
        hasattr(p, "full_tensor") for p in module.parameters()
    )


class SigmaNorm(MemberNorm):
    """Scales ``k_m ⊙ σ(γ_m) + o_m`` and shifts of M members; subclasses say how to normalise."""

    scale_logit: nn.Parameter
    scale: nn.Parameter
    carrier: Tensor | None
    offset: Tensor | None
    shift: Tensor | None
    prefix = "Sigma"

    def __init__(
        self,
        axis: MemberAxis,
        affine: Affine,
        source: nn.Module | None = None,
        tail: Sequence[str] = (),
    ) -> None:
        super().__init__(axis, source, tail)
        self.kind = affine.kind
        name = "scale_logit" if affine.kind == "sigmoid" else "scale"
        self.register_parameter(name, nn.Parameter(affine.logit))
        self.register_buffer("carrier", affine.carrier)
        self.register_buffer("offset", affine.offset)
        if affine.shift is not None and affine.shift.dim() == affine.logit.dim():
            self.register_parameter("shift", nn.Parameter(affine.shift))
        else:
            self.register_buffer("shift", affine.shift)

    def take_place_of(self, source: nn.Module, like: Tensor | None = None) -> None:
        super().take_place_of(source, like)
        for flag in ("affine", "elementwise_affine"):
            if hasattr(source, flag):
                setattr(self, flag, True)
        template = self.template
        if hasattr(template, "weight") and template.weight is None:
            like = self.logit if like is None else like
            ones = torch.ones(self.logit.shape[1:], dtype=like.dtype, device=like.device)
            template.weight = nn.Parameter(ones)

    @property
    def logit(self) -> nn.Parameter:
        """The trained scale parameter ``(M, *S)``: ``scale_logit``, or ``scale`` under "linear"."""
        return self.scale_logit if self.kind == "sigmoid" else self.scale

    def gates(self) -> Tensor:
        """σ(γ) ``(M, *S)``, the member's share of each channel; the plain factor under "linear"."""
        logit = whole(self.logit)
        return torch.sigmoid(logit) if self.kind == "sigmoid" else logit

    def scales(self) -> Tensor:
        """Effective scales of all members, ``(M, *S)``, at least float32."""
        scale = self.gates()
        if self.carrier is not None:
            scale = self.carrier * scale
        if self.offset is not None:
            scale = scale + self.offset
        return scale

    def shifts(self) -> Tensor | None:
        """Shifts ``(M, *S)`` or shared ``(1, *S)``, at least float32, or None."""
        shift = self.shift
        return shift if shift is None or shift.dim() == self.logit.dim() else shift.unsqueeze(0)

    def _apart(self, scale: Tensor) -> Tensor:
        count = scale.numel()
        wave = torch.arange(count, device=scale.device, dtype=scale.dtype).mul(0.9).cos()
        return scale * (1 + 0.5 * wave.view_as(scale))

    @property
    def weight(self) -> Tensor:
        """Effective scales ``(M, *S)``, to be read; a write raises InputError.

        ``weight.requires_grad_(…)`` is that of the scale parameter. torch's functions that fold a
        norm into another layer, or split its weight into parts, raise ConversionError.
        """
        if is_eager() and sys._getframe(1).f_globals.get("__name__") in _REBUILDING:
            raise ConversionError(
                f"{sys._getframe(1).f_globals['__name__']} would take the weight of σNorm layer "
                f"'{self.where}' ({type(self).__name__}) for one plain weight, but each member has "
                "scales of its own. Take one member out first: ens.member(i)"
            )
        return computed(self.scales(), self.logit, self._refusal("weight"))

    @weight.setter
    def weight(self, value: object) -> None:
        raise InputError(self._refusal("weight"))

    @property
    def bias(self) -> Tensor | None:
        """Shifts ``(M, *S)``: the parameter if there is one per member, else to be read.

        Zeros where the base had a shift and the members have none; None where neither has.
        """
        shift = self.shift
        if isinstance(shift, nn.Parameter):
            return shift
        if shift is None:
            if not self._template or getattr(self._template[0], "bias", None) is None:
                return None
            shift = torch.zeros_like(self.logit[0])
        value = shift.detach().expand(self.logit.shape)
        return computed(value, None, self._refusal("bias"))

    @bias.setter
    def bias(self, value: object) -> None:
        raise InputError(self._refusal("bias"))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As of any module; ``weight`` and ``bias`` are no parameters here and raise InputError."""
        if (own := name.removesuffix("_orig")) in ("weight", "bias"):
            raise InputError(self._refusal(own))
        super().register_parameter(name, param)

    def reset_parameters(self) -> None:
        """Raise InputError: scales are drawn by conversion."""
        raise InputError(
            f"σNorm layer '{self.where}' has no parameters of its base to reset: its scales are "
            "drawn by sigmanens.convert. Convert again"
        )

    def _refusal(self, name: str) -> str:
        """What a write to ``weight`` or ``bias`` is told."""
        if name == "weight":
            own = "scale_logit" if self.kind == "sigmoid" else "scale"
            what = f"computed from the members' scales in '{own}'"
            cure = f"Write to norm.{own} (M, *S), or to the base before sigmanens.convert"
        elif self.shift is None:
            what = "0 for all members, which have no shift"
            cure = "Convert with shift=True for one per member"
        else:
            what, cure = "the base's shift, shared by all members", "Write to norm.shift (*S)"
        which = f"the {name} of σNorm layer '{self.where}' ({type(self).__name__})"
        return f"{which} cannot be written: it is {what}. {cure}"

    def extra_repr(self) -> str:
        own = isinstance(self.shift, nn.Parameter)
        shift = "member" if own else "none" if self.shift is None else "shared"
        shape = tuple(self.logit.shape[1:])
        return f"{shape}, members={self.axis.num_members}, scale={self.kind}, shift={shift}"
