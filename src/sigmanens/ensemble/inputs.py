"""The inputs of a call: its arguments, their batch dimensions and the number of samples."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from sigmanens.errors import InputError
from sigmanens.passes.trees import map_tensors, opaque

__all__ = ["Inputs", "call_arguments", "resolve_batch_dims"]

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


@dataclass(frozen=True)
class Inputs:
    """Inputs of one call of a network.

    Attributes:
        tree: positional inputs under ``"0"``, ``"1"``, …, keyword inputs under their names.
        batched: batch dimension of each batched tensor, by path (``"0"``, ``"states.1"``).
        size: number of samples B; 0 where it is not known.
        guessed: paths whose batch dimension is a guess.
        whole: objects whose rows cannot be told apart, by path. If there are any, no input counts
            as batched: every member is given all inputs, one member after the other.
    """

    tree: Mapping[str, Any]
    batched: Mapping[str, int]
    size: int
    guessed: Sequence[str] = ()
    whole: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls, args: Sequence[Any], kwargs: Mapping[str, Any], dims: Mapping[str, int | None]
    ) -> Inputs:
        """Find the batch in the arguments of a call.

        Args:
            args, kwargs: positional and keyword inputs of the network.
            dims: what :func:`resolve_batch_dims` made of the declared batch dimensions.

        Raises:
            InputError: if no input is a tensor with a batch dimension, or a declared dimension
                does not have the size of the batch.
        """
        tree = {str(i): a for i, a in enumerate(args)} | dict(kwargs)
        whole = {} if torch.compiler.is_compiling() else opaque(tree)
        if whole:
            return cls(tree, {}, 0, (), whole)
        size = _batch_size(tree, dims)
        batched, guessed = _find_batched(tree, size, dims)
        return cls(tree, batched, size, guessed)

    def call(self, network: nn.Module) -> Any:
        """What the network returns for these inputs."""
        args, kwargs = self.arguments()
        return network(*args, **kwargs)

    def arguments(self) -> tuple[list[Any], dict[str, Any]]:
        """Positional and keyword inputs."""
        args = [v for k, v in self.tree.items() if k.isdigit()]
        return args, {k: v for k, v in self.tree.items() if not k.isdigit()}

    def expand(self, members: int) -> Inputs:
        """Every batched tensor (B, …) repeated to (k·B, …), member-major."""
        if members == 1:
            return self

        def repeat(x: Tensor, dim: int) -> Tensor:
            return torch.cat([x] * members, dim=dim)  # unlike expand, keeps the memory format

        return self._mapped(repeat, self.size * members)

    def narrow(self, start: int, length: int) -> Inputs:
        """Samples ``start … start+length-1``."""
        return self._mapped(lambda x, dim: x.narrow(dim, start, length), length)

    def select(self, rows: Tensor) -> Inputs:
        """The samples that ``rows`` (B′,) names, in its order."""
        if len(rows) == self.size:
            return self
        return self._mapped(lambda x, dim: x.index_select(dim, rows.to(x.device)), len(rows))

    def resized(self, rows: int) -> Inputs:
        """A batch of ``rows`` samples: those there are, over and over."""

        def pick(x: Tensor, dim: int) -> Tensor:
            index = torch.arange(rows, device=x.device) % x.shape[dim]
            return x.index_select(dim, index)

        return self._mapped(pick, rows)

    def copied(self) -> Inputs:
        """The same values in tensors of their own, for a network that writes to its inputs."""
        tree = map_tensors(lambda x, _: x.clone(), dict(self.tree))
        whole = {}
        for path, x in self.whole.items():
            try:
                whole[path] = x.clone() if isinstance(x, Tensor) else copy.deepcopy(x)
            except Exception:  # tensors with a graph cannot be copied so: all members share it
                whole[path] = x
            _put(tree, path.split("."), whole[path])
        return replace(self, tree=tree, whole=whole)

    def double(self) -> Inputs:
        """The same with float32 tensors in float64."""
        tree = map_tensors(lambda x, _: x.double() if x.dtype == torch.float32 else x, self.tree)
        return replace(self, tree=tree)

    def equals(self, other: Inputs) -> bool:
        """Whether all tensors have the same values, bit for bit."""
        theirs = other.tensors()
        return all(_same(x, theirs[p]) for p, x in self.tensors().items())

    def tensors(self) -> dict[str, Tensor]:
        """All tensors in containers, by path."""
        found: dict[str, Tensor] = {}
        map_tensors(lambda x, path: found.setdefault(path, x), dict(self.tree))
        return found

    def device(self, default: Tensor) -> torch.device:
        """The device of the first tensor."""
        return next(iter(self.tensors().values()), default).device

    def _mapped(self, fn: Any, size: int) -> Inputs:
        def one(x: Tensor, path: str) -> Tensor:
            return fn(x, self.batched[path]) if path in self.batched else x

        return replace(self, tree=map_tensors(one, dict(self.tree)), size=size)


def _same(x: Tensor, y: Tensor) -> bool:
    if x.layout != torch.strided or x.is_nested:
        return x is y
    return torch.equal(x, y) or (x.is_floating_point() and x.allclose(y, 0, 0, equal_nan=True))


def _put(tree: Any, path: Sequence[str], value: Any) -> None:
    """Replace a leaf within dictionaries and lists; elsewhere it stays."""
    for key in path[:-1]:
        tree = tree[int(key)] if isinstance(tree, list) else tree.get(key, {})
    if isinstance(tree, list):
        tree[int(path[-1])] = value
    elif isinstance(tree, dict):
        tree[path[-1]] = value


def call_arguments(
    x: Any, network: nn.Module | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword inputs from a tensor, a tuple or list of inputs, or a mapping of them.

    A mapping holds keyword inputs. Where ``network.forward`` does not take its keys, the mapping
    itself is the one positional input.
    """
    if isinstance(x, PackedSequence):
        return (x,), {}
    if isinstance(x, (tuple, list)):
        return tuple(x), {}
    if isinstance(x, Mapping) and _takes(network, x):
        return (), dict(x)
    return (x,), {}


def _takes(network: nn.Module | None, inputs: Mapping[Any, Any]) -> bool:
    if network is None:
        return True
    try:
        inspect.signature(network.forward).bind(**inputs)
    except (TypeError, ValueError):
        return False
    return True


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


def _batch_size(tree: Mapping[str, Any], dims: Mapping[str, int | None]) -> int:
    """Number of samples B: the size of the first tensor that is not declared as unbatched."""
    found: list[int] = []

    def look(x: Tensor, path: str) -> Tensor:
        dim = _declared(path, dims, default=0)
        if dim is not None and x.dim() > max(dim, 0):
            found.append(x.shape[max(dim, 0)])
        return x

    map_tensors(look, dict(tree))
    if not found:
        arrays = [
            f"{name!r} is a {type(value).__module__}.{type(value).__name__}: give "
            "torch.as_tensor(…)"
            for name, value in tree.items()
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


def _find_batched(
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

    map_tensors(look, dict(tree))
    return batched, guessed
