"""Rules: how each class of norm is converted. Users can add rules for their own classes.

A rule holds for its class and for subclasses that inherit its ``forward``. Any other norm is probed
(:mod:`sigmanens.conversion.probing`). Classes of optional libraries go by their qualified name, so
that nothing is imported for them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.lazy import LazyModuleMixin

from sigmanens.conversion.probing import Protocol, probe, settings
from sigmanens.errors import InputError
from sigmanens.norms import (
    Affine,
    MemberBatchNorm,
    MemberNorm,
    SigmaBatchNorm,
    SigmaChannelsFirstLayerNorm,
    SigmaGroupNorm,
    SigmaInstanceNorm,
    SigmaLayerNorm,
    SigmaNorm,
    SigmaRMSNorm,
)
from sigmanens.norms.wrapped import SigmaWrappedNorm
from sigmanens.passes.context import MemberAxis

__all__ = [
    "KeepRule", "NormRule", "Rule", "SigmaWrappedNorm", "is_norm", "qualified_name",
    "register_norm", "rule_for",
]  # fmt: skip

Builder = Callable[[nn.Module, MemberAxis, Affine], SigmaNorm]
Keeper = Callable[[nn.Module, MemberAxis, Tensor | None], MemberNorm]


def _weight(m: nn.Module) -> Tensor | None:
    weight = getattr(m, "weight", None)
    return weight.detach() if isinstance(weight, Tensor) else None


def _weight_from_one(m: nn.Module) -> Tensor | None:
    """Scale of a norm that computes ``(1 + weight) ⊙ norm(x)``."""
    weight = _weight(m)
    if weight is None:
        return None
    return 1 + weight.to(torch.promote_types(weight.dtype, torch.float32))


def _shape(m: nn.Module) -> tuple[int, ...]:
    """S, by the weight of a norm, or by what it declares if it has none."""
    weight = getattr(m, "weight", None)
    if isinstance(weight, Tensor):
        return tuple(weight.shape)
    for key in ("normalized_shape", "num_features", "num_channels"):
        declared = getattr(m, key, None)
        if declared is not None:
            return tuple(declared) if isinstance(declared, (tuple, list)) else (int(declared),)
    raise InputError(
        f"a rule for {type(m).__name__} needs shape=…: the module has no 'weight' to tell it"
    )


@dataclass(frozen=True)
class NormRule:
    """How one class of norms becomes a σNorm.

    Attributes:
        build: ``(source, axis, affine) -> SigmaNorm``.
        keep: ``(source, axis, like) -> MemberNorm`` for a BatchNorm that is kept: its statistics
            must be one set per member. None for norms without statistics.
        shape: gives the shape S of a source norm's parameters; that of its ``weight`` by default.
        scale: gives the scale ``(*S)`` of a source norm, or None for 1; its ``weight`` by default.
    """

    build: Builder
    keep: Keeper | None = None
    shape: Callable[[nn.Module], tuple[int, ...]] = _shape
    scale: Callable[[nn.Module], Tensor | None] = _weight


@dataclass(frozen=True)
class KeepRule:
    """The reason why a class is always kept, shared by all members."""

    reason: str


Rule = NormRule | KeepRule | str
"""How a norm is converted; or why it is always kept; or, as a text, why it cannot be converted."""


def _activated(
    build: Callable[..., SigmaNorm], keep: Callable[..., MemberNorm] | None = None
) -> NormRule:
    """The rule for a norm of timm's that drops out and activates what it has normalised."""
    tail = ("drop", "act")
    return NormRule(partial(build, tail=tail), keep and partial(keep, tail=tail))


_RULES: dict[type[nn.Module] | str, Rule] = {
    **dict.fromkeys(
        (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
        NormRule(SigmaBatchNorm, MemberBatchNorm),
    ),
    **dict.fromkeys(
        (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), NormRule(SigmaInstanceNorm)
    ),
    nn.LayerNorm: NormRule(SigmaLayerNorm),
    nn.RMSNorm: NormRule(SigmaRMSNorm),
    nn.GroupNorm: NormRule(SigmaGroupNorm),
    "torchvision.models.convnext.LayerNorm2d": NormRule(SigmaChannelsFirstLayerNorm),
    "timm.layers.norm.LayerNorm": NormRule(SigmaLayerNorm),
    "timm.layers.norm.LayerNorm2d": NormRule(SigmaChannelsFirstLayerNorm),
    "timm.layers.norm.GroupNorm": NormRule(SigmaGroupNorm),
    "timm.layers.norm.GroupNorm1": NormRule(SigmaGroupNorm),
    "timm.layers.norm_act.BatchNormAct2d": _activated(SigmaBatchNorm, MemberBatchNorm),
    "timm.layers.norm_act.SyncBatchNormAct": _activated(SigmaBatchNorm, MemberBatchNorm),
    "timm.layers.norm_act.GroupNormAct": _activated(SigmaGroupNorm),
    "timm.layers.norm_act.GroupNorm1Act": _activated(SigmaGroupNorm),
    "timm.layers.norm_act.LayerNormAct": _activated(SigmaLayerNorm),
    "timm.layers.norm_act.LayerNormAct2d": _activated(SigmaChannelsFirstLayerNorm),
    "timm.layers.grn.GlobalResponseNorm": KeepRule(
        "a response normalisation adds weight ⊙ norm(x) to its input: a gate, no scale"
    ),
    **{
        f"timm.layers.evo_norm.EvoNorm2d{kind}": (
            "an EvoNorm is normalisation and activation in one formula, so that its weight scales "
            "no normalised value and σNorm has no counterpart. Build the network with another "
            "norm layer"
        )
        for kind in ("B0", "B1", "B2", "S0", "S1", "S2")
    },
    "timm.layers.filter_response_norm.FilterResponseNormTlu2d": (
        "a FilterResponseNorm with TLU trains scale, shift and activation threshold as one. Build "
        "the network with another norm layer"
    ),
    **dict.fromkeys(
        ("timm.layers.inplace_abn.InplaceAbn", "inplace_abn.abn.InPlaceABN"),
        "an in-place activated BatchNorm recomputes its input from its output by weight and bias, "
        "of which there is one set only. Build the network with another norm layer",
    ),
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

    wrap = partial(SigmaWrappedNorm, channels_last=channels == "last")
    _RULES[cls] = NormRule(build or wrap, shape=shape or _shape)


def qualified_name(cls: type) -> str:
    """``"package.module.Class"``."""
    return f"{cls.__module__}.{cls.__qualname__}"


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm: by its class, or by its name and parameters."""
    cls = type(module)
    if cls in _RULES or any(qualified_name(base) in _RULES for base in cls.__mro__):
        return True
    if isinstance(module, (_NormBase, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm)):
        return True
    if "norm" not in cls.__name__.lower() or isinstance(module, _NO_NORMS):
        return False
    # A fused norm may hold dropout and activation; whatever holds more is a block.
    below = [p for child in module.children() for p in child.parameters()]
    if any(p.dim() > 1 for p in below) or any(is_norm(c) for c in module.children()):
        return False
    held = module._parameters | module._buffers
    named = any(held.get(n) is not None for n in ("weight", "scale", "gamma", "g"))
    return named or "weight" in module._parameters  # None without an affine


_NO_NORMS = (nn.Linear, nn.Embedding, _ConvNd)


def rule_for(module: nn.Module, probed: dict[Hashable, NormRule | str] | None = None) -> Rule:
    """The rule for one norm, see :func:`is_norm`.

    ``probed`` holds results of probes so far, by class and settings, so that norms of one class and
    setting are probed once. New results are added.
    """
    cls = type(module)
    if isinstance(module, LazyModuleMixin):
        return "a lazy norm has no shape yet: run one batch through the network first"
    if hasattr(module, "parametrizations"):
        return (
            "its parameters are parametrised: make them plain first, with "
            "torch.nn.utils.parametrize.remove_parametrizations"
        )
    if "_hf_hook" in vars(module):
        return (
            "accelerate has replaced its forward on the instance: undo that first, with "
            "accelerate.hooks.remove_hook_from_submodules"
        )
    forward = vars(module).get("forward")  # accelerate leaves the class's own there
    if forward is not None and getattr(forward, "__func__", None) is not cls.forward:
        return (
            "its forward was replaced on the instance, which may do more than normalise: delete "
            "the replacement, or make it a subclass"
        )
    what = f"no rule covers {qualified_name(cls)}"
    for base in cls.__mro__:
        rule = _RULES.get(base) or _RULES.get(qualified_name(base))
        if rule is not None:
            inherits = getattr(cls, "forward") is getattr(base, "forward")  # noqa: B009
            if inherits or not isinstance(rule, NormRule):
                return rule
            what = f"{cls.__name__} is a subclass of {base.__name__} with a forward of its own"
            break
    return _probed(module, what, {} if probed is None else probed)


def _probed(module: nn.Module, what: str, probed: dict[Hashable, NormRule | str]) -> NormRule | str:
    """The rule for a norm that follows the protocol, or the refusal with the reason."""
    key = settings(module)
    if key is not None and key in probed:
        return probed[key]
    if any(t.is_meta for t in module.parameters()):
        return f"{what}, and it lies on the meta device, where it cannot be tried: load it first"
    found = probe(module)
    rule: NormRule | str
    if isinstance(found, Protocol):
        scale = _weight if found.neutral else _weight_from_one
        rule = NormRule(partial(SigmaWrappedNorm, **vars(found)), scale=scale)
    else:
        rule = (
            f"{what}, and it does not compute weight ⊙ norm(x) + bias: {found}. Register a "
            "builder for it with sigmanens.conversion.rules.register_norm"
        )
    if key is not None:
        probed[key] = rule
    return rule
