"""The modes of norms after ``train()``, where a network overrides it.

A backbone may keep its norms in evaluation mode whenever it is trained. Converted norms are
instances of the class they replace, so that such code finds them. Code that asks for the exact
class (``type(m) is nn.BatchNorm2d``) does not; what it does to the base is seen here and repeated.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from sigmanens.norms import MemberNorm

__all__ = ["keep_in_evaluation", "modes_after_train"]


def modes_after_train(network: nn.Module) -> dict[str, bool]:
    """The mode of every module after ``network.train()``, by name; the network is left alone.

    Empty where no module overrides ``train``, or an override does not work without values.
    """
    if all(getattr(type(m), "train") is nn.Module.train for m in network.modules()):  # noqa: B009
        return {}
    values: dict[int, Any] = {}
    for parameter in network.parameters():
        empty = torch.empty_like(parameter, device="meta")
        values[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
    for buffer in network.buffers():
        values[id(buffer)] = torch.empty_like(buffer, device="meta")
    try:
        twin = copy.deepcopy(network, values).train()
    except Exception:
        return {}
    return {n: m.training for n, m in twin.named_modules(remove_duplicate=False)}


def keep_in_evaluation(network: nn.Module, modes: Mapping[str, bool]) -> list[str]:
    """Let members' norms stay in evaluation mode that ``train()`` kept there before conversion.

    Args:
        network: the converted network.
        modes: what :func:`modes_after_train` said of its base.

    Returns:
        names of the norms that would not have stayed there by themselves.
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
