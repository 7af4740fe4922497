"""Accuracy, proper scores and calibration errors of one predictive distribution.

Conventions of the whole package: ``log_probs`` (B, C) are natural-log probabilities of the
averaged distribution, ``labels`` (B,) integers in 0 … C−1. Tensors of any float type and device
and numpy arrays are accepted and computed in float64. Results are fractions and nats, never
percent. Rows that do not sum to 1, NaN, +inf, labels of the wrong type or range and empty input
raise :class:`~sigmanens.errors.InputError`; a log-probability of −inf is a probability of 0.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from sigmanens.errors import InputError, NonFiniteError

Scheme = Literal["equal_width", "equal_mass"]

DEFAULT_BINS = 15


def as_tensor(values: Any, name: str) -> Tensor:
    """``values`` (tensor, numpy array, nested list) as a detached tensor.

    Raises:
        InputError: if torch cannot read it; ``name`` is what to call it then.
    """
    # A read-only numpy array is copied: sharing its memory would warn.
    writable = getattr(getattr(values, "flags", None), "writeable", True)
    try:
        return (torch.as_tensor(values) if writable else torch.tensor(values)).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(
            f"{name} is a {type(values).__name__} that torch cannot read ({error}); "
            "expected a tensor or a numeric array"
        ) from error


def as_floats(values: Any, name: str, dims: str) -> Tensor:
    """``values`` as a detached float tensor, checked for type, dimensions and NaN.

    Args:
        values: tensor, numpy array or nested list.
        name: what to call it in an error.
        dims: one letter per dimension: ``"BC"`` is (B, C); a C must be at least 2.

    Raises:
        InputError: not floating point, other dimensions than ``dims``, or empty.
        NonFiniteError: NaN anywhere.
    """
    tensor = as_tensor(values, name)
    wanted = f"({', '.join(dims)})"
    if not tensor.is_floating_point():
        raise InputError(f"{name} has dtype {tensor.dtype}; expected floating point {wanted}")
    if tensor.dim() != len(dims):
        hint = "; flatten further dimensions into the samples first" if "C" in dims else ""
        raise InputError(f"{name} has shape {tuple(tensor.shape)}; expected {wanted}{hint}")
    if tensor.numel() == 0:
        raise InputError(f"{name} is empty: shape {tuple(tensor.shape)}; expected {wanted}")
    if dims.endswith("C") and tensor.shape[-1] < 2:
        raise InputError(
            f"{name} has shape {tuple(tensor.shape)}: one class; expected at least two (turn a "
            "sigmoid output z into the two columns logsigmoid(-z), logsigmoid(z))"
        )
    if torch.isnan(tensor.amax()):
        raise NonFiniteError(f"{name} has {int(torch.isnan(tensor).sum())} NaN values")
    return tensor


def as_log_probs(log_probs: Any) -> Tensor:
    """``log_probs`` (B, C) as float64, checked to hold one distribution a row.

    Raises:
        InputError: wrong type or shape, empty, NaN, or rows that do not sum to 1 (within 1e-3;
            0.05 for 16-bit floats).
    """
    tensor = as_floats(log_probs, "log_probs", "BC")
    double = tensor.double()
    check_rows_sum_to_one(double, "log_probs", tensor.dtype)
    return double


def check_rows_sum_to_one(log_probs: Tensor, name: str, dtype: torch.dtype) -> None:
    """Raise InputError unless the rows (…, C), once stored as ``dtype``, are distributions."""
    sums = log_probs.exp().sum(-1)
    tolerance = 0.05 if torch.finfo(dtype).bits < 32 else 1e-3
    if not ((sums - 1).abs() <= tolerance).all():
        raise InputError(
            f"the probabilities in the rows of {name} sum to between {sums.min():.4g} and "
            f"{sums.max():.4g}; expected 1: natural-log probabilities (log_softmax of logits, "
            "or the log of probabilities). Average members with log_mean_exp, not the mean of "
            "their logs; do not widen values that were rounded to 16 bits. Of several labels per "
            "sample, give one row each: Prediction.rows(labels)"
        )


def as_labels(labels: Any, log_probs: Tensor) -> Tensor:
    """``labels`` (B,) as int64 on the device of ``log_probs`` (…, B, C).

    Raises:
        InputError: not integers, another number than B, or outside 0 … C−1.
    """
    tensor = as_tensor(labels, "labels")
    samples, classes = log_probs.shape[-2:]
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise InputError(
            f"labels have dtype {tensor.dtype}; expected class indices of an integer dtype (B,), "
            "not probabilities or one-hot rows"
        )
    if tuple(tensor.shape) != (samples,):
        raise InputError(f"labels have shape {tuple(tensor.shape)}; expected ({samples},)")
    tensor = tensor.to(log_probs.device, torch.int64)
    low, high = int(tensor.min()), int(tensor.max())
    if low < 0 or high >= classes:
        raise InputError(
            f"labels run from {low} to {high}; expected 0 to {classes - 1} for {classes} classes "
            "(leave ignored samples out first)"
        )
    return tensor


def sample_accuracy(log_probs: Any, labels: Any) -> Tensor:
    """1.0 where the most probable class (the first of equals) is the label, else 0.0: (B,)."""
    return top_label(log_probs, labels)[1]


def sample_nll(log_probs: Any, labels: Any) -> Tensor:
    """−log p(label) per sample: (B,), nats; inf where the label has probability 0."""
    log_p = as_log_probs(log_probs)
    # 0 − x: a certain label costs 0, not −0.
    return 0 - log_p.gather(1, as_labels(labels, log_p)[:, None]).squeeze(1).cpu()


def sample_brier(log_probs: Any, labels: Any) -> Tensor:
    """Σ_c (p_c − 1[c = label])² per sample: (B,), between 0 and 2."""
    log_p = as_log_probs(log_probs)
    index = as_labels(labels, log_p)[:, None]
    error = log_p.exp()
    error.scatter_(1, index, error.gather(1, index) - 1)
    return error.square().sum(1).cpu()


def sample_confidence(log_probs: Any) -> Tensor:
    """Confidence max_c p_c per sample: (B,), in [1/C, 1]."""
    return as_log_probs(log_probs).amax(1).exp().clamp_max(1).cpu()


def accuracy(log_probs: Any, labels: Any) -> float:
    """Fraction of samples whose most probable class is the label."""
    return sample_accuracy(log_probs, labels).mean().item()


def nll(log_probs: Any, labels: Any) -> float:
    """Mean negative log-likelihood −(1/B) Σ log p(label) in nats; inf if a label has p = 0."""
    return sample_nll(log_probs, labels).mean().item()


def brier(log_probs: Any, labels: Any) -> float:
    """Multi-class Brier score: squared error summed over classes, mean over samples; 0 … 2."""
    return sample_brier(log_probs, labels).mean().item()


def sharpness(log_probs: Any) -> float:
    """Mean confidence (1/B) Σ max_c p_c: 1/C for uniform rows, 1 for certain ones.

    Sharpness minus accuracy is the overall over-confidence.
    """
    return sample_confidence(log_probs).mean().item()


def top_label(log_probs: Any, labels: Any) -> tuple[Tensor, Tensor]:
    """Confidence max_c p_c and correctness (1.0 or 0.0) of the most probable class: (B,) each."""
    log_p = as_log_probs(log_probs)
    index = as_labels(labels, log_p)
    best = log_p.argmax(1)
    confidence = log_p.gather(1, best[:, None]).squeeze(1).exp().clamp_max(1)
    return confidence.cpu(), (best == index).double().cpu()


def bin_index(confidence: Tensor, bins: int, scheme: Scheme = "equal_width") -> Tensor:
    """Bin 0 … bins−1 of each confidence (any shape under equal width, (B,) under equal mass).

    ``"equal_width"``: (i/bins, (i+1)/bins], the first bin also holding 0, so that a confidence of
    exactly 0 or 1 lies in the first or last bin. ``"equal_mass"``: by rank, sizes differing by at
    most one; equal confidences share the bin of their middle rank, so that the order of the
    samples does not matter.

    Raises:
        InputError: if ``bins`` is not a positive integer or the scheme unknown.
    """
    if not isinstance(bins, int) or isinstance(bins, bool) or bins < 1:
        raise InputError(f"bins is {bins!r}; expected a positive integer")
    if scheme == "equal_width":
        inner = torch.arange(1, bins, dtype=torch.float64, device=confidence.device) / bins
        return torch.bucketize(confidence, inner)
    if scheme == "equal_mass":
        ordered = confidence.sort().values
        below = torch.searchsorted(ordered, confidence)
        up_to = torch.searchsorted(ordered, confidence, right=True)
        return (below + up_to) * bins // (2 * len(ordered))
    raise InputError(f"scheme is {scheme!r}; expected 'equal_width' or 'equal_mass'")


@dataclass(frozen=True)
class Reliability:
    """Reliability diagram: mean confidence beside accuracy, bin by bin.

    Attributes:
        edges: bins + 1 edges from 0 to 1; bin i is (edges[i], edges[i+1]], the first with 0.
        confidence: mean confidence of each bin, None where it is empty.
        accuracy: accuracy of each bin, None where it is empty.
        count: samples in each bin.
        n: samples in all.
        scheme: ``"equal_width"`` or ``"equal_mass"``.
    """

    edges: tuple[float, ...]
    confidence: tuple[float | None, ...]
    accuracy: tuple[float | None, ...]
    count: tuple[int, ...]
    n: int
    scheme: Scheme

    @property
    def ece(self) -> float:
        """Σ_b (n_b/n) ``|accuracy_b − confidence_b|`` over these bins."""
        rows = zip(self.count, self.accuracy, self.confidence, strict=True)
        return sum(n * abs(a - c) for n, a, c in rows if a is not None and c is not None) / self.n

    @property
    def debiased_squared(self) -> float:
        """E² of :func:`ece_debiased` over these bins; may be negative."""
        total = 0.0
        for count, acc, conf in zip(self.count, self.accuracy, self.confidence, strict=True):
            if acc is not None and conf is not None and count > 1:
                total += count * ((acc - conf) ** 2 - acc * (1 - acc) / (count - 1))
        return total / self.n

    @property
    def debiased(self) -> float:
        """√max(E², 0) of :func:`ece_debiased` over these bins."""
        return max(self.debiased_squared, 0.0) ** 0.5

    def to_dict(self) -> dict[str, Any]:
        """A dict that ``json`` can write, with the number of bins added as ``bins``."""
        lists = {k: list(v) if isinstance(v, tuple) else v for k, v in asdict(self).items()}
        return {"bins": len(self.count), **lists}


def reliability(
    log_probs: Any, labels: Any, bins: int = DEFAULT_BINS, scheme: Scheme = "equal_width"
) -> Reliability:
    """Confidence and accuracy of the most probable class in bins of confidence.

    Args:
        log_probs: (B, C), nats.
        labels: (B,), integers.
        bins: number of bins.
        scheme: how they are laid, see :func:`bin_index`.
    """
    confidence, correct = top_label(log_probs, labels)
    index = bin_index(confidence, bins, scheme)
    count = torch.bincount(index, minlength=bins)

    def means(values: Tensor) -> tuple[float | None, ...]:
        sums = torch.bincount(index, weights=values, minlength=bins)
        return tuple(
            s / n if n else None for s, n in zip(sums.tolist(), count.tolist(), strict=True)
        )

    edges = [i / bins for i in range(bins + 1)]
    if scheme == "equal_mass":
        top = torch.zeros(bins, dtype=torch.float64)
        top.scatter_reduce_(0, index, confidence, "amax")
        edges = [0.0, *top.cummax(0).values[:-1].tolist(), 1.0]
    return Reliability(
        edges=tuple(edges),
        confidence=means(confidence),
        accuracy=means(correct),
        count=tuple(count.tolist()),
        n=len(confidence),
        scheme=scheme,
    )


def ece(log_probs: Any, labels: Any, bins: int = DEFAULT_BINS) -> float:
    """Expected calibration error Σ_b (n_b/n) ``|acc_b − conf_b|``, equal-width bins (1706.04599).

    Biased upwards at small n: a calibrated model reads about 0.13 at n = 50 and 0.03 at n = 1000.
    """
    return reliability(log_probs, labels, bins).ece


def adaptive_ece(log_probs: Any, labels: Any, bins: int = DEFAULT_BINS) -> float:
    """Expected calibration error over bins of equal mass (arXiv 1508.05154)."""
    return reliability(log_probs, labels, bins, "equal_mass").ece


def classwise_ece(log_probs: Any, labels: Any, bins: int = DEFAULT_BINS) -> float:
    """Class-wise ECE (1/C) Σ_c Σ_b (n_bc/n) ``|freq_bc − conf_bc|`` (arXiv 1910.12656).

    For each class, its probability is binned at equal width over all samples, and compared with
    how often the class was the label in that bin.
    """
    _, confidence, labelled = class_bins(log_probs, labels, bins)
    n = as_tensor(labels, "labels").numel()
    return (confidence - labelled).abs().sum().item() / (len(confidence) * n)


def class_bins(log_probs: Any, labels: Any, bins: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of each class and bin of its probability, over all samples: (C, bins) float64 each.

    Returns:
        the samples in the bin, the sum of their probabilities of the class, and how many of them
        have it as their label.
    """
    log_p = as_log_probs(log_probs)
    target = as_labels(labels, log_p)
    probs, target = log_p.exp().cpu(), target.cpu()
    classes = probs.shape[1]
    cell = bin_index(probs, bins) + torch.arange(classes) * bins
    own = cell.gather(1, target[:, None]).squeeze(1)
    size = classes * bins
    count = torch.bincount(cell.flatten(), minlength=size).double()
    total = torch.bincount(cell.flatten(), weights=probs.flatten(), minlength=size)
    labelled = torch.bincount(own, minlength=size).double()
    return count.view(classes, bins), total.view(classes, bins), labelled.view(classes, bins)


def ece_debiased(
    log_probs: Any, labels: Any, bins: int = DEFAULT_BINS, *, squared: bool = False
) -> float:
    """Debiased root-mean-square calibration error (Kumar et al. 2019, arXiv 1909.10155).

    E² = Σ_b (n_b/n) [(acc_b − conf_b)² − acc_b (1 − acc_b)/(n_b − 1)] over bins of equal mass;
    the second term is the variance of acc_b, and makes E² unbiased for the squared error of the
    binned model. Returns √max(E², 0). Mind that this is an ℓ2 error, at least as large as the ℓ1
    ``ece`` of the same bins when n is large. Bins with one sample are left out.

    Args:
        log_probs: (B, C), nats.
        labels: (B,), integers.
        bins: number of bins.
        squared: return E² itself, which may be negative and averages to the truth.
    """
    table = reliability(log_probs, labels, bins, "equal_mass")
    return table.debiased_squared if squared else table.debiased
