"""OOD scores fitted on features of training samples, per member and pooled: what they share.

Every score here is **higher for samples that look more OOD**. Features are what the members' heads
are given (:func:`sigmanens.ensemble.features.member_features`): (M, N, D), or (N, D) for one
network. All is computed in float64 on the device of the features.

Members have features of their own, on scales of their own. :meth:`FeatureScore.member_scores` gives
each member's score as published; :meth:`FeatureScore.score` pools them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from sigmanens.errors import InputError, NonFiniteError
from sigmanens.evaluation.metrics import as_tensor

Scorer = Callable[[Tensor, bool], Tensor]
"""From features (B, D) to scores (B,); the flag says that they are of the training samples."""

Head = tuple[Tensor, Tensor]
"""One member's weight (C, D) and bias (C,)."""

Score = TypeVar("Score", bound="FeatureScore")

_STANDARD = 2000
_SLICE_ELEMENTS = 2**22


class FeatureScore(ABC):
    """A score of features, higher = more OOD; fit it on training samples first."""

    def __init__(self) -> None:
        self._scorers: list[Scorer] = []
        self._width = 0
        self._mean = self._deviation = torch.empty(0)

    def fit(
        self: Score,
        features: Any,
        labels: Any = None,
        head: tuple[Any, Any] | None = None,
    ) -> Score:
        """Fit on in-distribution samples, each member on its own.

        Args:
            features: (M, N, D), or (N, D) for one network.
            labels: (N,), integers; needed by the Mahalanobis scores.
            head: weight (M, C, D) and bias (M, C) of the layer that turns features into logits
                (:func:`sigmanens.ensemble.features.head_weights`), without M for one network;
                needed by ViM.

        Returns:
            itself.

        Raises:
            InputError: wrong type or shape, too few samples, missing labels or head, or features
                on which the score is not defined. NonFiniteError: NaN or infinity.
        """
        x = _as_features(features)
        members = len(x)
        y = None if labels is None else _as_labels(labels, x)
        heads = [None] * members if head is None else _as_heads(head, x)
        self._width = x.shape[2]
        self._scorers = [self._fit(x[m], y, heads[m]) for m in range(members)]
        step = -(-x.shape[1] // _STANDARD)
        own = torch.stack([f(z[::step], True) for f, z in zip(self._scorers, x, strict=True)])
        self._mean, self._deviation = own.mean(1, keepdim=True), own.std(1, keepdim=True)
        if not bool((self._deviation > 0).all()):
            raise InputError(
                f"{type(self).__name__} scores all training samples of a member alike; expected "
                "features that differ"
            )
        return self

    def member_scores(self, features: Any) -> Tensor:
        """Each member's own score, as published: (M, B), float64.

        Args:
            features: (M, B, D), or (B, D) for one network.

        Raises:
            InputError: before :meth:`fit`, or for another M or D than it had.
            NonFiniteError: NaN or infinity.
        """
        if not self._scorers:
            raise InputError(f"{type(self).__name__} has not been fitted; call fit first")
        x = _as_features(features)
        expected = (len(self._scorers), self._width)
        if (len(x), x.shape[2]) != expected:
            raise InputError(
                f"features have {len(x)} members of width {x.shape[2]}; the score was fitted on "
                f"{expected[0]} of width {expected[1]}"
            )
        return torch.stack([f(z, False) for f, z in zip(self._scorers, x, strict=True)])

    def score(self, features: Any) -> Tensor:
        """Mean over members of the standardised scores: (B,), float64.

        (1/M) Σ_m (s_m − mean_m)/std_m, with mean and standard deviation of the scores of the
        training samples (2,000 of them at most, evenly spaced; k-NN leaves each sample itself out).
        For one network, its own score up to a factor and an offset.

        Args:
            features: (M, B, D), or (B, D) for one network.

        Raises:
            InputError, NonFiniteError: as :meth:`member_scores`.
        """
        return self.pool(self.member_scores(features))

    def pool(self, member_scores: Tensor) -> Tensor:
        """What :meth:`score` makes of members' scores (M, B) that are known: (B,)."""
        return ((member_scores - self._mean) / self._deviation).mean(0)

    @abstractmethod
    def _fit(self, x: Tensor, y: Tensor | None, head: Head | None) -> Scorer:
        """Fit one member on its features (N, D)."""


def in_slices(function: Callable[[Tensor], Tensor], z: Tensor, per_sample: int) -> Tensor:
    """The function of samples (B, D), in slices of bounded memory."""
    size = max(1, _SLICE_ELEMENTS // per_sample)
    return torch.cat([function(part) for part in z.split(size)])


def _as_features(values: Any) -> Tensor:
    x = as_tensor(values, "features")
    if not x.is_floating_point() or x.dim() not in (2, 3) or x.numel() == 0:
        raise InputError(
            f"features are {x.dtype} of shape {tuple(x.shape)}; expected floating point (M, N, D), "
            "or (N, D) for one network, not empty"
        )
    x = x.double()
    if not bool(torch.isfinite(x).all()):
        raise NonFiniteError(f"features hold {int((~torch.isfinite(x)).sum())} NaN or infinities")
    return x if x.dim() == 3 else x[None]


def _as_labels(values: Any, x: Tensor) -> Tensor:
    y = as_tensor(values, "labels")
    integer = not (y.is_floating_point() or y.is_complex() or y.dtype == torch.bool)
    if not integer or tuple(y.shape) != (x.shape[1],):
        raise InputError(
            f"labels are {y.dtype} of shape {tuple(y.shape)}; expected integers ({x.shape[1]},)"
        )
    return y.to(x.device, torch.int64)


def _as_heads(head: tuple[Any, Any], x: Tensor) -> list[tuple[Tensor, Tensor]]:
    weight, bias = (as_tensor(part, "head").to(x.device, torch.float64) for part in head)
    if weight.dim() == 2:
        weight, bias = weight[None], bias[None]
    members, _, width = x.shape
    classes = weight.shape[1] if weight.dim() == 3 else 0
    if tuple(weight.shape) != (members, classes, width) or tuple(bias.shape) != (members, classes):
        raise InputError(
            f"head is a weight of shape {tuple(weight.shape)} and a bias of {tuple(bias.shape)}; "
            f"expected ({members}, C, {width}) and ({members}, C)"
        )
    return list(zip(weight, bias, strict=True))
