"""The Jinja2 environment of the report's pages and sentences."""

from __future__ import annotations

from functools import lru_cache

from sigmanens.errors import MissingPackageError

try:
    from jinja2 import Environment, PackageLoader, StrictUndefined
except ImportError as e:
    raise MissingPackageError("reports need jinja2: pip install 'sigmanens[lab]'") from e

__all__ = ["environment"]


@lru_cache(maxsize=2)
def environment(html: bool) -> Environment:
    """Templates of this package; in HTML every value is escaped."""
    found = Environment(
        loader=PackageLoader("sigmanens.lab.report", "templates"), autoescape=html,
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    found.filters["nobreak"] = lambda text: str(text).replace(" ± ", "\u00a0±\u00a0")
    return found
