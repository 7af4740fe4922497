"""A parsed ``metrics.json`` as groups of seeds: what every part of the report reads.

Rows of the same method, M, τ, λ and variant that differ in their seed form one :class:`Group`.
Missing, null and non-finite values all mean "not measured".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean, stdev
from typing import Any

from sigmanens.evaluation.comparison import Difference
from sigmanens.lab.differences import setting_name
from sigmanens.lab.plain import finite
from sigmanens.lab.report.naming import Look, Setting, number

Seed = int | str
Row = Mapping[str, Any]

_CONTROLS = ("film", "heads_only", "fixed_masks", "sigmanens_lambda0")
_MANY = 9
"""Number of methods above which figures of a line or panel each show the main ones first."""


def dig(row: Any, *path: str) -> Any:
    """The value at ``path`` in nested mappings, None where a step is missing."""
    for step in path:
        if not isinstance(row, Mapping):
            return None
        row = row.get(step)
    return row


def numbers(values: Any) -> list[float] | None:
    """A list of finite numbers that is not empty; None for anything else."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        return None
    found = [number for value in values if (number := finite(value)) is not None]
    return found if found and len(found) == len(values) else None


def setting_of(row: Any) -> Setting:
    """What a row, or the history of a training, shares with its other seeds."""
    members = finite(dig(row, "members"))
    return Setting(
        str(dig(row, "method")),
        None if members is None else int(members),
        finite(dig(row, "tau")),
        finite(dig(row, "weight")),
        str(dig(row, "variant") or ""),
    )


@dataclass(frozen=True)
class Stat:
    """Mean and sample standard deviation (None below two seeds) of a value per seed.

    ``bounds`` is the interval of a single seed's value, where one was measured.
    """

    by_seed: Mapping[Seed, float]
    bounds: Sequence[float] | None = None

    @cached_property
    def mean(self) -> float | None:
        return fmean(self.by_seed.values()) if self.by_seed else None

    @cached_property
    def sd(self) -> float | None:
        return stdev(self.by_seed.values()) if len(self.by_seed) > 1 else None

    def text(self, digits: int = 3) -> str:
        """ "0.921 ± 0.004", "0.921 [0.906, 0.935]" of a single seed, or the mean alone."""
        if self.bounds is not None and len(self.by_seed) == 1:
            ends = ", ".join(number(bound, digits) for bound in self.bounds)
            return f"{number(self.mean, digits)} [{ends}]"
        spread = "" if self.sd is None else f" ± {number(self.sd, digits)}"
        return number(self.mean, digits) + spread

    def __str__(self) -> str:
        return Stat(self.by_seed).text()


def mean_of(stats: Sequence[Stat]) -> Stat:
    """The mean of several, in the seeds in which each was measured."""
    shared = [s for s in stats[0].by_seed if all(s in stat.by_seed for stat in stats)]
    return Stat({seed: fmean(stat.by_seed[seed] for stat in stats) for seed in shared})


@dataclass(frozen=True, eq=False)
class Group:
    """All seeds of one method under one setting.

    ``key`` is what the page calls the group, ``look`` how it is drawn.
    """

    method: str
    members: int | None
    tau: float | None
    weight: float | None
    variant: str
    rows: Mapping[Seed, Row]
    label: str
    short: str
    key: str
    look: Look

    @property
    def setting(self) -> Setting:
        """What the rows have in common."""
        return Setting(self.method, self.members, self.tau, self.weight, self.variant)

    @property
    def row(self) -> Row:
        """Its first seed's."""
        return next(iter(self.rows.values()))

    @cached_property
    def name(self) -> str:
        """What ``differences`` call it."""
        return setting_name(self.row)

    def stat(self, *path: str) -> Stat:
        """The value at ``path`` in each seed's row, where it was measured."""
        found = {seed: finite(dig(row, *path)) for seed, row in self.rows.items()}
        known = {seed: value for seed, value in found.items() if value is not None}
        if self.method == "single_temperature" and not known:
            raw = path[0].removesuffix("_calibrated")
            return self.stat(raw) if raw in ("nll", "ece") and raw != path[0] else Stat({})
        bounds = numbers(dig(self.row, *path[:-1], "intervals", path[-1]))
        alone = len(self.rows) == 1 and bounds is not None and len(bounds) == 2
        return Stat(known, bounds if alone else None)

    def corruption(self, severity: str, metric: str) -> Stat:
        """``metric`` under corruption of ``severity``, over all kinds of corruption.

        That of all their samples together where a row has it, else the mean over the kinds. They
        differ for the ECE alone. Severity "0" is the clean test set.
        """
        if severity == "0":
            return self.stat(metric)
        together = self.stat("corruption_pooled", severity, metric)
        if together.by_seed:
            return together
        found: dict[Seed, list[float]] = {}
        for kind in self.keys("corruption"):
            for seed, value in self.stat("corruption", kind, severity, metric).by_seed.items():
                found.setdefault(seed, []).append(value)
        return Stat({seed: fmean(values) for seed, values in found.items()})

    def keys(self, *path: str) -> list[str]:
        """The keys of the mapping at ``path``, over all seeds, in order of appearance."""
        found = (dig(row, *path) for row in self.rows.values())
        return unique(str(key) for item in found if isinstance(item, Mapping) for key in item)


def unique(items: Iterable[Any]) -> list[Any]:
    """Each item once, in order of appearance."""
    return list(dict.fromkeys(items))


@dataclass(frozen=True)
class Study:
    """The groups of a run, the ones its summary is about, and their paired differences.

    ``differences`` are by the names of both groups, the first less the second, then by metric.
    """

    metrics: Mapping[str, Any]
    groups: tuple[Group, ...]
    chosen: Group | None
    criterion: str | None
    reason: str | None
    split: str
    left_out: int = 0
    differences: Mapping[tuple[str, str], Mapping[str, Difference]] = field(default_factory=dict)

    @cached_property
    def seeds(self) -> list[Seed]:
        return unique(seed for group in self.groups for seed in group.rows)

    @cached_property
    def single(self) -> Group | None:
        return next((g for g in self.groups if g.method == "single"), None)

    @cached_property
    def deep(self) -> Group | None:
        """The separate networks, as many as the chosen σN-Ens has members if there are such."""
        deep = [g for g in self.groups if g.method == "deep_ensemble"]
        members = (self.chosen and self.chosen.members) or 0
        return min(deep, key=lambda g: abs((g.members or 0) - members), default=None)

    @property
    def leading(self) -> list[Group]:
        """One network, the chosen σN-Ens and the separate networks, of those that there are."""
        return [g for g in (self.single, self.chosen, self.deep) if g is not None]

    @cached_property
    def main(self) -> list[Group]:
        """What a crowded figure shows first: one network, separate ones, ours and the controls.

        Controls with the chosen number of members only; all groups where there are few.
        """
        if len(self.groups) <= _MANY:
            return list(self.groups)
        members = self.chosen.members if self.chosen else None
        controls = [g for g in self.groups if g.method in _CONTROLS and not g.variant]
        asked = [g for g in controls if members is None or g.members == members]
        asked += self.leading
        kept = [group for group in self.groups if group in asked]
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
        if self.chosen and self.chosen.row.get("head") == "fresh":
            alone.sort(key=lambda g: g.row.get("head") != "fresh")
        elif not any(g.method == "single" and not g.variant for g in alone):
            alone.sort(key=lambda g: bool(g.variant))
        return alone[0] if alone else self.scaled_single

    @property
    def scaled_single(self) -> Group | None:
        """One network with a fitted temperature: from its own row, or the single network's."""
        if self.single is not None and self.single.stat("nll_calibrated").by_seed:
            return self.single
        scaled = (g for g in self.groups if g.method == "single_temperature")
        return next(scaled, self.single)

    def multiple(self, group: Group) -> float | None:
        """Parameters as a multiple of one network's; None where unknown."""
        one = self.single or self.scaled_single
        ours, theirs = group.stat("params").mean, one.stat("params").mean if one else None
        return ours / theirs if ours and theirs else None

    def keys(self, *path: str) -> list[str]:
        """The keys of the mapping at ``path``, over all rows."""
        return unique(key for group in self.groups for key in group.keys(*path))

    @cached_property
    def kinds(self) -> list[str]:
        """The kinds of corruption that were measured."""
        return self.keys("corruption")

    @cached_property
    def pooled(self) -> bool:
        """Whether numbers under corruption are of the samples of all kinds together."""
        return bool(self.keys("corruption_pooled"))

    @cached_property
    def severities(self) -> list[str]:
        """The severities of corruption that were measured, mildest first."""
        found = {level for kind in self.kinds for level in self.keys("corruption", kind)}
        return sorted((s for s in found if s.isdecimal() and s != "0"), key=int)

    @cached_property
    def ood(self) -> dict[str, list[str]]:
        """The OOD sets that were measured, and the scores of each."""
        found = {name: self.keys("ood", name) for name in self.keys("ood")}
        return {name: scores for name, scores in found.items() if scores}
