"""Whether a converted network computes what its base does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sigmanens.conversion.copying import deep_copy
from sigmanens.ensemble.inputs import Inputs
from sigmanens.ensemble.prediction import logits_of
from sigmanens.ensemble.trial import tolerance
from sigmanens.errors import ConversionError
from sigmanens.passes.modes import evaluating


def check_preserved(ours: Tensor, theirs: Tensor, ensemble: Any, inputs: Inputs) -> str:
    """Compare the members' logits (M, B, …) with the base's (B, …), which they must reproduce.

    Returns "", or what to tell the user where float32 itself is too coarse to decide: the members'
    answers then move as much when they are computed in float64.

    Raises:
        ConversionError: if they differ by more than 1e-3 of the largest logit (5e-2 in half
            precision), and rounding does not explain it.
    """
    name = ensemble.report.model
    size = max(float(theirs.abs().amax()), 1e-30)
    gap = float((ours - theirs).abs().amax()) / size
    if gap <= tolerance(theirs):
        return ""
    rounding = _rounding(ours, ensemble, inputs) / size
    if gap <= 3 * rounding:
        return (
            f"on the example, rounding in float32 moves the logits of this {name} by "
            f"{rounding:.1e} of the largest one: too much to tell whether the converted network "
            f"reproduces the base (largest difference {gap:.1e}). Give inputs like those it was "
            "trained on, or check convert(model.double(), …)"
        )
    raise ConversionError(
        f"the converted {name} does not reproduce the base on the example "
        f"(largest difference {gap:.1e} of the largest logit). A norm is applied in a way "
        "its class does not show; leave it out with layers=…"
    )


def _rounding(ours: Tensor, ensemble: Any, inputs: Inputs) -> float:
    """Largest difference of float32 logits from those computed in float64; 0 if that fails."""
    if ours.dtype != torch.float32:
        return 0.0
    try:
        exact = deep_copy(ensemble).double()
        with evaluating(exact):
            return float((logits_of(inputs.double().call(exact)) - ours).abs().amax())
    except Exception:  # no float64 on this device, or a cast to float32 in the network
        return 0.0
