"""Which normalisation classes are converted, and how. Open to users' own classes.

A rule belongs to a class exactly, or to subclasses that inherit its ``forward`` unchanged; any
other subclass may do more than normalise (a fused activation, dropout) and is refused by name
rather than flattened. Classes of optional libraries are registered by their qualified name, so
that nothing is imported for them.

    >>> class Centre(nn.Module):                        # a norm of one's own: weight ⊙ norm(x)
    ...     def __init__(self, dim):
    ...         super().__init__(); self.weight = nn.Parameter(torch.ones(dim))
    ...     def forward(self, x): return (x - x.mean(-1, keepdim=True)) * self.weight
    >>> register_norm(Centre)                           # wrapped: normalise once, scale per member
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.lazy import LazyModuleMixin

from sigmanens.errors import ConversionError, InputError
from sigmanens.members import MemberAxis
from sigmanens.norms import (
    Affine,
    SigmaBatchNorm,
    SigmaChannelsFirstLayerNorm,
    SigmaGroupNorm,
    SigmaInstanceNorm,
    SigmaLayerNorm,
    SigmaNorm,
    SigmaRMSNorm,
)

__all__ = ["NormRule", "SigmaWrappedNorm", "is_norm", "register_norm", "rule_for"]

Builder = Callable[[nn.Module, MemberAxis, Affine], SigmaNorm]


@dataclass(frozen=True)
class NormRule:
    """How one class of norms becomes a σNorm.

    Attributes:
        build: ``(source, axis, affine) -> SigmaNorm``.
        shape: parameter shape S of a source norm; of its ``weight`` by default.
        batch_statistics: whether the source keeps statistics of the batch (BatchNorm).
    """

    build: Builder
    shape: Callable[[nn.Module], tuple[int, ...]]
    batch_statistics: bool = False


class SigmaWrappedNorm(SigmaNorm):
    """σNorm over a norm of any class that computes ``weight ⊙ norm(x) + bias`` sample by sample.

    Holds a copy of the source with weight 1 and bias 0 and scales its result per member.
    """

    def __init__(
        self, source: nn.Module, axis: MemberAxis, affine: Affine, channels_last: bool = True
    ) -> None:
        super().__init__(axis, affine)
        if isinstance(source, _NormBase):
            raise ConversionError(
                f"a wrapped {type(source).__name__} would take its batch statistics over all "
                "members together: give register_norm a builder for it"
            )
        self.channels_last = channels_last
        self.inner = copy.deepcopy(source)
        for name, value in (("weight", 1.0), ("bias", 0.0)):
            old = getattr(self.inner, name, None)
            if isinstance(old, Tensor):
                delattr(self.inner, name)
                self.inner.register_buffer(name, torch.full_like(old, value), persistent=False)

    def _blank(self) -> nn.Module:
        norm = (
            super()._blank()
        )  # parameters that are no scale or shift are shared and may be trained
        norm.load_state_dict(self.inner.state_dict(), strict=False)
        return norm

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x by the wrapped norm, then scale and shift per member."""
        return self._scale_shift(self.inner(x), *self.affine())


def _channels(m: nn.Module) -> tuple[int, ...]:
    return (int(getattr(m, "num_features", 0) or getattr(m, "num_channels", 0)),)


def _normalized(m: nn.Module) -> tuple[int, ...]:
    return tuple(m.normalized_shape)  # type: ignore[arg-type]


def _of_weight(m: nn.Module) -> tuple[int, ...]:
    weight = getattr(m, "weight", None)
    if not isinstance(weight, Tensor):
        raise InputError(
            f"a rule for {type(m).__name__} needs shape=…: the module has no 'weight' to tell it"
        )
    return tuple(weight.shape)


_RULES: dict[type[nn.Module] | str, NormRule] = {
    **dict.fromkeys(
        (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d),
        NormRule(SigmaBatchNorm, _channels, batch_statistics=True),
    ),
    **dict.fromkeys(
        (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
        NormRule(SigmaInstanceNorm, _channels),
    ),
    nn.LayerNorm: NormRule(SigmaLayerNorm, _normalized),
    nn.RMSNorm: NormRule(SigmaRMSNorm, _normalized),
    nn.GroupNorm: NormRule(SigmaGroupNorm, _channels),
    "torchvision.models.convnext.LayerNorm2d": NormRule(SigmaChannelsFirstLayerNorm, _normalized),
    "timm.layers.norm.LayerNorm": NormRule(SigmaLayerNorm, _normalized),
    "timm.layers.norm.LayerNorm2d": NormRule(SigmaChannelsFirstLayerNorm, _normalized),
    "timm.layers.norm.GroupNorm": NormRule(SigmaGroupNorm, _channels),
    "timm.layers.norm.GroupNorm1": NormRule(SigmaGroupNorm, _channels),
}


def register_norm(
    cls: type[nn.Module] | str,
    build: Builder | None = None,
    *,
    shape: Callable[[nn.Module], tuple[int, ...]] | None = None,
    channels: str = "last",
) -> None:
    """Teach conversion a normalisation class of your own.

    Args:
        cls: the class, or its qualified name ``"package.module.Class"``.
        build: ``(source, axis, affine) -> SigmaNorm``, a subclass of :class:`SigmaNorm` for
            example; None wraps the source (:class:`SigmaWrappedNorm`).
        shape: the scales' shape for one member; the shape of ``weight`` by default.
        channels: for wrapped norms, where the scaled dimensions are: "last", or "first"
            (dimension 1).

    Raises:
        InputError: if ``cls`` is no module class or ``channels`` is neither.
    """
    if not isinstance(cls, str) and not (isinstance(cls, type) and issubclass(cls, nn.Module)):
        raise InputError(f"register_norm got {cls!r}; expected an nn.Module class or its name")
    if channels not in ("last", "first"):
        raise InputError(f"channels is {channels!r}; expected 'last' or 'first'")

    def wrap(source: nn.Module, axis: MemberAxis, affine: Affine) -> SigmaNorm:
        return SigmaWrappedNorm(source, axis, affine, channels_last=channels == "last")

    _RULES[cls] = NormRule(build or wrap, shape or _of_weight)


def qualified_name(cls: type) -> str:
    """``"package.module.Class"``."""
    return f"{cls.__module__}.{cls.__qualname__}"


def is_norm(module: nn.Module) -> bool:
    """Whether a module is, or by its name and parameters claims to be, a normalisation layer."""
    cls = type(module)
    if cls in _RULES or qualified_name(cls) in _RULES:
        return True
    if isinstance(module, (_NormBase, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)):
        return True
    if "norm" not in cls.__name__.lower() or list(module.children()):
        return False
    tensors = dict(module.named_parameters(recurse=False)) | dict(
        module.named_buffers(recurse=False)
    )
    return any(tensors.get(n) is not None for n in ("weight", "scale", "gamma", "g"))


def rule_for(module: nn.Module) -> NormRule | str:
    """The rule for a norm, or the reason why there is none."""
    cls = type(module)
    if isinstance(module, LazyModuleMixin):
        return "a lazy norm has no shape yet: run one batch through the network first"
    if hasattr(module, "parametrizations"):
        return "its parameters are parametrised: call parametrize.remove_parametrizations first"
    if "forward" in vars(module):
        return "its forward was replaced on the instance, which may do more than normalise"
    for base in cls.__mro__:
        rule = _RULES.get(base) or _RULES.get(qualified_name(base))
        if rule is None:
            continue
        if base is cls or getattr(cls, "forward") is getattr(base, "forward"):  # noqa: B009
            return rule
        return (
            f"{cls.__name__} is a subclass of {base.__name__} with its own forward, which may do "
            "more than normalise: register a builder for it with sigmanens.rules.register_norm"
        )
    return (
        f"no rule for {cls.__module__}.{cls.__name__}: register it with "
        "sigmanens.rules.register_norm"
    )
