"""What the rivals have in common: where their base comes from, and the member axis."""

from __future__ import annotations

import copy
from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from sigmanens.conversion.audit import norms_are_trained
from sigmanens.conversion.rules import is_norm
from sigmanens.ensemble.inputs import Inputs, resolve_batch_dims
from sigmanens.ensemble.prediction import logits_of
from sigmanens.errors import InputError, MissingPackageError

__all__ = [
    "Rival",
    "base_network",
    "check_count",
    "import_library",
    "is_trained",
    "repeated",
    "unfolded",
]


class Rival(nn.Module):
    """A network behind the ensembles' interface; subclasses say how its members come about.

    Attributes:
        network: what is inside.
        num_members: M, the first dimension of the logits in evaluation mode.
    """

    def __init__(self, network: nn.Module, num_members: int) -> None:
        super().__init__()
        self.network = network
        self.num_members = num_members
        self.training = network.training

    def no_weight_decay(self) -> set[str]:
        """Dotted names of weights that the authors do not decay, besides norms and biases."""
        return set()


def base_network(model_or_factory: nn.Module | Callable[[], nn.Module]) -> nn.Module:
    """A network of the rival's own: a deep copy of the one given, or what the factory makes.

    Raises:
        InputError: if it is neither.
    """
    if isinstance(model_or_factory, nn.Module):
        return copy.deepcopy(model_or_factory)
    made = model_or_factory() if callable(model_or_factory) else model_or_factory
    if not isinstance(made, nn.Module):
        raise InputError(
            f"got a {type(made).__name__}; expected an nn.Module or a function without arguments "
            "that makes one"
        )
    return made


def is_trained(network: nn.Module) -> bool:
    """Whether the norms of a network carry training, as :func:`sigmanens.convert` decides it."""
    return norms_are_trained([m for m in network.modules() if is_norm(m)])[0]


def check_count(name: str, value: object) -> int:
    """The value, if it is an integer ≥ 1.

    Raises:
        InputError: if not.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise InputError(f"{name} is {value!r}; expected an integer ≥ 1")
    return value


def unfolded(output: Any, members: int) -> Tensor:
    """Logits (M·B, …), member-major, as (M, B, …).

    Raises:
        InputError: if M does not divide the rows.
    """
    logits = logits_of(output)
    if logits.shape[0] % members:
        raise InputError(
            f"the network returned {logits.shape[0]} rows, which {members} members do not divide: "
            "it changes its batch dimension after the members part"
        )
    return logits.unflatten(0, (members, logits.shape[0] // members))


def repeated(
    network: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], members: int
) -> tuple[list[Any], dict[str, Any]]:
    """The inputs of a network with every batched tensor (B, …) repeated to (M·B, …)."""
    dims = resolve_batch_dims(network, None)
    return Inputs.of(args, kwargs, dims).expand(members).arguments()


def import_library(module: str, package: str) -> Any:
    """Import a module of a library that only rivals need.

    Args:
        module: dotted name of the module.
        package: what installs it.

    Raises:
        MissingPackageError: if the library is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as e:
        if (e.name or "").partition(".")[0] != module.partition(".")[0]:
            raise
        raise MissingPackageError(
            f"this rival is built from {package}, which is not installed: "
            "pip install 'sigmanens[lab,bench]'"
        ) from e
