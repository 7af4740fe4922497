"""OOD scores of features, one sample and one class at a time: slow, obvious and independent."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def covariance(rows: Array, rho: float) -> Array:
    """(1−ρ) S + ρ (tr S / D) I of rows whose mean is 0."""
    width = rows.shape[1]
    total = np.zeros((width, width))
    for row in rows:
        total += np.outer(row, row)
    total /= len(rows)
    return (1 - rho) * total + rho * np.trace(total) / width * np.eye(width)


def distance(z: Array, mean: Array, inverse: Array) -> float:
    return float((z - mean) @ inverse @ (z - mean))


def class_means(train: Array, labels: list[int]) -> dict[int, Array]:
    return {
        c: np.mean([row for row, y in zip(train, labels, strict=True) if y == c], axis=0)
        for c in set(labels)
    }


def mahalanobis(train: Array, labels: list[int], samples: Array, rho: float) -> list[float]:
    means = class_means(train, labels)
    centred = np.array([row - means[y] for row, y in zip(train, labels, strict=True)])
    inverse = np.linalg.inv(covariance(centred, rho))
    return [min(distance(z, mean, inverse) for mean in means.values()) for z in samples]


def relative_mahalanobis(
    train: Array, labels: list[int], samples: Array, rho: float
) -> list[float]:
    mean = train.mean(0)
    inverse = np.linalg.inv(covariance(train - mean, rho))
    nearest = mahalanobis(train, labels, samples, rho)
    return [near - distance(z, mean, inverse) for near, z in zip(nearest, samples, strict=True)]


def knn(train: Array, samples: Array, k: int) -> list[float]:
    unit = [row / np.linalg.norm(row) for row in train]
    return [
        sorted(float(np.linalg.norm(z / np.linalg.norm(z) - row)) for row in unit)[k - 1]
        for z in samples
    ]


def vim(train: Array, weight: Array, bias: Array, samples: Array, dim: int) -> list[float]:
    origin = -np.linalg.pinv(weight) @ bias
    # Right singular vectors, the largest first: what is outside the first ``dim`` of them.
    main = np.linalg.svd(train - origin, full_matrices=True)[2][:dim]

    def residual(z: Array) -> float:
        left = z - origin
        for direction in main:
            left = left - (left @ direction) * direction
        return float(np.linalg.norm(left))

    def logits(z: Array) -> list[float]:
        return [float(row @ z + b) for row, b in zip(weight, bias, strict=True)]

    scale = sum(max(logits(z)) for z in train) / sum(residual(z) for z in train)
    return [
        scale * residual(z) - math.log(sum(math.exp(value) for value in logits(z))) for z in samples
    ]


def pooled(members: list[list[float]], of_training: list[list[float]]) -> list[float]:
    """Mean over members of (score − mean)/std, both over that member's training scores."""
    total = [0.0] * len(members[0])
    for scores, own in zip(members, of_training, strict=True):
        mean, deviation = np.mean(own), np.std(own, ddof=1)
        for i, score in enumerate(scores):
            total[i] += (score - mean) / deviation / len(members)
    return total
