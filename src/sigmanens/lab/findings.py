"""What is wrong with the diversity of a finished training, from its row of ``metrics.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sigmanens.diversity import diagnosis
from sigmanens.diversity.diagnosis import Finding

__all__ = ["row_findings"]


def row_findings(
    row: Mapping[str, Any],
    *,
    single_nll: float | None = None,
    epochs: Sequence[Mapping[str, Any]] = (),
) -> list[Finding]:
    """The findings of :mod:`sigmanens.diversity.diagnosis` for one row.

    Args:
        row: of an ensemble; its ``nll`` stands for the entropy, which no row has.
        single_nll: NLL of one network trained in the same way, nats.
        epochs: history of its training, of which the first epoch is the early one.

    Returns:
        the findings; empty if nothing is wrong, and for one member.
    """
    members = int(_number(row, "members", 1))
    if members < 2:
        return []
    found: list[Finding | None] = []
    disagreement, modulation = _number(row, "disagreement"), _number(row, "modulation")
    nll = _number(row, "nll")
    if not math.isnan(disagreement + modulation + nll):
        cosine = _number(row, "cosine")
        found.append(diagnosis.one_model(disagreement, modulation, nll, cosine=cosine))
    if single_nll is not None:
        found.append(diagnosis.weak_members(_number(row, "member_nll"), nll, single_nll))
    if epochs:
        early = _number(epochs[0], "cosine"), _number(epochs[0], "saturation")
        found.append(diagnosis.frozen_partition(*early))
    if _number(row, "tau") > 0 and _number(row, "weight", 0) > 0 and members > 2:
        found.append(diagnosis.flat_dial(_number(row, "tau"), members))
    return [f for f in found if f is not None]


def _number(row: Mapping[str, Any], key: str, default: float = math.nan) -> float:
    value = row.get(key)
    return default if value is None else float(value)
