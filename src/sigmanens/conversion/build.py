"""From a plan to an ensemble: swap the norms and heads of a network for those of M members."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from sigmanens.conversion.audit import MIXES, ConversionReport, NormEntry, audit
from sigmanens.conversion.blocks import paper_rule
from sigmanens.conversion.config import ConversionConfig
from sigmanens.conversion.copying import deep_copy, put
from sigmanens.conversion.fingerprint import fingerprint, shared_fingerprints, structure
from sigmanens.conversion.guards import switch_off
from sigmanens.conversion.heads import MemberHeads, member_heads
from sigmanens.conversion.modes import keep_in_evaluation, modes_after_train
from sigmanens.conversion.rules import NormRule, Rule
from sigmanens.errors import ConversionError, warn
from sigmanens.norms import MemberNorm, SigmaNorm
from sigmanens.norms.inits import initial_affine
from sigmanens.norms.member import adopt_hooks
from sigmanens.passes.context import MemberAxis


@dataclass
class Converted:
    """A network whose norms and heads are those of M members.

    Attributes:
        network: the converted network.
        axis: the member axis that all its layers share.
        report: audit of the conversion, with the plan.
        base_fingerprint: of the shared tensors at conversion, by state-dict key.
        structure: of the network at conversion, to which a checkpoint has to fit.
    """

    network: nn.Module
    axis: MemberAxis
    report: ConversionReport
    base_fingerprint: dict[str, int]
    structure: dict[str, str]


def build(
    model: nn.Module,
    plan: ConversionConfig,
    *,
    in_place: bool = False,
    generator: torch.Generator | None = None,
    audited: tuple[list[NormEntry], Mapping[str, Rule]] | None = None,
) -> Converted:
    """Build the network a resolved plan describes, from a copy of its base or from the base itself.

    ``audited`` is what :func:`sigmanens.conversion.audit.audit` found for it, anew by default.

    Raises:
        ConversionError: if the base has tensors on the meta device, or does not fit the plan.
    """
    for key, tensor in model.state_dict().items():
        if isinstance(tensor, Tensor) and tensor.is_meta:
            raise ConversionError(
                f"'{key}' lies on the meta device and has no values yet: load the weights first "
                "(model.to_empty(device=…), then model.load_state_dict(…))"
            )
    base_parameters = sum(p.numel() for p in model.parameters())
    if audited is None:
        audited = audit(model, plan.norms, plan.heads, {})
    entries, rules = audited
    kind = type(model)
    axis = MemberAxis(plan.members)
    network = model if in_place else deep_copy(model)
    # All that can fail comes before the network is touched, so that convert_ never leaves half.
    places = _replacements(network, plan, entries, rules, axis, generator)
    modes = modes_after_train(network)
    for name, new in places:
        network = put(network, name, new)
    switch_off(network)
    if plan.train == "members":
        _train_members_only(network)
    norms = {n: m for n, m in network.named_modules() if isinstance(m, SigmaNorm)}
    rule, chosen = paper_rule(network, norms)
    report = ConversionReport(
        model=kind.__name__,
        plan=plan,
        norms=entries,
        shift=_shift_word(norms.values()),
        base_parameters=base_parameters,
        added_parameters=sum(p.numel() for p in network.parameters()) - base_parameters,
        regularised=tuple(chosen),
        regularised_rule=rule,
    )
    if plan.train == "members" and plan.head == "shared":
        report.notes.append(
            "train='members' with head='shared': the one head is no member's own and stays frozen, "
            "as the rest of the base. For heads that train: head='copy' or head='fresh'"
        )
    mixing = [e.name for e in entries if e.reason.endswith(MIXES)]
    kept = keep_in_evaluation(network, modes)
    if kept:
        report.notes.append(
            f"train() of {kind.__name__} keeps {len(kept)} norms in evaluation mode by their exact "
            f"class (first: '{kept[0]}'), which the converted ones are not: they stay in "
            "evaluation mode until their always_evaluates is set to False"
        )
    if mixing:
        note = (
            f"{len(mixing)} kept norms (first: '{mixing[0]}') take their running "
            "statistics over all members together, for no rule says how to keep them apart. "
            "Register one with sigmanens.conversion.rules.register_norm, or freeze them with "
            "ens.freeze_statistics()"
        )
        report.notes.append(note)
        warn(note)
    made = Converted(network, axis, report, shared_fingerprints(network), structure(network))
    if plan.prefix:
        share(made, plan.prefix)
    return made


def share(converted: Converted, prefix: Iterable[str]) -> None:
    """Make what runs before the members part one network: its norms have one set of statistics.

    ``prefix`` are names of modules. Plan, report, fingerprints and structure follow.
    """
    network, report, before = converted.network, converted.report, structure(converted.network)
    names = tuple(prefix)
    report.plan, plain = replace(report.plan, prefix=names), plain_within(network, names)
    now = structure(network)
    converted.structure.update({k: v for k, v in now.items() if before.get(k) != v})
    for name, source in plain.items():
        base = {f"{name}.{k}": fingerprint(b) for k, b in source.named_buffers()}
        converted.base_fingerprint.update(base)
        if report.plan.train == "members":
            network.get_submodule(name).eval()
    reason = "not selected; before the members part, one set of statistics"
    report.norms[:] = [replace(e, reason=reason) if e.name in plain else e for e in report.norms]


def plain_within(network: nn.Module, prefix: Iterable[str]) -> dict[str, nn.Module]:
    """Let kept norms in these modules become plain ones; returns the base's by their names."""
    within = tuple(f"{name}." for name in prefix)
    found = network.named_modules(remove_duplicate=False)
    kept = {n: m for n, m in found if isinstance(m, MemberNorm) and f"{n}.".startswith(within)}
    sources = {name: layer.template for name, layer in kept.items()}
    for layer in set(kept.values()):
        layer.become_plain()
    return sources


def _replacements(
    network: nn.Module,
    plan: ConversionConfig,
    entries: list[NormEntry],
    rules: Mapping[str, Rule],
    axis: MemberAxis,
    generator: torch.Generator | None,
) -> list[tuple[str, nn.Module]]:
    """New modules by dotted name; tied modules get one replacement under all their names."""
    modules = dict(network.named_modules(remove_duplicate=False))
    like = next((t for t in network.state_dict().values() if _floating(t)), None)
    made: dict[int, nn.Module] = {}
    places: list[tuple[str, nn.Module]] = []

    def place(name: str, make: Callable[[nn.Module, str], nn.Module]) -> None:
        source = modules[name]
        if id(source) not in made:
            made[id(source)] = make(source, name)
        places.append((name, made[id(source)]))

    def converted(source: nn.Module, name: str) -> nn.Module:
        rule = rules[name]
        if not isinstance(rule, NormRule):
            raise ConversionError(f"norm '{name}': {rule}")
        weight, bias = rule.scale(source), getattr(source, "bias", None)
        tensors = [weight, *source.parameters(), *source.buffers(), like]
        near = next((t for t in tensors if _floating(t)), None)
        affine = initial_affine(
            weight,
            bias,
            rule.shape(source),
            axis.num_members,
            init=plan.init,
            scale=plan.scale,
            shift=plan.shift,
            generator=generator,
            device=None if near is None else near.device,
            dtype=None if near is None else near.dtype,
            where=name,
        )
        return _settled(rule.build(source, axis, affine), source, name, near)

    def kept(source: nn.Module, name: str) -> nn.Module:
        rule = rules[name]
        assert isinstance(rule, NormRule)
        assert rule.keep is not None
        return _settled(rule.keep(source, axis, like), source, name, like)

    for name in plan.norms:
        place(name, converted)
    heads = tuple(f"{h}." for h in plan.heads)
    for name in (e.name for e in entries if e.action == "kept"):
        if getattr(rules[name], "keep", None) is not None and not f"{name}.".startswith(heads):
            place(name, kept)
    for name in plan.heads:
        place(name, lambda m, n: member_heads(m, plan.head, axis, n, generator))
    return places


def _settled(new: nn.Module, source: nn.Module, name: str, like: Tensor | None) -> nn.Module:
    """Give the new layer its name, the mode, the hooks and the class of the old one."""
    if not isinstance(new, MemberNorm):  # by a rule of the user's
        raise ConversionError(
            f"the rule for {type(source).__name__} ('{name}') built a {type(new).__name__}; "
            "expected a SigmaNorm"
        )
    new.where = name or "(root)"
    theirs = set(source.modules())  # an activation taken over keeps its own mode
    for module in new.modules():
        if module not in theirs:
            module.training = source.training
    adopt_hooks(new, source)
    new.take_place_of(source, like)
    return new


def _floating(t: object) -> bool:
    return isinstance(t, Tensor) and t.is_floating_point()


def _train_members_only(network: nn.Module) -> None:
    network.requires_grad_(False)
    for module in network.modules():
        if isinstance(module, (SigmaNorm, MemberHeads)):
            for p in module.parameters(recurse=isinstance(module, MemberHeads)):
                p.requires_grad_(p.is_floating_point())


def _shift_word(norms: Iterable[SigmaNorm]) -> str:
    words = {None: "none", True: "one per member", False: "the base's, shared"}
    kinds = {None if m.shift is None else m.shift.requires_grad for m in norms}
    return " / ".join(sorted(words[kind] for kind in kinds))
