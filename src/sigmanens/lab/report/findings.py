"""Warnings that the trainings of a study gave by themselves, with the runs they concern."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sigmanens.lab.report.study import Group, Row, Seed, Study

__all__ = ["findings", "group_findings"]


def findings(study: Study) -> list[tuple[Group, str, list[Seed]]]:
    """What was found wrong: the method, the sentence and the seeds it was said of."""
    return [(g, text, seeds) for g in study.groups for text, seeds in group_findings(g).items()]


def group_findings(group: Group) -> dict[str, list[Seed]]:
    """The sentences said of a group, each with its seeds."""
    found: dict[str, list[Seed]] = {}
    for seed, row in group.rows.items():
        for text in _of_row(row):
            found.setdefault(text, []).append(seed)
    return found


def _of_row(row: Row) -> list[str]:
    """The sentences of a row: its ``findings`` are texts, or objects with a ``message``."""
    entries = row.get("findings")
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        return []
    texts = [e.get("message") if isinstance(e, Mapping) else e for e in entries]
    return list(dict.fromkeys(t.strip() for t in texts if isinstance(t, str) and t.strip()))
