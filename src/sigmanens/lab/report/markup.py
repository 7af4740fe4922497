"""HTML of the report's parts. Every text from the metrics is escaped here."""

from __future__ import annotations

import html
from collections.abc import Sequence

from sigmanens.lab.report.compare import METRICS, Comparison, compare
from sigmanens.lab.report.plot import Figure
from sigmanens.lab.report.study import Group, Study
from sigmanens.lab.report.tables import Cell, Table

__all__ = ["esc", "figure_html", "glance_html", "glyph", "palette_css", "prose", "table_html"]

_FILLED = {
    "square": "M3 3h10v10H3z",
    "circle": "M8 2.5a5.5 5.5 0 1 1 0 11a5.5 5.5 0 1 1 0-11z",
    "diamond": "M8 1.5L14.5 8L8 14.5L1.5 8z",
    "triangle-up": "M8 2.5L14.5 13.5H1.5z",
    "triangle-down": "M8 13.5L1.5 2.5h13z",
    "x": "M4.2 2L8 5.8L11.8 2L14 4.2L10.2 8L14 11.8L11.8 14L8 10.2L4.2 14L2 11.8L5.8 8L2 4.2z",
    "cross": "M6.2 2h3.6v4.2H14v3.6H9.8V14H6.2V9.8H2V6.2h4.2z",
    "pentagon": "M8 1.8L14.3 6.4L11.9 13.8H4.1L1.7 6.4z",
    "hexagon": "M4.8 2.4h6.4L14.4 8l-3.2 5.6H4.8L1.6 8z",
    "star": "M8 1.2L9.8 6H14.9L10.8 9.1L12.3 14L8 11L3.7 14L5.2 9.1L1.1 6H6.2z",
    "bowtie": "M2 3L8 7L14 3V13L8 9L2 13z",
    "star-diamond": "M8 1L10 6L15 8L10 10L8 15L6 10L1 8L6 6z",
}
_TAGS = {1: ("good", "▲", "σN-Ens better"), -1: ("bad", "▼", "σN-Ens worse")}
_GLANCE = ("accuracy", "nll", "nll_calibrated", "ece", "ece_calibrated")


def esc(text: object) -> str:
    """``text`` with no meaning in HTML, in element content and in quoted attributes."""
    return html.escape(str(text), quote=True)


def prose(text: str) -> str:
    """Escaped running text in which no line breaks inside a number with its spread or unit."""
    return esc(text).replace(" ± ", "\u00a0±\u00a0").replace(" ×", "\u00a0×")


def glyph(group: Group) -> str:
    """The symbol of a group in its colour, as drawn in the plots."""
    name = group.look.symbol
    if name == "square-open":
        shape = '<path d="M3.5 3.5h9v9h-9z" fill="none" stroke="currentColor" stroke-width="2"/>'
    else:
        shape = f'<path d="{_FILLED[name]}" fill="currentColor"/>'
    return (
        f'<svg class="glyph" viewBox="0 0 16 16" aria-hidden="true" '
        f'style="color:var(--{group.key})">{shape}</svg>'
    )


def palette_css(groups: Sequence[Group]) -> str:
    """One CSS colour variable per group, for light pages and for dark screens."""
    light = "".join(f"--{group.key}:{group.look.light};" for group in groups)
    dark = "".join(f"--{group.key}:{group.look.dark};" for group in groups)
    return (
        f":root{{{light}}}\n@media screen and (prefers-color-scheme:dark)"
        f"{{:root:not([data-theme=light]){{{dark}}}}}"
    )


def table_html(table: Table, key: str) -> str:
    """A sortable, copyable table inside its own scroll area."""
    bands = ""
    if table.bands:
        cells = "".join(
            f'<th scope="colgroup" colspan="{span}">{esc(name)}</th>' for name, span in table.bands
        )
        bands = f'<tr class="bands">{cells}</tr>'
    heads = "".join(
        f'<th scope="col" aria-sort="none"><button type="button" class="sort"'
        f"{_hint(table.meaning.get(name, ''))}>{esc(name)}</button></th>"
        for name in table.head
    )
    body = "".join(f"<tr>{''.join(_cell(c, i) for i, c in enumerate(r))}</tr>" for r in table.rows)
    meaning = ""
    if table.meaning:
        terms = "".join(f"<dt>{esc(k)}</dt><dd>{esc(v)}</dd>" for k, v in table.meaning.items())
        meaning = f"<details><summary>What the columns mean</summary><dl>{terms}</dl></details>"
    return (
        f'<div class="table"><div class="tools"><button type="button" class="copy" '
        f'aria-controls="{key}">Copy as TSV</button><span role="status"></span></div>'
        f'<div class="scroll" tabindex="0" role="region" aria-label="{esc(table.caption)}">'
        f'<table id="{key}"><caption>{esc(table.caption)}</caption>'
        f"<thead>{bands}<tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>{meaning}</div>"
    )


def _cell(cell: Cell, place: int) -> str:
    value = "" if cell.value is None else cell.value
    value = f"{value:.6g}" if isinstance(value, float | int) else value
    data = f' data-v="{esc(value)}"'
    if cell.sd is not None:
        data += f' data-sd="{cell.sd:.6g}"'
    mark = f' <span class="mark">{esc(cell.mark)}</span>' if cell.mark else ""
    if place == 0:
        picture = glyph(cell.group) if cell.group else ""
        chosen = ' class="chosen"' if cell.mark else ""
        return f'<th scope="row"{chosen}{data}>{picture}{esc(cell.text)}{mark}</th>'
    heat = f' class="heat" style="--heat:{cell.heat:.3f}"' if cell.heat is not None else ""
    word = "" if isinstance(cell.value, float | int) or cell.value is None else ' class="word"'
    return f"<td{heat or word}{data}{_hint(cell.hint)}>{esc(cell.text)}{mark}</td>"


def _hint(text: str) -> str:
    return f' title="{esc(text)}"' if text else ""


def figure_html(figure: Figure) -> str:
    """A figure: heading, legend, empty plots for the script to fill, words and numbers."""
    keys = "".join(
        f'<li><button type="button" class="key" aria-pressed="true" data-figure="{figure.key}" '
        f'data-group="{group.key}">{glyph(group)}{esc(group.label)}</button></li>'
        for group in figure.legend
    )
    legend = f'<ul class="legend" aria-label="Show or hide methods">{keys}</ul>' if keys else ""
    panels = []
    for i, panel in enumerate(figure.panels):
        name = f"{panel.group.label}: {panel.title}" if panel.group else panel.title
        head = f"{glyph(panel.group)}<b>{esc(panel.group.label)}</b> " if panel.group else ""
        title = f"<span>{esc(panel.title)}</span>" if panel.group else f"<b>{esc(panel.title)}</b>"
        alt = f"{figure.title}. {name}. {figure.summary}"
        panels.append(
            f'<div class="panel"><h3>{head}{title}</h3><div class="plot" id="{figure.key}-{i}" '
            f'role="img" aria-label="{esc(alt)}" style="height:{panel.height}px"></div></div>'
        )
    numbers = ""
    if figure.table is not None:
        numbers = (
            f"<details><summary>The numbers of this figure</summary>"
            f"{table_html(figure.table, f'{figure.key}-table')}</details>"
        )
    return (
        f'<section id="{figure.key}"><h2>{esc(figure.title)}</h2><figure>'
        f'<p class="said">{prose(figure.summary)}</p>{legend}'
        f'<div class="panels" style="--panel:{figure.panel_width}px">{"".join(panels)}</div>'
        f"<figcaption>{esc(figure.caption)}</figcaption></figure>{numbers}</section>"
    )


def glance_html(study: Study) -> str:
    """The chosen σN-Ens between one network and separate ones, with the outcome in words."""
    ours = study.chosen
    others = [group for group in (study.single, study.deep) if group is not None]
    if ours is None or not others:
        return ""
    groups = [*others[:1], ours, *others[1:]] if study.single else [ours, *others]
    heads = "".join(
        f'<th scope="col"{" class=ours" if g is ours else ""}>{glyph(g)}{esc(g.label)}</th>'
        for g in groups
    )
    rows = ""
    for key in _GLANCE:
        if not ours.stat(key).by_seed:
            continue
        cells = "".join(_glance_cell(study, group, key) for group in groups)
        name = METRICS[key].name
        arrow = "higher is better" if METRICS[key].better == "higher" else "lower is better"
        rows += (
            f'<tr><th scope="row">{esc(name[0].upper() + name[1:])} <small>{arrow}</small></th>'
            f"{cells}</tr>"
        )
    cost = "".join(
        f"<td{' class=ours' if g is ours else ''}><b>{esc(study.multiple(g) or '–')}</b></td>"
        for g in groups
    )
    if any(study.multiple(group) for group in groups):
        rows += f'<tr><th scope="row">Parameters <small>× one network</small></th>{cost}</tr>'
    return (
        '<div class="scroll glance" tabindex="0" role="region" aria-label="σN-Ens at a glance">'
        f"<table><caption>Where it stands, {esc(study.split)} data</caption><thead><tr>"
        f"<td></td>{heads}</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _glance_cell(study: Study, group: Group, key: str) -> str:
    ours = study.chosen
    theirs = study.scaled_single if group is study.single and "calibrated" in key else group
    stat = (theirs or group).stat(key)
    if group is ours or ours is None:
        return f'<td class="ours"><b>{esc(stat)}</b></td>'
    return f"<td><b>{esc(stat)}</b>{_tag(compare(ours, theirs or group, key))}</td>"


def _tag(outcome: Comparison | None) -> str:
    if outcome is None:
        return ""
    kind, sign, word = _TAGS.get(outcome.direction, ("same", "=", "no difference seen"))
    note = outcome.phrase.removeprefix(outcome.word).lstrip(",: ")
    more = f" <small>({esc(note)})</small>" if note else ""
    return f'<span class="tag {kind}"><span aria-hidden="true">{sign}</span> {word}{more}</span>'
