"""Statistics of many bootstrap resamples at once: what each metric needs is computed only once.

Bins of equal mass are those of the full sample here, and stay fixed over the resamples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sigmanens.evaluation import metrics, risk

Statistic = Callable[..., Any]

_SLICE_ELEMENTS = 2**22

_SAMPLE_VALUES: dict[Statistic, Callable[..., Tensor]] = {
    metrics.accuracy: metrics.sample_accuracy,
    metrics.nll: metrics.sample_nll,
    metrics.brier: metrics.sample_brier,
    metrics.sharpness: metrics.sample_confidence,
    torch.mean: lambda values: metrics.as_floats(values, "values", "B").double().cpu(),
}
"""Statistics that are means over samples, with their values per sample."""

_SCHEMES: dict[Statistic, metrics.Scheme] = {
    metrics.ece: "equal_width",
    metrics.classwise_ece: "equal_width",
    metrics.adaptive_ece: "equal_mass",
    metrics.ece_debiased: "equal_mass",
}
"""Statistics that bin, and how."""


def draws(n: int, resamples: int, generator: torch.Generator | None) -> Iterator[Tensor]:
    """Indices (r, n) of samples drawn with replacement, ``resamples`` rows in bounded slices."""
    generator = generator or torch.Generator().manual_seed(0)
    size = max(1, _SLICE_ELEMENTS // n)
    for start in range(0, resamples, size):
        yield torch.randint(n, (min(size, resamples - start), n), generator=generator)


def binning(statistic: Statistic) -> tuple[Statistic, int, metrics.Scheme] | None:
    """The metric, its bins and their scheme, if the statistic is one that bins.

    A ``functools.partial`` that sets ``bins`` only is seen through.
    """
    bins = metrics.DEFAULT_BINS
    if isinstance(statistic, partial) and not statistic.args and {*statistic.keywords} == {"bins"}:
        bins, statistic = statistic.keywords["bins"], statistic.func
    scheme = _SCHEMES.get(statistic)
    return (statistic, bins, scheme) if scheme else None


def resampler(statistic: Statistic, samples: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """Function of sample indices (R, n) that returns the statistic of each row: (R,), float64."""
    if statistic in _SAMPLE_VALUES:
        values = _SAMPLE_VALUES[statistic](*samples)
        return lambda rows: values[rows].mean(1)
    if statistic in (risk.aurc, risk.eaurc):
        return _ranked(*samples, excess=statistic is risk.eaurc)
    binned = binning(statistic)
    if binned is None:
        return partial(_one_by_one, statistic, samples)
    metric, bins, scheme = binned
    if metric is metrics.classwise_ece:
        log_probs, labels = samples
        return _by_class(log_probs, labels, bins)
    confidence, correct = metrics.top_label(*samples)
    index = metrics.bin_index(confidence, bins, scheme)
    if metric is metrics.ece_debiased:
        return lambda rows: _debiased(confidence[rows], correct[rows], index[rows], bins)
    residual = confidence - correct
    return lambda rows: _sums(residual[rows], index[rows], bins).abs().sum(1) / rows.shape[1]


def _one_by_one(statistic: Statistic, samples: list[Tensor], rows: Tensor) -> Tensor:
    results = [float(statistic(*(s[row.to(s.device)] for s in samples))) for row in rows]
    return torch.tensor(results, dtype=torch.float64)


def _sums(values: Tensor, index: Tensor, bins: int) -> Tensor:
    """Sum of the values (R, n) in each bin, row by row: (R, bins)."""
    size = len(index)
    flat = (index + torch.arange(size)[:, None] * bins).flatten()
    return torch.bincount(flat, weights=values.flatten(), minlength=size * bins).view(size, bins)


def _debiased(confidence: Tensor, correct: Tensor, index: Tensor, bins: int) -> Tensor:
    count = _sums(torch.ones_like(correct), index, bins)
    gap = _sums(confidence - correct, index, bins)
    acc = _sums(correct, index, bins) / count
    terms = gap.square() / count - count * acc * (1 - acc) / (count - 1)
    squared = terms.where(count > 1, 0.0).sum(1) / index.shape[1]
    return squared.clamp_min(0).sqrt()


def _by_class(log_probs: Tensor, labels: Tensor, bins: int) -> Callable[[Tensor], Tensor]:
    log_p = metrics.as_log_probs(log_probs)
    target = metrics.as_labels(labels, log_p)[:, None]
    probs = log_p.exp()
    index = metrics.bin_index(probs, bins).cpu()
    residual = probs.scatter_add(1, target, -torch.ones_like(target, dtype=torch.float64)).cpu()
    n, classes = residual.shape

    def statistic(rows: Tensor) -> Tensor:
        times = _sums(torch.ones(rows.shape, dtype=torch.float64), rows, n).T.contiguous()
        total = torch.zeros(len(rows), dtype=torch.float64)
        for c in range(classes):
            sums = torch.zeros(bins, len(rows), dtype=torch.float64)
            total += sums.index_add_(0, index[:, c], times * residual[:, c, None]).abs().sum(0)
        return total / (classes * n)

    return statistic


def _ranked(log_probs: Tensor, labels: Tensor, *, excess: bool) -> Callable[[Tensor], Tensor]:
    confidence, correct = metrics.top_label(log_probs, labels)
    rank, sizes = risk.confidence_groups(confidence)
    error = 1 - correct
    n, ranks = len(rank), len(sizes)
    harmonic = risk.harmonic_numbers(n)

    def statistic(rows: Tensor) -> Tensor:
        # In a rank of w samples with e errors, after K with E, the risk at its j-th is
        # (E + j e/w) / (K + j): summed over j, e + (E − K e/w) (H_{K+w} − H_K).
        of_row = rank[rows]
        count = _sums(torch.ones(rows.shape, dtype=torch.float64), of_row, ranks)
        errors = _sums(error[rows], of_row, ranks)
        last, all_errors = count.cumsum(1), errors.cumsum(1)
        first, rate = last - count, errors / count.clamp_min(1)
        gain = harmonic[last.long()] - harmonic[first.long()]
        area = (errors + (all_errors - errors - first * rate) * gain).sum(1) / n
        return area - risk.best_aurc(all_errors[:, -1], n) if excess else area

    return statistic
