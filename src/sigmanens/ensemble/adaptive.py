r"""Asking fewer members where the answer is settled.

After :math:`k` of :math:`M` members, with :math:`\bar p_k` their mean and :math:`g` the gap between
its two largest probabilities, no answer of the others can change the label once

.. math:: k\,g > M - k ,

for each of them moves the gap by at most 1. Members that are exchangeable (equal training, other
draws) are a sample without replacement from all :math:`M`, so by Hoeffding and Serfling the label
changes with a probability of at most

.. math:: (C - 1)(M - 1) \exp\!\Big({-\frac{k g^2}{2\,(1 - (k-1)/M)}}\Big)

over all classes and stopping times. Either way :math:`|\bar p_k - \bar p_M| \le (M-k)/M` in every
class.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from sigmanens.ensemble.inputs import Inputs
from sigmanens.ensemble.prediction import Prediction
from sigmanens.errors import InputError


def check_risk(adaptive: bool | float) -> float:
    """The risk that ``adaptive`` stands for; InputError unless it is True (0) or in (0, 1)."""
    if adaptive is True:
        return 0.0
    if isinstance(adaptive, bool) or not isinstance(adaptive, float) or not 0 < adaptive < 1:
        raise InputError(
            f"adaptive is {adaptive!r}; expected True (the label of all members for sure) or the "
            "risk of another label, a number in (0, 1)"
        )
    return adaptive


def settled(mean: Tensor, used: int, members: int, risk: float = 0.0) -> Tensor:
    """Which samples need no further member, by the mean (B, C) of the first ``used``: (B,) bool.

    ``risk`` is the accepted probability that a sample's label is not that of all members.
    """
    first, second = mean.topk(2, 1).values.unbind(1)
    gap = first - second
    sure = used * gap > members - used
    if risk > 0:
        exponent = used * gap.square() / (2 * (1 - (used - 1) / members))
        events = (mean.shape[1] - 1) * max(members - 1, 1)
        sure = sure | (exponent >= math.log(events / risk))
    return sure


def predict_adaptively(
    ask: Callable[[Inputs, int, int], Tensor],
    inputs: Inputs,
    members: int,
    risk: float,
    temperature: float,
    class_dim: int,
) -> Prediction:
    """Add members one at a time, each for the samples that are not settled yet.

    ``ask(samples, first, last)`` gives the logits (k, B′, C) of k members in evaluation mode.

    Each sample's figures are those of its ``members_used``; ``member_log_probs`` of the others is
    NaN.

    Raises:
        InputError: for logits other than one row (B, C) per sample.
    """
    size = inputs.size
    open_rows = torch.arange(size)
    used = torch.full((size,), members)
    logits: Tensor | None = None
    for m in range(members):
        new = ask(inputs.select(open_rows), m, m + 1)[0]
        if new.dim() != 2 or class_dim not in (1, -1):
            raise InputError(
                f"adaptive stopping is for one row of logits per sample; a member's logits are "
                f"{tuple(new.shape)}"
            )
        if logits is None:
            logits = new.new_zeros(members, size, new.shape[1])
        logits[m, open_rows.to(new.device)] = new
        so_far = logits[: m + 1, open_rows.to(new.device)].float()
        mean = so_far.softmax(2).mean(0)
        done = settled(mean, m + 1, members, risk).cpu()
        used[open_rows[done]] = m + 1
        open_rows = open_rows[~done]
        if not len(open_rows):
            break
    assert logits is not None
    return _joined(logits, used, temperature)


def _joined(logits: Tensor, used: Tensor, temperature: float) -> Prediction:
    """One prediction from the first ``used`` members of each sample."""
    used = used.to(logits.device)
    order, parts = [], []
    for k in used.unique().tolist():
        rows = (used == k).nonzero().squeeze(1)
        part = Prediction.from_logits(logits[:k, rows], temperature)
        missing = logits.new_full((len(logits) - k, *part.log_probs.shape), math.nan)
        members = torch.cat([part.member_log_probs, missing.to(part.log_probs.dtype)])
        order.append(rows)
        parts.append(replace(part, member_log_probs=members, members_used=used[rows]))
    return Prediction.cat(parts).reordered(torch.cat(order).argsort())
