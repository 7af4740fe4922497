"""Prediction in ONNX Runtime: an ensemble as one file, M networks as M, in float32 and int8."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sigmanens as sn
from benchmarks.subjects import Subject
from sigmanens.ensemble.inputs import call_arguments
from sigmanens.ensemble.prediction import Prediction
from sigmanens.export.program import OUTPUTS

__all__ = ["FLOAT", "INT8", "Exported", "exported", "is_mostly_linear"]

FLOAT = ("sigmanens onnx", "sigmanens onnx small", "separate onnx")
INT8 = ("sigmanens onnx int8", "separate onnx int8")


@dataclass(frozen=True)
class Exported:
    """Members in ONNX Runtime.

    Attributes:
        predict: from inputs to averaged probabilities (B, C); decomposes the uncertainty too.
        size: bytes of the files.
    """

    predict: Callable[[Any], Tensor]
    size: int


def exported(name: str, subject: Subject, members: int, folder: Path) -> Exported:
    """Export a contestant, with weights of its own, for any batch size.

    Args:
        name: one of ``FLOAT`` or ``INT8``.
        subject: the network.
        members: M.
        folder: where to write; files of a contestant in float32 serve its int8 form too.
    """
    torch.manual_seed(0)
    example = subject.inputs(2)
    if name.startswith("sigmanens"):
        layout = "small" if name.endswith("small") else "fast"
        path = folder / f"{layout}.onnx"
        if not path.exists():
            ensemble = sn.convert(subject.make(), members, schedule="folded")
            sn.export_onnx(ensemble, path, example, layout=layout)
        files = [path]
    else:
        files = [folder / f"network{m}.onnx" for m in range(members)]
        for file in files:
            if not file.exists():
                _export(subject.make().eval(), example, file)
    if name.endswith("int8"):
        files = [_quantised(file) for file in files]
    sessions = [_session(file) for file in files]
    predict = _ensemble(sessions[0]) if name.startswith("sigmanens") else _separate(sessions)
    return Exported(predict, sum(file.stat().st_size for file in files))


def is_mostly_linear(network: nn.Module) -> bool:
    """Whether most parameters but embeddings are those of linear layers, which become int8."""
    linear = total = 0
    for module in network.modules():
        if not isinstance(module, nn.Embedding):
            held = sum(p.numel() for p in module.parameters(recurse=False))
            total += held
            linear += held if isinstance(module, nn.Linear) else 0
    return 2 * linear > total


def _export(network: nn.Module, example: Any, path: Path) -> None:
    """A plain network as torch.onnx writes it; the batch is dynamic in every input."""
    args, kwargs = call_arguments(example)
    batch = {0: torch.export.Dim.DYNAMIC}
    shapes: Any = dict.fromkeys(kwargs, batch) if kwargs else tuple(batch for _ in args)
    torch.onnx.export(
        network, args, path, kwargs=kwargs or None, dynamo=True, dynamic_shapes=shapes,
        input_names=list(kwargs) or None, external_data=False, verbose=False,
    )  # fmt: skip


def _quantised(path: Path) -> Path:
    """The file with weights of matrix products in int8, activations quantised as they come."""
    from onnxruntime.quantization import quantize_dynamic

    target = path.with_suffix(".int8.onnx")
    if not target.exists():
        # It advises on its root logger to run a step for shapes, which these files have.
        logging.disable(logging.WARNING)
        try:
            quantize_dynamic(path, target, op_types_to_quantize=["MatMul"], per_channel=True)
        finally:
            logging.disable(logging.NOTSET)
    return target


def _session(path: Path) -> Any:
    """ONNX Runtime on as many threads as torch has."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _feeds(session: Any, x: Any) -> dict[str, Any]:
    args, kwargs = call_arguments(x)
    nodes = session.get_inputs()
    if kwargs:
        return {node.name: kwargs[node.name].numpy() for node in nodes}
    return {node.name: value.numpy() for node, value in zip(nodes, args, strict=True)}


def _ensemble(session: Any) -> Callable[[Any], Tensor]:
    def predict(x: Any) -> Tensor:
        return torch.from_numpy(session.run(OUTPUTS, _feeds(session, x))[0])

    return predict


def _separate(sessions: Sequence[Any]) -> Callable[[Any], Tensor]:
    def predict(x: Any) -> Tensor:
        logits = [torch.from_numpy(s.run(None, _feeds(s, x))[0]) for s in sessions]
        return Prediction.from_logits(torch.stack(logits)).probs

    return predict
