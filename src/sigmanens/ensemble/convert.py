"""From a network to an ensemble: find its norms and heads, then swap them.

``convert`` works on a copy, ``convert_`` in place. Both resolve a :class:`ConversionConfig` to
exact names and build that, as loading a checkpoint does.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from sigmanens.conversion.audit import audit, find_norms, norms_are_trained
from sigmanens.conversion.build import build
from sigmanens.conversion.config import ConversionConfig, LayerSelector, matches
from sigmanens.conversion.functional import FunctionalNorms
from sigmanens.conversion.heads import find_heads
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
from sigmanens.passes.modes import evaluating

# By problem_type of a configuration of transformers.
_TASKS: dict[str, str] = {
    "single_label_classification": "multiclass",
    "multi_label_classification": "multilabel",
    "regression": "regression",
}


def convert(
    model: nn.Module,
    members: int | ConversionConfig,
    *,
    head: str = "auto",
    head_name: str | Sequence[str] | None = None,
    layers: LayerSelector = "all",
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

    The base stays bit-identical. All that members share keeps its mode, device, dtype,
    ``requires_grad`` and memory format. ``print(ensemble.report)`` says what became of each norm.

        >>> ens = sn.convert(model, members=4)
        >>> ens = sn.convert(model, ConversionConfig(members=4, head="fresh"))    # the same options

    Args:
        model: any classifier with normalisation layers.
        members: M ≥ 1, or a :class:`~sigmanens.ConversionConfig` that holds all options but
            ``example`` and ``generator``.
        head: "fresh", "copy", "shared", or "auto": copy under "preserve", fresh otherwise.
        head_name: dotted name (or names) of the head, where it is not found by itself.
        layers: which norms to convert: "all", a regex (``re.search`` on the dotted name), a list of
            names or a callable ``(name, module) -> bool``. With [] members part at the head. What
            lies before the members part is one network (:mod:`sigmanens.ensemble.prefix`). A kept
            BatchNorm behind it keeps its shared affine and gets statistics per member.
        init: "normal", "preserve", "paper" (see :mod:`sigmanens.norms.inits`) or "auto": preserve
            when the selected norms have been trained, else normal.
        scale: "sigmoid", or "linear" for the FiLM-Ensemble control.
        shift: one trained shift per member; the default depends on ``init``.
        train: "all", or "members": only scales, shifts and members' heads require a gradient. The
            base stays bit-identical, and so does a head="shared", which is part of it.
        batch_dims: batch dimension by input name or position (None: not batched), where dimension
            0 is wrong or ambiguous.
        schedule: "auto", "folded", "sequential", or members per pass.
        task: "multiclass" (softmax over classes) or "multilabel" (a sigmoid for each label): how
            ``predict`` reads the logits. None: what ``problem_type`` of a transformers base or the
            loss in training says, else multiclass.
        example: an input (tensor, tuple of positional or mapping of keyword inputs) for checks that
            are done now: whether folding is right, whether copied heads under "preserve" give the
            base's logits, and whether the base calls norms as functions.
        generator: source of the random scales and fresh heads.

    Raises:
        NoNormError, UnsupportedNormError, AlreadyConvertedError, HeadNotFoundError,
        ConversionError: as named. InputError: for an argument out of its range, or options beside
        a config.
    """
    return _convert(**locals(), in_place=False)


def convert_(
    model: nn.Module,
    members: int | ConversionConfig,
    *,
    head: str = "auto",
    head_name: str | Sequence[str] | None = None,
    layers: LayerSelector = "all",
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

    A conversion that fails leaves the network as it was, and so does one of a network that is
    itself a norm, which cannot replace itself: ConversionError.
    """
    return _convert(**locals(), in_place=True)


def _config(members: int | ConversionConfig, options: dict[str, Any]) -> ConversionConfig:
    """The config that was given, or one of the options; InputError for both."""
    if not isinstance(members, ConversionConfig):
        return ConversionConfig(members, **options)
    defaults = {f.name: f.default for f in fields(ConversionConfig)}
    given = [f"{k}={v!r}" for k, v in options.items() if v is not None and v != defaults[k]]
    if given:
        raise InputError(
            f"convert got a ConversionConfig and beside it {', '.join(given)}; expected one of "
            f"them. Change the config: dataclasses.replace(config, {', '.join(given)})"
        )
    return members


def _convert(
    model: nn.Module,
    members: int | ConversionConfig,
    example: Any,
    generator: torch.Generator | None,
    in_place: bool,
    **options: Any,
) -> SigmaEnsemble:
    config = _config(members, options)
    _check_model(model)
    resolve_batch_dims(model, config.batch_dims)
    norms = find_norms(model)
    if in_place and norms[0][0] == "":
        raise ConversionError(
            f"a root {type(model).__name__} cannot be replaced in place; use convert(), or "
            "convert_() on the module that holds it"
        )
    init, head, reason = config.init, config.head, "as asked"
    if init == "auto":
        selected = [m for n, m in norms if matches(config.layers, n, m)]
        trained, why = norms_are_trained(selected)
        init, reason = ("preserve" if trained else "normal"), f"auto: {why}"
    if head == "auto":
        head = "copy" if init == "preserve" else "fresh"
    heads = [] if head == "shared" else find_heads(model, config.head_name, head)
    functional, output = FunctionalNorms(model, dict(norms)), None
    if example is not None:
        args, kwargs = call_arguments(example)
        with evaluating(model), functional:
            output = model(*args, **kwargs)
    audited = audit(model, config.layers, heads, functional.bypassed)
    converted = [e.name for e in audited[0] if e.action == "converted"]
    problem = getattr(getattr(model, "config", None), "problem_type", None)
    task = config.task or _TASKS.get(str(problem))
    plan = replace(config, init=init, head=head, head_name=heads, layers=converted, task=task)
    expected = None
    if example is not None and init == "preserve" and head != "fresh":
        expected = logits_of(output)
    with _restored_on_error(model):
        made = build(model, plan, in_place=in_place, generator=generator, audited=audited)
        ensemble = SigmaEnsemble(made)
        ensemble.report.init_reason = reason
        if head == "copy" and (init == "paper" or not converted):
            what, cure = ("init='paper'", " or init='preserve'") if converted else ("layers=[]", "")
            ensemble.report.notes.append(
                f"{what} with copied heads: all members are equal, and training keeps them so. "
                f"Use head='fresh'{cure}"
            )
        ensemble.report.notes += functional.found
        if example is not None:
            ensemble.check(example, expected)
    for found in functional.found:
        warnings.warn(found, SigmaNensWarning, stacklevel=3)
    return ensemble


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


def _check_model(model: nn.Module) -> None:
    if isinstance(model, SigmaEnsemble):
        raise AlreadyConvertedError(
            f"this is a SigmaEnsemble of {model.num_members} members already; it was left "
            "unchanged. Convert its base again for another number of members"
        )
    if not isinstance(model, nn.Module):
        raise InputError(f"convert got a {type(model).__name__}; expected an nn.Module")
    tensors = [*model.named_parameters(), *model.named_buffers()]
    lazy = [n for n, t in tensors if is_lazy(t)]
    if lazy:
        raise UnsupportedNormError(
            f"{len(lazy)} parameters and buffers of lazy modules have no shape yet (first: "
            f"'{lazy[0]}'): run one batch through the network first"
        )
