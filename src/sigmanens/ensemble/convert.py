"""From a network to an ensemble: audit, then swap norms and heads.

``convert`` works on a copy; ``convert_`` in place. Both build the same thing from a *plan*: which
norms, which heads, how initialised. A checkpoint stores its plan, so loading is building again
and filling in the values.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from sigmanens.conversion.audit import (
    LayerSelector,
    audit,
    check_selector,
    find_norms,
    matches,
    norms_are_trained,
)
from sigmanens.conversion.build import build
from sigmanens.conversion.config import Plan, check_schedule, check_task
from sigmanens.conversion.functional import FunctionalNorms
from sigmanens.conversion.heads import HEADS, find_heads
from sigmanens.ensemble.ensemble import SigmaEnsemble
from sigmanens.ensemble.inputs import call_arguments, resolve_batch_dims
from sigmanens.ensemble.prediction import logits_of
from sigmanens.errors import (
    AlreadyConvertedError,
    ConversionError,
    InputError,
    SigmaNensWarning,
    UnsupportedNormError,
)
from sigmanens.norms.inits import INITS
from sigmanens.passes.modes import evaluating

__all__ = ["convert", "convert_"]

_TASKS = {
    "single_label_classification": "multiclass",
    "multi_label_classification": "multilabel",
    "regression": "regression",
}
"""By ``problem_type`` of a configuration of transformers."""


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
    task: str | None = None,
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
        init: "normal", "preserve", "paper" (see :mod:`sigmanens.norms.inits`) or "auto": preserve
            when the selected norms have been trained, else normal.
        scale: "sigmoid", or "linear" for the FiLM-Ensemble control.
        shift: one trained shift per member; the default depends on ``init``.
        train: "all", or "members": only scales, shifts and members' heads require a gradient. The
            base stays bit-identical; so does a head="shared", which is part of it.
        batch_dims: batch dimension by input name or position (None: not batched), where dimension
            0 is wrong or ambiguous.
        schedule: "auto", "folded", "sequential", or members per pass.
        task: "multiclass" (softmax over classes) or "multilabel" (a sigmoid for each label): how
            ``predict`` reads the logits. None: what ``problem_type`` of a transformers base or the
            loss in training says, else multiclass.
        example: input (tensor, tuple of positional or mapping of keyword inputs) on which folding
            and, under "preserve" with copied heads, equality with the base are checked now, and
            norms that the base calls as functions are found and reported.
        generator: source of the random scales and fresh heads.

    Raises:
        NoNormError, UnsupportedNormError, AlreadyConvertedError, HeadNotFoundError,
        ConversionError: as named. InputError: for an argument out of its range.
    """
    return _convert(
        model, members, False, head, head_name, layers, init, scale, shift, train, batch_dims,
        schedule, task, example, generator,
    )  # fmt: skip


def convert_(
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
    task: str | None = None,
    example: Any = None,
    generator: torch.Generator | None = None,
) -> SigmaEnsemble:
    """Convert a network in place: as :func:`convert`, but ``model`` itself becomes the backbone.

    A conversion that fails leaves the network as it was.

    Raises:
        ConversionError: besides the errors of ``convert``, if the network is itself a norm, which
            cannot replace itself.
    """
    return _convert(
        model, members, True, head, head_name, layers, init, scale, shift, train, batch_dims,
        schedule, task, example, generator,
    )  # fmt: skip


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
    task: str | None,
    example: Any,
    generator: torch.Generator | None,
) -> SigmaEnsemble:
    _check_arguments(model, members, head, init, scale, shift, train)
    check_schedule(schedule, members)
    check_task(task)
    resolve_batch_dims(model, batch_dims)
    check_selector(layers)
    norms = find_norms(model)
    if in_place and norms[0][0] == "":
        raise ConversionError(
            f"a root {type(model).__name__} cannot be replaced in place; use convert(), or "
            "convert_() on the module that holds it"
        )
    reason = "as asked"
    if init == "auto":
        trained, why = norms_are_trained([m for n, m in norms if matches(layers, n, m)])
        init, reason = ("preserve" if trained else "normal"), f"auto: {why}"
    if head == "auto":
        head = "copy" if init == "preserve" else "fresh"
    names = [] if head == "shared" else find_heads(model, head_name, head)
    functional, output = _functional_norms(model, dict(norms), example)
    audited = audit(model, layers, names, head != "shared", functional.bypassed)
    plan = Plan(
        members=members,
        norms=tuple(e.name for e in audited[0] if e.action == "converted"),
        heads=tuple(names),
        head=head,
        init=init,
        scale=scale,
        shift=shift,
        train=train,
        schedule=schedule,
        batch_dims={str(k): v for k, v in batch_dims.items()} if batch_dims else None,
        task=task or _TASKS.get(str(getattr(getattr(model, "config", None), "problem_type", ""))),
    )
    expected = None
    if example is not None and init == "preserve" and head != "fresh":
        expected = logits_of(output)
    with _restored_on_error(model):
        converted = build(model, plan, in_place=in_place, generator=generator, audited=audited)
        ensemble = SigmaEnsemble(converted)
        ensemble.report.init_reason = reason
        if init == "paper" and head == "copy":
            ensemble.report.notes.append(
                "init='paper' with copied heads: all members are equal and stay so in training "
                "(a symmetric fixed point). Use head='fresh' or init='preserve'"
            )
        ensemble.report.notes += [str(f) for f in functional.found]
        if example is not None:
            ensemble.check(example, expected)
    for found in functional.found:
        warnings.warn(str(found), SigmaNensWarning, stacklevel=3)
    return ensemble


def _functional_norms(
    model: nn.Module, norms: Mapping[str, nn.Module], example: Any
) -> tuple[FunctionalNorms, Any]:
    """Run the base on the example, if there is one: norms called as functions, and its result."""
    functional = FunctionalNorms(model, norms)
    if example is None:
        return functional, None
    args, kwargs = call_arguments(example)
    with evaluating(model), functional:
        return functional, model(*args, **kwargs)


@contextmanager
def _restored_on_error(model: nn.Module) -> Iterator[None]:
    """Put modules, attributes and ``requires_grad`` of a network back if the block fails."""
    states = [(m, dict(vars(m)), dict(m._modules)) for m in model.modules()]
    trained = [(p, p.requires_grad) for p in model.parameters()]
    try:
        yield
    except BaseException:
        for module, attributes, children in states:
            vars(module).clear()
            vars(module).update(attributes)
            module._modules.clear()
            module._modules.update(children)
        for p, required in trained:
            p.requires_grad_(required)
        raise


def _check_arguments(
    model: nn.Module,
    members: int,
    head: str,
    init: str,
    scale: str,
    shift: bool | None,
    train: str,
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
    if shift not in (None, True, False):
        raise InputError(f"shift is {shift!r}; expected True, False or None")
    for key, value, allowed in (
        ("head", head, ("auto", *HEADS)),
        ("init", init, ("auto", *INITS)),
        ("scale", scale, ("sigmoid", "linear")),
        ("train", train, ("all", "members")),
    ):
        if value not in allowed:
            raise InputError(f"{key} is {value!r}; expected one of {', '.join(map(repr, allowed))}")
    tensors = [*model.named_parameters(), *model.named_buffers()]
    lazy = [n for n, t in tensors if is_lazy(t)]
    if lazy:
        raise UnsupportedNormError(
            f"{len(lazy)} parameters and buffers of lazy modules have no shape yet (first: "
            f"'{lazy[0]}'): run one batch through the network first"
        )
