"""What an ensemble predicts, in loops over Python floats."""

from __future__ import annotations

import math

from torch import Tensor


def sigmoid(z: float) -> float:
    return 1 / (1 + math.exp(-z)) if z >= 0 else math.exp(z) / (1 + math.exp(z))


def binary_entropy(p: float) -> float:
    return -sum(q * math.log(q) for q in (p, 1 - p) if q > 0)


def multilabel(logits: Tensor, temperature: float = 1.0) -> dict[str, list]:
    """Of member logits (M, B, C): probs and figures per label (B, C), and their sums (B,)."""
    members, size, labels = logits.shape
    out: dict[str, list] = {"probs": [], "entropy": [], "expected_entropy": [], "modulation": []}
    for b in range(size):
        row: dict[str, list[float]] = {name: [] for name in out}
        for c in range(labels):
            each = [sigmoid(float(logits[m, b, c])) for m in range(members)]
            mean = sum(each) / members
            row["probs"].append(sigmoid((math.log(mean) - math.log(1 - mean)) / temperature))
            row["entropy"].append(binary_entropy(mean))
            row["expected_entropy"].append(sum(map(binary_entropy, each)) / members)
            row["modulation"].append(row["entropy"][-1] - row["expected_entropy"][-1])
        for name in out:
            out[name].append(row[name])
    return out
