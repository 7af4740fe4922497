"""The chosen σN-Ens against every other method, on the same test examples."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from sigmanens.evaluation import apply_temperature
from sigmanens.evaluation.intervals import bootstrap
from sigmanens.lab.bench.measure import prediction_name
from sigmanens.lab.bench.trials import Trial
from sigmanens.prediction import log_mean_exp

__all__ = ["kept_pairs", "paired"]

Setting = tuple[Any, ...]


def paired(
    finished: Mapping[Trial, Path],
    rows: list[dict[str, Any]],
    choice: Mapping[str, Any] | None,
) -> list[dict[str, Any]]:
    r"""Differences of NLL, ours less theirs, with a 95 % bootstrap interval over test examples.

    The difference of an example is averaged over the seeds both have, where these share their test
    examples; else the examples of all seeds are pooled. The interval then covers which examples
    were drawn, not which seeds: for that, see the spread over seeds.

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
        seeds = [s for s in losses[ours] if s in theirs]
        if not seeds:
            continue
        for metric in ("nll", "nll_calibrated"):
            gaps = [losses[ours][s][metric] - theirs[s][metric] for s in seeds]
            same = all(torch.equal(losses[ours][s]["labels"], losses[ours][seeds[0]]["labels"])
                       for s in seeds)  # fmt: skip
            gap = torch.stack(gaps).mean(0) if same else torch.cat(gaps)
            interval = bootstrap(torch.mean, gap)
            method, members, tau, weight, variant = setting
            found.append(
                {
                    "against": method, "members": members, "tau": tau, "weight": weight,
                    "variant": variant, "metric": metric, "seeds": len(seeds),
                    "value": interval.value, "low": interval.low, "high": interval.high,
                    "n": interval.n, "level": interval.level,
                }
            )  # fmt: skip
    return found


def kept_pairs(earlier: Mapping[str, Any], metrics: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Differences found by an earlier call of which a side's predictions are not at hand now.

    They hold as long as the same σN-Ens is chosen and the rows of both sides are what they were;
    where both calls compared a setting, the one with more seeds counts.

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
    changed = {_of_row(r) for r in earlier["rows"] if rows.get((_of_row(r), r["seed"])) != r["nll"]}
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
) -> dict[Setting, dict[int, dict[str, Tensor]]]:
    """−log p of each test example, as predicted and with the fitted temperature, by setting."""
    by_trial: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        by_trial.setdefault(row["trial"], []).append(row)
    found: dict[Setting, dict[int, dict[str, Tensor]]] = {}
    for trial, folder in finished.items():
        if not (folder / "predictions.safetensors").exists():
            continue  # the rows were kept, the predictions were not
        tensors = load_file(folder / "predictions.safetensors")
        labels = tensors["labels"]
        for row in by_trial.get(trial.key, []):
            name = f"{prediction_name(row)}.member_log_probs"
            if name not in tensors:
                continue
            mean = log_mean_exp(tensors[name].double())
            scaled = apply_temperature(mean, row["temperature"])
            found.setdefault(_of_row(row), {})[trial.seed] = {
                "nll": _picked(mean, labels),
                "nll_calibrated": _picked(scaled, labels),
                "labels": labels,
            }
    return found


def _picked(log_probs: Tensor, labels: Tensor) -> Tensor:
    return -log_probs.gather(1, labels[:, None])[:, 0]
