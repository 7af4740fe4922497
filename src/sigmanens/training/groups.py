"""Parameter groups for an optimizer, and a check of one: scales are fast and never decayed."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from sigmanens.conversion.heads import head_lists
from sigmanens.conversion.rules import is_norm
from sigmanens.diversity.theory import is_number
from sigmanens.ensemble.ensemble import SigmaEnsemble, as_ensemble
from sigmanens.errors import InputError, warn
from sigmanens.norms import SigmaBatchNorm, SigmaNorm


def param_groups(
    ensemble: nn.Module,
    lr: float,
    weight_decay: float = 0.0,
    scale_lr_mult: float | None = None,
    head_lr_mult: float | None = None,
) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer: fast scales; no decay of scales, norms and biases.

    Scale logits of batch norms get ``lr × 100``, those of other norms ``lr × 10``
    (arXiv 2607.23860, 2512.20420), linear scales ``lr``. A one-cycle scheduler needs the rates
    told: ``OneCycleLR(optimizer, max_lr=[g["lr"] for g in groups], …)``.

    The objective is a mean over M members, so that a member's own head has 1/M of the gradient of
    one network's. Under SGD, ``head_lr_mult=M`` makes up for it; Adam does not need it.

    Args:
        ensemble: an ensemble, or any network (then there are no scale groups).
        lr: base learning rate > 0.
        weight_decay: for weights of linear, convolution and embedding layers.
        scale_lr_mult: one factor for all scale parameters.
        head_lr_mult: factor for the members' own heads. None: they are weights like others. Warns
            where an ensemble has none.

    Returns:
        the groups that are not empty, with a "name" and "lr_mult", the factor on ``lr``.

    Raises:
        InputError: for a rate, decay or factor out of range, or if nothing requires a gradient.
    """
    _check_number("lr", lr, positive=True)
    _check_number("weight_decay", weight_decay)
    for name, mult in (("scale_lr_mult", scale_lr_mult), ("head_lr_mult", head_lr_mult)):
        if mult is not None:
            _check_number(name, mult)
    factors = {"decay": 1.0, "no_decay": 1.0}
    factors |= {"scales_batch_norm": 100.0, "scales": 10.0, "scales_linear": 1.0}
    if scale_lr_mult is not None:
        factors |= {n: float(scale_lr_mult) for n in factors if n.startswith("scales")}
    of_heads: set[int] = set()
    if head_lr_mult is not None:
        factors |= dict.fromkeys(("heads_decay", "heads_no_decay"), float(head_lr_mult))
        of_heads = _of_heads(ensemble)
        if not of_heads and any(isinstance(m, SigmaEnsemble) for m in ensemble.modules()):
            warn(
                f"head_lr_mult is {head_lr_mult}, but the members share one head: it is a weight "
                "like others. Leave head_lr_mult out, or convert with head='copy' or 'fresh'"
            )
    sets: dict[str, list[nn.Parameter]] = {n: [] for n in factors}
    scales = {id(m.logit): m for m in ensemble.modules() if isinstance(m, SigmaNorm)}
    spared = _spared(ensemble)
    seen: set[int] = set()
    for module in ensemble.modules():
        for key, p in module.named_parameters(recurse=False):
            if not p.requires_grad or id(p) in seen:
                continue
            seen.add(id(p))
            if id(p) in scales:
                norm = scales[id(p)]
                kind = "scales_batch_norm" if isinstance(norm, SigmaBatchNorm) else "scales"
                sets[kind if norm.kind == "sigmoid" else "scales_linear"].append(p)
                continue
            undecayed = p.dim() < 2 or key == "bias" or id(p) in spared
            undecayed |= is_norm(module) or isinstance(module, SigmaNorm)
            where = "heads_" if id(p) in of_heads else ""
            sets[where + ("no_decay" if undecayed else "decay")].append(p)
    if not seen:
        raise InputError("no parameter requires a gradient: there is nothing to train")
    return [
        {
            "params": sets[n],
            "lr": lr * factor,
            "weight_decay": weight_decay if n in ("decay", "heads_decay") else 0.0,
            "name": n,
            "lr_mult": factor,
        }
        for n, factor in factors.items()
        if sets[n]
    ]


def _spared(network: nn.Module) -> set[int]:
    """Parameters that a network names in ``no_weight_decay()``, as timm's and the rivals do."""
    named = getattr(network, "no_weight_decay", None)
    names = set(named()) if callable(named) else set()
    return {id(p) for n, p in network.named_parameters() if n in names}


def _of_heads(network: nn.Module) -> set[int]:
    """Parameters of heads that one member alone has, in a network or in ensembles within it."""
    counts = [(m, getattr(m, "num_members", None)) for m in network.modules()]
    lists = [head_lists(m, count) for m, count in counts if isinstance(count, int)]
    return {id(p) for found in lists for _, heads in found for p in heads.parameters()}


def _check_number(name: str, value: float, positive: bool = False) -> None:
    if not is_number(value) or not math.isfinite(value) or value < 0 or (positive and value == 0):
        bound = "> 0" if positive else "≥ 0"
        raise InputError(f"{name} is {value!r}; expected a finite number {bound}")


def check_optimizer(ensemble: SigmaEnsemble, optimizer: torch.optim.Optimizer) -> list[str]:
    """Problems with how an optimizer treats the scales; each is also issued as a warning.

    Looks for scales that are decayed or missing, and for sigmoid scales at the learning rate of the
    weights (a scheduler that was given one ``max_lr``, say). Call it after the scheduler is made; a
    rate of 0, as at the start of a warm-up, tells nothing.
    """
    norms = as_ensemble(ensemble).sigma_norms()
    scales = {id(m.logit): n for n, m in norms.items() if m.logit.requires_grad}
    problems: list[str] = []
    found: set[str] = set()
    scale_rates: set[float] = set()
    other_rates: set[float] = set()
    for group in optimizer.param_groups:
        mine = [scales[id(p)] for p in group["params"] if id(p) in scales]
        found.update(mine)
        rate = float(group["lr"])
        if mine and group.get("weight_decay", 0.0):
            problems.append(
                f"weight decay {group['weight_decay']:g} reaches the scales of {len(mine)} σNorm "
                f"layers (first: '{mine[0]}') and pulls every σ(γ) to ½. Build the optimizer from "
                "sigmanens.param_groups"
            )
        if any(norms[n].kind == "sigmoid" for n in mine) and group.get("lr_mult") != 1.0:
            scale_rates.add(rate)
        if len(mine) < len(group["params"]) and group.get("lr_mult", 1.0) == 1.0:
            other_rates.add(rate)
    missing = [n for n in scales.values() if n not in found]
    if missing:
        problems.append(
            f"{len(missing)} σNorm layers have trainable scales that are not in the optimizer "
            f"(first: '{missing[0]}'): they stay as they are"
        )
    equal = sorted((scale_rates & other_rates) - {0.0})
    if equal:
        problems.append(
            f"scales and weights have the same learning rate {equal[0]:g}, where scales need 10 to "
            "100 times as much. Build the optimizer from sigmanens.param_groups and give a "
            "scheduler max_lr=[g['lr'] for g in groups]"
        )
    for problem in problems:
        warn(problem)
    return problems
