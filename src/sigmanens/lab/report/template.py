"""Pages from templates: self-contained files that work offline and ask the network for nothing."""

from __future__ import annotations

from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from markupsafe import Markup

from sigmanens.errors import MissingPackageError, RunError
from sigmanens.saving.checkpoint import write_atomic

try:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from plotly.offline import get_plotlyjs
except ImportError as e:
    raise MissingPackageError(
        "reports and the page of sigmanens explain need plotly and jinja2: "
        "pip install 'sigmanens[lab]'"
    ) from e

_ASSETS = (("style", "css"), ("guard", "js"), ("script", "js"))


@lru_cache(maxsize=1)
def _environment() -> Environment:
    """Templates of this package, with a page's style, its script and plotly; values are escaped."""
    found = Environment(
        loader=PackageLoader("sigmanens.lab.report", "templates"), autoescape=True,
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    found.filters["nobreak"] = lambda text: str(text).replace(" ± ", "\u00a0±\u00a0")
    for name, kind in _ASSETS:
        text = files(__package__).joinpath(f"{name}.{kind}").read_text(encoding="utf-8")
        found.globals[name] = Markup(text)
    found.globals["plotly"] = Markup(get_plotlyjs())  # constants of the packages
    return found


def document(template: str, **values: Any) -> str:
    """A page from a template, with its style, its script and plotly inside."""
    return _environment().get_template(template).render(**values)


def write_page(text: str, path: Path) -> Path:
    """Write a page to ``path``, whole or not at all; RunError where it cannot be written."""
    try:
        write_atomic(Path(path), text.encode())
    except OSError as error:
        raise RunError(
            f"{path} cannot be written: {error.strerror or error}; expected a folder that exists, "
            "may be written to and has about 6 MB free"
        ) from error
    return Path(path)
