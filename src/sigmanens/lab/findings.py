"""What is wrong with a finished training, from its row of ``metrics.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sigmanens.diversity import diagnosis
from sigmanens.diversity.diagnosis import Finding

_COLDEST, _HOTTEST = 0.02, 50.0
"""Temperatures that make every answer certain, or every answer the same."""
ONE_RUN = ("method", "members", "tau", "weight", "variant", "seed")
"""What tells rows apart."""


def add_findings(
    rows: Sequence[dict[str, Any]], histories: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Put what is wrong with each row, in words, into its ``findings``; null where nothing is.

    Args:
        rows: of ``metrics.json``, changed in place.
        histories: ``epochs`` of trainings, with the keys of ``ONE_RUN``.
    """
    epochs = {tuple(h.get(k) for k in ONE_RUN): h["epochs"] for h in histories}
    alone = {
        r["seed"]: r["nll"]
        for r in rows
        if r["method"] in ("single", "single_finetuned") and not r.get("variant")
    }
    for row in rows:
        known = epochs.get(tuple(row.get(k) for k in ONE_RUN), ())
        found = row_findings(row, single_nll=alone.get(row["seed"]), epochs=known)
        row["findings"] = [*map(str, found), *row_warnings(row)] or None


def row_warnings(row: Mapping[str, Any]) -> list[str]:
    """A temperature that is no scaling any more, and an accuracy that guessing would reach.

    Guessing: within two standard errors of one class in ``classes``, or below.
    """
    found = []
    temperature = _number(row, "temperature")
    if temperature <= _COLDEST or temperature >= _HOTTEST:
        found.append(
            f"the fitted temperature is {temperature:g}: the validation examples do not determine "
            "one, because all are answered rightly, or no better than by guessing"
        )
    classes, n = _number(row, "classes"), _number(row, "n")
    if classes > 1 and n > 0:
        chance = 1 / classes
        if _number(row, "accuracy") <= chance + 2 * math.sqrt(chance * (1 - chance) / n):
            found.append(
                f"the accuracy {_number(row, 'accuracy'):.3f} is that of guessing among "
                f"{classes:.0f} classes: look at labels, learning rate and normalisation"
            )
    return found


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
