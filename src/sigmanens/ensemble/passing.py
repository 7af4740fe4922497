"""One pass of some members through the shared weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from sigmanens.ensemble.inputs import Inputs
from sigmanens.passes.context import MemberAxis, follow_backward
from sigmanens.passes.trees import unfold


def run_pass(
    network: nn.Module,
    axis: MemberAxis,
    inputs: Inputs,
    start: int,
    stop: int,
    *,
    split: bool = False,
    **changes: Any,
) -> Any:
    """Fold members ``start … stop-1`` into the batch, run the network once, and unfold them.

    Under ``split`` each member sees its own share b of the samples. ``changes`` are further
    attributes of the :class:`~sigmanens.passes.context.Pass`. Returns what the network returns,
    each tensor (k, B, …) or (k, b, …).
    """
    k = stop - start
    size = inputs.size // k if split else inputs.size
    folded = inputs if split else inputs.expand(k)
    with axis.running(start, stop, split=split, recorded=None, **changes) as made:
        result = folded.call(network)
    if torch.is_grad_enabled() and not torch.compiler.is_compiling():
        follow_backward(result, made)
    return unfold(result, k, size)
