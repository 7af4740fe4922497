"""Functional norms: norms that a network calls as functions. One run on an example finds them.

A network may call ``F.layer_norm`` and the like, or use the weight of a norm module elsewhere. Each
such call is traced to the module whose code makes it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_FUNCTIONS = {
    getattr(space, f"{prefix}{name}"): name
    for name in ("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm")
    for space, prefix in ((F, ""), (torch, ""), (torch, "native_"))
    if hasattr(space, f"{prefix}{name}")
}
# Questions about a tensor, such as .device and .dtype, whose answers do not depend on its values.
_QUESTIONS = ("__get__", "dim", "size", "numel", "is_floating_point", "is_complex", "get_device")


@dataclass(frozen=True)
class FunctionalNorm:
    """One call of a norm outside every norm module.

    Attributes:
        function: "layer_norm", "rms_norm", "group_norm", "batch_norm" or "instance_norm"; any
            function if there is an owner.
        module, kind: dotted name and class of the module whose code makes the call.
        owner: dotted name of the norm module whose weight or bias the call uses, or None.
    """

    function: str
    module: str
    kind: str
    owner: str | None

    def __str__(self) -> str:
        where = f"'{self.module}' ({self.kind})" if self.module else f"this {self.kind}"
        if self.owner is not None:
            return f"{self.function}() is called in {where} with the weight of norm '{self.owner}'"
        note = (
            f"{self.function}() is called in {where}, not by a norm module: it stays shared by all"
        )
        if self.function != "batch_norm":
            return f"{note} members"
        return (
            f"{note} members, and in training its statistics are taken over all members of a pass: "
            "use schedule='sequential'"
        )


class FunctionalNorms(TorchFunctionMode):
    """A context that collects in ``found`` the functional norms that a network calls.

    Args:
        network: the base.
        norms: its norm modules by dotted name (:func:`sigmanens.conversion.audit.find_norms`).
    """

    def __init__(self, network: nn.Module, norms: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._names = {id(m): n for n, m in network.named_modules()}
        self._norms = {id(m) for m in norms.values()}
        self._owners = {
            id(t): name
            for name, norm in norms.items()
            for t in (getattr(norm, "weight", None), getattr(norm, "bias", None))
            if isinstance(t, Tensor)
        }
        self._weights = {id(p) for p in network.parameters()}
        self.found: list[FunctionalNorm] = []

    @property
    def bypassed(self) -> dict[str, str]:
        """Norm modules whose weight is used outside the module, each with the reason it stays."""
        return {f.owner: str(f) for f in self.found if f.owner is not None}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Make the call, and note it if it is a norm's."""
        kwargs = kwargs or {}
        arguments = [*args, *kwargs.values()]
        owners: set[str | None] = {self._owners[id(a)] for a in arguments if id(a) in self._owners}
        function = _FUNCTIONS.get(func)
        name = str(function or getattr(func, "__name__", "a function"))
        x = args[0] if args else None
        base = x._base if isinstance(x, Tensor) and x._base is not None else x
        standardised = function == "batch_norm" and id(base) in self._weights
        if (function or owners) and name not in _QUESTIONS and not standardised:
            for owner in owners or {None}:
                self._note(name, owner, sys._getframe(1))
        return func(*args, **kwargs)

    def _note(self, function: str, owner: str | None, frame: FrameType | None) -> None:
        callers: list[nn.Module] = []
        while frame is not None:
            module = frame.f_locals.get("self")
            if isinstance(module, nn.Module) and id(module) in self._names:
                callers.append(module)
            frame = frame.f_back
        if not callers or any(id(module) in self._norms for module in callers):
            return
        name, kind = self._names[id(callers[0])], type(callers[0]).__name__
        call = FunctionalNorm(function, name, kind, owner)
        if call not in self.found:
            self.found.append(call)
