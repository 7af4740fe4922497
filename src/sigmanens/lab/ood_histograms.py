"""How the OOD scores of test pictures and of OOD sets are distributed: what a report draws."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

BINS = 20
_TAIL = 0.005
"""Share of the scores at either end that is counted in the outermost bin."""


def ood_histograms(
    inside: Mapping[str, Tensor],
    outside: Mapping[str, Mapping[str, Tensor]],
    auroc: Mapping[str, Mapping[str, float]],
) -> dict[str, Any] | None:
    """Histograms of max softmax and of the score with the highest mean AUROC over the sets.

    Args:
        inside: scores of the test pictures by name, each (N,), higher = more OOD.
        outside: the same of each OOD set, by name of the set.
        auroc: by set, then by score.

    Returns:
        ``{score: {"edges": 21 floats, "inside": 20 counts, "sets": {set: 20 counts}}}``. Scores
        outside the edges count in the first or last bin. None without a set.
    """
    if not outside:
        return None
    means = {name: sum(found[name] for found in auroc.values()) / len(auroc) for name in inside}
    known = {name: mean for name, mean in means.items() if math.isfinite(mean)}
    names = ["max_softmax", *([max(known, key=lambda n: known[n])] if known else [])]
    found = {name: _histogram(inside[name], {k: v[name] for k, v in outside.items()})
             for name in dict.fromkeys(names) if name in inside}  # fmt: skip
    return {name: table for name, table in found.items() if table is not None} or None


def _histogram(inside: Tensor, sets: Mapping[str, Tensor]) -> dict[str, Any] | None:
    """Counts between edges that span all but the tails; None where all scores are equal."""
    pooled = torch.cat([inside.flatten(), *(v.flatten() for v in sets.values())]).double().sort()[0]
    last = len(pooled) - 1
    low, high = (float(pooled[round(share * last)]) for share in (_TAIL, 1 - _TAIL))
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        return None
    return {
        "edges": [float(f"{low + (high - low) * i / BINS:.6g}") for i in range(BINS + 1)],
        "inside": _counts(inside, low, high),
        "sets": {name: _counts(values, low, high) for name, values in sets.items()},
    }


def _counts(values: Tensor, low: float, high: float) -> list[int]:
    held = values.double().flatten().clamp(low, high)
    return [int(n) for n in torch.histc(held, BINS, low, high).tolist()]
