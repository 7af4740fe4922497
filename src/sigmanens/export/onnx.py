"""The ensemble's prediction as one ONNX file, compared with what it was made from."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sigmanens.ensemble.ensemble import SigmaEnsemble
from sigmanens.errors import ExportError, InputError, MissingPackageError, SigmaNensError, warn
from sigmanens.export.program import OUTPUTS, Task, UnrolledModule, reason

LAYOUTS = ("fast", "small")
TOLERANCE = 1e-4
INLINE_BYTES = 2**30  # of weights in one file, which the format limits to 2 GiB


def export_onnx(
    ensemble: SigmaEnsemble,
    path: str | Path,
    example: Any,
    *,
    members: int | None = None,
    class_dim: int = 1,
    length_dim: int | None = None,
    layout: str = "fast",
    opset: int | None = None,
    verify: bool = True,
) -> Path:
    """Write :meth:`~sigmanens.SigmaEnsemble.predict` as an ONNX file.

    Inputs are named as in the base's ``forward``, outputs as in :class:`~sigmanens.Prediction`:
    ``probs`` (B, C, …), ``member_probs`` (k, B, C, …), ``entropy``, ``expected_entropy`` and
    ``modulation`` (B, …) in nats, for the ensemble's task. The batch dimension is dynamic and
    called ``batch``; all other sizes are those of the example. Weights of more than 1 GiB go into a
    file ``<name>.data`` beside it. An older file is replaced only by one that was verified.

    Args:
        ensemble: M members, in any mode and on any device; left as it is.
        path: where to write; missing folders are made.
        example: inputs with real values, as for :func:`~sigmanens.export_program`.
        members: export the first k members only.
        class_dim: dimension of the classes in one member's logits; -1 for token classifiers.
        length_dim: a dimension that may have any size, as for :func:`~sigmanens.export_program`.
        layout: "fast" computes the members as plain networks: what they share is stored once, and
            the runtime folds each one's norms into its convolutions. "small" is a graph of one
            network with the members in the batch. Use it for many members, or for a transformer
            that gets one text per call.
        opset: version of the operator set; the exporter's own choice by default.
        verify: compare with the ensemble in ONNX Runtime at two batch sizes, to 1e-4 in each
            output; a warning says so if ONNX Runtime is not installed.

    Returns:
        the path.

    Raises:
        MissingPackageError: without onnx or onnxscript. InputError: for a bad example, path or
            layout, or a network in half precision. ExportError: if the export or the check fails.
    """
    absent = [name for name in ("onnx", "onnxscript") if find_spec(name) is None]
    if absent:
        raise MissingPackageError(
            f"export_onnx needs {' and '.join(absent)}: pip install 'sigmanens[onnx]'"
        )
    path = Path(path)
    if path.is_dir():
        raise InputError(f"{path} is a folder; expected the path of the file to write")
    if layout not in LAYOUTS:
        raise InputError(f"layout is {layout!r}; expected one of {', '.join(LAYOUTS)}")
    _refuse_half(ensemble)
    task = Task.of(ensemble, example, members, class_dim, length_dim, torch.device("cpu"))
    exported = _unrolled(task, path) if layout == "fast" else task
    program = exported.program()
    try:
        converted = _convert(exported, program, opset, OUTPUTS)
    except Exception as e:
        raise task.failure("torch.onnx", e, lambda t: _convert(t, t.trace(), opset, None)) from e
    version = converted.model.opset_imports.get("")
    if opset is not None and version != opset:
        raise ExportError(f"torch.onnx wrote operator set {version} instead of {opset}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        written = Path(folder) / path.name
        weights = converted.model.graph.initializers.values()
        size = sum(w.const_value.nbytes for w in weights if w.const_value is not None)
        converted.save(written, external_data=size > INLINE_BYTES)
        if verify:
            _verify(task, written)
        for file in sorted(Path(folder).iterdir(), key=lambda f: f == written):  # the data first
            os.replace(file, path.with_name(file.name))
    return path


def _unrolled(task: Task, path: Path) -> Task:
    try:
        return task.unrolled()
    except SigmaNensError as e:
        warn(f"{path.name} has layout 'small': members have no plain form ({reason(e)})")
        return task


def _refuse_half(ensemble: SigmaEnsemble) -> None:
    for name, tensor in ensemble.network.state_dict().items():
        if isinstance(tensor, Tensor) and tensor.dtype in (torch.float16, torch.bfloat16):
            raise InputError(
                f"'{name}' is {tensor.dtype}, in which runtimes round too differently to compare, "
                "or lack operators. Export ens.float(), and convert the file where it will run"
            )


def _convert(task: Task, program: Any, opset: int | None, outputs: Sequence[str] | None) -> Any:
    """torch's ONNX program, with its inputs, outputs and free dimensions named."""
    roots = dict(zip(task.inputs.tree, task.names, strict=True))
    names: list[str] = []
    axes: list[dict[int, str]] = []
    named: set[str] = set()
    for path in task.inputs.tensors():
        root, dot, rest = path.partition(".")
        names.append((roots[root] + dot + rest).replace(".", "_"))
        # Inputs share the dimensions: each is named at the first (naming it twice is warned of).
        new = {dim: name for dim, name in task.free(path).items() if name not in named}
        named.update(new.values())
        axes.append(new)
    unrolled = isinstance(task.module, UnrolledModule)
    converted = torch.onnx.export(
        program, dynamo=True, input_names=names, output_names=outputs, dynamic_shapes=axes,
        opset_version=opset, verbose=False, optimize=not unrolled,
    )  # fmt: skip
    assert converted is not None
    if unrolled:
        _merge(converted.model)
    for node in converted.model.graph.all_nodes():
        # Holds folders of this machine.
        node.metadata_props.pop("pkg.torch.onnx.stack_trace", None)
    return converted


def _merge(model: Any) -> None:
    """Store equal weights once, and compute what members have in common once.

    torch's own optimisation would fold norms into the weights, and so write them M times.
    """
    passes = import_module("onnx_ir.passes.common")
    fold_constants = import_module("onnxscript.optimizer").fold_constants
    passes.InlinePass()(model)
    for _ in range(2):  # what is folded can be equal, too
        passes.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
        passes.DeduplicateInitializersPass(size_limit=2**62)(model)
        passes.CommonSubexpressionEliminationPass()(model)
        fold_constants(model)
        passes.RemoveUnusedNodesPass()(model)
    passes.RemoveUnusedFunctionsPass()(model)
    passes.RemoveUnusedOpsetsPass()(model)
    passes.NameFixPass()(model)


def _verify(task: Task, path: Path) -> None:
    """Compare the file with its module, on one row and on more than were traced."""
    if find_spec("onnxruntime") is None:
        warn(
            f"{path.name} was not compared with the ensemble: onnxruntime is not installed "
            "(pip install 'sigmanens[onnx]'). verify=False says that this is meant"
        )
        return
    runtime = import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors, which are raised too
    try:
        session = runtime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    except Exception as e:
        raise ExportError(
            f"ONNX Runtime does not load the file: {reason(e)}. verify=False writes it unchecked"
        ) from e
    lengthy = task.lengthy()
    for rows, shorter in ((1, 0), (task.inputs.size + 1, 1)):
        inputs = task.resized(rows, shorter)
        try:
            with torch.no_grad():
                expected = inputs.call(task.module)
        except Exception as e:
            cure = ". length_dim needs a network that takes texts of any length" * bool(lengthy)
            raise ExportError(
                f"the ensemble itself fails at another batch size{' or length' * bool(lengthy)}: "
                f"{reason(e)}{cure}"
            ) from e
        pairs = zip(session.get_inputs(), inputs.tensors().values(), strict=True)
        feeds = {node.name: value.numpy() for node, value in pairs}
        try:
            results = session.run(OUTPUTS, feeds)
        except Exception as e:
            raise ExportError(f"ONNX Runtime fails on a batch of {rows}: {reason(e)}") from e
        for name, result in zip(OUTPUTS, results, strict=True):
            got = torch.from_numpy(result)
            want = expected[name]
            if got.shape != want.shape:
                raise ExportError(
                    f"on a batch of {rows}, ONNX Runtime gives '{name}' of shape "
                    f"{tuple(got.shape)} instead of {tuple(want.shape)}"
                )
            gap = float((got - want).abs().amax())
            if not gap <= TOLERANCE:
                raise ExportError(
                    f"on a batch of {rows}, ONNX Runtime differs from the ensemble by {gap:.1e} in "
                    f"'{name}'; up to {TOLERANCE:.0e} is rounding. Nothing was written"
                )
