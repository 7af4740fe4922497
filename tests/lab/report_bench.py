"""Metrics of a study as large as they come: rivals, sweeps of τ, λ and M, variants, failures."""

from __future__ import annotations

import math
import random
from typing import Any

from tests.lab.report_fixture import reliability

RIVALS = {
    "single": 0.0, "single_temperature": 0.0, "single_finetuned": 0.02, "mc_dropout": 0.1,
    "laplace": 0.12, "deep_ensemble": 1.0, "packed": 0.75, "batchensemble": 0.35, "mimo": 0.45,
    "masksembles": 0.4, "lora_ensemble": 0.3, "norm_tuning": 0.05, "film": 0.5, "heads_only": 0.2,
    "fixed_masks": 0.55, "sigmanens_lambda0": 0.58,
}  # fmt: skip
"""How far each gets from one network (0) to separate networks (1)."""
ALONE = ("single", "single_temperature", "single_finetuned", "norm_tuning", "laplace")
KINDS = (
    *("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur"),
    *("motion_blur", "zoom_blur", "snow", "frost", "fog", "brightness", "contrast"),
    *("elastic_transform", "pixelate", "jpeg_compression"),
)
SETS = ("svhn", "textures", "held_out_classes", "uniform_noise")
LAYERS = [f"layers.{i}.{j}.norm{k}" for i in range(3) for j in range(3) for k in (1, 2)]
TAUS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


def gain(method: str, members: int, tau: float | None, weight: float | None) -> float:
    """A dial with a hump: too little and too much sharing are both worse."""
    share = RIVALS.get(method, 0.6)
    if method == "sigmanens" and tau is not None and weight is not None:
        share = 0.72 - 0.09 * math.log2(tau / 0.5) ** 2 / 4 - 0.03 * abs(math.log10(weight / 0.01))
    return share if method in ALONE else share * (1 - 0.55 ** (members - 1)) * 1.12


def histogram(rng: random.Random, quality: float) -> dict[str, Any]:
    """Twenty bins of a score: most test samples to the left, OOD samples to the right."""

    def counts(middle: float, width: float, n: int) -> list[int]:
        weights = [math.exp(-(((i + 0.5) / 20 - middle) ** 2) / width) for i in range(20)]
        return [round(n * w / sum(weights)) for w in weights]

    return {
        "edges": [round(0.9 * i / 20, 6) for i in range(21)],
        "inside": counts(0.0, 0.03, 2000),
        "sets": {
            name: counts(0.35 + 0.12 * i + 0.1 * quality, 0.05 + rng.random() / 50, 1000)
            for i, name in enumerate(SETS)
        },
    }


def row(
    method: str,
    members: int,
    seed: int,
    tau: float | None = None,
    weight: float | None = None,
    variant: str | None = None,
) -> dict[str, Any]:
    """One row with everything a study measures."""
    rng = random.Random(f"{method} {members} {seed} {tau} {weight} {variant}")
    share = gain(method, members, tau, weight) - (0.08 if variant else 0.0)
    accuracy = 0.712 + 0.035 * share + rng.gauss(0, 0.003)
    nll = 0.905 - 0.11 * share + rng.gauss(0, 0.005)
    scaled = 0.861 - 0.075 * share + rng.gauss(0, 0.004)
    ece = max(0.008, 0.06 - 0.035 * share + rng.gauss(0, 0.003))
    several = members > 1
    sigmoid = method in ("sigmanens", "sigmanens_lambda0", "fixed_masks") and several
    middle = 0.3 * members + 0.12 * members * math.log10((tau or 1.0) * 10)
    owners = {
        name: [
            round(64 * math.exp(-((k - middle - i / 12) ** 2) / 1.5)) + rng.randrange(3)
            for k in range(members + 1)
        ]
        for i, name in enumerate(LAYERS)
    }

    def corrupted(kind: int, severity: int) -> dict[str, float]:
        hurt = 0.05 * severity**1.2 * (0.6 + 0.09 * (kind * 7 % 11))
        return {
            "accuracy": accuracy - hurt * (1 - 0.2 * share),
            "nll": nll + 3.2 * hurt * (1 - 0.3 * share),
            "ece": ece + 0.6 * hurt * (1 - 0.5 * share) + rng.gauss(0, 0.003),
        }

    return {
        "method": method, "members": members, "tau": tau, "weight": weight, "seed": seed,
        "variant": variant, "split": "test", "n": 2000,
        "params": 272_474 * (members if method == "deep_ensemble" else 1) + 812 * members,
        "accuracy": accuracy, "nll": nll, "ece": ece, "nll_calibrated": scaled,
        "ece_calibrated": min(ece, 0.02), "temperature": 1 + 6 * ece, "brier": 0.4 * nll,
        "member_nll": nll + 0.08 if several else None,
        "disagreement": 0.03 + 0.15 * share if several else None,
        "jensen_gap": 0.05 + 0.1 * share if several else None,
        "cosine": 0.85 - 0.6 * share if sigmoid else None,
        "owners": [sum(c[k] for c in owners.values()) for k in range(members + 1)]
        if sigmoid else None,
        "owners_by_layer": owners if sigmoid else None,
        "reliability": reliability(accuracy, ece, rng, 2000),
        "risk_coverage": {"coverage": [0.5, 1.0], "risk": [(1 - accuracy) / 4, 1 - accuracy]},
        "ood": {
            name: {
                "max_softmax": 0.78 + 0.04 * i + 0.05 * share + rng.gauss(0, 0.005),
                "predictive_entropy": 0.79 + 0.04 * i + 0.05 * share + rng.gauss(0, 0.005),
                "energy": 0.8 + 0.03 * i + 0.05 * share + rng.gauss(0, 0.005),
                "modulation": 0.76 + 0.04 * i + 0.06 * share if several else None,
            }
            for i, name in enumerate(SETS)
        },
        "ood_histograms": {
            "max_softmax": histogram(rng, share), "energy": histogram(rng, share + 0.2)
        },
        "corruption": {
            kind: {str(s): corrupted(i, s) for s in range(1, 6)} for i, kind in enumerate(KINDS)
        },
        "intervals": {
            "accuracy": [accuracy - 0.02, accuracy + 0.02], "nll": [nll - 0.04, nll + 0.04]
        },
        "validation": {"nll": nll + 0.01, "nll_calibrated": scaled + 0.005, "ece": ece,
                       "accuracy": accuracy, "n": 1000},
        "train_seconds": 600.0 * (members if method == "deep_ensemble" else 1 + members / 2),
        "findings": ["the dial is in its flat part: any τ above 1.4 gives the same owners (M = 4)"]
        if tau == 2.0 else [],
        "curve": {str(k): 0.861 - 0.075 * (1 - 0.55 ** (k - 1)) * 1.12 for k in range(1, 9)}
        if method == "deep_ensemble" else None,
    }  # fmt: skip


def epochs(method: str, tau: float | None) -> list[dict[str, float | None]]:
    """The history of a training of 30 epochs."""
    target = 0.1 + 0.2 * math.log10((tau or 1.0) * 10)
    scales = method in ("sigmanens", "sigmanens_lambda0")
    return [
        {
            "epoch": float(e),
            "task": 2.3 * math.exp(-e / 9) + 0.05 * RIVALS.get(method, 0.6),
            "cosine": target + (0.85 - target) * math.exp(-e / 3) if scales else None,
            "saturation": min(1.0, e / 40) if scales else None,
            "jensen_gap": 0.1 * (1 - math.exp(-e / 8)) if method not in ALONE else None,
        }
        for e in range(1, 31)
    ]


def bench_metrics(seeds: int = 2) -> dict[str, Any]:
    """Sixteen methods, six τ, three λ, four M, two variants, 15 × 5 corruptions, four OOD sets."""
    settings: list[tuple[Any, ...]] = [
        (method, 1 if method in ALONE else 4, None, None, None) for method in RIVALS
    ]
    settings += [("sigmanens", 4, tau, 0.01, None) for tau in TAUS]
    settings += [("sigmanens", 4, 0.5, weight, None) for weight in (0.001, 0.1)]
    for m in (2, 8, 16):
        settings += [("sigmanens", m, 0.5, 0.01, None), ("deep_ensemble", m, None, None, None)]
        settings.append(("packed", m, None, None, None))
    settings += [("sigmanens", 4, 0.5, 0.01, name) for name in ("late_split", "delayed_penalty")]
    rows = [
        row(method, members, seed, tau, weight, variant)
        for method, members, tau, weight, variant in settings
        for seed in range(seeds)
    ]
    names = ("method", "members", "tau", "weight", "variant")
    return {
        "version": 1,
        "preset": "cifar10-small",
        "command": "sigmanens bench cifar10-small --out runs/bench",
        "environment": {"python": "3.11.9", "torch": "2.9.0", "threads": 1},
        "seconds": 86_400.0,
        "data": {"description": "CIFAR-10, 5,000 training pictures", "train": 5000, "test": 2000},
        "rows": rows,
        "histories": [
            dict(zip(names, s, strict=True)) | {"seed": 0, "epochs": epochs(s[0], s[2])}
            for s in settings
        ],
        "choice": {
            "criterion": "validation nll_calibrated", "tau": 0.5, "members": 4, "weight": 0.01,
            "reason": "τ=0.5: 0.812, τ=1: 0.815",
        },
        "failures": {"mimo-m16-seed1": "the loss is NaN after epoch 3: lower the learning rate"},
    }  # fmt: skip
