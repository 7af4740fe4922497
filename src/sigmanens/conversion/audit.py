"""The audit: every norm of a network, and whether conversion takes, keeps or refuses it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.conv import _ConvNd

from sigmanens.conversion.config import (
    ConversionConfig,
    LayerSelector,
    matches,
    some_names,
    unknown_names,
)
from sigmanens.conversion.rules import KeepRule, NormRule, Rule, is_norm, rule_for
from sigmanens.errors import AlreadyConvertedError, NoNormError, UnsupportedNormError
from sigmanens.norms import MemberNorm

_IN_HEAD, _UNSELECTED = "inside a head", "not selected"
MIXES = "running statistics mix all members"
_KNOWN = "BatchNorm, LayerNorm, RMSNorm, GroupNorm or InstanceNorm"


@dataclass(frozen=True)
class NormEntry:
    """One norm: its dotted name, class, scales per member, what happens to it, and why."""

    name: str
    kind: str
    channels: int
    action: str  # "converted", "kept" or "refused"
    reason: str = ""


@dataclass
class ConversionReport:
    """What a conversion did. Print it for a table.

    Attributes:
        model: class of the base.
        plan: the resolved config, with the schedule and the task as they are now.
        norms: every norm, in the order of registration.
        init_reason: why the initialisation was chosen.
        shift: kind of shift.
        base_parameters, added_parameters: numbers of parameters.
        regularised, regularised_rule: the paper's choice of norms for the penalty.
        notes: what else a user should know, such as guesses and fallbacks.
    """

    model: str
    plan: ConversionConfig
    norms: list[NormEntry]
    shift: str
    base_parameters: int
    added_parameters: int
    regularised: tuple[str, ...]
    regularised_rule: str
    init_reason: str = ""
    notes: list[str] = field(default_factory=list)

    def _names(self, action: str) -> list[str]:
        return [n.name for n in self.norms if n.action == action]

    @property
    def converted(self) -> list[str]:
        """Names of the converted norms."""
        return self._names("converted")

    @property
    def kept(self) -> list[str]:
        """Names of the norms left as they were, or with their affine shared."""
        return self._names("kept")

    @property
    def refused(self) -> list[str]:
        """Names of the norms no rule covers."""
        return self._names("refused")

    def __str__(self) -> str:
        width = max([len(n.name) for n in self.norms] + [4])
        kinds = max([len(n.kind) for n in self.norms] + [5])
        plan, total = self.plan, self.base_parameters + self.added_parameters
        lines = [
            f"{self.model} as an ensemble of {plan.members} members: "
            f"{len(self.converted)} norms converted, {len(self.kept)} kept, "
            f"{len(self.refused)} refused",
            f"  init        {plan.init}" + (f" ({self.init_reason})" if self.init_reason else ""),
            f"  scale       {plan.scale}; shift {self.shift}",
            f"  heads       {plan.head}: {', '.join(plan.heads) or 'one for all'}",
            f"  schedule    {plan.schedule}",
            f"  task        {plan.task or 'multiclass, unless the loss says otherwise'}",
            f"  parameters  {total:,} ({self.base_parameters:,} in the base"
            + (f", × {total / self.base_parameters:.3f})" if self.base_parameters else ")"),
            f"  penalty     {len(self.regularised)} layers by rule '{self.regularised_rule}'",
            *(f"  note        {note}" for note in self.notes),
            f"  {'norm':<{width}}  {'class':<{kinds}}  {'C':>6}  action     reason",
        ]
        for n in self.norms:
            name = f"{n.name or '(root)':<{width}}  {n.kind:<{kinds}}"
            lines.append(f"  {name}  {n.channels:>6}  {n.action:<9}  {n.reason}")
        return "\n".join(lines)


def find_norms(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every norm of a network with its dotted name; a tied one under each of its names.

    Raises:
        AlreadyConvertedError: if σNorm layers are present.
        NoNormError: if there is no norm.
    """
    done = [n for n, m in model.named_modules() if isinstance(m, MemberNorm)]
    if done:
        raise AlreadyConvertedError(
            f"this {type(model).__name__} holds {len(done)} σNorm layers already (first: "
            f"'{done[0]}'); it was left unchanged. Convert the base network instead"
        )
    found = [(n, m) for n, m in model.named_modules(remove_duplicate=False) if is_norm(m)]
    if not found:
        raise _no_norms(model)
    return found


def audit(
    model: nn.Module,
    layers: LayerSelector,
    head_names: Sequence[str],
    bypassed: Mapping[str, str],
) -> tuple[list[NormEntry], dict[str, Rule]]:
    """An entry for every norm and the rule by its name, in the order of registration.

    Norms inside ``head_names`` are copied with their head. ``bypassed`` are norms whose weight the
    base uses elsewhere, and where; they are kept. Nothing is changed.

    Raises:
        AlreadyConvertedError: if σNorm layers are present.
        NoNormError: if there is no norm, or none is selected.
        UnsupportedNormError: if no rule covers a selected norm. It names the norms and reasons.
    """
    found = find_norms(model)
    kind = type(model).__name__
    entries: list[NormEntry] = []
    probed: dict[Hashable, NormRule | str] = {}
    rules = {name: rule_for(norm, probed) for name, norm in found}
    first: dict[int, str] = {}
    selected = {id(m) for n, m in found if matches(layers, n, m)}  # tied norms: under any name
    heads = tuple(f"{h}." for h in head_names)
    for name, module in found:
        rule = rules[name]
        action, channels = "kept", 0
        if isinstance(rule, NormRule):
            channels = torch.Size(rule.shape(module)).numel()
        if f"{name}.".startswith(heads):
            reason = f"{_IN_HEAD}, copied with it"
        elif name in bypassed and isinstance(rule, NormRule) and rule.keep is not None:
            cure = "past each member's statistics: call the norm itself there"
            action, reason = "refused", f"{bypassed[name]}, {cure}"
        elif id(module) not in selected:
            reason = f"{_UNSELECTED}{_statistics_of_kept(module, rule)}"
        elif isinstance(rule, str):
            action, reason = "refused", rule
        elif isinstance(rule, KeepRule):
            reason = rule.reason
        elif name in bypassed:
            reason = f"{bypassed[name]}: it stays shared by all members"
        else:
            tied = first.setdefault(id(module), name)
            action, reason = "converted", "" if tied == name else f"tied to '{tied}'"
        entries.append(NormEntry(name, type(module).__name__, channels, action, reason))
    names = [n for n, _ in found]
    unknown = unknown_names(layers, names)
    if unknown:
        raise NoNormError(
            f"layers names {', '.join(map(repr, unknown))}, which are no norms of this "
            f"{kind}; its norms are {some_names(names)}"
        )
    refused = [e for e in entries if e.action == "refused"]
    if refused:
        them = "it as it is" if len(refused) == 1 else "them as they are"
        advice = f"\nTo keep {them}, the same for all members, choose other norms with layers=…"
        if any(e.name in bypassed for e in refused):
            advice = ""
        elif not any(isinstance(rule, NormRule) for rule in rules.values()):
            advice = f"\nThis {kind} has no other norm to convert"
        raise UnsupportedNormError(
            f"{len(refused)} of {len(found)} norms of this {kind} cannot be converted:"
            f"{_listed(refused)}{advice}"
        )
    if first or (layers == () and head_names):  # no norm: members part at the head
        return entries, rules
    if not selected:
        raise NoNormError(
            f"layers={layers!r} selects none of the {len(found)} norms of this {kind}: "
            f"{some_names(names)}"
        )
    wanted = [e for e in entries if not e.reason.startswith(_UNSELECTED)]
    if all(e.reason.startswith(_IN_HEAD) for e in wanted):
        raise NoNormError(
            f"all norms of this {kind} that layers={layers!r} selects lie inside the head "
            f"{', '.join(map(repr, head_names))}, which becomes one per member. Name a smaller "
            "head with head_name, or use head='shared'"
        )
    listed = "\n".join(f"  {e.name or '(root)'}: {e.reason}" for e in wanted)
    raise NoNormError(f"no norm of this {kind} can be converted:\n{listed}")


def _no_norms(model: nn.Module) -> NoNormError:
    """The error for a network without a norm. It names weight-standardised convolutions."""
    kind = type(model).__name__
    # timm and BiT call convolutions that standardise their weights StdConv2d and the like.
    standardised = [
        type(m).__name__
        for m in model.modules()
        if isinstance(m, _ConvNd) and any("StdConv" in c.__name__ for c in type(m).__mro__)
    ]
    if standardised:
        return NoNormError(
            f"this {kind} has no normalisation layers: it standardises the weights of its "
            f"convolutions instead ({len(standardised)} × {', '.join(sorted(set(standardised)))}). "
            "σNorm scales normalised activations per member. Take a network with "
            f"{_KNOWN} layers"
        )
    return NoNormError(
        f"no normalisation layer found in this {kind}: σNorm needs at least one module of the "
        f"kind {_KNOWN}. A norm that forward calls as a function (such as F.layer_norm) cannot be "
        "converted: make it a module of the network"
    )


def _listed(refused: Sequence[NormEntry]) -> str:
    """Every reason once, with its norms."""
    groups: dict[tuple[str, str], list[str]] = {}
    for e in refused:
        groups.setdefault((e.kind, e.reason), []).append(e.name)
    text = ""
    for (kind, reason), names in groups.items():
        count = kind if len(names) == 1 else f"{len(names)} × {kind}"
        text += f"\n  {some_names(names, 4)} ({count}): {reason}"
    return text


def _statistics_of_kept(module: nn.Module, rule: Rule) -> str:
    """What becomes of the running statistics of a norm that is not selected."""
    if isinstance(rule, NormRule) and rule.keep is not None:
        return "; statistics per member"
    values = (getattr(module, n, None) for n in ("running_mean", "running_var"))
    unruled = isinstance(rule, str) and any(isinstance(t, Tensor) for t in values)
    mixes = module.track_running_stats if isinstance(module, _NormBase) else unruled
    return f"; {MIXES}" if mixes else ""


def norms_are_trained(norms: Sequence[nn.Module]) -> tuple[bool, str]:
    """Whether norms have counted batches, moved statistics or weights that vary; and the reason."""
    for norm in norms:
        counted = getattr(norm, "num_batches_tracked", None)
        if isinstance(counted, Tensor) and not counted.is_meta and bool((counted > 0).any()):
            return True, "the base's norms have counted batches"
        mean, var = getattr(norm, "running_mean", None), getattr(norm, "running_var", None)
        if _differs(mean, 0) or _differs(var, 1):
            return True, "the base's norms have moved statistics"
        values = [v for v in norm.state_dict().values() if isinstance(v, Tensor) and v.numel()]
        if any(v.is_floating_point() and _differs(v, v.flatten()[0]) for v in values):
            return True, "the base's norms have trained affine parameters"
    return False, "the base's norms are untrained"


def _differs(value: object, constant: Tensor | float) -> bool:
    return isinstance(value, Tensor) and not value.is_meta and bool((value != constant).any())
