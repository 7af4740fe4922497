"""Metrics of a small study with realistic numbers, made without training anything."""

from __future__ import annotations

import copy
import math
import random
from typing import Any

#                        accuracy, nll, scaled nll, ece, disagreement, cosine, owners
METHODS: dict[tuple[str, float | None], tuple[Any, ...]] = {
    ("single", None): (0.921, 0.352, 0.281, 0.048, None, None, None),
    ("single_temperature", None): (0.921, 0.281, 0.281, 0.017, None, None, None),
    ("deep_ensemble", None): (0.948, 0.186, 0.178, 0.016, 0.094, None, None),
    ("film", None): (0.933, 0.262, 0.236, 0.027, 0.041, None, None),
    ("sigmanens_lambda0", None): (0.936, 0.249, 0.228, 0.024, 0.047, 0.86, (3, 20, 59, 31, 7)),
    ("sigmanens", 0.1): (0.931, 0.241, 0.232, 0.019, 0.121, 0.09, (2, 98, 16, 4, 0)),
    ("sigmanens", 0.5): (0.942, 0.205, 0.197, 0.013, 0.083, 0.31, (0, 46, 67, 7, 0)),
    ("sigmanens", 2.0): (0.940, 0.213, 0.203, 0.015, 0.068, 0.42, (0, 27, 74, 17, 2)),
}


def reliability(accuracy: float, ece: float, rng: random.Random, n: int) -> dict[str, Any]:
    """Bins whose confidence exceeds their accuracy by about ``ece``, most samples at the top."""
    weights = [0.0, 0.0, *(math.exp(0.36 * k) for k in range(13))]
    count = [round(n * w / sum(weights)) for w in weights]
    confidence: list[float | None] = []
    hit: list[float | None] = []
    for k, here in enumerate(count):
        if not here:
            confidence.append(None)
            hit.append(None)
            continue
        middle = (k + 0.5) / 15
        confidence.append(middle)
        gap = ece * 4 * (1 - middle) + ece * 0.4 + rng.gauss(0, 0.25 / math.sqrt(here))
        hit.append(min(1.0, max(0.0, middle - gap)))
    edges = [i / 15 for i in range(16)]
    return {"edges": edges, "confidence": confidence, "accuracy": hit, "count": count}


def row(method: str, tau: float | None, seed: int, n: int = 899) -> dict[str, Any]:
    """One row of metrics.json."""
    accuracy, nll, scaled, ece, disagreement, cosine, owners = METHODS[method, tau]
    rng = random.Random(f"{method} {tau} {seed}")
    shift = (0.0, 0.006, -0.005, 0.003, -0.002)[seed % 5]
    many = method not in ("single", "single_temperature")
    quality = 1 - accuracy
    ece += rng.gauss(0, 0.001)

    def auroc(base: float, modulation: float | None) -> dict[str, float | None]:
        noise = rng.gauss(0, 0.006)
        return {
            "max_softmax": base + noise,
            "predictive_entropy": base + 0.008 + noise,
            "modulation": modulation + noise if many and modulation else None,
        }

    return {
        "method": method,
        "members": 4 if many else 1,
        "tau": tau,
        "weight": 0.01 if method == "sigmanens" else None,
        "seed": seed,
        "split": "test",
        "n": n,
        "params": {"single": 78_346, "single_temperature": 78_347, "deep_ensemble": 313_384}.get(
            method, 81_120
        ),
        "accuracy": accuracy - shift / 2,
        "nll": nll + shift + rng.gauss(0, 0.002),
        "ece": ece,
        "nll_calibrated": scaled + shift + rng.gauss(0, 0.002),
        "ece_debiased": max(0.0, ece - 0.006),
        "ece_calibrated": min(ece, 0.014) + rng.gauss(0, 0.001),
        "temperature": 1.0 if method == "single_temperature" else 1 + ece * 18,
        "brier": 0.3 * nll + shift / 3 + 0.04,
        "member_nll": nll + 0.09 if many else None,
        "member_accuracy": accuracy - 0.025 if many else None,
        "disagreement": disagreement,
        "pairwise_kl": disagreement and 3.1 * disagreement,
        "modulation": disagreement and 1.2 * disagreement,
        "jensen_gap": 0.09 + rng.gauss(0, 0.003) if many else None,
        "cosine": cosine,
        "owners": list(owners) if owners else None,
        "reliability": reliability(accuracy, ece, rng, n),
        "risk_coverage": {
            "coverage": [i / 20 for i in range(1, 21)],
            "risk": [(1 - accuracy) * (i / 20) ** 2 for i in range(1, 21)],
        },
        "confusion": [[90, 6, 4], [3, 95, 2], [0, 10, 90]],
        "ood": {
            "patches": auroc(0.99 - 1.1 * quality, 0.985 - 1.1 * quality),
            "held_out_noise": auroc(0.985 - 0.9 * quality, 0.992 - 0.9 * quality),
        },
        "corruption": {
            "gaussian_noise": {
                str(severity): {
                    "accuracy": accuracy - quality * 0.45 * severity**1.35 - shift,
                    "nll": nll * (1 + 0.5 * severity),
                    "ece": ece * (1 + 0.35 * severity**1.4) + rng.gauss(0, 0.002),
                }
                for severity in range(1, 6)
            }
        },
        "intervals": {
            "accuracy": [accuracy - 0.015, accuracy + 0.014],
            "nll": [nll - 0.03, nll + 0.035],
            "ece": [max(0.0, ece - 0.007), ece + 0.011],
        },
        "validation": {
            "nll": nll + 0.004 + shift,
            "nll_calibrated": scaled + 0.003 + shift + rng.gauss(0, 0.003),
            "ece": ece,
            "accuracy": accuracy,
        },
        "train_seconds": {"single": 1.9, "single_temperature": 1.9, "deep_ensemble": 7.7}.get(
            method, 6.4
        ),
    }


def demo_metrics(seeds: int = 3) -> dict[str, Any]:
    """What ``sigmanens demo`` writes: eight methods, ``seeds`` seeds each."""
    return {
        "version": 1,
        "preset": "digits-demo",
        "command": "sigmanens demo --out runs/demo",
        "environment": {"python": "3.11.9", "torch": "2.9.0", "threads": 2, "cpu": "x86_64"},
        "seconds": 93.4,
        "data": {
            "description": "scikit-learn digits, 8×8 grey pictures of handwritten digits",
            "train": 300,
            "validation": 598,
            "test": 899,
            "ood": {"patches": 899, "held_out_noise": 899},
        },
        "rows": [row(method, tau, seed) for method, tau in METHODS for seed in range(seeds)],
        "choice": {
            "criterion": "validation nll_calibrated",
            "tau": 0.5,
            "reason": "0.200 against 0.206 (τ=2) and 0.235 (τ=0.1), mean of 3 seeds",
        },
    }


def single_row_metrics() -> dict[str, Any]:
    """What ``sigmanens train`` may write: one row with little in it."""
    return {
        "version": 1,
        "preset": None,
        "command": "sigmanens train",
        "environment": {},
        "rows": [{"method": "sigmanens", "accuracy": 0.91, "nll": 0.3, "ece": None, "n": 500}],
        "choice": None,
    }


def shifted(metrics: dict[str, Any], method: str, key: str, values: list[float]) -> dict[str, Any]:
    """A copy in which ``key`` of ``method`` (every τ) takes ``values``, one per seed."""
    changed = copy.deepcopy(metrics)
    for entry in changed["rows"]:
        if entry["method"] == method:
            entry[key] = values[entry["seed"]]
    return changed
