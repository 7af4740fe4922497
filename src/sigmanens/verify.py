"""Checks by trial that a converted network computes what it should: on the user's own inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sigmanens.errors import ConversionError
from sigmanens.members import join, map_tensors, narrow
from sigmanens.prediction import logits_of

if TYPE_CHECKING:
    from sigmanens.ensemble import SigmaEnsemble

__all__ = ["check_preserved", "evaluating", "folding_problem"]


def folding_problem(
    ensemble: SigmaEnsemble, tree: Mapping[str, Any], batched: Mapping[str, int]
) -> str | None:
    """Compare folded with sequential on up to 2 rows, with scales that differ visibly.

    A network that moves its batch dimension (time-major recurrent nets, for example) would mix
    the folded members without any error; this shows it.

    Returns:
        what is wrong; "" if folding is right; None if these inputs cannot tell, because the
        members answer alike on them (all zeros, say) or not with finite numbers.
    """
    members = ensemble.num_members
    rows = min(2, *[_size(tree, path, dim) for path, dim in batched.items()])
    small = narrow(dict(tree), batched, 0, rows)
    axis = ensemble.axis
    with evaluating(ensemble), axis.probe(), axis.only(0, members):
        one_by_one = []
        for m in range(members):
            with axis.only(m, m + 1):
                one_by_one.append(ensemble.run(small, dict(batched), rows, False))
        expected = logits_of(join(one_by_one, [1] * members))
        try:
            got = logits_of(ensemble.run(small, dict(batched), rows, False))
        except Exception as e:
            return (str(e) or type(e).__name__).splitlines()[0]
    if got.shape != expected.shape:
        return f"shape {tuple(got.shape)} instead of {tuple(expected.shape)}"
    if expected.numel() == 0:
        return None
    tolerance = _tolerance(expected)
    size = float(expected.abs().amax())
    if not size > 0 or size == float("inf"):
        return None
    gap = float((got - expected).abs().amax()) / size
    if not gap <= tolerance:
        return f"results differ by {gap:.1e} of their size"
    spread = float((expected - expected[:1]).abs().amax()) / size
    return "" if spread > 2 * tolerance else None


def check_preserved(ours: Tensor, theirs: Tensor, name: str) -> None:
    """Compare the members' logits (M, B, …) with the base's (B, …), which they must reproduce.

    Raises:
        ConversionError: if they do by more than 1e-3 of the largest logit (5e-2 in half precision).
    """
    gap = float((ours - theirs).abs().amax()) / max(float(theirs.abs().amax()), 1e-30)
    if not gap <= _tolerance(theirs):
        raise ConversionError(
            f"the converted {name} does not reproduce the base on the example "
            f"(largest difference {gap:.1e} of the largest logit). A norm is applied in a way "
            "its class does not show; leave it out with layers=…"
        )


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every submodule gets back the mode it had."""
    modes = [(m, m.training) for m in module.modules()]
    try:
        module.eval()
        with torch.no_grad():
            yield
    finally:
        for m, mode in modes:
            m.training = mode


def _tolerance(logits: Tensor) -> float:
    return 1e-3 if logits.dtype in (torch.float32, torch.float64) else 5e-2


def _size(tree: Mapping[str, Any], path: str, dim: int) -> int:
    sizes: list[int] = []
    map_tensors(lambda t, p: sizes.append(t.shape[dim]) if p == path else t, dict(tree))
    return sizes[0]
