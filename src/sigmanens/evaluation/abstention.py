r"""When not to answer: a threshold on confidence, with a promise about the errors that are left.

Inputs of confidence c ≥ t are answered; R(t) = P(wrong | c ≥ t) is the risk among them. For a
wished risk r the threshold is the lowest that labelled samples allow under

.. math:: P\big(R(\hat t) \le r\big) \ge 1 - \delta .

Of n samples with c ≥ t, k ~ Binomial(n, R(t)) are wrong, so that P(Binomial(n, r) ≤ k) is a p-value
of R(t) > r; it is at most α where the upper Clopper–Pearson bound of level 1 − α is at most r
(arXiv 1705.08500). Thresholds that were fixed without these samples are tested from the highest
down (arXiv 2110.01052): four of them open with δ/4 each, and one that is passed hands the level it
was tested at on to the next, one that is not loses it (the fallback procedure). Nothing is assumed
about the confidence, not even that R falls with t.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sigmanens.errors import InputError
from sigmanens.evaluation.metrics import as_floats, as_tensor

STARTS = (0.125, 0.25, 0.5, 0.75)
"""Shares of inputs that are answered at the thresholds that open with a part of δ."""

_LEVELS = 100


@dataclass(frozen=True)
class Abstention:
    """A rule when to answer, and what it promises.

    Attributes:
        risk: r, the share of errors among answered inputs that is promised at most.
        delta: δ, the probability over the labelled samples that the promise is not kept.
        threshold: lowest confidence that is answered; None: no threshold keeps the promise.
        answered: labelled samples at or above it.
        errors: wrong ones among them.
        n: labelled samples in all.
        lowest_risk: least risk that these samples can promise at this δ, at some threshold.
    """

    risk: float
    delta: float
    threshold: float | None
    answered: int
    errors: int
    n: int
    lowest_risk: float

    def abstains(self, confidence: Tensor) -> Tensor:
        """Which of these confidences (B,) are not answered: (B,) bool."""
        return confidence.double() < (math.inf if self.threshold is None else self.threshold)

    def __str__(self) -> str:
        lowest = math.ceil(self.lowest_risk * 1e4) / 1e4  # rounded down it could not be promised
        if self.threshold is None:
            return (
                f"nothing is answered: from {self.n} labelled examples no threshold promises a "
                f"risk of {self.risk:g} with confidence {1 - self.delta:g}; the lowest risk that "
                f"they can promise is {lowest:g}"
            )
        return (
            f"answered where the probability is at least {self.threshold:.6g}: with confidence "
            f"{1 - self.delta:g} at most {self.risk:g} of these answers are wrong, for inputs like "
            f"the labelled examples ({self.answered} of {self.n} answered, {self.errors} wrong)"
        )


def fit_abstention(
    confidence: Any, correct: Any, risk: float, others: Any, delta: float = 0.05
) -> Abstention:
    """The threshold that answers most under a promised risk.

    The promise holds for inputs that are exchangeable with the labelled samples, and for one risk
    that was chosen without them (:attr:`Abstention.lowest_risk` may be asked for as well). The
    confidence must not have been fitted to them: a temperature or an epoch chosen on the same
    samples, a single number, weakens it slightly.

    Args:
        confidence: of labelled samples (n,), such as the largest averaged probability.
        correct: 1 or true where the label was predicted (n,).
        risk: r in (0, 1).
        others: confidences of other samples (N,), whose labels are not needed: the thresholds that
            are tested are their quantiles.
        delta: δ in (0, 1).

    Raises:
        InputError: for risk or delta out of range, empty or NaN confidences, or another number of
            ``correct``.
    """
    for name, value in (("risk", risk), ("delta", delta)):
        if not 0 < value < 1:
            raise InputError(f"{name} is {value!r}; expected a number between 0 and 1")
    known = as_floats(confidence, "confidence", "B").double().cpu()
    wrong = 1 - as_tensor(correct, "correct").double().cpu()
    if wrong.shape != known.shape:
        raise InputError(f"correct has shape {tuple(wrong.shape)}; expected {tuple(known.shape)}")
    ordered = as_floats(others, "others", "B").double().cpu().sort(descending=True).values
    shares = torch.arange(1, _LEVELS + 1, dtype=torch.float64) / _LEVELS
    tested = ordered[(shares * len(ordered)).ceil().long() - 1]
    opens = torch.zeros(_LEVELS, dtype=torch.float64)
    opens[torch.searchsorted(shares, torch.tensor(STARTS).double())] = delta / len(STARTS)
    answers = known >= tested[:, None]
    n, k = answers.sum(1), (answers * wrong).sum(1).long()
    best, level = None, 0.0
    p_values = binomial_cdf(k, n, torch.full((_LEVELS,), risk).double())
    for j, p in enumerate(p_values.tolist()):
        level += float(opens[j])
        if 0 < level >= p:  # p may have been rounded to 0
            best = j
        else:
            level = 0.0
    start = opens > 0
    lowest = float(upper_bound(k[start], n[start], opens[start]).min())
    if best is None:
        return Abstention(risk, delta, None, 0, 0, len(known), lowest)
    found = float(tested[best]), int(n[best]), int(k[best])
    return Abstention(risk, delta, *found, len(known), lowest)


def binomial_cdf(k: Tensor, n: Tensor, p: Tensor) -> Tensor:
    """P(Binomial(n, p) ≤ k) for k and n (T,), int64, and p (T,) in (0, 1): (T,), float64."""
    i = torch.arange(int(k.max()) + 1, dtype=torch.float64)
    n, k, p = n.double()[:, None], k[:, None], p.double()[:, None]
    ways = torch.lgamma(n + 1) - torch.lgamma(i + 1) - torch.lgamma((n - i).clamp_min(0) + 1)
    logs = ways + i * p.log() + (n - i) * torch.log1p(-p)
    return logs.masked_fill(i > k, -math.inf).logsumexp(1).exp().clamp_max(1)


def upper_bound(k: Tensor, n: Tensor, alpha: Tensor) -> Tensor:
    """Upper Clopper–Pearson bound of level 1 − α for k (T,) successes in n (T,): (T,), float64.

    The p with P(Binomial(n, p) ≤ k) = α; 1 where k = n.
    """
    low, high = torch.zeros_like(alpha), torch.ones_like(alpha)
    for _ in range(40):
        middle = (low + high) / 2
        above = (binomial_cdf(k, n, middle) > alpha) | (k == n)
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    return high
