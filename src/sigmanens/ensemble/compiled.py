"""Passes of compiled networks: one graph for all members.

A compiler takes the numbers that a network reads from its modules for constants. So it compiles a
pass of members 0 … k-1 anew for members k … 2k-1. In the block of :func:`alone` layers hold views
of the rows of the members in the pass, as an ensemble of that many members would: all passes look
the same. Gradients and statistics reach the tensors that are viewed. The block changes the modules,
so the caller holds a lock.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from sigmanens.conversion.heads import MemberHeads
from sigmanens.norms import MemberNorm, SigmaNorm
from sigmanens.norms.scales import is_sharded
from sigmanens.passes.context import MemberAxis

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_SCALES = ("scale_logit", "scale")
_AFFINE = ("carrier", "offset", "shift")  # one for each member, or one for all
_KNOWN = {*_STATISTICS, *_SCALES, *_AFFINE, "weight", "bias", "ones"}


def is_compiled(module: nn.Module) -> bool:
    """Whether a module or one within it is compiled."""
    if "torch._dynamo" not in sys.modules:  # the compiler
        return False
    return any(
        getattr(m, "_compiled_call_impl", None) is not None or type(m).__name__ == "OptimizedModule"
        for m in module.modules()
    )


def uncompiled() -> AbstractContextManager[Any]:
    """Run compiled modules as they were written, for trials with hooks on many modules."""
    stance = getattr(torch.compiler, "set_stance", None)  # torch 2.6
    if stance is None or "torch._dynamo" not in sys.modules:
        return nullcontext()
    return stance("force_eager")


def can_be_alone(network: nn.Module, members: int) -> bool:
    """Whether all that layers hold of each member is in tensors that are known and can be viewed.

    Not so of layers of other authors that hold more, and of parameters divided over ranks.
    """
    if members == 1 or is_sharded(network):
        return False
    for module in network.modules():
        if isinstance(module, MemberNorm):
            if not {*module._parameters, *module._buffers} <= _KNOWN:
                return False
        elif isinstance(module, MemberHeads):
            continue
        elif any(isinstance(value, MemberAxis) for value in vars(module).values()):
            return False
    return True


@contextmanager
def alone(network: nn.Module, axis: MemberAxis, start: int, stop: int) -> Iterator[None]:
    """Let a network for which :func:`can_be_alone` holds have members ``start … stop-1`` only."""
    k = stop - start
    with ExitStack() as undo:

        def change(held: dict[str, Any], values: dict[str, Any]) -> None:
            undo.callback(dict.update, held, {name: held[name] for name in values})
            held.update(values)

        for module in list(network.modules()):
            if isinstance(module, MemberHeads):
                change(module._modules, {"heads": nn.ModuleList(module.heads[start:stop])})
            elif isinstance(module, MemberNorm):
                for held in (module._parameters, module._buffers):
                    own = [(n, t) for n, t in held.items() if t is not None]
                    rows = {n: t[start:stop] for n, t in own if _has_members(module, n, t)}
                    change(held, rows)
        undo.enter_context(axis.choosing(pin=True, start=0, stop=k, held=k, memory=None))
        yield


def _has_members(module: MemberNorm, name: str, t: Tensor) -> bool:
    """Whether dimension 0 of a layer's tensor are the members."""
    if name in _AFFINE and isinstance(module, SigmaNorm):
        return t.dim() == module.logit.dim() and t.shape[0] == module.axis.num_members
    return name in _STATISTICS or name in _SCALES
