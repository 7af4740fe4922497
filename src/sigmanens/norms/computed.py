"""The weight of a σNorm: a value computed from the members' scales, to be read and not written.

A write to a computed value would be lost, so it raises::

    >>> nn.init.zeros_(norm.weight)                 # InputError: … write to norm.scale_logit …
    >>> norm.weight.requires_grad_(False)           # the same as on norm.scale_logit
    >>> norm.weight.mean(), norm.weight.device      # plain results

What shares memory with it (``.data``, ``.detach()``, views) refuses too; other results are plain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from sigmanens.errors import InputError
from sigmanens.norms.kernels import is_eager

_OPERATORS = ("iadd", "isub", "imul", "itruediv", "ipow", "ifloordiv")
_IN_PLACE = {"__set__", "__setitem__", *(f"__{name}__" for name in _OPERATORS)}


class Computed(Tensor):
    """A tensor that refuses to be written to, made by :func:`computed`."""

    _is_param = True  # what isinstance(…, nn.Parameter) asks for, as it does of the base's weight
    _source: nn.Parameter | None = None
    _refusal: str = "this value is computed and cannot be written to"

    def _set_requires_grad(self, requires_grad: bool = True) -> None:
        if self._source is not None:
            self._source.requires_grad_(requires_grad)
        elif requires_grad:
            raise InputError(self._refusal)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        target = _target(args[0] if args else kwargs.get("tensor", kwargs.get("input")))
        if target is not None:
            what = getattr(func, "__self__", None)  # the attribute that is read or set
            if name == "requires_grad_":
                target._set_requires_grad(*args[1:], **kwargs)
                return target
            if what is Tensor.requires_grad and name == "__get__":
                return target._source is not None and target._source.requires_grad
            if what is Tensor.requires_grad:
                return target._set_requires_grad(args[1])
            if name == "__get__" and what is Tensor.grad:
                raise InputError(f"its gradient arrives elsewhere: {target._refusal}")
            writes = name.endswith("_") and not name.endswith("__")
            if writes or name in _IN_PLACE:
                raise InputError(target._refusal)
            if name in ("__deepcopy__", "__reduce_ex__"):
                plain = _plain(target).detach().clone()
                return plain if name == "__deepcopy__" else plain.__reduce_ex__(*args[1:])
        elif name == "copy_" and args[0].shape != args[1].shape:
            shapes = f"{tuple(args[1].shape)} does not fit into {tuple(args[0].shape)}"
            raise InputError(f"{shapes}: {args[1]._refusal}")
        if isinstance(kwargs.get("out"), Computed):
            raise InputError(kwargs["out"]._refusal)
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        return result if target is None else _guarded(result, target)


def computed(value: Tensor, source: nn.Parameter | None, refusal: str) -> Tensor:
    """A tensor to read; a write raises InputError with the refusal. Compilers get the plain value.

    ``requires_grad`` is read and set on the source; without one it is always False.
    """
    if type(value) is not Tensor or not is_eager():
        return value
    made = value.as_subclass(Computed)
    made._source, made._refusal = source, refusal
    return made


def _target(first: Any) -> Computed | None:
    """The computed tensor that an operation is called on, alone or in a list."""
    if isinstance(first, (tuple, list)):
        return next((t for t in first if isinstance(t, Computed)), None)
    return first if isinstance(first, Computed) else None


def _plain(t: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return t.as_subclass(Tensor)


def _guarded(result: Any, origin: Computed) -> Any:
    """The result of an operation, guarded as well where it shares memory with its origin."""
    if type(result) in (tuple, list):
        return type(result)(_guarded(r, origin) for r in result)
    if type(result) not in (Tensor, Computed):
        return result
    result = _plain(result)
    if not result.numel() or result.is_meta or result.layout != torch.strided:
        return result
    same = result.untyped_storage().data_ptr() == _plain(origin).untyped_storage().data_ptr()
    return computed(result, origin._source, origin._refusal) if same else result
