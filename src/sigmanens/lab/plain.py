"""Between the lab's objects and the plain types that YAML and JSON files hold."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from sigmanens.errors import ConfigError, SigmaNensError

T = TypeVar("T")


def to_json(value: Any) -> Any:
    """The same with string keys, lists, numbers of 9 digits, and null for what is not finite."""
    if isinstance(value, Mapping):
        return {str(k): to_json(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_json(v) for v in value]
    if isinstance(value, float):
        return float(f"{value:.9g}") if math.isfinite(value) else None
    return value


def finite(value: Any) -> float | None:
    """``value`` as a float, or None where it is no finite number."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if number and math.isfinite(value) else None


def dump_json(value: Any, indent: str = "") -> str:
    """JSON text of plain types; what holds nothing nested stands on one line.

    Raises:
        ValueError: for a number that is not finite: see :func:`to_json`.
    """
    inner = value.values() if isinstance(value, Mapping) else value
    flat = not isinstance(value, (Mapping, list)) or not any(
        isinstance(item, (Mapping, list)) for item in inner
    )
    if flat:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    deeper = indent + " "
    if isinstance(value, Mapping):
        parts = [f"{json.dumps(k)}: {dump_json(v, deeper)}" for k, v in value.items()]
    else:
        parts = [dump_json(v, deeper) for v in value]
    lines = f",\n{deeper}".join(parts)
    first, last = "{}" if isinstance(value, Mapping) else "[]"
    return f"{first}\n{deeper}{lines}\n{indent}{last}"


def from_plain(cls: type[T], data: Any) -> T:
    """A dataclass, whose fields may be dataclasses, from the mapping ``asdict`` makes of it.

    Raises:
        ConfigError: for an unknown key, or a value that is not of its field's type; both are named.
    """
    return _build(cls, data, "")


def _build(cls: Any, data: Any, where: str) -> Any:
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"the configuration has {data!r} at {where.rstrip('.') or 'its top'}; expected keys "
            "with values"
        )
    hints = get_type_hints(cls)
    known = {f.name for f in fields(cls)}
    unknown = sorted((k for k in data if k not in known), key=str)
    if unknown:
        raise ConfigError(
            f"the configuration has an unknown key {where}{unknown[0]}; known here: "
            f"{', '.join(sorted(known))}"
        )
    for f in fields(cls):
        if f.default is MISSING and f.default_factory is MISSING and f.name not in data:
            raise ConfigError(f"the configuration misses the key {where}{f.name}")
    values = {}
    for key, value in data.items():
        nested = _nested(hints[key])
        if nested is not None and (nested is hints[key] or isinstance(value, Mapping)):
            value = _build(nested, value, f"{where}{key}.")
        elif not _fits(value, hints[key]):
            kind = getattr(hints[key], "__name__", None) or str(hints[key])
            raise ConfigError(f"{where}{key} is {value!r}; expected {kind}")
        values[key] = value
    try:
        return cls(**values)
    except SigmaNensError as e:
        raise ConfigError(f"the configuration has at {where.rstrip('.') or 'its top'}: {e}") from e


def _nested(hint: Any) -> Any:
    """The dataclass that a field is declared with, alone or among other types; or None."""
    hints = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    return next((h for h in hints if is_dataclass(h)), None)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value as YAML gives it is of the type that a field is declared with."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, h) for h in inner)
    if origin is Callable:
        return callable(value)
    if origin in (list, Sequence):
        return isinstance(value, (list, tuple)) and all(_fits(v, inner[0]) for v in value)
    if origin in (dict, Mapping):
        return isinstance(value, Mapping) and all(
            _fits(k, inner[0]) and _fits(v, inner[1]) for k, v in value.items()
        )
    if hint is Any:
        return True
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return isinstance(value, hint)
