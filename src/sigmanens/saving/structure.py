"""Whether a network is still what its plan builds, so that its checkpoint can be loaded again."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from sigmanens.conversion.fingerprint import structure
from sigmanens.errors import CheckpointError


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

    The error names the first that was added, removed, replaced, resized or parametrised.
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
        "is loaded by converting the base again, which would not have the change. Nothing was "
        "written. Undo it before you save (parametrisations: torch.nn.utils.parametrize."
        "remove_parametrizations; older ones: torch.nn.utils.remove_weight_norm, "
        "remove_spectral_norm, prune.remove; adapters: merge_and_unload), make it in the base and "
        "convert that, or keep the members as plain networks: ens.member(i)"
    )
