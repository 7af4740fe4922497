"""Functions of a user's own files, named ``module:function`` in a configuration."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from typing import Any

from sigmanens.errors import ConfigError


def is_import(name: str) -> bool:
    """Whether a name is of the form ``module:function``."""
    module, colon, function = name.partition(":")
    return bool(colon) and all(part.isidentifier() for part in [*module.split("."), function])


def imported(name: str, key: str) -> Callable[..., Any]:
    """The function called ``module:function``; modules of the current folder are found too.

    Args:
        name: such as ``my_rivals:dropout_ensemble``.
        key: of the configuration, for the message.

    Raises:
        ConfigError: if the module cannot be imported, or holds no such function.
    """
    module, _, function = name.partition(":")
    here = os.getcwd()
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module), function, None)
    except Exception as e:  # a user's file may raise anything
        raise ConfigError(
            f"{key} is {name!r}, but {module} cannot be imported: {type(e).__name__}: {e}"
        ) from e
    if not callable(found):
        raise ConfigError(f"{key} is {name!r}, but {module} has no function {function!r}")
    return found
