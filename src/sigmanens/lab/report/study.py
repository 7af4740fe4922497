"""A parsed ``metrics.json`` as groups of seeds: what every part of the report reads.

Rows of the same (method, members, tau, weight) that differ in their seed form one
:class:`Group`. Missing, null and non-finite values all mean "not measured".
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from numbers import Real
from statistics import fmean, stdev
from typing import Any

from sigmanens.lab.report import naming

__all__ = ["Group", "Row", "Seed", "Setting", "Stat", "Study", "dig", "finite"]

Seed = int | str
Row = Mapping[str, Any]

_USUAL_SCORES = ("max_softmax", "predictive_entropy")
_CONTROLS = ("film", "heads_only", "fixed_masks", "sigmanens_lambda0")
_MANY = 9
"""Number of methods above which figures of a line or panel each show the main ones first."""


def finite(value: Any) -> float | None:
    """``value`` as a float, or None where it is no finite number."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def dig(row: Any, *path: str) -> Any:
    """The value at ``path`` in nested mappings, None where a step is missing."""
    for step in path:
        if not isinstance(row, Mapping):
            return None
        row = row.get(step)
    return row


@dataclass(frozen=True)
class Stat:
    """Mean and sample standard deviation (None below two seeds) of a value per seed."""

    by_seed: Mapping[Seed, float]

    @cached_property
    def mean(self) -> float | None:
        return fmean(self.by_seed.values()) if self.by_seed else None

    @cached_property
    def sd(self) -> float | None:
        return stdev(self.by_seed.values()) if len(self.by_seed) > 1 else None

    def __str__(self) -> str:
        if self.sd is None:
            return naming.number(self.mean)
        return f"{naming.number(self.mean)} ± {naming.number(self.sd)}"


Setting = tuple[str, int | None, float | None, float | None, str]
"""Method, members, τ, λ and variant."""


@dataclass(frozen=True)
class Group:
    """All seeds of one method under one setting.

    ``key`` is what the page calls the group, ``look`` how it is drawn.
    """

    method: str
    members: int | None
    tau: float | None
    weight: float | None
    rows: Mapping[Seed, Row]
    label: str
    short: str
    key: str
    look: naming.Look
    variant: str = ""

    @property
    def setting(self) -> Setting:
        """What the rows have in common."""
        return self.method, self.members, self.tau, self.weight, self.variant

    def text(self, *path: str) -> str:
        """The text at ``path`` of its first row, "" where there is none."""
        value = dig(next(iter(self.rows.values()), {}), *path)
        return value if isinstance(value, str) else ""

    def stat(self, *path: str) -> Stat:
        """The value at ``path`` in each seed's row, where it was measured."""
        if self.method == "single_temperature" and path[0] in ("nll_calibrated", "ece_calibrated"):
            stat = self._stat(*path)
            return stat if stat.by_seed else self._stat(path[0].removesuffix("_calibrated"))
        return self._stat(*path)

    def _stat(self, *path: str) -> Stat:
        values = {seed: finite(dig(row, *path)) for seed, row in self.rows.items()}
        return Stat({seed: value for seed, value in values.items() if value is not None})

    def corruption(self, severity: str, metric: str) -> Stat:
        """``metric`` under corruption of ``severity``, over all kinds of corruption.

        That of all their samples together where a row has it, else the mean over the kinds. They
        differ for the ECE alone. Severity "0" is the clean test set.
        """
        if severity == "0":
            return self.stat(metric)
        found: dict[Seed, float] = {}
        for seed, row in self.rows.items():
            together = finite(dig(row, "corruption_pooled", severity, metric))
            if together is not None:
                found[seed] = together
                continue
            kinds = dig(row, "corruption")
            values = [
                finite(dig(kinds, kind, severity, metric))
                for kind in (kinds if isinstance(kinds, Mapping) else {})
            ]
            measured = [value for value in values if value is not None]
            if measured:
                found[seed] = fmean(measured)
        return Stat(found)

    def nested_keys(self, *path: str) -> list[str]:
        """The keys of the mapping at ``path``, over all seeds, in order of appearance."""
        keys: dict[str, None] = {}
        for row in self.rows.values():
            found = dig(row, *path)
            if isinstance(found, Mapping):
                keys.update(dict.fromkeys(str(key) for key in found))
        return list(keys)

    def lists(self, *path: str) -> list[list[Any]]:
        """The lists at ``path``, one per seed that has one."""
        found = (dig(row, *path) for row in self.rows.values())
        return [list(item) for item in found if isinstance(item, Sequence) and len(item) > 0]

    @property
    def owners(self) -> dict[int, float] | None:
        """Share of the channels with k owners, over all seeds; None where not measured."""
        counts: dict[int, float] = {}
        for owners in self.lists("owners"):
            for k, count in enumerate(owners):
                counts[k] = counts.get(k, 0.0) + (finite(count) or 0.0)
        total = sum(counts.values())
        return {k: count / total for k, count in counts.items()} if total > 0 else None


@dataclass(frozen=True)
class Study:
    """The groups of a run, the ones its summary is about, and their paired differences.

    ``differences`` holds those of ``metrics.json`` by the names of both sides.
    """

    metrics: Mapping[str, Any]
    groups: tuple[Group, ...]
    chosen: Group | None
    criterion: str | None
    reason: str | None
    single: Group | None
    deep: Group | None
    split: str
    left_out: int = 0
    differences: Mapping[tuple[str, str], Mapping[str, Any]] = field(default_factory=dict)

    @cached_property
    def seeds(self) -> list[Seed]:
        found: dict[Seed, None] = {}
        for group in self.groups:
            found.update(dict.fromkeys(group.rows))
        return list(found)

    @cached_property
    def main(self) -> list[Group]:
        """What a crowded figure shows first: one network, separate ones, ours and the controls.

        Controls with the chosen number of members only; all groups where there are few.
        """
        if len(self.groups) <= _MANY:
            return list(self.groups)
        members = self.chosen.members if self.chosen else None
        kept = [
            group
            for group in self.groups
            if group in (self.single, self.deep, self.chosen)
            or (
                group.method in _CONTROLS
                and not group.variant
                and (members is None or group.members == members)
            )
        ]
        return kept if len(kept) > 1 else list(self.groups)

    @cached_property
    def sigma(self) -> list[Group]:
        """The σN-Ens groups, by τ; variants of the training are not among them."""
        return [g for g in self.groups if g.method == "sigmanens" and not g.variant]

    def was_chosen(self, group: Group) -> bool:
        """Whether ``group`` won a choice among several σN-Ens."""
        return group is self.chosen and len(self.sigma) > 1

    @property
    def reference(self) -> Group | None:
        """One network, against which the page compares first.

        A network trained as long with heads like the members' stands before one with another head,
        and a trained one before the network as it was loaded, where that has no trained head.
        """
        alone = [g for g in self.groups if g.method in ("single", "single_finetuned")]
        head = self.chosen and self.chosen.text("head")
        if head == "fresh":
            alone.sort(key=lambda g: g.text("head") != "fresh")
        elif not any(g.method == "single" and not g.variant for g in alone):
            alone.sort(key=lambda g: bool(g.variant))
        return alone[0] if alone else self.scaled_single

    @property
    def scaled_single(self) -> Group | None:
        """One network with a fitted temperature: from its own row, or the single network's."""
        if self.single is not None and self.single.stat("nll_calibrated").by_seed:
            return self.single
        for group in self.groups:
            if group.method == "single_temperature":
                return group
        return self.single

    def multiple(self, group: Group) -> str:
        """Parameters as a multiple of one network: "1.02 ×", "" where unknown."""
        one = self.single or self.scaled_single
        ours, theirs = group.stat("params").mean, one.stat("params").mean if one else None
        return f"{ours / theirs:.2f} ×" if ours and theirs else ""

    @cached_property
    def kinds(self) -> list[str]:
        """The kinds of corruption that were measured."""
        found: dict[str, None] = {}
        for group in self.groups:
            found.update(dict.fromkeys(group.nested_keys("corruption")))
        return list(found)

    @cached_property
    def pooled(self) -> bool:
        """Whether numbers under corruption are of the samples of all kinds together."""
        rows = [r for g in self.groups for r in g.rows.values() if dig(r, "corruption")]
        return bool(rows) and all(dig(r, "corruption_pooled") for r in rows)

    @cached_property
    def corrupted(self) -> int:
        """Examples of one severity, of all kinds together; 0 where the rows do not say."""
        rows = (row for group in self.groups for row in group.rows.values())
        found = [dig(row, "corruption_pooled", s, "n") for row in rows for s in self.severities]
        return int(max((finite(n) or 0.0 for n in found), default=0.0))

    @cached_property
    def severities(self) -> list[str]:
        """The severities of corruption that were measured, mildest first."""
        found = {
            severity
            for group in self.groups
            for kind in group.nested_keys("corruption")
            for severity in group.nested_keys("corruption", kind)
            if severity.isdecimal() and severity != "0"
        }
        return sorted(found, key=int)

    @cached_property
    def ood(self) -> dict[str, list[str]]:
        """The OOD sets that were measured, and the scores of each."""
        found: dict[str, dict[str, None]] = {}
        for group in self.groups:
            for name in group.nested_keys("ood"):
                found.setdefault(name, {}).update(dict.fromkeys(group.nested_keys("ood", name)))
        return {name: list(scores) for name, scores in found.items() if scores}

    def quoted_score(self, name: str) -> str:
        """The score by which sentences quote the OOD set ``name``: the usual ones first."""
        known = self.ood[name]
        return next((score for score in _USUAL_SCORES if score in known), known[0])

    @property
    def samples(self) -> list[int]:
        """The numbers of evaluated samples that occur in the rows."""
        found = {finite(row.get("n")) for group in self.groups for row in group.rows.values()}
        return sorted(int(n) for n in found if n is not None)
