"""Scores of the averaged distribution over the batches of an epoch, in constant memory."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sigmanens.ensemble.prediction import Prediction
from sigmanens.evaluation import metrics
from sigmanens.evaluation.diversity import jensen_gap

__all__ = ["Scores"]


class Scores:
    r"""NLL, accuracy, ECE and Jensen gap of an ensemble, summed over batches.

    With :math:`\bar p` the average of the members' distributions, temperature applied,

    .. math:: \mathrm{nll} = -\tfrac1n {\textstyle\sum_i} \log \bar p(y_i), \qquad
              \mathrm{ece} = \tfrac1n {\textstyle\sum_b}
              \bigl|{\textstyle\sum_{i \in b}} (1[\hat y_i = y_i] - \bar p(\hat y_i))\bigr|

    over bins b of equal width; ``jensen_gap`` is the members' mean NLL minus that of their average,
    both without temperature. Each is a function of sums over samples, so that batches of any size,
    and several processes, give what :mod:`sigmanens.evaluation` gives for all samples at once.

    In a multilabel task every label of a sample counts as a sample of two classes, absent and
    present: the NLL is the binary cross-entropy, and accuracy the fraction of right labels.

    Args:
        class_dim: dimension of the classes in one member's logits.
        ignore_index: label of samples to leave out.
        bins: of the ECE.
    """

    def __init__(
        self, class_dim: int = 1, ignore_index: int = -100, bins: int = metrics.DEFAULT_BINS
    ) -> None:
        self.class_dim = class_dim
        self.ignore_index = ignore_index
        self.bins = bins
        self.sums = torch.zeros(4 + 2 * bins, dtype=torch.float64)

    def update(
        self,
        logits: Tensor,
        labels: Tensor,
        temperature: float = 1.0,
        task: str | None = "multiclass",
    ) -> None:
        """Add a batch.

        Args:
            logits: member logits (M, B, C, …), or with the classes in ``class_dim``.
            labels: class indices (B, …), integers; in a multilabel task 0 or 1 for each label, laid
                out as one member's logits.
            temperature: T applied to the averaged distribution.
            task: "multiclass" (or None) or "multilabel".

        Raises:
            InputError: for labels that are no class indices, shapes that do not fit, or a
                regression.
            NonFiniteError: for NaN or infinite logits.
        """
        found = Prediction.from_logits(logits.detach(), temperature, self.class_dim, task)
        if task == "multilabel" and labels.dim() == logits.dim() - 1:
            labels = labels.movedim(self.class_dim, 1)
        log_probs, target, members = found.rows(labels, self.ignore_index)
        if not len(target):
            return
        confidence, correct = metrics.top_label(log_probs, target)
        n = len(target)
        totals = torch.tensor(
            [
                n,
                float(metrics.sample_nll(log_probs, target).sum()),
                float(correct.sum()),
                jensen_gap(members, target) * n,
            ],
            dtype=torch.float64,
        )
        index = metrics.bin_index(confidence, self.bins)
        in_bins = [torch.bincount(index, w, self.bins) for w in (confidence, correct)]
        self.sums += torch.cat([totals, *in_bins])

    def compute(self, gather: Callable[[Tensor], Tensor] = lambda t: t) -> dict[str, float]:
        """The scores of all batches so far: ``nll``, ``accuracy``, ``ece``, ``jensen_gap``.

        Args:
            gather: adds up the sums of all processes.

        Returns:
            NLL and Jensen gap in nats, accuracy and ECE as fractions; empty without a sample.
        """
        sums = gather(self.sums).cpu()
        n, nll, correct, gap = sums[:4].tolist()
        if not n:
            return {}
        confidence, right = sums[4:].view(2, self.bins)
        ece = float((right - confidence).abs().sum()) / n
        return {"nll": nll / n, "accuracy": correct / n, "ece": ece, "jensen_gap": gap / n}
