"""Pretrained weights from a file into a network, strictly."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from sigmanens.errors import DataError

Network = TypeVar("Network", bound=nn.Module)

_TORCH_SUFFIXES = (".pt", ".pth", ".th", ".bin")
_SHOWN = 3
_COUNTER = "num_batches_tracked"


def load_weights(model: Network, path: str | os.PathLike[str], new: str = "") -> Network:
    """Load a state dict from a file into the network, in place, and return the network.

    Every tensor of the network must be in the file and the reverse, with equal shapes: nothing is
    loaded in part. A file of the form ``{"state_dict": ...}`` is opened, and the prefix ``module.``
    that data-parallel training leaves on every key is dropped. Only the batch counters of BatchNorm
    may be absent, as older files have none. Tensors keep the network's dtype and device.

    Args:
        model: the network to fill.
        path: a ``.safetensors`` file, or a torch file (``.pt``, ``.pth``, ``.th``, ``.bin``), which
            is read with ``weights_only=True``.
        new: how the keys of a layer begin that keeps the network's own values, because the file has
            it for other classes; "": every layer is loaded.

    Returns:
        The same network.

    Raises:
        DataError: if the file is missing, of another kind or damaged, or if its keys or shapes
            differ from the network's; the message names the first of them.
    """
    path = Path(path)
    state = _read(path)
    if state and all(key.startswith("module.") for key in state):
        state = {key.removeprefix("module."): tensor for key, tensor in state.items()}
    own = model.state_dict()
    if new:
        state = {key: tensor for key, tensor in state.items() if not key.startswith(new)}
        state |= {key: tensor for key, tensor in own.items() if key.startswith(new)}
    missing = [key for key in own if key not in state and not key.endswith(_COUNTER)]
    problems = [
        *_listing("missing in the file", missing),
        *_listing("not in the network", [key for key in state if key not in own]),
        *_listing(
            "of another shape",
            [
                f"{key} (file {tuple(state[key].shape)}, network {tuple(own[key].shape)})"
                for key in own
                if key in state and state[key].shape != own[key].shape
            ],
        ),
    ]
    if problems:
        raise DataError(
            f"The weights of {path} do not fit {type(model).__name__}: {'; '.join(problems)}. "
            "Check the backbone's name, width and number of classes."
        )
    model.load_state_dict(dict(state))  # without the metadata that would ask for the counters
    return model


def _read(path: Path) -> Mapping[str, Tensor]:
    """Read the file into a flat mapping from key to tensor."""
    if not path.is_file():
        raise DataError(f"There is no weight file {path}.")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        if path.suffix not in _TORCH_SUFFIXES:
            raise DataError(
                f"{path} is not a weight file: expected .safetensors or one of "
                f"{', '.join(_TORCH_SUFFIXES)}."
            )
        state = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, pickle.UnpicklingError, OSError, RuntimeError, EOFError) as error:
        raise DataError(f"{path} cannot be read as a file of tensors: {error}") from error
    if isinstance(state, Mapping) and isinstance(state.get("state_dict"), Mapping):
        state = state["state_dict"]
    if not isinstance(state, Mapping) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in state.items()
    ):
        raise DataError(
            f"{path} holds {type(state).__name__}, not a state dict of tensors. Save "
            "model.state_dict(), not the model."
        )
    return state


def _listing(what: str, keys: list[str]) -> list[str]:
    """Return one phrase that counts the keys and names the first ones, or nothing."""
    if not keys:
        return []
    rest = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return [f"{len(keys)} {what}: {', '.join(keys[:_SHOWN])}{rest}"]
