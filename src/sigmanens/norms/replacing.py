"""Helpers that swap norms: what they build from a converted norm is carried over to it.

timm's ``freeze`` and ``nn.SyncBatchNorm.convert_sync_batchnorm`` put the values of a norm into a
plain one, which would mix the members. So the converted norm stays and becomes what was built:

=============================== ================================================================
built from a converted norm     the converted norm
=============================== ================================================================
``FrozenBatchNorm…``            stays in evaluation mode; ``.train()`` does not thaw it
a BatchNorm, of a frozen one    follows ``.train()`` again
``SyncBatchNorm…``              takes each member's statistics over all processes of the group
anything else                   ConversionError
=============================== ================================================================

A module that holds nothing of the members (an ``nn.Identity()``, say) replaces a norm as ever.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_module_registration_hook

from sigmanens.errors import ConversionError
from sigmanens.norms.batchnorm import RunningStatistics
from sigmanens.norms.kinds import stand_for
from sigmanens.norms.member import MemberNorm

_VALUES = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")


def become(layer: MemberNorm, new: nn.Module) -> None:
    """Let a converted norm become what ``new``, built from its values, was meant to be.

    Raises:
        ConversionError: unless that is a frozen, a synchronised or a plain BatchNorm.
    """
    was_frozen, frozen = _is_frozen(type(layer)), _is_frozen(type(new))
    if not isinstance(layer, RunningStatistics) or not (frozen or isinstance(new, _BatchNorm)):
        raise ConversionError(
            f"layer '{layer.where}' has values of {layer.axis.num_members} members, which the "
            f"{type(new).__name__} built from them would mix. Change the base before "
            "sigmanens.convert, or take one member out first: ens.member(0)"
        )
    if frozen or was_frozen:
        for parameter in layer.parameters(recurse=False):
            parameter.requires_grad_(not frozen)
    layer.always_evaluates = frozen
    layer.training = new.training and not frozen
    layer.synchronised = isinstance(new, nn.SyncBatchNorm)
    layer.process_group = getattr(new, "process_group", None)
    if _applies(new, layer.tail):
        layer.take_place_of(_of_one_member(new, layer.template))
    else:  # plain members keep the class that drops out and activates
        stand_for(layer, type(new))


def _is_frozen(kind: type) -> bool:
    return any(base.__name__.startswith("Frozen") for base in kind.__mro__)


def _applies(new: nn.Module, tail: Sequence[str]) -> bool:
    """Whether a norm applies these submodules; torch's converter adds them to one that doesn't."""
    plain = type(new).forward in (_BatchNorm.forward, nn.SyncBatchNorm.forward)
    return not tail or (not plain and all(name in new._modules for name in tail))


def _of_one_member(new: nn.Module, old: nn.Module) -> nn.Module:
    """``new`` with the values of ``old`` in place of the members': what plain norms start from."""
    values = {key: getattr(old, key, None) for key in _VALUES}
    like = next(t for t in values.values() if isinstance(t, Tensor))
    none = {
        "weight": torch.ones_like(like),
        "bias": torch.zeros_like(like),
        "num_batches_tracked": torch.zeros_like(like[0]).long(),
    }
    for key, value in values.items():
        if key in new._parameters:
            new._parameters[key] = None if value is None else nn.Parameter(value.detach().clone())
        elif key in new._buffers:
            new._buffers[key] = none[key] if value is None else value.detach().clone()
    return new


def _on_registration(parent: nn.Module, name: str, new: nn.Module | None) -> nn.Module | None:
    """Called by torch before a module is registered; what is returned takes its place."""
    old = parent._modules.get(name)
    if not isinstance(old, MemberNorm) or new is None or isinstance(new, MemberNorm):
        return None
    values = (getattr(new, key, None) for key in _VALUES)
    if not any(isinstance(v, Tensor) and v.shape == old.scales().shape for v in values):
        return None
    become(old, new)
    return old


register_module_module_registration_hook(_on_registration)  # type: ignore[arg-type]
