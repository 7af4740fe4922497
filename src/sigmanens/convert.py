"""From a network to an ensemble: audit, then swap norms and heads.

``convert`` works on a copy; ``convert_`` in place. Both build the same thing from a *plan*: which
norms, which heads, how initialised. A checkpoint stores its plan, so loading is building again
and filling in the values.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from sigmanens.audit import ConversionReport, LayerSelector, NormEntry, audit, norms_are_trained
from sigmanens.ensemble import SigmaEnsemble, check_schedule
from sigmanens.errors import AlreadyConvertedError, ConversionError, InputError
from sigmanens.fingerprint import shared_fingerprints
from sigmanens.heads import HEADS, find_heads, member_heads
from sigmanens.inits import INITS, initial_affine
from sigmanens.members import MemberAxis
from sigmanens.norms import MemberBatchNorm, MemberNorm, SigmaNorm
from sigmanens.plan import Plan
from sigmanens.rules import NormRule, rule_for
from sigmanens.selection import paper_rule

__all__ = ["build", "convert", "convert_"]


def convert(
    model: nn.Module,
    members: int,
    *,
    head: str = "auto",
    head_name: str | Sequence[str] | None = None,
    layers: LayerSelector = None,
    init: str = "auto",
    scale: str = "sigmoid",
    shift: bool | None = None,
    train: str = "all",
    batch_dims: Mapping[str | int, int | None] | None = None,
    schedule: str | int = "auto",
    example: Any = None,
    generator: torch.Generator | None = None,
) -> SigmaEnsemble:
    """Convert a copy of a network into an ensemble of M members (arXiv 2607.23860).

    The base stays bit-identical. Mode, device, dtype, ``requires_grad`` and memory format of
    everything shared are kept; ``print(ensemble.report)`` says what became of each norm.

    Args:
        model: any classifier with normalisation layers.
        members: M ≥ 1.
        head: "fresh", "copy", "shared", or "auto": copy under "preserve", fresh otherwise.
        head_name: dotted name (or names) of the head, where it is not found by itself.
        layers: which norms to convert: regex (``re.search`` on the dotted name), list of names or
            callable ``(name, module) -> bool``; all by default. A kept BatchNorm keeps its shared
            affine and gets statistics per member.
        init: "normal", "preserve", "paper" (see :mod:`sigmanens.inits`) or "auto": preserve when
            the selected norms have been trained, else normal.
        scale: "sigmoid", or "linear" for the FiLM-Ensemble control.
        shift: one trained shift per member; the default depends on ``init``.
        train: "all", or "members": only scales, shifts and heads require a gradient.
        batch_dims: batch dimension by input name or position (None: not batched), where dimension
            0 is wrong or ambiguous.
        schedule: "auto", "folded", "sequential", or members per pass.
        example: input (tensor, tuple of positional or mapping of keyword inputs) on which folding
            and, under "preserve" with copied heads, equality with the base are checked now.
        generator: source of the random scales and fresh heads.

    Raises:
        NoNormError, UnsupportedNormError, AlreadyConvertedError, HeadNotFoundError,
        ConversionError: as named. InputError: for an argument out of its range.
    """
    return _convert(
        model, members, False, head, head_name, layers, init, scale, shift, train, batch_dims,
        schedule, example, generator,
    )  # fmt: skip


def convert_(model: nn.Module, members: int, **options: Any) -> SigmaEnsemble:
    """Convert a network in place: as :func:`convert`, but ``model`` itself becomes the backbone.

    Raises:
        ConversionError: besides the errors of ``convert``, if the network is itself a norm, which
            cannot replace itself.
    """
    defaults: dict[str, Any] = {
        "head": "auto", "head_name": None, "layers": None, "init": "auto", "scale": "sigmoid",
        "shift": None, "train": "all", "batch_dims": None, "schedule": "auto", "example": None,
        "generator": None,
    }  # fmt: skip
    unknown = sorted(set(options) - set(defaults))
    if unknown:
        raise TypeError(f"convert_() got unexpected arguments: {', '.join(unknown)}")
    return _convert(model, members, True, **(defaults | options))


def _convert(
    model: nn.Module,
    members: int,
    in_place: bool,
    head: str,
    head_name: str | Sequence[str] | None,
    layers: LayerSelector,
    init: str,
    scale: str,
    shift: bool | None,
    train: str,
    batch_dims: Mapping[str | int, int | None] | None,
    schedule: str | int,
    example: Any,
    generator: torch.Generator | None,
) -> SigmaEnsemble:
    _check_arguments(model, members, head, init, scale, train)
    check_schedule(schedule, members)
    norm_list = _selected_norms(model, layers)
    reason = "as asked"
    if init == "auto":
        trained, why = norms_are_trained(norm_list)
        init, reason = ("preserve" if trained else "normal"), f"auto: {why}"
    if head == "auto":
        head = "copy" if init == "preserve" else "fresh"
    names = [] if head == "shared" else find_heads(model, head_name, head)
    entries, rules = audit(model, layers, names, head != "shared")
    if in_place and "" in rules:
        raise ConversionError(
            f"a root {type(model).__name__} cannot be replaced in place; use convert(), or "
            "convert_() on the module that holds it"
        )
    plan = Plan(
        members=members,
        norms=tuple(rules),
        heads=tuple(names),
        head=head,
        init=init,
        scale=scale,
        shift=shift,
        train=train,
        schedule=schedule,
        batch_dims={str(k): v for k, v in batch_dims.items()} if batch_dims else None,
    )
    ensemble = build(model, plan, in_place=in_place, generator=generator, entries=entries)
    ensemble.report.init_reason = reason
    if init == "paper" and head == "copy":
        ensemble.report.notes.append(
            "init='paper' with copied heads: all members are equal and stay so in training "
            "(a symmetric fixed point). Use head='fresh' or init='preserve'"
        )
    if example is not None:
        ensemble.check(example, base=None if in_place else model)
    return ensemble


def build(
    model: nn.Module,
    plan: Plan,
    *,
    in_place: bool = False,
    generator: torch.Generator | None = None,
    entries: list[NormEntry] | None = None,
) -> SigmaEnsemble:
    """Build the ensemble a plan describes from its base; the draws come from ``generator``."""
    base_parameters = sum(p.numel() for p in model.parameters())
    if entries is None:
        entries, _ = audit(model, list(plan.norms), plan.heads, plan.head != "shared")
    kind = type(model)
    # All that can fail is computed before the network is touched, so that convert_ never leaves half.
    axis = MemberAxis(plan.members)
    network = model if in_place else copy.deepcopy(model)
    swaps: dict[int, nn.Module] = {}
    places: list[tuple[str, nn.Module]] = []
    modules = dict(network.named_modules(remove_duplicate=False))
    for name in plan.norms:
        source = modules[name]
        if id(source) not in swaps:
            swaps[id(source)] = _sigma_norm(source, name, axis, plan, generator)
        places.append((name, swaps[id(source)]))
    inside = tuple(f"{h}." for h in plan.heads)
    for entry in entries:
        source = modules[entry.name]
        rule = rule_for(source)
        in_head = entry.name in plan.heads or (bool(inside) and entry.name.startswith(inside))
        if entry.action == "kept" and not in_head and isinstance(rule, NormRule) and rule.batch_statistics:
            if id(source) not in swaps:
                swaps[id(source)] = _settled(MemberBatchNorm(source, axis), source, entry.name)
            places.append((entry.name, swaps[id(source)]))
    for name in plan.heads:
        heads = member_heads(modules[name], plan.head, axis, name, generator)
        heads.training = modules[name].training
        places.append((name, heads))
    for name, new in places:
        if name == "":
            network = new
            continue
        parent, _, leaf = name.rpartition(".")
        setattr(network.get_submodule(parent), leaf, new)
    patches = _disable_fused_paths(network)
    if plan.train == "members":
        _freeze_shared(network, plan)
    report = ConversionReport(
        model=kind.__name__,
        members=plan.members,
        norms=entries,
        init=plan.init,
        scale=plan.scale,
        shift=_shift_word(network),
        head=plan.head,
        heads=plan.heads,
        schedule=str(plan.schedule),
        base_parameters=base_parameters,
    )
    norms = {n: m for n, m in network.named_modules() if isinstance(m, SigmaNorm)}
    report.regularised_rule, chosen = paper_rule(network, norms)
    report.regularised = tuple(chosen)
    report.added_parameters = sum(p.numel() for p in network.parameters()) - base_parameters
    ensemble = SigmaEnsemble(network, axis, plan, report)
    ensemble.patches = patches
    ensemble.base_fingerprint = shared_fingerprints(network)
    return ensemble


def _check_arguments(
    model: nn.Module, members: int, head: str, init: str, scale: str, train: str
) -> None:
    if isinstance(model, SigmaEnsemble):
        raise AlreadyConvertedError(
            f"this is a SigmaEnsemble of {model.num_members} members already; it was left "
            "unchanged. Convert its base again for another number of members"
        )
    if not isinstance(model, nn.Module):
        raise InputError(f"convert got a {type(model).__name__}; expected an nn.Module")
    if isinstance(members, bool) or not isinstance(members, int) or members < 1:
        raise InputError(f"members is {members!r}; expected an integer ≥ 1")
    for key, value, allowed in (
        ("head", head, ("auto", *HEADS)),
        ("init", init, ("auto", *INITS)),
        ("scale", scale, ("sigmoid", "linear")),
        ("train", train, ("all", "members")),
    ):
        if value not in allowed:
            raise InputError(f"{key} is {value!r}; expected one of {', '.join(map(repr, allowed))}")


def _selected_norms(model: nn.Module, layers: LayerSelector) -> list[nn.Module]:
    _, rules = audit(model, layers, (), False)
    return [model.get_submodule(n) for n in rules]


def _sigma_norm(
    source: nn.Module, name: str, axis: MemberAxis, plan: Plan, generator: torch.Generator | None
) -> nn.Module:
    rule = rule_for(source)
    if isinstance(rule, str):
        raise ConversionError(f"norm '{name}': {rule}")
    weight, bias = getattr(source, "weight", None), getattr(source, "bias", None)
    tensors = [weight, *source.parameters(), *source.buffers()]
    device = next((t.device for t in tensors if isinstance(t, torch.Tensor)), None)
    affine = initial_affine(
        weight,
        bias,
        rule.shape(source),
        axis.num_members,
        init=plan.init,
        scale=plan.scale,
        shift=plan.shift,
        generator=generator,
        device=device,
        where=name,
    )
    return _settled(rule.build(source, axis, affine), source, name)


def _settled(new: nn.Module, source: nn.Module, name: str) -> nn.Module:
    """Give the new layer its name, the mode and the forward hooks of the old one, and a template."""
    assert isinstance(new, MemberNorm)
    new.where = name or "(root)"
    new.train(source.training)
    new._forward_hooks = source._forward_hooks
    new._forward_pre_hooks = source._forward_pre_hooks
    new.remember(source)
    return new


def _disable_fused_paths(network: nn.Module) -> list[tuple[str, str, Any]]:
    """Keep nn.TransformerEncoder(Layer) from reading norm weights past the σNorms in evaluation.

    Returns:
        what was changed as (module, attribute, former value), to be undone in plain networks.
    """
    patches: list[tuple[str, str, Any]] = []
    for name, module in network.named_modules():
        if not any(isinstance(m, MemberNorm) for m in module.modules()):
            continue
        if isinstance(module, nn.TransformerEncoderLayer):
            patches.append((name, "activation_relu_or_gelu", module.activation_relu_or_gelu))
            module.activation_relu_or_gelu = 0
        if isinstance(module, nn.TransformerEncoder):
            patches.append((name, "use_nested_tensor", module.use_nested_tensor))
            module.use_nested_tensor = False
    return patches


def _freeze_shared(network: nn.Module, plan: Plan) -> None:
    own = tuple(f"{h}." for h in plan.heads)
    for module_name, module in network.named_modules():
        if isinstance(module, SigmaNorm) or (own and f"{module_name}.".startswith(own)):
            continue
        for p in module.parameters(recurse=False):
            p.requires_grad_(False)


def _shift_word(network: nn.Module) -> str:
    shifts = {
        "none" if m.shift is None else ("one per member" if m.shift.requires_grad else "the base's, shared")
        for m in network.modules()
        if isinstance(m, SigmaNorm)
    }
    return " / ".join(sorted(shifts))
