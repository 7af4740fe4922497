"""The diversity penalty and the measures of members, in loops over plain Python floats."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

Vector = Sequence[float]
Layer = Sequence[Vector]  # γ of one layer: [member][channel]


def sigmoid(gamma: float) -> float:
    return 1 / (1 + math.exp(-gamma))


def softmax(values: Vector) -> list[float]:
    top = max(values)
    weights = [math.exp(v - top) for v in values]
    return [w / sum(weights) for w in weights]


def log_softmax(values: Vector) -> list[float]:
    top = max(values)
    total = math.log(sum(math.exp(v - top) for v in values))
    return [v - top - total for v in values]


def channels(layers: Sequence[Layer]) -> list[list[float]]:
    """s = σ(γ) of the members, for each channel of each layer."""
    return [
        [sigmoid(member[i]) for member in layer] for layer in layers for i in range(len(layer[0]))
    ]


def penalty(layers: Sequence[Layer], tau: float, weight: float) -> float:
    """λ Σ_ℓ Σ_i Σ_m log softmax(s_ℓi / τ)_m."""
    total = 0.0
    for s in channels(layers):
        for log_p in log_softmax([v / tau for v in s]):
            total += log_p
    return weight * total


def penalty_gradient(layers: Sequence[Layer], tau: float, weight: float) -> list[list[list[float]]]:
    """∂L/∂γ = λ/τ s (1 - s)(1 - M p), indexed [layer][member][channel]."""
    out = []
    for layer in layers:
        members = len(layer)
        rows: list[list[float]] = [[] for _ in layer]
        for i in range(len(layer[0])):
            s = [sigmoid(member[i]) for member in layer]
            p = softmax([v / tau for v in s])
            for m in range(members):
                rows[m].append(weight / tau * s[m] * (1 - s[m]) * (1 - members * p[m]))
        out.append(rows)
    return out


def soft_maximum(s: Vector, tau: float) -> float:
    """LME_τ(s) = τ log((1/M) Σ_j e^{s_j/τ})."""
    top = max(s)
    return top + tau * math.log(sum(math.exp((v - top) / tau) for v in s) / len(s))


def gaps(layers: Sequence[Layer], tau: float) -> list[float]:
    """LME_τ(s) - mean s of every channel."""
    return [soft_maximum(s, tau) - sum(s) / len(s) for s in channels(layers)]


def corner(owners: int, members: int, tau: float) -> float:
    """The gap with ``owners`` members at s = 1 and the others at 0, in terms scaled by e^{-1/τ}."""
    lower = (members - owners) * math.exp(-1 / tau)
    return 1 + tau * math.log((owners + lower) / members) - owners / members


def cosine(layers: Sequence[Layer]) -> float:
    """Mean over layers and member pairs of cos(σ(γ_a), σ(γ_b))."""
    values = []
    for layer in layers:
        s = [[sigmoid(g) for g in member] for member in layer]
        pairs = []
        for a, b in itertools.combinations(s, 2):
            dot = sum(x * y for x, y in zip(a, b, strict=True))
            pairs.append(dot / math.sqrt(sum(x * x for x in a)) / math.sqrt(sum(y * y for y in b)))
        values.append(sum(pairs) / len(pairs))
    return sum(values) / len(values)


def owners(layers: Sequence[Layer]) -> list[int]:
    """Members with s > ½ in every channel."""
    return [sum(v > 0.5 for v in s) for s in channels(layers)]


def saturation(layers: Sequence[Layer], margin: float) -> float:
    flat = [v for s in channels(layers) for v in s]
    return sum(v < margin or v > 1 - margin for v in flat) / len(flat)


# Predictions: log-probabilities or logits [member][sample][class].
Predictions = Sequence[Sequence[Vector]]


def disagreement(predictions: Predictions) -> float:
    members, samples = len(predictions), len(predictions[0])
    labels = [[max(range(len(z)), key=z.__getitem__) for z in member] for member in predictions]
    pairs = list(itertools.combinations(range(members), 2))
    differ = sum(labels[a][n] != labels[b][n] for a, b in pairs for n in range(samples))
    return differ / (len(pairs) * samples)


def pairwise_kl(predictions: Predictions) -> float:
    members, samples = len(predictions), len(predictions[0])
    total = 0.0
    for a, b in itertools.permutations(range(members), 2):
        for n in range(samples):
            p, q = log_softmax(predictions[a][n]), log_softmax(predictions[b][n])
            total += sum(math.exp(x) * (x - y) for x, y in zip(p, q, strict=True))
    return total / (members * (members - 1) * samples)


def jensen_gap(predictions: Predictions, labels: Sequence[int]) -> float:
    members, samples = len(predictions), len(predictions[0])
    own = pooled = 0.0
    for n, label in enumerate(labels):
        probs = [softmax(predictions[m][n])[label] for m in range(members)]
        own -= sum(math.log(p) for p in probs) / members
        pooled -= math.log(sum(probs) / members)
    return (own - pooled) / samples
