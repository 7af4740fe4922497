"""Checks of the sizes a backbone is built from."""

from __future__ import annotations

from sigmanens.errors import ConfigError


def check_positive(**sizes: int) -> None:
    """Raise ConfigError unless every named size is an integer of at least 1."""
    for name, value in sizes.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name} must be a positive integer; got {value!r}.")


def check_rate(name: str, value: float) -> None:
    """Raise ConfigError unless the value is a dropout probability in [0, 1)."""
    if not 0 <= value < 1:
        raise ConfigError(f"{name} must be a probability in [0, 1); got {value!r}.")
