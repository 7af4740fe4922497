"""Heads only: the whole network is shared and the members are M heads (arXiv 1511.06314).

The control that says what the members' normalisation layers add to heads of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sigmanens.baselines.base import Rival, base_network, check_count, is_trained, unfolded
from sigmanens.conversion.heads import find_heads, member_heads
from sigmanens.errors import InputError
from sigmanens.passes.context import MemberAxis
from sigmanens.passes.trees import join
from sigmanens.seeding import seeded

__all__ = ["HeadsOnly", "ParallelHeads", "heads_only"]


class ParallelHeads(nn.Module):
    """M heads on the same features: (B, F) → (M·B, C), member-major."""

    def __init__(self, heads: nn.ModuleList) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What each head makes of the features, joined along dimension 0."""
        return join([head(*args, **kwargs) for head in self.heads], [1] * len(self.heads))


class HeadsOnly(Rival):
    """One backbone with M heads; made by :func:`heads_only`."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Logits (M, B, C, …); the backbone runs once, on B rows."""
        return unfolded(self.network(*args, **kwargs), self.num_members)


def heads_only(
    model_or_factory: nn.Module | Callable[[], nn.Module],
    members: int,
    *,
    head: str = "auto",
    head_name: str | Sequence[str] | None = None,
    noise: float = 0.1,
    generator: torch.Generator | None = None,
) -> HeadsOnly:
    """Give a network M heads and leave everything else, norms included, shared (arXiv 1511.06314).

    Args:
        model_or_factory: a network, which is copied, or a function that makes one.
        members: M ≥ 1.
        head: "fresh" gives each member a norm and a Linear as in :func:`sigmanens.convert`; "copy"
            copies of the base's head, told apart by ``noise``: equal heads on the same features
            have the same gradients and would stay equal. "auto" is copy where the norms of the
            base have been trained, else fresh.
        head_name: where the head is, if it is not found by itself.
        noise: standard deviation of what is added to each weight of a copied head, in units of the
            standard deviation of that weight tensor; > 0 for more than one member.
        generator: source of fresh heads and of the noise.

    Returns:
        a network from (B, …) to (M, B, C); parameters: the backbone's and M times the head's.

    Raises:
        HeadNotFoundError: if no head is found. InputError: for an argument out of its range, or a
        copied head with a constant (zero-initialised) weight, from which no noise can be scaled.
    """
    check_count("members", members)
    if head not in ("auto", "fresh", "copy"):
        raise InputError(f"head is {head!r}; expected 'auto', 'fresh' or 'copy'")
    network = base_network(model_or_factory)
    if head == "auto":
        head = "copy" if is_trained(network) else "fresh"
    if head == "copy" and not (noise > 0 or (noise == 0 and members == 1)):
        raise InputError(
            f"noise is {noise!r}; expected a number > 0: {members} equal heads on the same "
            "features would stay equal in training"
        )
    modules = dict(network.named_modules(remove_duplicate=False))
    made: dict[int, ParallelHeads] = {}
    for name in find_heads(network, head_name, head):
        source = modules[name]
        if id(source) not in made:
            heads = member_heads(source, head, MemberAxis(members), name, generator).heads
            if head == "copy" and noise:
                _perturb(heads, noise, seeded(generator))
            made[id(source)] = ParallelHeads(heads).train(source.training)
        parent, _, leaf = name.rpartition(".")
        setattr(network.get_submodule(parent), leaf, made[id(source)])
    return HeadsOnly(network, members)


@torch.no_grad()
def _perturb(heads: nn.ModuleList, noise: float, seed: int) -> None:
    """Add noise to the weights (not to biases and norms) of every head."""
    generator = torch.Generator().manual_seed(seed)
    for p in heads.parameters():
        if p.dim() > 1:
            drawn = torch.randn(p.shape, generator=generator, dtype=torch.float32)
            deviation = p.float().std(correction=0).cpu()
            if deviation == 0:
                raise InputError(
                    f"a weight of the head, {tuple(p.shape)}, has {float(p.flatten()[0]):g} "
                    "everywhere, so that noise in units of its deviation is none and the copies "
                    "would stay equal in training. Use head='fresh'"
                )
            drawn *= noise * deviation
            p.add_(drawn.to(p.device, p.dtype))
