"""The modes of norms after ``train()``, where a network overrides it.

A backbone may keep its norms in evaluation mode. Code that asks for their exact class
(``type(m) is nn.BatchNorm2d``) misses converted ones; what it does to the base is repeated here.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from sigmanens.norms import MemberNorm


def modes_after_train(network: nn.Module) -> dict[str, bool]:
    """The mode of every module after ``network.train()``, by name; the network is left alone.

    Empty where no module overrides ``train``, or an override does not work without values.
    """
    if all(getattr(type(m), "train") is nn.Module.train for m in network.modules()):  # noqa: B009
        return {}
    values: dict[int, Any] = {
        id(b): torch.empty_like(b, device="meta") for b in network.buffers()
    } | {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
        for p in network.parameters()
    }
    try:
        twin = copy.deepcopy(network, values).train()
    except Exception:
        return {}
    return {n: m.training for n, m in twin.named_modules(remove_duplicate=False)}


def keep_in_evaluation(network: nn.Module, modes: Mapping[str, bool]) -> list[str]:
    """Let members' norms stay in evaluation mode that ``train()`` kept there before conversion.

    ``modes`` is what :func:`modes_after_train` said of the base. Returns the names of the norms
    that would not have stayed there by themselves.
    """
    if all(modes.values()):
        return []
    found = []
    now = modes_after_train(network)
    for name, module in network.named_modules():
        evaluates = not modes.get(name, True)
        if isinstance(module, MemberNorm) and evaluates and now.get(name, True):
            module.always_evaluates = True
            found.append(name)
    return found
