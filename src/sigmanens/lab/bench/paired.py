"""The chosen σN-Ens against every other method, on the same test examples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor

from sigmanens.ensemble.prediction import log_mean_exp
from sigmanens.evaluation import apply_temperature, metrics
from sigmanens.evaluation.intervals import Interval
from sigmanens.lab.bench.measure import prediction_name
from sigmanens.lab.bench.trials import Trial
from sigmanens.lab.bench.under_corruption import clustered_mean

__all__ = ["kept_pairs", "paired"]

Setting = tuple[Any, ...]

METRICS = ("nll", "nll_calibrated", "nll_corrupted", "nll_calibrated_corrupted")
"""Losses that are compared, as they are called in ``metrics.json``."""


class Loss(NamedTuple):
    """−log p of every sample (n,), nats.

    ``examples`` (n,) says from which test example each was made, ``labels`` (N,) which test
    examples they are.
    """

    values: Tensor
    examples: Tensor
    labels: Tensor

    def alike(self, other: Loss) -> bool:
        """Whether both are of the same samples."""
        same = torch.equal(self.labels, other.labels)
        return same and torch.equal(self.examples, other.examples)


def paired(
    finished: Mapping[Trial, Path],
    rows: list[dict[str, Any]],
    choice: Mapping[str, Any] | None,
) -> list[dict[str, Any]]:
    r"""Differences of NLL, ours less theirs, with a 95 % bootstrap interval over test examples.

    The difference of an example is averaged over the seeds both have, where these share their test
    examples; else the examples of all seeds are pooled. The interval then covers which examples
    were drawn, not which seeds: for that, see the spread over seeds. Under corruption the mean over
    kinds and severities is taken, and what one example was made into is drawn together.

    Args:
        finished: folders of the trainings.
        rows: theirs.
        choice: which σN-Ens is ours; None: no comparison.
    """
    if choice is None:
        return []
    losses = _losses(finished, rows)
    ours = ("sigmanens", choice["members"], choice["tau"], choice["weight"], None)
    found = []
    for setting, theirs in losses.items():
        if setting == ours or ours not in losses:
            continue
        method, members, tau, weight, variant = setting
        for metric in METRICS:
            both = [
                (mine[metric], theirs[seed][metric])
                for seed, mine in losses[ours].items()
                if seed in theirs and metric in mine and metric in theirs[seed]
            ]
            pairs = [(a, b) for a, b in both if a.alike(b)]
            interval = _difference(pairs)
            if interval is None:
                continue
            found.append(
                {
                    "against": method, "members": members, "tau": tau, "weight": weight,
                    "variant": variant, "metric": metric, "seeds": len(pairs),
                    "value": interval.value, "low": interval.low, "high": interval.high,
                    "n": interval.n, "level": interval.level,
                }
            )  # fmt: skip
    return found


def _difference(pairs: Sequence[tuple[Loss, Loss]]) -> Interval | None:
    """The interval of ours less theirs, over pairs of one seed each; None with fewer than two."""
    if not pairs:
        return None
    gaps = [ours.values - theirs.values for ours, theirs in pairs]
    first = pairs[0][0]
    if all(ours.alike(first) for ours, _ in pairs):
        return clustered_mean(torch.stack(gaps).mean(0), first.examples)
    apart = 1 + max(int(ours.examples.max()) for ours, _ in pairs)
    examples = [ours.examples + i * apart for i, (ours, _) in enumerate(pairs)]
    return clustered_mean(torch.cat(gaps), torch.cat(examples))


def kept_pairs(earlier: Mapping[str, Any], metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Differences found by an earlier call of which a side's predictions are not at hand now.

    They hold as long as the same σN-Ens is chosen and the rows of both sides are what they were, up
    to the rounding of a network that was measured again; where both calls compared a setting, the
    one with more seeds counts.

    Args:
        earlier: ``metrics.json`` before this call.
        metrics: what it is to be now.

    Returns:
        the pairs of ``metrics`` and of ``earlier``, one for each setting and metric.
    """
    then, now = earlier.get("choice"), metrics["choice"]
    keys = ("tau", "members", "weight")
    found = {_of_pair(p): p for p in metrics["paired"]}
    if not then or not now or any(then[k] != now[k] for k in keys):
        return list(found.values())
    rows = {(_of_row(r), r["seed"]): r["nll"] for r in metrics["rows"]}
    changed = {
        _of_row(r)
        for r in earlier["rows"]
        if not math.isclose(rows.get((_of_row(r), r["seed"]), math.nan), r["nll"], rel_tol=1e-6)
    }
    if ("sigmanens", now["members"], now["tau"], now["weight"], None) in changed:
        return list(found.values())
    for pair in earlier.get("paired") or []:
        key = _of_pair(pair)
        if key[:-1] not in changed and pair["seeds"] > found.get(key, {"seeds": 0})["seeds"]:
            found[key] = pair
    return list(found.values())


def _of_row(row: Mapping[str, Any]) -> Setting:
    return row["method"], row["members"], row["tau"], row["weight"], row.get("variant")


def _of_pair(pair: Mapping[str, Any]) -> Setting:
    return (
        pair["against"], pair["members"], pair["tau"], pair["weight"], pair.get("variant"),
        pair["metric"],
    )  # fmt: skip


def _losses(
    finished: Mapping[Trial, Path], rows: list[dict[str, Any]]
) -> dict[Setting, dict[int, dict[str, Loss]]]:
    """The losses of every setting and seed, by metric; those with "calibrated" are tempered."""
    by_trial: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_trial.setdefault(row["trial"], []).append(row)
    found: dict[Setting, dict[int, dict[str, Loss]]] = {}
    for trial, folder in finished.items():
        if not (folder / "predictions.safetensors").exists():
            continue  # the rows were kept, the predictions were not
        tensors = load_file(folder / "predictions.safetensors")
        labels = tensors["labels"]
        for row in by_trial.get(trial.key, []):
            name = prediction_name(row)
            if f"{name}.member_log_probs" not in tensors:
                continue
            mean = log_mean_exp(tensors[f"{name}.member_log_probs"].double())
            scaled = apply_temperature(mean, row["temperature"])
            every = torch.arange(len(labels))
            losses = {
                "nll": Loss(metrics.sample_nll(mean, labels), every, labels),
                "nll_calibrated": Loss(metrics.sample_nll(scaled, labels), every, labels),
            }
            for metric in ("nll_corrupted", "nll_calibrated_corrupted"):
                if (values := tensors.get(f"{name}.{metric}")) is not None:
                    losses[metric] = Loss(values, tensors[f"{name}.corrupted_rows"], labels)
            found.setdefault(_of_row(row), {})[trial.seed] = losses
    return found
