"""The report: one HTML file that holds everything it needs and asks the network for nothing."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sigmanens.errors import RunError
from sigmanens.lab.report.document import document
from sigmanens.lab.report.markup import esc, palette_css
from sigmanens.lab.report.reading import read_study
from sigmanens.lab.report.sections import sections
from sigmanens.lab.report.study import Study, finite

__all__ = ["render", "write_report"]


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
    return document(title, body, drawn, palette_css(study.groups))


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
