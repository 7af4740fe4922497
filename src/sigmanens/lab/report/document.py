"""One HTML file with its style, plots and script, which asks the network for nothing."""

from __future__ import annotations

import json
from collections.abc import Iterable
from importlib.resources import files
from typing import Any

from sigmanens.errors import MissingPackageError
from sigmanens.lab.report.markup import esc
from sigmanens.lab.report.plot import Figure

try:
    from plotly.offline import get_plotlyjs
except ImportError as e:
    raise MissingPackageError(
        "reports and the page of sigmanens explain need plotly: pip install 'sigmanens[lab]'"
    ) from e

__all__ = ["document"]

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; base-uri 'none'; form-action 'none'"
)
"""Content security policy: the browser itself refuses any request the page might make."""


def document(title: str, body: str, drawn: Iterable[Figure], style: str = "") -> str:
    """The HTML of a page.

    Args:
        title: of the page, as plain text.
        body: HTML, in which every panel of a figure has its element.
        drawn: figures of the body, which the page's script draws.
        style: CSS after that of all pages.
    """
    return _DOCUMENT.format(
        policy=_POLICY,
        title=esc(title),
        style=_asset("style.css") + style,
        guard=_asset("guard.js"),
        body=body,
        data=_json({"plots": _plots(drawn)}),
        plotly=get_plotlyjs(),
        script=_asset("script.js"),
    )


def _asset(name: str) -> str:
    return files(__package__).joinpath(name).read_text(encoding="utf-8")


def _json(value: Any) -> str:
    """JSON that may stand inside a script element: no character in it can end the element."""
    text = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for character in "<\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _plots(drawn: Iterable[Figure]) -> dict[str, Any]:
    """What the script draws: traces and layout by the id of the element."""
    return {
        f"{figure.key}-{i}": {"traces": panel.traces, "layout": panel.layout}
        for figure in drawn
        for i, panel in enumerate(figure.panels)
    }


_DOCUMENT = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
{style}
</style>
<noscript><style>.plot, .picker, .legend, .keys, .tools, .sort::after {{ display: none; }}
.run[hidden] {{ display: block; }}</style></noscript>
<script>
{guard}
</script>
</head>
<body>
{body}
<noscript><p>The plots need JavaScript; the tables hold the same numbers.</p></noscript>
<script type="application/json" id="report-data">{data}</script>
<script>
{plotly}
</script>
<script>
{script}
</script>
</body>
</html>
"""
