"""The paired difference of any two rows of a run: what every "better" and "worse" stands on.

Two settings that share several seeds are compared over these (Student's t); two that share one, on
its samples (bootstrap). See :mod:`sigmanens.evaluation.comparison`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from sigmanens.evaluation import apply_temperature, ece_interval, metrics
from sigmanens.evaluation.comparison import (
    Difference,
    resampled_means,
    sample_difference,
    seed_difference,
)
from sigmanens.evaluation.intervals import Interval
from sigmanens.lab.plain import finite

METRICS = (
    "accuracy", "nll", "nll_calibrated", "brier", "ece", "ece_calibrated",
    "nll_corrupted", "nll_calibrated_corrupted",
)  # fmt: skip
"""What is compared; "corrupted" is the mean over all kinds and severities."""
_BINNED = ("ece", "ece_calibrated")
_LEVEL = 0.95

Row = Mapping[str, Any]
Samples = Mapping[str, Tensor]
"""Of one row: ``log_probs`` (n, C) of the averaged prediction, ``labels`` (n,), and where corrupted
examples were measured ``nll_corrupted``, ``nll_calibrated_corrupted`` and ``corrupted_rows`` (m,).
"""
Load = Callable[[Row], Samples | None]
"""From a row to its samples; None where they were not kept."""


def setting_name(row: Row) -> str:
    """What a row's setting is called in ``differences``: "sigmanens m4 tau0.5 weight0.01"."""
    parts = [str(row["method"])]
    for key, sign in (("members", "m"), ("tau", "tau"), ("weight", "weight")):
        if isinstance(row.get(key), int | float):
            parts.append(f"{sign}{row[key]:g}")
    return " ".join([*parts, *([str(row["variant"])] if row.get("variant") else [])])


def value_of(row: Row, metric: str) -> float | None:
    """A row's number for a name of ``METRICS``; None where it was not measured."""
    if metric.endswith("_corrupted"):
        levels = row.get("corruption_pooled")
        levels = levels.values() if isinstance(levels, Mapping) else ()
        of = metric.removesuffix("_corrupted")
        found = [finite(level.get(of)) for level in levels if isinstance(level, Mapping)]
        known = [value for value in found if value is not None]
        return fmean(known) if known and len(known) == len(found) else None
    return finite(row.get(metric))


def differences(
    rows: Sequence[Row], load: Load, earlier: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Differences of any two settings of a run, a less b, with 95 % intervals.

    Args:
        rows: of ``metrics.json``.
        load: gives the samples of a row, asked only where two settings share a single seed.
        earlier: ``metrics.json`` of an earlier call: its differences stand in where samples are not
            at hand, as long as both rows are what they were.

    Returns:
        one object for each pair: ``a`` and ``b`` (:func:`setting_name`), ``seeds`` they share, and
        ``metrics``, by name ``value``, ``low``, ``high``, ``p``, ``n`` and ``basis`` of a
        :class:`~sigmanens.evaluation.comparison.Difference`. The ``p`` of a calibration error of
        one seed is null: its interval comes from two.
    """
    settings: dict[str, dict[Any, Row]] = {}
    for row in rows:
        settings.setdefault(setting_name(row), {})[row.get("seed")] = row
    sampled: dict[Any, _Sampled] = {}
    before = _unchanged(earlier, rows) if earlier else {}
    found = []
    for a, b in combinations(settings, 2):
        shared = [seed for seed in settings[a] if seed in settings[b]]
        compared: dict[str, Any] = {}
        for metric in METRICS:
            both = {
                seed: values
                for seed in shared
                if None not in (values := [value_of(settings[k][seed], metric) for k in (a, b)])
            }
            gap: Difference | None = None
            if len(both) > 1:
                ours, theirs = zip(*both.values(), strict=True)
                gap = seed_difference(ours, theirs, _LEVEL)
            elif both:
                (seed,) = both
                if seed not in sampled:
                    of_seed = {name: by[seed] for name, by in settings.items() if seed in by}
                    sampled[seed] = _Sampled(of_seed, load)
                gap = sampled[seed].difference(metric, a, b)
                if gap is None and (kept := before.get((a, b), {}).get(metric)):
                    compared[metric] = kept
            if gap is not None:
                compared[metric] = _plain(gap)
        if compared:
            found.append({"a": a, "b": b, "seeds": len(shared), "metrics": compared})
    return found


def _plain(gap: Difference) -> dict[str, Any]:
    """Its fields with six digits, as JSON has them."""
    numbers = {k: getattr(gap, k) for k in ("value", "low", "high", "p")}
    rounded = {k: None if math.isnan(x) else float(f"{x:.6g}") for k, x in numbers.items()}
    return rounded | {"n": gap.n, "basis": gap.basis}


class _Sampled:
    """Rows of one seed on their samples; every metric is resampled once for all rows."""

    def __init__(self, rows: Mapping[str, Row], load: Load) -> None:
        self.rows = rows
        self.samples = {name: s for name, row in rows.items() if (s := load(row)) is not None}
        self._columns: dict[str, tuple[dict[str, int], Tensor, Tensor, int]] = {}
        self._ends: dict[tuple[str, str], Interval] = {}

    def difference(self, metric: str, a: str, b: str) -> Difference | None:
        """a less b; None where samples are missing or not the same ones."""
        if a not in self.samples or b not in self.samples or not self._alike(metric, a, b):
            return None
        if metric in _BINNED:
            x, y = self._inverted(metric, a), self._inverted(metric, b)
            ends = x.low - y.high, x.high - y.low
            return Difference(x.value - y.value, *ends, math.nan, x.n, "samples", _LEVEL)
        place, values, draws, n = self._resampled(metric, a)
        if a not in place or b not in place:
            return None
        gap = float(values[place[a]] - values[place[b]])
        return sample_difference(gap, draws[:, place[a]] - draws[:, place[b]], n, _LEVEL)

    def _alike(self, metric: str, a: str, b: str) -> bool:
        """Whether two rows were measured on the same samples."""
        keys = ["labels", *(["corrupted_rows"] if metric.endswith("_corrupted") else [])]
        first, second = self.samples[a], self.samples[b]
        return all(k in first and k in second and torch.equal(first[k], second[k]) for k in keys)

    def _resampled(self, metric: str, like: str) -> tuple[dict[str, int], Tensor, Tensor, int]:
        """Place of each row, means (K,), their draws (R, K) and the number of examples."""
        if metric not in self._columns:
            names = [name for name in self.samples if self._alike(metric, name, like)]
            values = torch.stack([self._values(metric, name) for name in names], 1)
            groups = self.samples[like].get("corrupted_rows") if "corrupted" in metric else None
            n = len(values) if groups is None else len(groups.unique())
            place = {name: i for i, name in enumerate(names)}
            self._columns[metric] = place, values.mean(0), resampled_means(values, groups), n
        return self._columns[metric]

    def _values(self, metric: str, name: str) -> Tensor:
        """The metric of every sample."""
        samples = self.samples[name]
        if metric.endswith("_corrupted"):
            return samples[metric].double()
        log_probs = self._log_probs(metric, name)
        measure = {
            "accuracy": metrics.sample_accuracy,
            "brier": metrics.sample_brier,
        }.get(metric, metrics.sample_nll)
        return measure(log_probs, samples["labels"]).double()

    def _log_probs(self, metric: str, name: str) -> Tensor:
        log_probs = self.samples[name]["log_probs"].double()
        if metric.endswith("_calibrated"):
            return apply_temperature(log_probs, self.rows[name]["temperature"])
        return log_probs

    def _inverted(self, metric: str, name: str) -> Interval:
        """A calibration error with an interval at half the miss, so that two give a difference."""
        if (metric, name) not in self._ends:
            given = self._log_probs(metric, name), self.samples[name]["labels"]
            self._ends[metric, name] = ece_interval(*given, level=(1 + _LEVEL) / 2)
        return self._ends[metric, name]


def _unchanged(earlier: Mapping[str, Any], rows: Sequence[Row]) -> dict[Any, Mapping[str, Any]]:
    """Differences of an earlier call whose rows are what they were, up to rounding."""
    then, now = (
        {(setting_name(row), row.get("seed")): row["nll"] for row in of}
        for of in (earlier.get("rows") or [], rows)
    )
    changed = {
        name
        for name, seed in then.keys() | now.keys()
        if not math.isclose(
            then.get((name, seed), math.nan), now.get((name, seed), math.nan), rel_tol=1e-6
        )
    }
    return {
        (pair["a"], pair["b"]): pair["metrics"]
        for pair in earlier.get("differences") or []
        if not {pair["a"], pair["b"]} & changed
    }
