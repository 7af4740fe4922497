"""Whether a network is still what its plan builds: what a checkpoint needs to be loaded again."""

from __future__ import annotations

from torch import nn
from torch.nn.utils.parametrize import is_parametrized
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from sigmanens.conversion.fingerprint import Structure
from sigmanens.errors import CheckpointError

__all__ = ["check_structure", "check_values"]


def check_values(network: nn.Module) -> None:
    """Refuse a network without values.

    Raises:
        CheckpointError: if tensors lie on the meta device.
    """
    tensors = [*network.named_parameters(), *network.named_buffers()]
    empty = [name for name, tensor in tensors if tensor.is_meta]
    if empty:
        raise CheckpointError(
            f"{len(empty)} tensors lie on the meta device and have no values (first: "
            f"'{empty[0]}'). Load them before you save"
        )


def check_structure(network: nn.Module, made: Structure) -> None:
    """Refuse a network that was rebuilt after its conversion.

    Args:
        network: a converted network.
        made: its structure at conversion.

    Raises:
        CheckpointError: if layers or tensors were added, removed, replaced, resized or
            parametrised; it names the first and says how to go on.
    """
    now = Structure.of(network)
    found = _difference(made, now)
    if found is None:
        return
    raise CheckpointError(
        f"this {type(network).__name__} was changed after its conversion: {found}. A checkpoint is "
        f"loaded by converting the base again, which would not have the change. {_fix(network)}. "
        "Nothing was written"
    )


def _difference(made: Structure, now: Structure) -> str | None:
    """The first thing that is not as it was made, in words."""
    for name, kind in made.classes.items():
        other = now.classes.get(name)
        if other is None:
            return f"layer '{name}' ({_short(kind)}) was removed"
        if other != kind:
            alike = _short(kind) == _short(other)
            was, is_now = (kind, other) if alike else (_short(kind), _short(other))
            return f"layer '{name}' was a {was} and is a {is_now}"
    for name in now.classes:
        if name not in made.classes:
            return f"layer '{name}' ({_short(now.classes[name])}) was added"
    for key, shape in made.shapes.items():
        if key not in now.shapes:
            return f"tensor '{key}' was removed"
        if now.shapes[key] != shape:
            return f"tensor '{key}' had shape {shape} and has {now.shapes[key]}"
    for key in now.shapes:
        if key not in made.shapes:
            return f"tensor '{key}' was added"
    return None


def _short(kind: str) -> str:
    return kind.rpartition(".")[2]


_HOOKS: dict[type, str] = {
    WeightNorm: "torch.nn.utils.remove_weight_norm(layer)",
    SpectralNorm: "torch.nn.utils.remove_spectral_norm(layer)",
    BasePruningMethod: "torch.nn.utils.prune.remove(layer, 'weight')",
}


def _fix(network: nn.Module) -> str:
    """What to do, by what was done."""
    for name, module in network.named_modules():
        if is_parametrized(module):
            call = "torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight')"
            return f"Put the plain weight into '{name}' before you save: {call}"
        for hook in module._forward_pre_hooks.values():
            for kind, call in _HOOKS.items():
                if isinstance(hook, kind):
                    return f"Put the plain weight into '{name}' before you save: {call}"
        if type(module).__module__.startswith("peft."):
            return "Merge the adapters first (merge_and_unload), or add them before convert(…)"
    return (
        "Make the change in the base and convert that, or keep the members as plain networks: "
        "ens.member(i)"
    )
