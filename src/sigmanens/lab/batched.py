"""Results of a network for many examples, batch by batch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sigmanens.lab.backbones.tokens import length_order
from sigmanens.lab.data import Pictures


def by_batches(
    run: Callable[[Tensor], Tensor], network: nn.Module, examples: Pictures, batch: int
) -> Tensor:
    """Results (M, N, …), float32 on the CPU, in the order of the examples.

    Texts are taken by length, so that short ones are not filled up to long ones.

    Args:
        run: maps examples (B, …) on the network's device to results (M, B, …).
        network: by which ``run`` answers.
        examples: (N, …), in memory or not.
        batch: B.
    """
    device = next(network.parameters()).device
    order = length_order(network, examples) if isinstance(examples, Tensor) else None
    rows = examples if order is None else examples[order]
    parts = [run(part.to(device)).float().cpu() for part in rows.split(batch)]
    results = torch.cat(parts, 1)
    if order is None:
        return results
    return torch.empty_like(results).index_copy_(1, order, results)
