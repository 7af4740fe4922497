"""The inputs of a call: where their batch dimension is, and which were only guessed."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from sigmanens.errors import InputError
from sigmanens.passes.trees import map_tensors

__all__ = [
    "batch_size",
    "call_arguments",
    "find_batched",
    "input_tree",
    "resolve_batch_dims",
    "split_tree",
]

# Among declared dimensions, -1 - n: dimension 0 if it has the size of the batch, and for tensors of
# up to n dimensions that is known rather than guessed.
_UNDECLARED = -1

# Inputs of Hugging Face transformers whose dimension 0 is the batch (or 1, to be broadcast), with
# the number of dimensions up to which that holds: some networks have one more in front.
_HUGGING_FACE = {
    "input_ids": 2,
    "attention_mask": 4,
    "token_type_ids": 2,
    "position_ids": 2,
    "inputs_embeds": 3,
    "pixel_values": 5,
    "pixel_mask": 3,
    "bool_masked_pos": 2,
    "bbox": 3,
    "input_values": 3,
    "input_features": 3,
    "audio_values": 3,
    "decoder_input_ids": 2,
    "decoder_attention_mask": 4,
}


def call_arguments(x: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword inputs from a tensor, a tuple/list of inputs or a mapping of them."""
    if isinstance(x, Mapping):
        return (), dict(x)
    if isinstance(x, (tuple, list)):
        return tuple(x), {}
    return (x,), {}


def input_tree(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs of a call by position (``"0"``) or name."""
    return {str(i): a for i, a in enumerate(args)} | dict(kwargs)


def split_tree(tree: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Inverse of :func:`input_tree`."""
    args = [v for k, v in tree.items() if k.isdigit()]
    return args, {k: v for k, v in tree.items() if not k.isdigit()}


def resolve_batch_dims(
    model: nn.Module, dims: Mapping[str, int | None] | Mapping[str | int, int | None] | None
) -> dict[str, int | None]:
    """Batch dimensions as declared, by name and by position alike.

    An input that is declared by name may then be given by position, and the other way round. A
    network of Hugging Face transformers, known by its ``config``, has the usual inputs declared.

    Args:
        model: the network, whose ``forward`` says which names and positions there are.
        dims: batch dimension (None: not batched) by name, position, or path (``"states.0"``).

    Raises:
        InputError: for an input that ``forward`` does not have, or a dimension that is neither
            None nor an integer ≥ 0.
    """
    declared = {str(k): v for k, v in (dims or {}).items()}
    for key, dim in declared.items():
        if dim is not None and (isinstance(dim, bool) or not isinstance(dim, int) or dim < 0):
            raise InputError(
                f"batch_dims[{key!r}] is {dim!r}; expected the batch dimension counted from 0, or "
                "None for an input that is not batched"
            )
    usual = _usual_inputs(model)
    if not declared and not usual:
        return {}
    parameters = list(inspect.signature(model.forward).parameters.values())
    kinds = {p.kind for p in parameters}
    names = [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    resolved = dict(declared)
    for key, dim in declared.items():
        root, dot, rest = key.partition(".")
        if root.isdigit():
            if int(root) < len(names):
                resolved.setdefault(f"{names[int(root)]}{dot}{rest}", dim)
                continue
            known = inspect.Parameter.VAR_POSITIONAL in kinds
        elif root in names:
            resolved.setdefault(f"{names.index(root)}{dot}{rest}", dim)
            continue
        else:
            known = inspect.Parameter.VAR_KEYWORD in kinds
        if not known:
            raise InputError(
                f"batch_dims names {root!r}, which is no input of {type(model).__name__}.forward; "
                f"its inputs are {', '.join(names)}"
            )
    for name, most_dims in usual.items():
        resolved.setdefault(name, _UNDECLARED - most_dims)
        if name in names:
            resolved.setdefault(str(names.index(name)), _UNDECLARED - most_dims)
    return resolved


def _usual_inputs(model: nn.Module) -> Mapping[str, int]:
    config = getattr(model, "config", None)
    known = hasattr(config, "model_type") and hasattr(config, "to_dict")
    return _HUGGING_FACE if known else {}


def batch_size(
    args: Sequence[Any], kwargs: Mapping[str, Any], dims: Mapping[str, int | None]
) -> int:
    """Number of samples B: the size of the first tensor that is not declared as unbatched.

    Args:
        args, kwargs: positional and keyword inputs of the network.
        dims: batch dimension by input name or position, ``None`` for "not batched".

    Raises:
        InputError: if no input is a tensor with a batch dimension.
    """
    found: list[int] = []

    def look(x: Tensor, path: str) -> Tensor:
        dim = _declared(path, dims, default=0)
        if dim is not None and x.dim() > max(dim, 0):
            found.append(x.shape[max(dim, 0)])
        return x

    map_tensors(look, input_tree(args, kwargs))
    if not found:
        arrays = [
            f"{name!r} is a {type(value).__module__}.{type(value).__name__}: give "
            "torch.as_tensor(…)"
            for name, value in input_tree(args, kwargs).items()
            if not isinstance(value, Tensor) and hasattr(value, "__array__")
        ]
        raise InputError(
            "no input tensor with a batch dimension was given; expected at least one tensor of "
            "shape (B, …). "
            + (
                f"Input {', '.join(arrays)}"
                if arrays
                else "If the batch lies in another dimension, name it: batch_dims={'x': 1}"
            )
        )
    return found[0]


def _declared(path: str, dims: Mapping[str, int | None], default: int) -> int | None:
    """Batch dimension declared for an input, matched by its full path or its first part."""
    root = path.split(".", 1)[0]
    for key in (path, root):
        if key in dims:
            return dims[key]
    return default


def find_batched(
    tree: Mapping[str, Any], size: int, dims: Mapping[str, int | None]
) -> tuple[dict[str, int], list[str]]:
    """Batch dimension of every tensor input, and the inputs for which it was a guess.

    Undeclared inputs count as batched when dimension 0 has the size of the batch. It is a guess
    when another dimension has that size too (and the input is not the first), or when dimension 0
    does not match while another does. It is none for the usual inputs of Hugging Face
    transformers, where dimension 0 is the batch or 1.

    Args:
        tree: inputs by name or position.
        size: number of samples B.
        dims: declared batch dimensions.

    Returns:
        ``{path: batch dimension}`` of the batched inputs, and the guessed paths.

    Raises:
        InputError: if a declared dimension does not have the size of the batch.
    """
    batched: dict[str, int] = {}
    guessed: list[str] = []
    seen = 0

    def look(x: Tensor, path: str) -> Tensor:
        nonlocal seen
        seen += 1
        dim = _declared(path, dims, default=_UNDECLARED)
        if dim is None:
            return x
        if dim >= 0:
            if x.dim() <= dim or x.shape[dim] != size:
                raise InputError(
                    f"input '{path}' has shape {tuple(x.shape)}; batch_dims says that its "
                    f"dimension {dim} is the batch, which has {size} samples here"
                )
            batched[path] = dim
            return x
        known = x.dim() <= _UNDECLARED - dim
        if x.dim() and x.shape[0] == size:
            batched[path] = 0
            if seen > 1 and size > 1 and x.dim() > 1 and x.shape[1] == size and not known:
                guessed.append(path)
        elif size > 1 and size in x.shape and not (known and x.shape[0] == 1):
            guessed.append(path)
        return x

    map_tensors(look, tree)
    return batched, guessed
