"""Leaving the ensemble: its members, or their average, as plain networks."""

from __future__ import annotations

import copy

import torch
from torch import nn

from sigmanens.ensemble import SigmaEnsemble
from sigmanens.errors import InputError
from sigmanens.guards import allow_fusing
from sigmanens.heads import MemberHeads
from sigmanens.norms import MemberNorm
from sigmanens.scales import adopt_hooks

__all__ = ["collapse", "member"]


def member(ensemble: SigmaEnsemble, index: int) -> nn.Module:
    """A copy of one member: a network of the base's own class with plain norms and one head.

    Args:
        ensemble: M members.
        index: which, 0 … M-1.

    Raises:
        InputError: if there is no such member.
    """
    if (
        isinstance(index, bool)
        or not isinstance(index, int)
        or not 0 <= index < ensemble.num_members
    ):
        raise InputError(
            f"member({index!r}): expected an index from 0 to {ensemble.num_members - 1}"
        )
    return _plain(ensemble, slice(index, index + 1))


def collapse(ensemble: SigmaEnsemble) -> nn.Module:
    """One plain network with the members' scales, shifts, statistics and heads averaged.

    Its function is not the ensemble's average: docs/export.md has measurements of what it costs.
    Running statistics become those of the members' mixture, mean of the means and mean variance
    plus variance of the means; they are not re-estimated, for which
    ``torch.optim.swa_utils.update_bn(loader, network)`` takes a pass over training data. Members
    that are equal, as after ``convert`` of a trained network, collapse to the base, up to rounding.

    Raises:
        InputError: if heads were made by hand with different structures.
    """
    return _plain(ensemble, slice(0, ensemble.num_members))


@torch.no_grad()
def _plain(ensemble: SigmaEnsemble, members: slice) -> nn.Module:
    network = copy.deepcopy(ensemble.network)
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
    for path, attribute, value in ensemble.patches:
        setattr(network.get_submodule(path), attribute, value)
    allow_fusing(network)
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
