"""The audit: every norm of a network, and whether conversion takes, keeps or refuses it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from sigmanens.conversion.config import LayerSelector, check_selector, matches
from sigmanens.conversion.refusals import no_norms, some_names, unsupported
from sigmanens.conversion.rules import KeepRule, NormRule, Rule, is_norm, rules_for
from sigmanens.errors import AlreadyConvertedError, NoNormError
from sigmanens.norms import MemberNorm

__all__ = [
    "ConversionReport",
    "NormEntry",
    "audit",
    "find_norms",
    "mixes_members",
    "norms_are_trained",
]

_IN_HEAD, _UNSELECTED = "inside a head", "not selected"


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
        members: M.
        norms: every norm, in the order of registration.
        init, init_reason: the initialisation, and why it was chosen.
        scale, shift, head: kinds of scale, shift and head.
        heads: dotted names of the heads that became one per member.
        regularised, regularised_rule: norms that the paper's rule chooses for the penalty, and its
            name.
        task: what the outputs are; None until it is stated or a loss says it: read as multiclass.
        notes: what else a user should know, such as guesses and fallbacks.
    """

    model: str
    members: int
    norms: list[NormEntry]
    init: str = ""
    init_reason: str = ""
    scale: str = "sigmoid"
    shift: str = ""
    head: str = ""
    heads: tuple[str, ...] = ()
    schedule: str | int = "auto"
    task: str | None = None
    base_parameters: int = 0
    added_parameters: int = 0
    regularised: tuple[str, ...] = ()
    regularised_rule: str = ""
    notes: list[str] = field(default_factory=list)

    def with_action(self, action: str) -> list[NormEntry]:
        """The entries with one action: "converted", "kept" or "refused"."""
        return [n for n in self.norms if n.action == action]

    @property
    def converted(self) -> list[str]:
        """Names of the converted norms."""
        return [n.name for n in self.with_action("converted")]

    @property
    def kept(self) -> list[str]:
        """Names of the norms left as they were, or with their affine shared."""
        return [n.name for n in self.with_action("kept")]

    @property
    def refused(self) -> list[str]:
        """Names of the norms no rule covers."""
        return [n.name for n in self.with_action("refused")]

    def __str__(self) -> str:
        width = max([len(n.name) for n in self.norms] + [4])
        kinds = max([len(n.kind) for n in self.norms] + [5])
        total = self.base_parameters + self.added_parameters
        lines = [
            f"{self.model} as an ensemble of {self.members} members: "
            f"{len(self.converted)} norms converted, {len(self.kept)} kept, "
            f"{len(self.refused)} refused",
            f"  init        {self.init}" + (f" ({self.init_reason})" if self.init_reason else ""),
            f"  scale       {self.scale}; shift {self.shift}",
            f"  heads       {self.head}: {', '.join(self.heads) if self.heads else 'one for all'}",
            f"  schedule    {self.schedule}",
            f"  task        {self.task or 'multiclass, unless the loss says otherwise'}",
            f"  parameters  {total:,} ({self.base_parameters:,} in the base"
            + (f", × {total / self.base_parameters:.3f})" if self.base_parameters else ")"),
        ]
        if self.regularised:
            lines.append(
                f"  penalty     {len(self.regularised)} layers by rule '{self.regularised_rule}'"
            )
        lines += [f"  note        {n}" for n in self.notes]
        lines.append(f"  {'norm':<{width}}  {'class':<{kinds}}  {'C':>6}  action     reason")
        for n in self.norms:
            name = n.name or "(root)"
            lines.append(
                f"  {name:<{width}}  {n.kind:<{kinds}}  {n.channels:>6}  {n.action:<9}  {n.reason}"
            )
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
        raise no_norms(model)
    return found


def audit(
    model: nn.Module,
    layers: LayerSelector,
    head_names: Sequence[str],
    own_heads: bool,
    bypassed: Mapping[str, str] = MappingProxyType({}),
) -> tuple[list[NormEntry], dict[str, Rule]]:
    """List every norm of a network with its rule. Nothing is changed.

    Args:
        model: the base.
        layers: which norms to convert.
        head_names: names of the heads.
        own_heads: whether heads become one per member. The norms inside are copied with them.
        bypassed: norms whose weight the base uses outside the norm, and where
            (:mod:`sigmanens.conversion.functional`). They are kept.

    Returns:
        an entry for every norm, and the rule by its name, in the order of registration.

    Raises:
        AlreadyConvertedError: if σNorm layers are present.
        NoNormError: if there is no norm, or none is selected.
        UnsupportedNormError: if no rule covers a selected norm. It names the norms and reasons.
    """
    check_selector(layers)
    found = find_norms(model)
    entries: list[NormEntry] = []
    rules = rules_for(found)
    first: dict[int, str] = {}
    selected = {id(m) for n, m in found if matches(layers, n, m)}  # tied norms: under any name
    for name, module in found:
        rule = rules[name]
        channels = 0
        if isinstance(rule, NormRule):
            channels = int(torch.Size(rule.shape(module)).numel())
        kind = type(module).__name__

        def entry(
            action: str, reason: str, name: str = name, kind: str = kind, channels: int = channels
        ) -> NormEntry:
            return NormEntry(name, kind, channels, action, reason)

        if own_heads and any(name == h or name.startswith(f"{h}.") for h in head_names):
            entries.append(entry("kept", f"{_IN_HEAD}, copied with it"))
        elif name in bypassed and isinstance(rule, NormRule) and rule.keep is not None:
            cure = "past each member's statistics: call the norm itself there"
            entries.append(entry("refused", f"{bypassed[name]}, {cure}"))
        elif id(module) not in selected:
            entries.append(entry("kept", f"{_UNSELECTED}{_statistics_of_kept(module, rule)}"))
        elif isinstance(rule, str):
            entries.append(entry("refused", rule))
        elif isinstance(rule, KeepRule):
            entries.append(entry("kept", rule.reason))
        elif name in bypassed:
            entries.append(entry("kept", f"{bypassed[name]}: it stays shared by all members"))
        else:
            tied = first.setdefault(id(module), name)
            entries.append(entry("converted", "" if tied == name else f"tied to '{tied}'"))
    if isinstance(layers, Sequence) and not isinstance(layers, str):
        unknown = sorted(set(layers) - {n for n, _ in found})
        if unknown:
            raise NoNormError(
                f"layers names {', '.join(map(repr, unknown))}, which are no norms of this "
                f"{type(model).__name__}; its norms are {some_names([n for n, _ in found])}"
            )
    converted = any(e.action == "converted" for e in entries)
    refused = [(e.name, e.kind, e.reason) for e in entries if e.action == "refused"]
    if refused:
        others: bool | None = any(isinstance(rule, NormRule) for rule in rules.values())
        if any(name in bypassed for name, _, _ in refused):
            others = None
        raise unsupported(model, refused, len(found), others)
    wanted = [e for e in entries if not e.reason.startswith(_UNSELECTED)]
    if not converted and selected and all(e.reason.startswith(_IN_HEAD) for e in wanted):
        raise NoNormError(
            f"all norms of this {type(model).__name__} that layers={layers!r} selects lie inside "
            f"the head {', '.join(map(repr, head_names))}, which becomes one per member. Name a "
            "smaller head with head_name, or use head='shared'"
        )
    if not converted and selected:
        listed = "\n".join(f"  {e.name or '(root)'}: {e.reason}" for e in wanted)
        raise NoNormError(f"no norm of this {type(model).__name__} can be converted:\n{listed}")
    if not converted:
        raise NoNormError(
            f"layers={layers!r} selects none of the {len(found)} norms of this "
            f"{type(model).__name__}: {some_names([n for n, _ in found])}"
        )
    return entries, rules


def mixes_members(module: nn.Module, rule: Rule) -> bool:
    """Whether a norm that is kept takes its running statistics over all members together."""
    if isinstance(rule, NormRule) and rule.keep is not None:
        return False
    if isinstance(module, _NormBase):
        return bool(module.track_running_stats)
    statistics = (getattr(module, n, None) for n in ("running_mean", "running_var"))
    return isinstance(rule, str) and any(isinstance(t, Tensor) for t in statistics)


def _statistics_of_kept(module: nn.Module, rule: Rule) -> str:
    if isinstance(rule, NormRule) and rule.keep is not None:
        return "; statistics per member"
    return "; running statistics mix all members" if mixes_members(module, rule) else ""


def norms_are_trained(norms: Sequence[nn.Module]) -> tuple[bool, str]:
    """Whether norms have been trained, and the reason.

    Trained norms have counted batches, moved their statistics, or weights that are not constant.
    """
    for norm in norms:
        counted = getattr(norm, "num_batches_tracked", None)
        if isinstance(counted, Tensor) and not counted.is_meta and bool((counted > 0).any()):
            return True, "the base's norms have counted batches"
        mean, var = getattr(norm, "running_mean", None), getattr(norm, "running_var", None)
        if _differs(mean, 0) or _differs(var, 1):
            return True, "the base's norms have moved statistics"
        for value in norm.state_dict().values():
            floats = isinstance(value, Tensor) and value.is_floating_point() and value.numel()
            if floats and _differs(value, value.flatten()[0]):
                return True, "the base's norms have trained affine parameters"
    return False, "the base's norms are untrained"


def _differs(value: object, constant: Tensor | float) -> bool:
    return isinstance(value, Tensor) and not value.is_meta and bool((value != constant).any())
