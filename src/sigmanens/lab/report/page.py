"""The report: one HTML file that holds everything it needs and asks the network for nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from plotly.offline import get_plotlyjs

from sigmanens.errors import RunError
from sigmanens.lab.report.markup import esc, palette_css
from sigmanens.lab.report.plot import Figure
from sigmanens.lab.report.reading import read_study
from sigmanens.lab.report.sections import sections
from sigmanens.lab.report.study import Study, finite

__all__ = ["render", "write_report"]

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; base-uri 'none'; form-action 'none'"
)
"""Content security policy: the browser itself refuses any request the page might make."""


def write_report(metrics: Mapping[str, Any], path: Path) -> Path:
    """Write the report of a parsed ``metrics.json`` to ``path`` and return it.

    The file is self-contained HTML. It is written beside its place first and then renamed, so a
    file that is already there stays whole when something fails. Raises ``InputError`` where the
    metrics have no rows or are not understood, ``RunError`` where the file cannot be written.
    """
    path = Path(path)
    text = render(metrics)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise RunError(
            f"the report cannot be written to {path}: {error.strerror or error}; expected a folder "
            "that exists, may be written to and has about 6 MB free"
        ) from error
    finally:
        part.unlink(missing_ok=True)
    return path


def render(metrics: Mapping[str, Any]) -> str:
    """The HTML of the report. Raises ``InputError`` as :func:`write_report` does."""
    study = read_study(metrics)
    parts, drawn = sections(study)
    links = "".join(f'<li><a href="#{key}">{esc(n)}</a></li>' for key, (n, _) in parts.items())
    title = f"sigmanens report: {_name(metrics)}"
    body = (
        f'<a class="skip" href="#verdict">Skip to the verdict</a><header><p>{esc(title)}</p>'
        f'<nav aria-label="Sections"><ul>{links}</ul></nav></header>'
        f"<main>{''.join(html for _, html in parts.values())}</main>{_footer(study)}"
    )
    return _DOCUMENT.format(
        policy=_POLICY,
        title=esc(title),
        style=_asset("style.css") + palette_css(study.groups),
        body=body,
        data=_json({"plots": _plots(drawn)}),
        plotly=get_plotlyjs(),
        guard=_asset("guard.js"),
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


def _plots(drawn: list[Figure]) -> dict[str, Any]:
    """What the script draws: traces and layout by the id of the element."""
    return {
        f"{figure.key}-{i}": {"traces": panel.traces, "layout": panel.layout}
        for figure in drawn
        for i, panel in enumerate(figure.panels)
    }


def _name(metrics: Mapping[str, Any]) -> str:
    return str(metrics.get("preset") or "run")


def _footer(study: Study) -> str:
    metrics = study.metrics
    facts: dict[str, object] = {}
    if metrics.get("command"):
        facts["Command"] = metrics["command"]
    data = metrics.get("data")
    if isinstance(data, Mapping):
        facts["Data"] = _facts(data)
    environment = metrics.get("environment")
    if isinstance(environment, Mapping) and environment:
        facts["Environment"] = _facts(environment)
    seconds = finite(metrics.get("seconds"))
    if seconds is not None:
        facts["Time"] = f"{seconds / 60:.1f} minutes" if seconds >= 120 else f"{seconds:.0f} s"
    facts["Rows"] = f"{sum(len(group.rows) for group in study.groups)} of split {study.split}"
    if study.left_out:
        facts["Rows"] = f"{facts['Rows']}; {study.left_out} of other splits are not shown"
    items = "".join(f"<div><dt>{esc(k)}</dt><dd>{esc(v)}</dd></div>" for k, v in facts.items())
    return (
        f'<footer><h2>How these numbers were made</h2><dl class="lines">{items}</dl>'
        "<p>Numbers are fractions, never percent; NLL is in nats; “–” means not measured. "
        "Everything here comes from the run’s metrics.json.</p></footer>"
    )


def _facts(values: Mapping[str, Any]) -> str:
    """A flat or nested mapping as one line: "train 300, ood patches 899"."""
    parts = []
    for key, value in values.items():
        name = str(key).replace("_", " ")
        if isinstance(value, Mapping):
            parts.append(f"{name} {_facts(value)}")
        elif value is not None:
            text = f"{value:,}" if isinstance(value, int) and value >= 10_000 else str(value)
            parts.append(text if name == "description" else f"{name} {text}")
    return ", ".join(parts)


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
