"""Bootstrap intervals of metrics, and of the difference of two runs on the same samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from sigmanens.errors import InputError, NonFiniteError
from sigmanens.evaluation import metrics

Statistic = Callable[..., Any]
Method = Literal["auto", "percentile", "basic"]

_SLICE_ELEMENTS = 2**22
_CANDIDATES = 101
_INVERTED = "inverted parametric bootstrap"

_SAMPLE_VALUES: dict[Statistic, Callable[..., Tensor]] = {
    metrics.accuracy: metrics.sample_accuracy,
    metrics.nll: metrics.sample_nll,
    metrics.brier: metrics.sample_brier,
    torch.mean: lambda values: metrics.as_floats(values, "values", "B").double().cpu(),
}
"""Statistics that are means over samples, with their values per sample."""


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval.

    Attributes:
        value: the statistic on all samples.
        low: lower end.
        high: upper end.
        n: number of samples.
        level: nominal coverage, e.g. 0.95.
        method: how the ends were found.
    """

    value: float
    low: float
    high: float
    n: int
    level: float
    method: str

    def to_dict(self) -> dict[str, Any]:
        """A dict that ``json`` can write."""
        return asdict(self)


def bootstrap(
    statistic: Statistic,
    *arrays: Any,
    resamples: int = 1000,
    level: float = 0.95,
    generator: torch.Generator | None = None,
    method: Method = "auto",
) -> Interval:
    """Bootstrap interval of ``statistic(*arrays)`` over samples drawn with replacement.

    ``"percentile"`` takes the quantiles q of the resampled statistic; ``"basic"`` reflects them
    about the estimate θ, [2θ − q_high, 2θ − q_low], which removes a bias that percentiles would
    double: use it for statistics biased at this n, such as ``classwise_ece``. ``"auto"`` is
    percentile, except that ``ece`` and ``adaptive_ece`` go to :func:`ece_interval`, also as
    ``functools.partial(ece, bins=…)``. ``accuracy``, ``nll``, ``brier`` and ``torch.mean`` (of
    values you computed per sample) are resampled all at once, any other function one by one.

    Args:
        statistic: function of the arrays that returns a number.
        arrays: tensors or numpy arrays with the samples in the first dimension; the statistic gets
            tensors. (For members (M, B, C) pass ``x.movedim(1, 0)`` and move the dimension back in
            the statistic.)
        resamples: number of resamples.
        level: nominal coverage, in (0, 1).
        generator: CPU source of the draws; None takes a fresh one of seed 0, so results repeat.
        method: ``"auto"``, ``"percentile"`` or ``"basic"``.

    Raises:
        InputError: arrays of different lengths, fewer than two samples, a level outside (0, 1), or
            too few resamples for the level.
        NonFiniteError: if the statistic is NaN on the samples or on a resample.
    """
    samples = _check(arrays, resamples, level, method)
    binning = _ece_binning(statistic)
    if method == "auto" and binning:
        log_probs, labels = samples
        return ece_interval(
            log_probs,
            labels,
            binning[0],
            scheme=binning[1],
            resamples=resamples,
            level=level,
            generator=generator,
        )
    resampled = _resampler(statistic, samples)
    draws = [resampled(index) for index in _draws(len(samples[0]), resamples, generator)]
    value = float(statistic(*samples))
    return _interval(value, torch.cat(draws), len(samples[0]), level, method)


def paired_difference(
    statistic: Statistic,
    a: Any,
    b: Any,
    *shared: Any,
    resamples: int = 1000,
    level: float = 0.95,
    generator: torch.Generator | None = None,
    method: Method = "auto",
) -> Interval:
    """Bootstrap interval of ``statistic(a, *shared) − statistic(b, *shared)``, samples paired.

    Both are evaluated on the same resamples, so what makes a sample easy or hard for both cancels.
    The difference is settled at this level if the interval leaves out 0.

    ``"auto"`` is the percentile method, except for ``ece`` and ``adaptive_ece``: their biases
    depend on the run and do not cancel, and resampling hides that. There the interval is
    [low_a − high_b, high_a − low_b] of two intervals of :func:`ece_interval` at level
    (1+level)/2, which is valid but wide, for it makes no use of the pairing. The basic method is
    narrower, but in simulations with one calibrated run covered the truth only 0.5 to 0.8 of the
    time at level 0.95. To settle which run is better, prefer ``nll`` or ``brier``: no such bias.

    Args:
        statistic: as in :func:`bootstrap`.
        a: log-probabilities of the first run: (B, C), nats.
        b: log-probabilities of the second run on the same samples: (B, C), nats.
        shared: what both use, e.g. labels (B,).
        resamples: number of resamples.
        level: nominal coverage, in (0, 1).
        generator: CPU source of the draws; None takes a fresh one of seed 0.
        method: ``"auto"``, ``"percentile"`` or ``"basic"``.

    Raises:
        InputError, NonFiniteError: as in :func:`bootstrap`.
    """
    samples = _check((a, b, *shared), resamples, level, method)
    first, second, *rest = samples
    value = float(statistic(first, *rest)) - float(statistic(second, *rest))
    n = len(first)
    generator = generator or torch.Generator().manual_seed(0)
    binning = _ece_binning(statistic)
    if method == "auto" and binning:
        tables = [metrics.reliability(x, rest[0], *binning) for x in (first, second)]
        (low_a, high_a), (low_b, high_b) = (
            _inverted_ends(table, resamples, (1 + level) / 2, generator) for table in tables
        )
        return Interval(
            value, low_a - high_b, high_a - low_b, n, level, f"difference of {_INVERTED}"
        )
    resampled_a = _resampler(statistic, [first, *rest])
    resampled_b = _resampler(statistic, [second, *rest])
    draws = [resampled_a(i) - resampled_b(i) for i in _draws(n, resamples, generator)]
    return _interval(value, torch.cat(draws), n, level, method)


def ece_interval(
    log_probs: Any,
    labels: Any,
    bins: int = metrics.DEFAULT_BINS,
    *,
    scheme: metrics.Scheme = "equal_width",
    resamples: int = 1000,
    level: float = 0.95,
    generator: torch.Generator | None = None,
) -> Interval:
    """Interval for the calibration error itself, of which the ECE is an estimate biased upwards.

    No resampling of an absolute value is right near 0, so a test is inverted instead. Candidate
    models have the bins' gaps scaled by κ ≥ 0, acc_b(κ) = conf_b − κ (conf_b − acc_b), and a true
    calibration error Σ_b (n_b/n) |conf_b − acc_b(κ)|. For each κ the correct answers in each bin
    are drawn anew, n_b of them with chance acc_b(κ); the interval holds the true errors of all
    candidates whose drawn ECEs have the observed one between their (1−level)/2 and (1+level)/2
    quantiles. The work does not grow with n.

    κ = 0 is a calibrated model and the draws are consistency resampling (Bröcker and Smith 2007;
    arXiv 1902.06977): for a calibrated model the interval covers 0 with a chance of at least
    (1+level)/2. The ECE itself always lies inside, often near the upper end. In simulations at
    n = 100 to 2,000, calibrated to strongly over-confident, intervals of level 0.95 covered the
    truth 0.87 to 0.98 of the time.

    Args:
        log_probs: (B, C), nats.
        labels: (B,), integers.
        bins: number of bins.
        scheme: ``"equal_width"`` (:func:`~sigmanens.evaluation.metrics.ece`) or ``"equal_mass"``
            (:func:`~sigmanens.evaluation.metrics.adaptive_ece`).
        resamples: number of resamples for each of 101 values of κ.
        level: nominal coverage, in (0, 1).
        generator: CPU source of the draws; None takes a fresh one of seed 0.

    Raises:
        InputError: as in :func:`bootstrap`.
    """
    table = metrics.reliability(log_probs, labels, bins, scheme)
    _check((log_probs, labels), resamples, level, "auto")
    generator = generator or torch.Generator().manual_seed(0)
    low, high = _inverted_ends(table, resamples, level, generator)
    return Interval(table.ece, low, high, table.n, level, _INVERTED)


def _inverted_ends(
    table: metrics.Reliability, resamples: int, level: float, generator: torch.Generator
) -> tuple[float, float]:
    rows = zip(table.count, table.confidence, table.accuracy, strict=True)
    filled = torch.tensor([row for row in rows if row[0] > 0], dtype=torch.float64)
    count, confidence, correct = filled.T
    value = table.ece

    # Up to four standard errors beyond the ECE: that of a mean of n outcomes is at most ½/√n.
    reach = 1 + 2 / (table.n**0.5 * value) if value > 0 else 1.0
    above, below = [value], [value]
    for kappa in torch.linspace(0, reach, _CANDIDATES).tolist():
        chance = (confidence - kappa * (confidence - correct)).clamp(0, 1)
        true_error = (((confidence - chance).abs() * count).sum() / table.n).item()
        drawn = torch.binomial(
            count.expand(resamples, -1).contiguous(),
            chance.expand(resamples, -1).contiguous(),
            generator=generator,
        )
        errors = (confidence * count - drawn).abs().sum(1) / table.n
        if value <= torch.quantile(errors, (1 + level) / 2, interpolation="higher"):
            above.append(true_error)
        if value >= torch.quantile(errors, (1 - level) / 2, interpolation="lower"):
            below.append(true_error)
    return min(above), max(below)


def _resampler(statistic: Statistic, samples: list[Tensor]) -> Callable[[Tensor], Tensor]:
    """Function of sample indices (R, n) that returns the statistic of each row: (R,), float64."""
    if statistic in _SAMPLE_VALUES:
        values = _SAMPLE_VALUES[statistic](*samples)
        return lambda rows: values[rows].mean(1)
    binning = _ece_binning(statistic)
    if binning:
        bins, scheme = binning
        confidence, correct = metrics.top_label(*samples)
        residual = confidence - correct
        index = metrics.bin_index(confidence, bins, scheme)
        return lambda rows: _binned_gap(residual[rows], index[rows], bins)

    def one_by_one(rows: Tensor) -> Tensor:
        results = [float(statistic(*(s[row.to(s.device)] for s in samples))) for row in rows]
        return torch.tensor(results, dtype=torch.float64)

    return one_by_one


def _ece_binning(statistic: Statistic) -> tuple[int, metrics.Scheme] | None:
    """Bins and scheme if the statistic is an ECE, or a ``functools.partial`` that sets its bins."""
    keywords: dict[str, Any] = {}
    function = statistic
    if isinstance(statistic, partial) and not statistic.args:
        function, keywords = statistic.func, statistic.keywords
    bins = keywords.get("bins", metrics.DEFAULT_BINS)
    if function is metrics.ece:
        return bins, "equal_width"
    return (bins, "equal_mass") if function is metrics.adaptive_ece else None


def _binned_gap(residual: Tensor, index: Tensor, bins: int) -> Tensor:
    """ECE = (1/n) Σ_b |Σ_{i in b} (confidence_i − correct_i)| of each row: (R, n) to (R,)."""
    size, n = residual.shape
    offset = torch.arange(size)[:, None] * bins
    sums = torch.bincount(
        (index + offset).flatten(), weights=residual.flatten(), minlength=size * bins
    )
    return sums.view(size, bins).abs().sum(1) / n


def _draws(n: int, resamples: int, generator: torch.Generator | None) -> Iterator[Tensor]:
    """Indices (r, n) of samples drawn with replacement, ``resamples`` rows in bounded slices."""
    generator = generator or torch.Generator().manual_seed(0)
    size = max(1, _SLICE_ELEMENTS // n)
    for start in range(0, resamples, size):
        yield torch.randint(n, (min(size, resamples - start), n), generator=generator)


def _interval(value: float, draws: Tensor, n: int, level: float, method: Method) -> Interval:
    if torch.isnan(draws).any() or value != value:
        raise NonFiniteError(
            f"the statistic is {value} on the {n} samples and NaN on "
            f"{int(torch.isnan(draws).sum())} of {len(draws)} resamples; no interval exists "
            "(a difference of two infinite values?)"
        )
    # Ends are order statistics, not interpolated: two infinities have no mean.
    low = torch.quantile(draws, (1 - level) / 2, interpolation="lower").item()
    high = torch.quantile(draws, (1 + level) / 2, interpolation="higher").item()
    if method == "basic":
        return Interval(value, 2 * value - high, 2 * value - low, n, level, "basic")
    return Interval(value, low, high, n, level, "percentile")


def _check(arrays: tuple[Any, ...], resamples: int, level: float, method: str) -> list[Tensor]:
    if method not in ("auto", "percentile", "basic"):
        raise InputError(f"method is {method!r}; expected 'auto', 'percentile' or 'basic'")
    samples = [metrics.as_tensor(a, f"array {i}") for i, a in enumerate(arrays)]
    if not samples:
        raise InputError("no arrays given; expected at least one with samples first")
    lengths = [len(s) if s.dim() else 0 for s in samples]
    if len(set(lengths)) != 1 or lengths[0] < 2:
        raise InputError(
            f"the arrays hold {lengths} samples; expected the same number, at least 2, in the "
            "first dimension of each"
        )
    if not 0 < level < 1:
        raise InputError(f"level is {level}; expected a fraction between 0 and 1, such as 0.95")
    if resamples * (1 - level) < 2 - 1e-9:
        raise InputError(
            f"{resamples} resamples are too few for level {level}; expected at least "
            f"{round(2 / (1 - level))}"
        )
    return samples
