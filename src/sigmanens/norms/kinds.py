"""One class for each pair of a σNorm and the norm it replaces, an instance of both.

Code around a network asks ``isinstance(m, nn.BatchNorm2d)``. A converted ``nn.BatchNorm2d``
therefore has the class ``SigmaBatchNorm2d``, derived from ``SigmaBatchNorm`` first and from
``nn.BatchNorm2d`` second. Each class is made once, when it is first needed.
"""

from __future__ import annotations

from typing import Any, SupportsIndex

from torch import nn


def stand_for(layer: nn.Module, kind: type[nn.Module]) -> None:
    """Make a layer an instance of ``kind`` too, or of the first base that can be derived from."""
    own = getattr(type(layer), "_parts", (type(layer),))[0]  # before it stood for another one
    for base in kind.__mro__:
        try:
            layer.__class__ = own if base is nn.Module else _joined(own, base)
        except TypeError:
            continue
        return


_made: dict[tuple[type[nn.Module], type[nn.Module]], type[nn.Module]] = {}


def _joined(own: type[nn.Module], kind: type[nn.Module]) -> type[nn.Module]:
    if (own, kind) in _made:
        return _made[own, kind]
    name = f"{own.prefix}{kind.__name__}"  # type: ignore[attr-defined]
    made = {
        "__doc__": own.__doc__,
        "__module__": own.__module__,
        "__qualname__": name,
        "__reduce_ex__": _reduce,
        "_parts": (own, kind),
    }
    return _made.setdefault((own, kind), type(name, (own, kind), made))


def _reduce(layer: nn.Module, protocol: SupportsIndex) -> tuple[Any, ...]:
    """Pickle and copy by the two parts, for the class itself has no place in a module."""
    found: Any = object.__reduce_ex__(layer, protocol)
    parts = vars(type(layer)).get("_parts")
    if parts is None:  # a class that torch has derived from this one (FSDP, parametrisations)
        return found
    return _empty, parts, *found[2:]


def _empty(own: type[nn.Module], kind: type[nn.Module]) -> nn.Module:
    joined = _joined(own, kind)
    return joined.__new__(joined)
