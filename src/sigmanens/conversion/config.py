"""The one config of a conversion: arguments of ``convert``, plan in a checkpoint, section of YAML.

``convert`` resolves it: the plan that an ensemble keeps names every norm and every head, and says
"preserve" or "normal" where the user said "auto". A checkpoint stores that plan as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from torch import nn

from sigmanens.conversion.heads import HEADS
from sigmanens.errors import InputError
from sigmanens.norms.inits import INITS

_VERSION = 1
_SCHEDULES = ("auto", "folded", "sequential")
LayerSelector = str | Sequence[str] | Callable[[str, nn.Module], bool] | None
_ALLOWED: dict[str, tuple[object, ...]] = {
    "head": ("auto", *HEADS),
    "init": ("auto", *INITS),
    "scale": ("sigmoid", "linear"),
    "shift": (True, False, None),
    "train": ("all", "members"),
    "task": ("multiclass", "multilabel", "regression", None),
}


@dataclass(frozen=True)
class ConversionConfig:
    """Everything that decides how an ensemble is built from its base.

    Attributes:
        members: M ≥ 1.
        head: "fresh" = a new norm and Linear per member, "copy" = a copy of the base's head per
            member, "shared" = one head for all, "auto" = copy under "preserve", fresh otherwise.
        head_name: dotted name or names of the head; None: convert finds it.
        layers: norms to convert: "all", a regex (``re.search`` on the dotted name), a list of
            names, or a callable ``(name, module) -> bool``. None means "all".
        init: "normal", "preserve", "paper" (see :mod:`sigmanens.norms.inits`), or "auto" =
            preserve if the selected norms have been trained, else normal.
        scale: kind of scale: "sigmoid", or "linear" for the FiLM-Ensemble control.
        shift: one trained shift per member: True, False, or None for the default of ``init``.
        train: "all", or "members" = only scales, shifts and members' heads require a gradient.
        batch_dims: batch dimension by input name or position (None: that input is not batched).
        schedule: members per pass: "auto", "folded" (all), "sequential" (one) or a number.
        task: "multiclass" (logits of which one class is right), "multilabel" (logits of labels that
            are present or not) or "regression" (no logits). None is read as multiclass.
        prefix: modules that run before the members part, once for all. None: a trace finds them.

    Raises:
        InputError: for a value out of its range.
    """

    members: int = 4
    head: str = "auto"
    head_name: str | Sequence[str] | None = None
    layers: LayerSelector = "all"
    init: str = "auto"
    scale: str = "sigmoid"
    shift: bool | None = None
    train: str = "all"
    batch_dims: Mapping[str, int | None] | Mapping[str | int, int | None] | None = None
    schedule: str | int = "auto"
    task: str | None = None
    prefix: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if isinstance(self.members, bool) or not isinstance(self.members, int) or self.members < 1:
            raise InputError(f"members is {self.members!r}; expected an integer ≥ 1")
        for key, allowed in _ALLOWED.items():
            if getattr(self, key) not in allowed:
                choices = ", ".join(map(repr, allowed))
                raise InputError(f"{key} is {getattr(self, key)!r}; expected one of {choices}")
        if self.layers == "auto":
            raise InputError(
                "layers='auto' chooses norms for the diversity penalty; a conversion takes 'all', "
                "a regular expression, a list of dotted names or a callable"
            )
        check_selector(self.layers)
        numbers = range(1, self.members + 1)
        exact = type(self.schedule) in (str, int)
        if not exact or self.schedule not in (*_SCHEDULES, *numbers):
            raise InputError(
                f"schedule is {self.schedule!r}; expected {', '.join(map(repr, _SCHEDULES))} or a "
                f"number of members per pass from 1 to {self.members}"
            )
        # One form for each value, so that equal configs compare equal and JSON gives them back.
        layers = "all" if self.layers is None else self.layers
        dims = {str(k): v for k, v in self.batch_dims.items()} if self.batch_dims else None
        named = ("head_name", self.head_name), ("prefix", self.prefix)
        for key, value in (("layers", layers), ("batch_dims", dims), *named):
            if isinstance(value, Sequence) and not isinstance(value, str):
                value = tuple(value)
            object.__setattr__(self, key, value)

    @property
    def norms(self) -> tuple[str, ...]:
        """Dotted names of the norms to convert, in a resolved config."""
        return self._names("layers")

    @property
    def heads(self) -> tuple[str, ...]:
        """Dotted names of the heads that become one per member, in a resolved config."""
        return self._names("head_name")

    def _names(self, key: str) -> tuple[str, ...]:
        value = getattr(self, key)
        if not isinstance(value, tuple) or "auto" in (self.init, self.head):
            raise InputError(
                f"this conversion config is not resolved ({key}={value!r}, init={self.init!r}, "
                f"head={self.head!r}); expected that of an ensemble: ens.plan"
            )
        return value

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types, with the version of this form.

        Raises:
            InputError: if ``layers`` is a callable, which JSON cannot hold.
        """
        if callable(self.layers):
            raise InputError(
                "layers is a callable, which JSON cannot hold. Use a regular expression or a list "
                "of names, or the plan of the ensemble: ens.plan.to_dict()"
            )
        plain = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}
        return {"version": _VERSION, **plain}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ConversionConfig:
        """Inverse of :meth:`to_dict`; a missing key means its default.

        Raises:
            InputError: for an unknown key or version, or a value out of its range.
        """
        values = dict(data)
        version = values.pop("version", _VERSION)
        if version != _VERSION:
            raise InputError(
                f"the conversion config has version {version!r}; expected {_VERSION}. Use "
                "the sigmanens that wrote it, or a newer one"
            )
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            raise InputError(f"the conversion config has unknown keys: {', '.join(unknown)}")
        return cls(**values)


def check_selector(layers: LayerSelector) -> None:
    """Raise InputError unless ``layers`` is a valid regex, a list of names, a callable or None."""
    if isinstance(layers, str):
        try:
            re.compile(layers)
        except re.error as e:
            raise InputError(f"layers={layers!r} is no valid regular expression: {e}") from e
        return
    names = isinstance(layers, Sequence) and all(isinstance(n, str) for n in layers)
    if layers is not None and not callable(layers) and not names:
        raise InputError(
            f"layers is {layers!r}; expected 'all', a regular expression, a list of dotted names, "
            "or a callable (name, module) -> bool"
        )


def matches(layers: LayerSelector, name: str, module: nn.Module) -> bool:
    """Whether "all" (or None), a regex, a list of names or a callable selects a layer."""
    if isinstance(layers, str):
        return layers == "all" or re.search(layers, name) is not None
    if callable(layers):
        return bool(layers(name, module))
    return layers is None or name in layers


def unknown_names(layers: LayerSelector, names: Iterable[str]) -> list[str]:
    """What a list of names holds besides those of the norms; nothing for another selector."""
    if isinstance(layers, str) or not isinstance(layers, Sequence):
        return []
    return sorted(set(layers) - set(names))


def some_names(names: Sequence[str], limit: int = 12) -> str:
    """The first names of a list, and the number of the others."""
    shown = ", ".join(name or "(root)" for name in names[:limit])
    more = len(names) - limit
    return f"{shown} and {more} more" if more > 0 else shown
