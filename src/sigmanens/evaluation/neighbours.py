"""OOD score from the training samples nearest in feature space."""

from __future__ import annotations

import torch
from torch import Tensor

from sigmanens.errors import InputError
from sigmanens.evaluation.feature_score import FeatureScore, Head, Scorer, in_slices


class KNN(FeatureScore):
    """Distance to the k-th nearest training sample, features at unit length (arXiv 2204.06507).

    The work grows with the number of training samples: fit on a part of a large set.

    Args:
        k: which neighbour; the paper takes 50 for 50,000 samples of 10 classes, more for more
            classes.
    """

    def __init__(self, k: int = 50) -> None:
        super().__init__()
        if isinstance(k, bool) or not isinstance(k, int) or k < 1:
            raise InputError(f"k is {k!r}; expected an integer ≥ 1")
        self.k = k

    def _fit(self, x: Tensor, y: Tensor | None, head: Head | None) -> Scorer:
        if len(x) <= self.k:
            raise InputError(
                f"{len(x)} training samples are too few for k={self.k}; expected more than k"
            )
        bank = _unit(x)

        def distance(z: Tensor, own: bool) -> Tensor:
            k = self.k + own  # a training sample is its own first neighbour
            return in_slices(
                lambda part: (
                    (2 - 2 * (_unit(part) @ bank.T).topk(k, 1).values[:, -1]).clamp_min(0).sqrt()
                ),
                z,
                len(bank),
            )

        return distance


def _unit(x: Tensor) -> Tensor:
    return torch.nn.functional.normalize(x, dim=1, eps=1e-12)
