"""Leaving the ensemble: its members, or their average, as plain networks."""

from __future__ import annotations

import copy
from itertools import chain
from typing import Any

import torch
from torch import nn

from sigmanens.conversion.copying import deep_copy, put
from sigmanens.conversion.guards import switch_on
from sigmanens.conversion.heads import MemberHeads
from sigmanens.errors import ConversionError, InputError
from sigmanens.norms import MemberNorm
from sigmanens.norms.member import adopt_hooks
from sigmanens.passes.sharing import unshare


def member(network: nn.Module, index: int, members: int) -> nn.Module:
    """A copy of one of M members: see :meth:`sigmanens.SigmaEnsemble.member`.

    Raises:
        InputError: if there is no such member. ConversionError: if the network was moved from the
            meta device by assigning tensors, so that its plain norms have no values.
    """
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < members:
        raise InputError(f"member({index!r}): expected an index from 0 to {members - 1}")
    return _plain(network, slice(index, index + 1))


def collapse(network: nn.Module, members: int) -> nn.Module:
    """One plain network with the members averaged: see :meth:`sigmanens.SigmaEnsemble.collapse`.

    Raises:
        InputError: if the members' heads differ in structure, or compute their weights from
            parts (weight_norm, spectral_norm, different pruning), whose average is another weight.
    """
    return _plain(network, slice(0, members))


@torch.no_grad()
def _plain(converted: nn.Module, members: slice) -> nn.Module:
    network = deep_copy(converted)
    made: dict[int, nn.Module] = {}
    for name, module in list(network.named_modules(remove_duplicate=False)):
        if not isinstance(module, (MemberNorm, MemberHeads)):
            continue
        if id(module) not in made:
            if isinstance(module, MemberHeads):
                made[id(module)] = _average(name, list(module.heads)[members])
            else:
                made[id(module)] = module.plain(members)
                adopt_hooks(made[id(module)], module)
            tensors = chain(made[id(module)].parameters(), made[id(module)].buffers())
            if any(t.is_meta for t in tensors):
                raise ConversionError(
                    f"the plain form of '{name}' lies on the meta device and has no values. Move "
                    "the ensemble by to_empty(device=…), which moves it too, and "
                    "load_state_dict(…) then"
                )
        network = put(network, name, made[id(module)])
    switch_on(network)
    unshare(network)
    return network


def _average(name: str, heads: list[nn.Module]) -> nn.Module:
    head = copy.deepcopy(heads[0])
    if len(heads) == 1:
        return head
    states = [h.state_dict() for h in heads]
    if any(s.keys() != states[0].keys() for s in states):
        raise InputError("the members' heads differ in structure and cannot be averaged")
    made = [k for k in states[0] if _is_part(k, [s[k] for s in states])]
    if made:
        raise InputError(
            f"the heads '{name}' compute their weights from parts (first: '{made[0]}'), and the "
            "average of the parts is not that of the weights. Put plain weights in their place "
            "first: torch.nn.utils.parametrize.remove_parametrizations, remove_weight_norm, "
            "prune.remove"
        )
    for key, value in head.state_dict().items():
        if value.is_floating_point():
            value += torch.stack([s[key] - value for s in states]).mean(0)
    return head


def _is_part(key: str, values: list[Any]) -> bool:
    """Whether a weight is computed from this entry of the heads in a way that no average keeps."""
    if not all(isinstance(v, torch.Tensor) for v in values):  # quantised
        return True
    if key.endswith("weight_mask"):
        return any(not torch.equal(v, values[0]) for v in values)
    return "parametrizations." in key or key.endswith(("weight_g", "weight_v", "weight_u"))
