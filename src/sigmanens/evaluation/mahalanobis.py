"""OOD scores from Gaussians fitted to the features of the classes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from sigmanens.errors import InputError
from sigmanens.evaluation.feature_score import FeatureScore, Head, Scorer, in_slices


class Mahalanobis(FeatureScore):
    """Squared Mahalanobis distance to the nearest class mean (arXiv 1807.03888).

    min_c (z − μ_c)ᵀ Σ⁻¹ (z − μ_c), Σ the covariance within classes, one for all, shrunk towards a
    multiple of the identity: (1−ρ) Σ + ρ (tr Σ / D) I. Without shrinkage it is singular as soon as
    a feature is constant, and near so for most trained networks.

    Args:
        shrinkage: ρ in [0, 1], or ``"oas"``: from the samples (Chen et al. 2010, oracle
            approximating shrinkage); near 0 for many samples.
    """

    def __init__(self, shrinkage: float | Literal["oas"] = "oas") -> None:
        super().__init__()
        if shrinkage != "oas" and not (isinstance(shrinkage, (int, float)) and 0 <= shrinkage <= 1):
            raise InputError(f"shrinkage is {shrinkage!r}; expected 'oas' or a number in [0, 1]")
        self.shrinkage = shrinkage

    def _fit(self, x: Tensor, y: Tensor | None, head: Head | None) -> Scorer:
        nearest = self._within_classes(x, y)
        return lambda z, own: nearest(z)

    def _within_classes(self, x: Tensor, y: Tensor | None) -> Callable[[Tensor], Tensor]:
        if y is None:
            raise InputError(f"{type(self).__name__} needs the labels of the training samples")
        classes, index, counts = y.unique(return_inverse=True, return_counts=True)
        if int(counts.min()) < 2:
            few = classes[counts < 2].tolist()
            raise InputError(
                f"class {few[0]} has 1 training sample (and {len(few) - 1} other classes too); "
                "expected at least 2 of each class that occurs"
            )
        means = x.new_zeros(len(classes), x.shape[1]).index_add_(0, index, x) / counts[:, None]
        whiten = _whitening(x - means[index], self.shrinkage)
        centre = x.mean(0)
        targets = (means - centre) @ whiten

        def nearest(z: Tensor) -> Tensor:
            return in_slices(
                lambda part: torch.cdist((part - centre) @ whiten, targets).square().amin(1),
                z,
                len(targets) + z.shape[1],
            )

        return nearest


class RelativeMahalanobis(Mahalanobis):
    """Mahalanobis score less the distance to one Gaussian of all classes (arXiv 2106.09022).

    min_c (z − μ_c)ᵀ Σ⁻¹ (z − μ_c) − (z − μ_0)ᵀ Σ_0⁻¹ (z − μ_0): directions in which all classes
    vary alike no longer count. Meant for OOD samples close to the training classes.

    Args:
        shrinkage: as for :class:`Mahalanobis`, of both covariances.
    """

    def _fit(self, x: Tensor, y: Tensor | None, head: Head | None) -> Scorer:
        nearest = self._within_classes(x, y)
        centre = x.mean(0)
        whiten = _whitening(x - centre, self.shrinkage)
        return lambda z, own: nearest(z) - ((z - centre) @ whiten).square().sum(1)


def _whitening(centred: Tensor, shrinkage: float | str) -> Tensor:
    """W (D, D) with W Wᵀ the inverse of the shrunk covariance of centred samples (N, D)."""
    samples, width = centred.shape
    covariance = centred.T @ centred / samples
    scale = covariance.trace() / width
    if not scale > 0:
        raise InputError("the features of every class are constant; expected features that differ")
    rho = _oas(covariance, samples) if isinstance(shrinkage, str) else shrinkage
    values, vectors = torch.linalg.eigh(covariance)
    values = (1 - rho) * values.clamp_min(0) + rho * scale
    if not values.min() > values.max() * width * torch.finfo(values.dtype).eps:
        raise InputError(
            f"the covariance of {samples} training samples of width {width} is singular at "
            f"shrinkage={rho}: features that are constant or depend on each other, or too few "
            "samples. Use shrinkage='oas' or a number above 0"
        )
    return vectors / values.sqrt()


def _oas(covariance: Tensor, samples: int) -> float:
    width = len(covariance)
    squares = covariance.square().sum().item()
    trace = covariance.trace().item() ** 2
    spread = (samples + 1) * (squares - trace / width)
    return 1.0 if spread <= 0 else min(1.0, (squares + trace) / spread)
