"""``sigmanens export``: what leaves of a finished training, as one file."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from sigmanens.errors import ConfigError, ExportError, RunError, warn
from sigmanens.export.onnx import export_onnx
from sigmanens.export.program import export_program
from sigmanens.lab.config import TrainConfig
from sigmanens.lab.data.texts import load_tokenizer
from sigmanens.lab.predicting import TrainedRun
from sigmanens.lab.runs import read_config, write_tensors

FORMATS = ("onnx", "program", "collapse", "member:<i>")
"""What can leave: ONNX, a ``torch.export`` program, one plain network's tensors."""


def export_run(folder: Path, out: Path, form: str, layout: str = "fast") -> Path:
    """Export the ensemble of a finished run of ``sigmanens train``.

    "onnx" and "program" give the decomposed prediction for any batch size. Texts may have any
    length up to ``data.length`` tokens. Where the network takes one length only, as an LSTM does,
    texts must be filled up to it, and a warning says so. "collapse" and "member:<i>" write the
    tensors of a plain network of the base's class as safetensors; the file's metadata name the
    base. Under fresh heads its head is a norm and a Linear.

    Args:
        folder: the run.
        out: the file to write; it must not exist.
        form: one of ``FORMATS``.
        layout: of an ONNX file, see :func:`sigmanens.export_onnx`.

    Returns:
        the file.

    Raises:
        ConfigError: for an unknown form or a member that is not there. RunError: if the file exists
            or cannot be written, or the run is none. What the export raises.
    """
    kind, _, number = form.partition(":")
    numbered = kind == "member" and number.isdecimal()
    if form not in FORMATS[:3] and not numbered:
        raise ConfigError(f"--format is {form!r}; expected one of {', '.join(FORMATS)}")
    if out.exists():
        raise RunError(f"{out} exists already; give another --out")
    run = TrainedRun.load(folder)
    ensemble, model = run.ensemble.cpu(), TrainConfig.from_dict(read_config(folder)).model
    if numbered and int(number) >= ensemble.num_members:
        raise ConfigError(
            f"--format is {form!r}, but the members are 0 to {ensemble.num_members - 1}"
        )
    example, length_dim = _example(run)

    def leave(dim: int | None) -> None:
        if kind == "onnx":
            export_onnx(ensemble, out, example, length_dim=dim, layout=layout)
        else:
            torch.export.save(export_program(ensemble, example, length_dim=dim), out)

    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        if kind in ("onnx", "program"):
            try:
                leave(length_dim)
            except ExportError as e:
                if length_dim is None:
                    raise
                length = example.shape[1]
                warn(f"texts must be filled up to {length} tokens for this file: {e}")
                leave(None)
            return out
        plain = ensemble.member(int(number)) if numbered else ensemble.collapse()
        told = {"model": model.name, "options": json.dumps(model.options)}
        write_tensors(out, plain.state_dict(), told)
    except OSError as e:
        raise RunError(f"could not write {out}: {e.strerror or e}") from e
    return out


def _example(run: TrainedRun) -> tuple[Tensor, int | None]:
    """Four inputs of the run's kind, drawn at random, and the dimension of any length."""
    how, draw = run.inputs, torch.Generator().manual_seed(0)
    if how["kind"] == "pictures":
        return torch.randn(4, how["channels"], *how["size"], generator=draw), None
    tokenizer = load_tokenizer(how["tokenizer"])
    padding = tokenizer.pad_token_id
    tokens = torch.randint(len(tokenizer) - 1, (4, how["length"]), generator=draw)
    tokens += tokens >= padding  # which stands on the right only
    tokens[1, -(-how["length"] // 2) :] = padding
    return tokens, 1
