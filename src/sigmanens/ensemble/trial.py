"""Checks by trial that a converted network computes what it should: on the user's own inputs."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sigmanens.ensemble.prediction import logits_of
from sigmanens.ensemble.prefix import Prefix, find_prefix
from sigmanens.errors import ConversionError
from sigmanens.norms import MemberNorm
from sigmanens.passes.trees import join, map_tensors, narrow

if TYPE_CHECKING:
    from sigmanens.ensemble.runner import MemberPasses

__all__ = ["check_preserved", "evaluating", "folding_problem", "resized", "shared_prefix"]


def folding_problem(
    ensemble: MemberPasses, tree: Mapping[str, Any], batched: Mapping[str, int]
) -> tuple[str | None, int]:
    """Compare folded with sequential on up to 2 rows, with scales that differ visibly.

    A network that moves its batch dimension (time-major recurrent nets, for example) would mix
    the folded members without any error; this shows it.

    Returns:
        what is wrong; "" if folding is right; None if these inputs cannot tell, because the
        members answer alike on them (all zeros, say) or not with finite numbers. And the bytes of
        the largest input of a norm for one sample of one member.
    """
    row_bytes = _RowBytes(ensemble.network)
    with row_bytes:
        return _folding_problem(ensemble, tree, batched), row_bytes.largest


def _folding_problem(
    ensemble: MemberPasses, tree: Mapping[str, Any], batched: Mapping[str, int]
) -> str | None:
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
    return _difference(got, expected)


def _difference(got: Tensor, expected: Tensor) -> str | None:
    """What is wrong with members' logits (M, B, …); None if these cannot tell members apart."""
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


def _versions(results: Any) -> list[int]:
    """How often each tensor was written to; those made in inference mode do not know."""
    found: list[int] = []
    map_tensors(lambda t, _: found.append(0 if t.is_inference() else t._version), results)
    return found


class _RowBytes:
    """Looks at the inputs of a network's norms: bytes of the largest, for one row."""

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.largest = 0
        self._handles: list[Any] = []

    def __enter__(self) -> None:
        for module in self.network.modules():
            if isinstance(module, MemberNorm):
                self._handles.append(module.register_forward_pre_hook(self._look))

    def _look(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], Tensor) and args[0].dim() and len(args[0]):
            x = args[0]
            self.largest = max(self.largest, x.numel() * x.element_size() // len(x))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()


def shared_prefix(
    ensemble: MemberPasses, tree: Mapping[str, Any], batched: Mapping[str, int]
) -> tuple[Prefix | None, str | None]:
    """Find the shared prefix of a network and compare a prediction with and without it.

    Returns:
        the prefix, or None; and what the report says about it: "" if nothing, None if these inputs
        cannot tell.
    """
    members, axis = ensemble.num_members, ensemble.axis
    rows = 2
    small, larger = resized(tree, batched, rows), resized(tree, batched, rows + 1)
    with evaluating(ensemble), axis.only(0, members):
        prefix = find_prefix(ensemble.network, axis, [small, larger])
        if prefix is None or not prefix.alike():
            return None, ""
        with axis.probe():
            recorded = prefix.record(ensemble.network, small)
            if recorded is None:
                return None, ""

            def replay(results: list[Any]) -> Any:
                with prefix.replaying(results, axis.active):
                    return ensemble.run(small, dict(batched), rows, False)

            versions = _versions(recorded)
            expected, one_by_one = [], []
            for m in range(members):
                with axis.only(m, m + 1):
                    expected.append(ensemble.run(small, dict(batched), rows, False))
                    one_by_one.append(logits_of(replay(recorded)))
            wanted = logits_of(join(expected, [1] * members))
            problem = _difference(torch.cat(one_by_one), wanted)
            if _versions(recorded) != versions:
                problem = "the network writes into a result of these layers"
            if problem == "" and ensemble.schedule != "sequential":
                try:
                    folded = logits_of(replay(recorded))
                except Exception as e:
                    problem = (str(e) or type(e).__name__).splitlines()[0]
                else:
                    problem = _difference(folded, wanted)
    if problem is None:
        return None, None
    where = next(n for n, m in ensemble.network.named_modules() if m is prefix.end)
    if problem:
        return None, f"nothing is shared before '{where}': {problem}"
    names = prefix.names if len(prefix.names) < 6 else [*prefix.names[:4], "…", prefix.names[-1]]
    return prefix, f"computed once for all members, before '{where}': {', '.join(names)}"


def check_preserved(
    ours: Tensor, theirs: Tensor, ensemble: MemberPasses, args: Any, kwargs: Any
) -> str:
    """Compare the members' logits (M, B, …) with the base's (B, …), which they must reproduce.

    Returns:
        "", or what to tell the user where float32 itself is too coarse to decide: the members'
        answers then move as much when they are computed in float64.

    Raises:
        ConversionError: if they differ by more than 1e-3 of the largest logit (5e-2 in half
            precision), and rounding does not explain it.
    """
    name = ensemble.report.model
    size = max(float(theirs.abs().amax()), 1e-30)
    gap = float((ours - theirs).abs().amax()) / size
    if gap <= _tolerance(theirs):
        return ""
    rounding = _rounding(ours, ensemble, args, kwargs) / size
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


def _rounding(ours: Tensor, ensemble: MemberPasses, args: Any, kwargs: Any) -> float:
    """Largest difference of float32 logits from those computed in float64; 0 if that fails."""
    if ours.dtype != torch.float32:
        return 0.0

    def double(x: Tensor, _: str) -> Tensor:
        return x.double() if x.dtype == torch.float32 else x

    args, kwargs = map_tensors(double, args), map_tensors(double, kwargs)
    try:
        exact = copy.deepcopy(ensemble).double()
        with evaluating(exact):
            return float((logits_of(exact(*args, **kwargs)) - ours).abs().amax())
    except Exception:  # no float64 on this device, or a cast to float32 in the network
        return 0.0


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every submodule gets back the mode it had."""
    training = [m for m in module.modules() if m.training]
    try:
        if training:
            module.eval()
        with torch.no_grad():
            yield
    finally:
        for m in training:
            m.training = True


def resized(tree: Mapping[str, Any], batched: Mapping[str, int], rows: int) -> dict[str, Any]:
    """Inputs with a batch of ``rows``: those of the tree, over and over."""

    def pick(x: Tensor, path: str) -> Tensor:
        if path not in batched:
            return x
        index = torch.arange(rows, device=x.device) % x.shape[batched[path]]
        return x.index_select(batched[path], index)

    return map_tensors(pick, dict(tree))


def _tolerance(logits: Tensor) -> float:
    return 1e-3 if logits.dtype in (torch.float32, torch.float64) else 5e-2


def _size(tree: Mapping[str, Any], path: str, dim: int) -> int:
    sizes: list[int] = []
    map_tensors(lambda t, p: sizes.append(t.shape[dim]) if p == path else t, dict(tree))
    return sizes[0]
