"""The OOD part of a row: each score of logits and, given features, of features, on each set."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sigmanens.ensemble.features import head_weights, member_features
from sigmanens.errors import HeadNotFoundError, InputError, SigmaNensWarning
from sigmanens.evaluation import ood
from sigmanens.evaluation.feature_score import FeatureScore
from sigmanens.evaluation.mahalanobis import Mahalanobis, RelativeMahalanobis
from sigmanens.evaluation.neighbours import KNN
from sigmanens.evaluation.vim import ViM
from sigmanens.lab.batched import by_batches
from sigmanens.lab.data import Pictures
from sigmanens.lab.digits import Labelled

MemberFeatures = Callable[[Pictures], Tensor]
"""From pictures (N, C, H, W) to what the members' heads are given (M, N, D)."""

_TRIED = 64  # pictures on which the head is tried

Found = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Scores by name: of the ensemble (N,), and of its members (M, N) where they have their own."""


def feature_reader(
    network: nn.Module, batch: int = 256, head_name: str | None = None
) -> MemberFeatures:
    """Read features batch by batch, in evaluation mode, without gradients; texts by length.

    ``network`` and ``head_name`` are those of :func:`sigmanens.ensemble.features.member_features`,
    ``batch`` the pictures in a pass. What comes back gives float32 on the CPU.
    """
    read = partial(member_features, network, head_name=head_name)
    return lambda images: by_batches(read, network, images, batch)


def feature_options(
    network: nn.Module, train: Labelled, batch: int = 256, head_name: str | None = None
) -> dict[str, Any]:
    """What :func:`sigmanens.lab.rows.evaluate` needs for scores of features, as keyword arguments.

    Empty, with a SigmaNensWarning that says why, for a network whose members have no features of
    their own (MIMO has one head for all) or whose head is of a library's own kind. ``train`` holds
    training pictures to fit the scores on, of which a few thousand will do; the rest is as for
    :func:`feature_reader`.
    """
    read = feature_reader(network, batch, head_name)
    try:
        read(train.images[:2])
    except (HeadNotFoundError, InputError) as error:
        warnings.warn(f"no OOD scores of features: {error}", SigmaNensWarning, stacklevel=2)
        return {}
    options: dict[str, Any] = {"features": read, "train": train, "head": None}
    try:
        options["head"] = head_weights(network, head_name=head_name)
    except InputError as error:
        warnings.warn(f"no ViM: {error}", SigmaNensWarning, stacklevel=2)
    return options


_OF_LOGITS = ("energy", "max_logit")
_NORMALISED = 1e-4
"""The logsumexp of log-probabilities is 0 up to rounding, that of logits is not."""


class OodScores:
    """Scores of pictures by name, higher = more OOD, and what they are worth.

    Args:
        logits: maps pictures to member logits (M, N, K).
        features: maps pictures to member features (M, N, D), or None for scores of logits only.
        train: training pictures to fit the feature scores on.
        head: weight (M, K, D) and bias (M, K), for ViM.

    Raises:
        InputError: if features come without train, or a score cannot be fitted. That ViM cannot is
            said in the row instead, for it asks more of a network: logits that are positive, and
            made by the head from the features alone. So it is of energy and max logit where a
            method answers in log-probabilities.
    """

    def __init__(
        self,
        logits: Callable[[Pictures], Tensor],
        features: MemberFeatures | None = None,
        train: Labelled | None = None,
        head: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        self.logits = logits
        self.features = features
        self.fitted: dict[str, FeatureScore] = {}
        self.unfit: dict[str, str] = {}
        if features is None:
            return
        if train is None:
            raise InputError("features are given without train, the pictures to fit the scores on")
        found = features(train.images)
        self.fitted = {
            "mahalanobis": Mahalanobis().fit(found, train.labels),
            "relative_mahalanobis": RelativeMahalanobis().fit(found, train.labels),
            "knn": KNN().fit(found),
        }
        if head is not None:
            try:
                _check_head(train.images[:_TRIED], logits, features, head)
                self.fitted["vim"] = ViM().fit(found, head=head)
            except InputError as error:
                self.unfit["vim"] = str(error)

    def __call__(self, images: Pictures, logits: Tensor | None = None) -> Found:
        """Scores of pictures; ``logits`` (M, N, K) are theirs, if known."""
        answers = self.logits(images) if logits is None else logits
        together = ood.scores(answers)
        if float(answers.logsumexp(2).abs().max()) < _NORMALISED:
            for name in _OF_LOGITS:
                del together[name]
                self.unfit[name] = "the method answers in log-probabilities, which have no energy"
        if self.features is None:
            return together, {}
        found = self.features(images)
        members = {name: score.member_scores(found) for name, score in self.fitted.items()}
        pooled = {name: score.pool(members[name]) for name, score in self.fitted.items()}
        return together | pooled, members

    def compare(self, inside: Found, outside: Found) -> tuple[dict[str, float], dict[str, Any]]:
        """AUROC by score, and the rest by score; OOD is positive, as in ``evaluation.ood``."""
        auroc: dict[str, float] = {}
        detail: dict[str, dict[str, Any]] = {}
        for name, scores in inside[0].items():
            if name not in outside[0]:
                continue
            pair = scores, outside[0][name]
            auroc[name] = ood.auroc(*pair)
            detail[name] = {
                "n": len(pair[1]),
                "aupr_in": ood.aupr_in(*pair),
                "aupr_out": ood.aupr_out(*pair),
                "fpr95": ood.fpr_at_tpr(*pair),
            }
            if name in inside[1]:
                members = zip(inside[1][name], outside[1][name], strict=True)
                detail[name]["member_auroc"] = [ood.auroc(*of_member) for of_member in members]
        return auroc, detail | {name: {"reason": why} for name, why in self.unfit.items()}


def _check_head(
    images: Tensor,
    logits: Callable[[Pictures], Tensor],
    features: MemberFeatures,
    head: tuple[Tensor, Tensor],
) -> None:
    """Refuse a head that does not turn features into logits, up to one factor (a temperature)."""
    weight, bias = (part.detach().double().cpu() for part in head)
    made = torch.einsum("mnd,mkd->mnk", features(images).double().cpu(), weight) + bias[:, None]
    given = logits(images).double().cpu()
    factor = (made * given).sum() / made.square().sum()
    gap = (factor * made - given).abs().max() / given.abs().max()
    if not gap <= 0.02:
        raise InputError(
            f"the head's weights make logits from the features that differ from the network's by "
            f"{gap:.2g} of the largest: the head does more than a matrix product"
        )
