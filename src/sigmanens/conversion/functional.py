"""Functional norms: norms that a network calls as functions. One run on an example finds them.

A network may call ``F.layer_norm`` and the like, or use the weight of a norm module elsewhere. Each
such call is traced to the module whose code makes it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
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


class FunctionalNorms(TorchFunctionMode):
    """A context that collects the functional norms that a network calls.

    Args:
        network: the base.
        norms: its norm modules by dotted name (:func:`sigmanens.conversion.audit.find_norms`).

    Attributes:
        found: every such call in words, and the norm module whose weight or bias it uses, or None.
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
        self.found: dict[str, str | None] = {}

    @property
    def bypassed(self) -> dict[str, str]:
        """Norm modules whose weight is used outside the module, each with the reason it stays."""
        return {owner: text for text, owner in self.found.items() if owner is not None}

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
        where = f"{function}() is called in " + (f"'{name}' ({kind})" if name else f"this {kind}")
        if owner is not None:
            text = f"{where} with the weight of norm '{owner}'"
        else:
            text = f"{where}, not by a norm module: it stays shared by all members"
            if function == "batch_norm":
                text += (
                    ", and in training its statistics are taken over all members of a pass: use "
                    "schedule='sequential'"
                )
        self.found[text] = owner
