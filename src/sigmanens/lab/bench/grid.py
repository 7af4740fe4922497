"""A range of τ as a grid."""

from __future__ import annotations

import math

from sigmanens.errors import ConfigError


def geometric(text: str) -> list[float]:
    """Numbers in equal ratios: "0.1:10:3" is 0.1, 1, 10; rounded to three digits.

    Raises:
        ConfigError: unless the text is LOW:HIGH:COUNT with 0 < LOW < HIGH and COUNT ≥ 2.
    """
    try:
        low, high, count = (kind(part) for kind, part in zip((float, float, int), text.split(":"),
                                                             strict=True))  # fmt: skip
    except ValueError:
        low, high, count = 0.0, 0.0, 0
    if not 0 < low < high < math.inf or count < 2:
        raise ConfigError(
            f"the range of τ is {text!r}; expected LOW:HIGH:COUNT with 0 < LOW < HIGH and COUNT "
            "≥ 2, such as 0.05:4:6"
        )
    steps = int(count) - 1
    values = [float(f"{low * (high / low) ** (i / steps):.3g}") for i in range(steps + 1)]
    if len(set(values)) < len(values):
        raise ConfigError(f"the range of τ {text!r} has values that are equal to three digits")
    return values
