"""Leaving the ensemble: its members, or their average, as plain networks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from sigmanens.conversion.guards import allow_fusing
from sigmanens.conversion.heads import MemberHeads
from sigmanens.errors import InputError
from sigmanens.norms import MemberNorm
from sigmanens.norms.member import adopt_hooks
from sigmanens.passes.sharing import unshare

__all__ = ["collapse", "member"]


Patches = Sequence[tuple[str, str, Any]]


def member(network: nn.Module, patches: Patches, index: int, members: int) -> nn.Module:
    """A copy of one member: a network of the base's own class with plain norms and one head.

    Args:
        network: a converted network.
        patches: what conversion switched off in it, to be switched on again.
        index: which member, 0 … M-1.
        members: M.

    Raises:
        InputError: if there is no such member.
    """
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < members:
        raise InputError(f"member({index!r}): expected an index from 0 to {members - 1}")
    return _plain(network, patches, slice(index, index + 1))


def collapse(network: nn.Module, patches: Patches, members: int) -> nn.Module:
    """One plain network with the members' scales, shifts, statistics and heads averaged.

    Running statistics become those of the members' mixture: mean of the means; mean variance plus
    variance of the means.

    Args:
        network: a converted network.
        patches: what conversion switched off in it, to be switched on again.
        members: M.

    Raises:
        InputError: if the members' heads differ in structure.
    """
    return _plain(network, patches, slice(0, members))


@torch.no_grad()
def _plain(converted: nn.Module, patches: Patches, members: slice) -> nn.Module:
    network = copy.deepcopy(converted)
    made: dict[int, nn.Module] = {}
    for name, module in list(network.named_modules(remove_duplicate=False)):
        if not isinstance(module, (MemberNorm, MemberHeads)):
            continue
        if id(module) not in made:
            if isinstance(module, MemberHeads):
                made[id(module)] = _average(list(module.heads)[members])
            else:
                made[id(module)] = module.plain(members)
                adopt_hooks(made[id(module)], module)
        if name == "":
            return made[id(module)]
        parent, _, leaf = name.rpartition(".")
        setattr(network.get_submodule(parent), leaf, made[id(module)])
    for path, attribute, value in patches:
        setattr(network.get_submodule(path), attribute, value)
    allow_fusing(network)
    unshare(network)
    return network


def _average(heads: list[nn.Module]) -> nn.Module:
    head = copy.deepcopy(heads[0])
    if len(heads) == 1:
        return head
    states = [h.state_dict() for h in heads]
    if any(s.keys() != states[0].keys() for s in states):
        raise InputError("the members' heads differ in structure and cannot be averaged")
    mean = {
        k: v + torch.stack([s[k] - v for s in states]).mean(0) if v.is_floating_point() else v
        for k, v in states[0].items()
    }
    head.load_state_dict(mean)
    return head
