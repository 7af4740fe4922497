"""How often intervals of calibration errors cover the truth: writes docs/coverage.json.

Logits of 10 classes are normal with deviation 2, labels are drawn from their softmax, and the
prediction is that softmax with its logits divided by a temperature: 1 is calibrated, below 1
over-confident. The truth is 0 for the first, else the metric at 400,000 samples.

    python docs/make_coverage.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sigmanens import evaluation as ev

METRICS = (ev.ece, ev.adaptive_ece, ev.ece_debiased, ev.classwise_ece)
TEMPERATURES = (1.0, 0.8, 0.4)
SAMPLES = (200, 1000, 4000)
REPEATS = 100
RESAMPLES = 100
CLASSES = 10
OUT = Path(__file__).parent / "coverage.json"


def draw(samples: int, temperature: float, seed: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities (B, C) and labels (B,)."""
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(samples, CLASSES, generator=generator, dtype=torch.float64)
    labels = torch.multinomial(torch.softmax(logits, 1), 1, generator=generator).squeeze(1)
    return torch.log_softmax(logits / temperature, 1), labels


def interval(metric: Any, samples: int, temperature: float, seed: int) -> ev.Interval:
    """The interval of one sample, with draws of its own: equal ones would err alike."""
    return ev.ece_interval(
        *draw(samples, temperature, seed), metric=metric, resamples=RESAMPLES,
        generator=torch.Generator().manual_seed(10**7 + seed),
    )  # fmt: skip


def rows() -> list[dict[str, Any]]:
    """One simulation for each metric, temperature and number of samples."""
    found = []
    for metric in METRICS:
        for temperature in TEMPERATURES:
            truth = 0.0 if temperature == 1 else metric(*draw(400_000, temperature, 10**6))
            for samples in SAMPLES:
                intervals = [interval(metric, samples, temperature, i) for i in range(REPEATS)]
                covered = sum(i.low <= truth <= i.high for i in intervals) / REPEATS
                found.append(
                    {
                        "metric": metric.__name__,
                        "temperature": temperature,
                        "n": samples,
                        "truth": truth,
                        "mean_value": sum(i.value for i in intervals) / REPEATS,
                        "mean_width": sum(i.high - i.low for i in intervals) / REPEATS,
                        "covered": covered,
                    }
                )
                print(found[-1], flush=True)
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    settings = {"level": 0.95, "classes": CLASSES, "repeats": REPEATS, "resamples": RESAMPLES}
    OUT.write_text(json.dumps(settings | {"rows": rows()}, indent=1) + "\n", encoding="utf-8")
