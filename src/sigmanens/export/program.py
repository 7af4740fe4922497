"""What ``SigmaEnsemble.predict`` computes as one function, traced by ``torch.export``."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from sigmanens.conversion.copying import deep_copy
from sigmanens.ensemble.ensemble import SigmaEnsemble
from sigmanens.ensemble.inputs import Inputs, call_arguments, resolve_batch_dims
from sigmanens.ensemble.prediction import Prediction, logits_of
from sigmanens.errors import ExportError, InputError, SigmaNensError
from sigmanens.passes.trees import map_tensors

OUTPUTS = ("probs", "member_probs", "entropy", "expected_entropy", "modulation")
BATCH, LENGTH = "batch", "length"


def export_program(
    ensemble: SigmaEnsemble,
    example: Any,
    *,
    members: int | None = None,
    class_dim: int = 1,
    length_dim: int | None = None,
) -> ExportedProgram:
    """Trace :meth:`~sigmanens.SigmaEnsemble.predict` with ``torch.export``.

    The program takes the base's inputs as in the example, by position or by keyword. The batch size
    B ≥ 1 is free, and so is the length of texts along ``length_dim``; all other sizes are those of
    the example. It returns a dict of tensors: ``probs``
    (B, C, …), ``member_probs`` (k, B, C, …), and in nats ``entropy``, ``expected_entropy`` and
    ``modulation`` (B, …), as in :class:`~sigmanens.Prediction`. It holds a copy of the weights, the
    example, the temperature and the task; it does not look for NaN. Members share passes as
    ``ensemble.schedule`` says.

    Args:
        ensemble: M members, in any mode; left as it is.
        example: a tensor, a tuple of positional or a mapping of keyword inputs with real values.
            From a batch of 2 it can be told which inputs have a batch dimension; of 1, each whose
            dimension 0 is 1 counts as batched unless ``batch_dims`` says otherwise.
        members: export the first k members only.
        class_dim: dimension of the classes in one member's logits; -1 for token classifiers.
        length_dim: a dimension that may have any size, in the first input that has it and in those
            of equal size there: 1 for tokens. Recurrent layers and learned positions do not allow
            it.

    Raises:
        InputError: if the example has no batch dimension or is empty, ``members`` is out of
            range, or no input has a ``length_dim`` of more than one. ExportError: if
            ``torch.export`` fails; it says whether it fails for one member's plain network too.
    """
    return Task.of(ensemble, example, members, class_dim, length_dim).program()


class InferenceModule(nn.Module):
    """The prediction of an ensemble's first k members, in evaluation mode, as a dict of tensors."""

    def __init__(self, ensemble: SigmaEnsemble, members: int, class_dim: int = 1) -> None:
        super().__init__()
        self.ensemble = ensemble
        self.members = members
        self.temperature = float(ensemble.temperature)
        self.class_dim = class_dim
        self.training = False

    def forward(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Predict for the inputs of the base network; the result has the keys of ``OUTPUTS``."""
        logits = self.logits(*args, **kwargs)
        task = self.ensemble.task
        prediction = Prediction.from_logits(logits, self.temperature, self.class_dim, task)
        return {name: getattr(prediction, name) for name in OUTPUTS}

    def logits(self, *args: Any, **kwargs: Any) -> Tensor:
        """Logits (k, B, C, …) of the ensemble's own pass."""
        with self.ensemble.axis.choosing(start=0, stop=self.members):
            return logits_of(self.ensemble(*args, **kwargs))


class UnrolledModule(InferenceModule):
    """The same prediction from k plain networks, which hold the shared tensors together.

    In plain networks a runtime can fold norms into the convolutions before them.
    """

    def __init__(self, ensemble: SigmaEnsemble, members: int, class_dim: int = 1) -> None:
        super().__init__(ensemble, members, class_dim)
        del self.ensemble
        vars(self)["ensemble"] = ensemble  # as no submodule: its tensors are not this module's
        self.plain = nn.ModuleList()
        for i in range(members):
            network = ensemble.member(i).eval().requires_grad_(False)
            if i:
                _tie(network, self.plain[0])
            self.plain.append(network)

    def logits(self, *args: Any, **kwargs: Any) -> Tensor:
        """Logits (k, B, C, …) of one network after the other."""
        found = []
        for network in self.plain:  # on copies, for a network may write into its inputs
            own = map_tensors(lambda x, _: x.clone(), {"args": args, "kwargs": kwargs})
            found.append(logits_of(network(*own["args"], **own["kwargs"])))
        return torch.stack(found)


def _tie(network: nn.Module, first: nn.Module) -> None:
    """Let a network hold the first one's tensors wherever both are equal."""
    modules = dict(first.named_modules())
    for name, module in network.named_modules():
        for table in ("_parameters", "_buffers"):
            theirs = getattr(modules.get(name), table, {})
            for key, mine in list(getattr(module, table).items()):
                its = theirs.get(key)
                if mine is not None and its is not None and torch.equal(mine, its):
                    setattr(module, key, its)


class PlainModule(nn.Module):
    """A network's logits alone."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.training = False

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return logits_of(self.network(*args, **kwargs))


@dataclass(frozen=True)
class Task:
    """What there is to export: a copy of the ensemble, at least 2 rows, and the inputs' names."""

    module: nn.Module
    inputs: Inputs
    names: list[str]
    length_dim: int | None = None

    @classmethod
    def of(
        cls,
        ensemble: SigmaEnsemble,
        example: Any,
        members: int | None,
        class_dim: int,
        length_dim: int | None = None,
        device: torch.device | None = None,
    ) -> Task:
        """Copy an ensemble and try it on the example; see :func:`export_program`."""
        args, kwargs = call_arguments(example, ensemble.network)
        dims = resolve_batch_dims(ensemble.network, ensemble.plan.batch_dims)
        inputs = Inputs.of(args, kwargs, dims)
        if inputs.whole:
            raise ExportError(
                f"input {', '.join(map(repr, inputs.whole))} is an object that holds tensors; "
                "expected tensors, or tuples, lists and dicts of them"
            )
        twin = deep_copy(ensemble).eval().requires_grad_(False)
        if device is not None:
            twin = twin.to(device)
        # Copies: a file keeps the example, and with a view all that it is a view of.
        tree = map_tensors(lambda x, _: x.detach().to(device).clone(), dict(inputs.tree))
        inputs = replace(inputs, tree=tree)
        # By trial, what a trace cannot: finite results, and that folding keeps members apart.
        given = inputs.tree if kwargs else tuple(inputs.tree.values())
        twin.predict(given, members=members, class_dim=class_dim)
        if inputs.size == 1:  # which a trace would take for a constant
            inputs = inputs.expand(2)
        declared = {path: inputs.batched.get(path) for path in inputs.tensors()}
        plan = replace(twin.plan, batch_dims=declared)
        twin.restate(plan)
        k = twin.num_members if members is None else members
        names = _input_names(twin.network, inputs.tree)
        task = cls(InferenceModule(twin, k, class_dim), inputs, names, length_dim)
        if length_dim is not None and (type(length_dim) is not int or not task.lengthy()):
            raise InputError(
                f"length_dim is {length_dim!r}, but dimension {length_dim} of every input is its "
                "batch, has size 1 or is not there"
            )
        return task

    def free(self, path: str) -> dict[int, str]:
        """Dimensions of an input that may have any size: ``BATCH``, and ``LENGTH`` if there is."""
        if path not in self.inputs.batched:
            return {}
        lengthy = self.lengthy()
        found = {self.inputs.batched[path]: BATCH}
        return found | ({lengthy[path]: LENGTH} if path in lengthy else {})

    def lengthy(self) -> dict[str, int]:
        """The dimension of any length, by input: where it has the size that it has first."""
        found: dict[str, int] = {}
        size = None
        for path, batch in self.inputs.batched.items():
            shape, dim = self.inputs.tensors()[path].shape, self.length_dim
            if dim is None or not -len(shape) <= dim < len(shape) or dim % len(shape) == batch:
                continue
            size = shape[dim] if size is None and shape[dim] > 1 else size
            if shape[dim] == size:
                found[path] = dim % len(shape)
        return found

    def resized(self, rows: int, shorter: int = 0) -> Inputs:
        """The example with so many rows, and so much less than its length."""
        dims = self.lengthy()

        def cut(x: Tensor, path: str) -> Tensor:
            return x.narrow(dims[path], 0, x.shape[dims[path]] - shorter) if path in dims else x

        inputs = self.inputs.resized(rows)
        return replace(inputs, tree=map_tensors(cut, dict(inputs.tree)))

    def unrolled(self) -> Task:
        """The same task of one plain network after the other."""
        module = self.module
        assert isinstance(module, InferenceModule)
        plain = UnrolledModule(module.ensemble, module.members, module.class_dim)
        return replace(self, module=plain)

    def program(self) -> ExportedProgram:
        """Trace the module; raises ExportError if that fails."""
        try:
            return self.trace()
        except Exception as e:
            raise self.failure("torch.export", e, Task.trace) from e

    def trace(self) -> ExportedProgram:
        """Trace the module; raises what ``torch.export`` does."""
        args, kwargs = self.inputs.arguments()
        sizes = {BATCH: Dim(BATCH, min=1), LENGTH: Dim.DYNAMIC}

        def shape(_: Tensor, path: str) -> dict[int, Any]:
            return {dim: sizes[name] for dim, name in self.free(path).items()}

        tree = map_tensors(shape, dict(self.inputs.tree))
        roots = {path.partition(".")[0] for path in self.inputs.tensors()}
        shapes = {n: tree[k] if k in roots else None for n, k in zip(self.names, tree, strict=True)}
        module = _with_inputs(self.module, self.names)
        with warnings.catch_warnings():
            # torch's LSTM and GRU set their list of weights anew in a call, to the same tensors.
            warnings.filterwarnings("ignore", r"The tensor attributes? .*\._flat_weights\[")
            program = torch.export.export(
                module, tuple(args), kwargs, dynamic_shapes=shapes, strict=False
            )
        for held in (program.state_dict, program.constants):
            held.update({key: _own_memory(value) for key, value in held.items()})
        return program

    def failure(self, what: str, error: Exception, attempt: Callable[[Task], Any]) -> ExportError:
        """What to raise for ``error``: says whether the first member's plain network fails too."""
        assert isinstance(self.module, InferenceModule)
        ensemble = self.module.ensemble
        name = type(ensemble.network).__name__
        why = reason(error)
        if self.lengthy():
            try:
                attempt(replace(self, length_dim=None))
            except Exception:  # the length is not the cause
                pass
            else:
                return ExportError(
                    f"{what} failed for this {name} with length_dim={self.length_dim}: {why}. It "
                    "passes at the example's length: leave length_dim out, and pad texts to it"
                )
        try:
            attempt(replace(self, module=PlainModule(ensemble.member(0).eval())))
        except SigmaNensError as e:
            verdict = f"No plain {name} was there to compare with ({reason(e)})"
        except Exception as e:
            also = "" if reason(e) == why else f" ({reason(e)})"
            verdict = f"The plain {name} of member 0 fails too{also}: the cause is not the members"
        else:
            verdict = f"The plain {name} of member 0 passes: export ens.member(i) one by one"
        return ExportError(f"{what} failed for this {name}: {why}. {verdict}")


def _own_memory(value: Any) -> Any:
    """A tensor without the rest of the memory that it is a view of; anything else as it is."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        return value
    if value.untyped_storage().nbytes() <= value.numel() * value.element_size():
        return value
    own = value.detach().clone()
    return nn.Parameter(own, value.requires_grad) if isinstance(value, nn.Parameter) else own


def reason(error: BaseException) -> str:
    """The start of the message of what caused an error, on one line."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split()) or type(error).__name__
    return text.rstrip(".") if len(text) <= 300 else f"{text[:300]} …"


def _input_names(network: nn.Module, tree: Mapping[str, Any]) -> list[str]:
    """Names of the inputs: keywords, and for positions what ``forward`` calls them."""
    parameters = inspect.signature(network.forward).parameters.values()
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    named = {str(i): p.name for i, p in enumerate(parameters) if p.kind in kinds}
    return [named.get(key, f"input_{key}" if key.isdigit() else key) for key in tree]


def _with_inputs(module: nn.Module, names: list[str]) -> nn.Module:
    """A module that calls another under a signature of its own, for torch.export to go by."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module
            self.training = False

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return self.module(*args, **kwargs)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(n, kind) for n in ("self", *names)]
    Named.forward.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return Named()
