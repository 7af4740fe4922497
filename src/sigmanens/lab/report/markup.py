"""HTML of the report's parts. Every text from the metrics is escaped here."""

from __future__ import annotations

import html
from collections.abc import Sequence

from sigmanens.lab.report.compare import METRICS, WITHIN, Comparison, compare
from sigmanens.lab.report.plot import Figure, Key
from sigmanens.lab.report.study import Group, Study
from sigmanens.lab.report.tables import Cell, Table

__all__ = [
    "esc",
    "figure_body",
    "figure_html",
    "glance_html",
    "glyph",
    "palette_css",
    "prose",
    "table_html",
]

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
    "octagon": "M5.3 1.8h5.4l3.5 3.5v5.4l-3.5 3.5H5.3L1.8 10.7V5.3z",
    "hourglass": "M2.5 2h11L9 8l4.5 6h-11L7 8z",
    "triangle-left": "M13.5 1.5v13L2.5 8z",
    "triangle-right": "M2.5 1.5v13L13.5 8z",
    "bowtie": "M2 3L8 7L14 3V13L8 9L2 13z",
    "star-diamond": "M8 1L10 6L15 8L10 10L8 15L6 10L1 8L6 6z",
}
_STROKES = {"dash": "6 3", "dot": "2.5 2.5", "dashdot": "7 2 2 2", "longdash": "9 3"}
_TAGS = {1: ("good", "▲", "σN-Ens better"), -1: ("bad", "▼", "σN-Ens worse")}
_BADGES = {"chosen": "mark", "better": "mark note good", "worse": "mark note bad"}
_TALL = 18
"""Number of rows above which a table scrolls under its own head."""
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
    words = [i for i, cell in enumerate(table.rows[0] if table.rows else ()) if _is_word(cell)]
    heads = "".join(
        f'<th scope="col" aria-sort="none"{" class=word" if i in words else ""}>'
        f'<button type="button" class="sort"{_hint(table.meaning.get(name, ""))}>{esc(name)}'
        "</button></th>"
        for i, name in enumerate(table.head)
    )
    body = "".join(f"<tr>{''.join(_cell(c, i) for i, c in enumerate(r))}</tr>" for r in table.rows)
    meaning = ""
    if table.meaning:
        terms = "".join(f"<dt>{esc(k)}</dt><dd>{esc(v)}</dd>" for k, v in table.meaning.items())
        meaning = f"<details><summary>What the columns mean</summary><dl>{terms}</dl></details>"
    tall = " tall" if len(table.rows) > _TALL else ""
    return (
        f'<div class="table"><div class="tools"><button type="button" class="copy" '
        f'aria-controls="{key}">Copy as TSV</button><span role="status"></span></div>'
        f'<div class="scroll{tall}" tabindex="0" role="region" aria-label="{esc(table.caption)}">'
        f'<table id="{key}"><caption>{esc(table.caption)}</caption>'
        f"<thead>{bands}<tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>{meaning}</div>"
    )


def _cell(cell: Cell, place: int) -> str:
    value = "" if cell.value is None else cell.value
    value = f"{value:.6g}" if isinstance(value, float | int) else value
    data = f' data-v="{esc(value)}"'
    if cell.sd is not None:
        data += f' data-sd="{cell.sd:.6g}"'
    badge = _BADGES.get(cell.mark, "mark note")
    mark = f' <span class="{badge}">{esc(cell.mark)}</span>' if cell.mark else ""
    if place == 0:
        picture = glyph(cell.group) if cell.group else ""
        chosen = ' class="chosen"' if cell.mark == "chosen" else ""
        text = esc(cell.text)
        if cell.run:
            text = f'<a href="#run" data-run="{cell.run}">{text}</a>'
        return f'<th scope="row"{chosen}{data}>{picture}{text}{mark}</th>'
    heat = f' class="heat" style="--heat:{cell.heat:.3f}"' if cell.heat is not None else ""
    word = ' class="word"' if _is_word(cell) else ""
    return f"<td{heat or word}{data}{_hint(cell.hint)}>{esc(cell.text)}{mark}</td>"


def _is_word(cell: Cell) -> bool:
    """Whether a cell holds words, which stand to the left, not a number."""
    return cell.value is not None and not isinstance(cell.value, float | int)


def _hint(text: str) -> str:
    return f' title="{esc(text)}"' if text else ""


def figure_html(figure: Figure) -> str:
    """A figure: heading, legend, empty plots for the script to fill, words and numbers."""
    return f'<section id="{figure.key}"><h2>{esc(figure.title)}</h2>{figure_body(figure)}</section>'


def figure_body(figure: Figure) -> str:
    """What stands below the heading of a figure."""
    panels = [_panel(figure, i) for i in range(len(figure.panels))]
    first, rest = panels[: figure.first], panels[figure.first :] if figure.first else []
    style = f'<div class="panels" style="--panel:{figure.panel_width}px">'
    drawn = f"{style}{''.join(first)}</div>" if first else ""
    if rest:
        drawn += (
            f'<details class="more"><summary>Show all: {len(rest)} more</summary>'
            f"{style}{''.join(rest)}</div></details>"
        )
    numbers = ""
    if figure.table is not None:
        numbers = (
            f"<details><summary>The numbers of this figure</summary>"
            f"{table_html(figure.table, f'{figure.key}-table')}</details>"
        )
    caption = f"<figcaption>{esc(figure.caption)}</figcaption>" if figure.caption else ""
    return (
        f'<figure><p class="said">{prose(figure.summary)}</p>{_legend(figure)}{drawn}'
        f"{_keys(figure.keys)}{caption}</figure>{numbers}"
    )


def _legend(figure: Figure) -> str:
    """Buttons that show and hide methods, and one that brings up those folded away."""
    if not figure.legend:
        return ""
    rest = [group for group in figure.legend if group.key in figure.rest]
    first = [group for group in figure.legend if group.key not in figure.rest]
    keys = "".join(_legend_key(figure, group) for group in (*first, *rest))
    every = ""
    if rest:
        verb = "Show" if figure.rest_off else "List"
        every = (
            f'<li><button type="button" class="every" aria-expanded="false" '
            f'data-figure="{figure.key}" data-off="{figure.rest_off:d}" data-less="{verb} fewer">'
            f"{verb} all {len(figure.legend)}</button></li>"
        )
    return f'<ul class="legend" aria-label="Show or hide methods">{keys}{every}</ul>'


def _legend_key(figure: Figure, group: Group) -> str:
    folded = group.key in figure.rest
    pressed = "false" if folded and figure.rest_off else "true"
    return (
        f'<li{" class=rest" if folded else ""}><button type="button" class="key" '
        f'aria-pressed="{pressed}" data-figure="{figure.key}" data-group="{group.key}">'
        f"{glyph(group)}{esc(group.label)}</button></li>"
    )


def _panel(figure: Figure, i: int) -> str:
    panel = figure.panels[i]
    name = f"{panel.group.label}: {panel.title}" if panel.group else panel.title
    head = f"{glyph(panel.group)}<b>{esc(panel.group.label)}</b> " if panel.group else ""
    title = f"<span>{esc(panel.title)}</span>" if panel.group else f"<b>{esc(panel.title)}</b>"
    alt = f"{figure.title}. {name}. {figure.summary}"
    return (
        f'<div class="panel"><h3>{head}{title}</h3><div class="plot" id="{figure.key}-{i}" '
        f'role="img" aria-label="{esc(alt)}" style="height:{panel.height}px"></div>'
        f"{_keys(panel.keys)}</div>"
    )


def _keys(keys: Sequence[Key]) -> str:
    """A legend of lines."""
    items = "".join(f"<li>{_stroke(key)}{esc(key.name)}</li>" for key in keys)
    return f'<ul class="keys">{items}</ul>' if items else ""


def _stroke(key: Key) -> str:
    """A short piece of a line in its colour and dash."""
    return (
        f'<svg class="stroke" viewBox="0 0 22 8" aria-hidden="true" style="color:{key.colour}">'
        f'<path d="M0 4h22" stroke="currentColor" stroke-width="2.5" '
        f'stroke-dasharray="{_STROKES.get(key.dash, "none")}"/></svg>'
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
    note = outcome.phrase.removeprefix(outcome.word).removesuffix(WITHIN).lstrip(",: ")
    more = f" <small>({esc(note)})</small>" if note else ""
    return f'<span class="tag {kind}"><span aria-hidden="true">{sign}</span> {word}{more}</span>'
