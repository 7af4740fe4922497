"""OOD score from what the features hold outside their main subspace."""

from __future__ import annotations

import torch
from torch import Tensor

from sigmanens.errors import InputError
from sigmanens.evaluation.feature_score import FeatureScore, Head, Scorer


class ViM(FeatureScore):
    """Virtual-logit matching: features outside the main subspace against the logits (2203.10807).

    With z centred at −W⁺b and the subspace of the ``dim`` largest principal directions of the
    training features, the virtual logit is α ‖z^⊥‖, α = Σ max_c logit_c / Σ ‖z^⊥‖ over training
    samples; the score is α ‖z^⊥‖ − logsumexp_c (W z + b)_c.

    Args:
        dim: dimension of the subspace; None is the paper's: 1000 for D ≥ 2048, 512 for D ≥ 768,
            else D/2.
    """

    def __init__(self, dim: int | None = None) -> None:
        super().__init__()
        if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int) or dim < 1):
            raise InputError(f"dim is {dim!r}; expected an integer ≥ 1, or None")
        self.dim = dim

    def _fit(self, x: Tensor, y: Tensor | None, head: Head | None) -> Scorer:
        if head is None:
            raise InputError("ViM needs the head: the weight and bias that make the logits")
        samples, width = x.shape
        dim = self.dim or (1000 if width >= 2048 else 512 if width >= 768 else max(1, width // 2))
        if not dim < min(width, samples):
            raise InputError(
                f"dim is {dim} for {samples} training samples of width {width}; expected less than "
                "either, so that something is left outside the subspace"
            )
        weight, bias = head
        centre = -torch.linalg.pinv(weight) @ bias
        directions = torch.linalg.eigh((x - centre).T @ (x - centre) / samples).eigenvectors
        outside = directions[:, : width - dim]  # eigenvalues ascend

        def residual(z: Tensor) -> Tensor:
            return ((z - centre) @ outside).norm(dim=1)

        largest, left = (x @ weight.T + bias).amax(1).mean(), residual(x).mean()
        if not (left > 1e-12 * (x - centre).norm(dim=1).mean() and largest > 0):
            raise InputError(
                f"ViM's scale is {largest:.3g} / {left:.3g}, the mean largest logit over the mean "
                "residual; expected both positive. Logits that are mostly negative, or features "
                f"that lie in {dim} dimensions, have no virtual logit"
            )
        scale = largest / left
        return lambda z, own: scale * residual(z) - torch.logsumexp(z @ weight.T + bias, 1)
