"""Whether a network is still what its plan builds, so that its checkpoint can be loaded again."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from sigmanens.conversion.fingerprint import structure
from sigmanens.errors import CheckpointError

__all__ = ["check_structure", "check_values"]

_HOOKS = {
    WeightNorm: "torch.nn.utils.remove_weight_norm(layer)",
    SpectralNorm: "torch.nn.utils.remove_spectral_norm(layer)",
    BasePruningMethod: "torch.nn.utils.prune.remove(layer, 'weight')",
}


def check_values(network: nn.Module) -> None:
    """Raise CheckpointError for a network with tensors on the meta device."""
    tensors = [*network.named_parameters(), *network.named_buffers()]
    empty = [name for name, tensor in tensors if tensor.is_meta]
    if empty:
        raise CheckpointError(
            f"{len(empty)} tensors lie on the meta device and have no values (first: "
            f"'{empty[0]}'). Load them before you save"
        )


def check_structure(network: nn.Module, made: Mapping[str, str]) -> None:
    """Raise CheckpointError if layers or tensors were changed since ``made``, the conversion.

    The error names the first that was added, removed, replaced, resized or parametrised, and says
    how to go on.
    """
    now = structure(network)
    what = next((key for key in (*made, *now) if made.get(key) != now.get(key)), None)
    if what is None:
        return
    if what in made and what in now:
        change = f"{what} was {made[what]} and is {now[what]}"
    elif what in made:
        change = f"{what}, {made[what]}, was removed"
    else:
        change = f"{what}, {now[what]}, was added"
    raise CheckpointError(
        f"this {type(network).__name__} was changed after its conversion: {change}. A checkpoint "
        f"is loaded by converting the base again, which would not have the change. {_fix(network)}"
        ". Nothing was written"
    )


def _fix(network: nn.Module) -> str:
    """What to do, by what was done."""
    for name, module in network.named_modules():
        hooks = module._forward_pre_hooks.values()
        calls = [_HOOKS[k] for hook in hooks for k in _HOOKS if isinstance(hook, k)]
        if is_parametrized(module):
            calls = ["torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')"]
        if calls:
            return f"Put the plain weight into '{name}' before you save: {calls[0]}"
        if type(module).__module__.startswith("peft."):
            return "Merge the adapters first (merge_and_unload), or add them before convert(…)"
    return (
        "Make the change in the base and convert that, or keep the members as plain networks: "
        "ens.member(i)"
    )
