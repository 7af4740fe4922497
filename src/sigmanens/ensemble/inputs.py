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
from sigmanens.passes.trees import map_leaves, map_tensors, opaque, tensors

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
    """Inputs of one call of a network. Paths are as in ``"0"`` and ``"states.1"``.

    If there are objects whose rows cannot be told apart, no input counts as batched: every member
    is given all inputs, one member after the other.
    """

    tree: Mapping[str, Any]  # positional inputs under "0", "1", …, keyword inputs under their names
    batched: Mapping[str, int]  # batch dimension of each batched tensor, by path
    size: int  # number of samples B; 0 where it is not known
    guessed: Sequence[str] = ()  # paths whose batch dimension is a guess
    whole: Mapping[str, Any] = field(default_factory=dict)  # such objects, by path

    @classmethod
    def of(
        cls, args: Sequence[Any], kwargs: Mapping[str, Any], dims: Mapping[str, int | None]
    ) -> Inputs:
        """Find the batch in the arguments of a call; ``dims`` is of :func:`resolve_batch_dims`.

        Undeclared inputs count as batched when dimension 0 has the size of the batch, which is
        that of the first tensor. It is a guess when another dimension has that size too (and the
        input is not the first), or when dimension 0 does not match while another does. It is none
        for the usual inputs of Hugging Face transformers, where dimension 0 is the batch or 1.

        Raises:
            InputError: if no input is a tensor with a batch dimension, or a declared dimension
                does not have the size of the batch.
        """
        tree = {str(i): a for i, a in enumerate(args)} | dict(kwargs)
        whole = {} if torch.compiler.is_compiling() else opaque(tree)
        if whole:
            return cls(tree, {}, 0, (), whole)
        found = [
            (p, x, dims.get(p, dims.get(p.split(".")[0], _UNDECLARED))) for p, x in tensors(tree)
        ]
        sizes = [x.shape[max(d, 0)] for _, x, d in found if d is not None and x.dim() > max(d, 0)]
        if not sizes:
            raise InputError(_no_batch(tree))
        size = sizes[0]
        batched: dict[str, int] = {}
        guessed: list[str] = []
        for number, (path, x, dim) in enumerate(found):
            if dim is None:
                continue
            if dim >= 0:
                if x.dim() <= dim or x.shape[dim] != size:
                    raise InputError(
                        f"input '{path}' has shape {tuple(x.shape)}; batch_dims says that its "
                        f"dimension {dim} is the batch, which has {size} samples here"
                    )
                batched[path] = dim
                continue
            known = x.dim() <= _UNDECLARED - dim
            if x.dim() and x.shape[0] == size:
                batched[path] = 0
                if number and size > 1 and x.dim() > 1 and x.shape[1] == size and not known:
                    guessed.append(path)
            elif size > 1 and size in x.shape and not (known and x.shape[0] == 1):
                guessed.append(path)
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

        return self.select(torch.arange(rows) % self.size)

    def copied(self) -> Inputs:
        """The same values in tensors of their own, for a network that writes to its inputs."""

        def own(x: Any, path: str) -> Any:
            if isinstance(x, Tensor):
                return x.clone()
            if path not in self.whole:
                return x
            try:
                return copy.deepcopy(x)
            except Exception:  # tensors with a graph cannot be copied so: all members share it
                return x

        return replace(self, tree=map_leaves(own, dict(self.tree)))

    def double(self) -> Inputs:
        """The same with float32 tensors in float64."""
        tree = map_tensors(lambda x, _: x.double() if x.dtype == torch.float32 else x, self.tree)
        return replace(self, tree=tree)

    def tensors(self) -> dict[str, Tensor]:
        """All tensors in containers, by path."""
        return dict(tensors(self.tree))

    @property
    def device(self) -> torch.device:
        """The device of the first tensor."""
        return next((x.device for x in self.tensors().values()), torch.device("cpu"))

    def _mapped(self, fn: Any, size: int) -> Inputs:
        def one(x: Tensor, path: str) -> Tensor:
            return fn(x, self.batched[path]) if path in self.batched else x

        return replace(self, tree=map_tensors(one, dict(self.tree)), size=size)


def call_arguments(
    x: Any, network: nn.Module | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword inputs from a tensor, a tuple or list of inputs, or a mapping of them.

    A mapping holds keyword inputs. Where ``network.forward`` does not take its keys, the mapping
    itself is the one positional input.
    """
    if isinstance(x, (tuple, list)) and not isinstance(x, PackedSequence):
        return tuple(x), {}
    if isinstance(x, Mapping):
        try:
            if network is not None:
                inspect.signature(network.forward).bind(**x)
            return (), dict(x)
        except (TypeError, ValueError):
            pass
    return (x,), {}


def resolve_batch_dims(
    model: nn.Module, dims: Mapping[str, int | None] | Mapping[str | int, int | None] | None
) -> dict[str, int | None]:
    """Batch dimensions as declared, by name and by position alike.

    ``dims`` are batch dimensions (None: not batched) by name, position, or path (``"states.0"``).
    An input that is declared by name may then be given by position, and the other way round. A
    network of Hugging Face transformers, known by its ``config``, has the usual inputs declared.

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
    config = getattr(model, "config", None)
    from_transformers = hasattr(config, "model_type") and hasattr(config, "to_dict")
    usual = _HUGGING_FACE if from_transformers else {}
    if not declared and not usual:
        return {}
    parameters = list(inspect.signature(model.forward).parameters.values())
    kinds = {p.kind.name for p in parameters}
    names = [p.name for p in parameters if not p.kind.name.startswith("VAR_")]
    resolved = dict(declared)
    for key, dim in declared.items():
        root, dot, rest = key.partition(".")
        if root.isdigit() and int(root) < len(names):
            other = names[int(root)]
        elif root in names:
            other = str(names.index(root))
        elif ("VAR_POSITIONAL" if root.isdigit() else "VAR_KEYWORD") in kinds:
            continue
        else:
            raise InputError(
                f"batch_dims names {root!r}, which is no input of {type(model).__name__}.forward; "
                f"its inputs are {', '.join(names)}"
            )
        resolved.setdefault(f"{other}{dot}{rest}", dim)
    for name, most_dims in usual.items():
        resolved.setdefault(name, _UNDECLARED - most_dims)
        if name in names:
            resolved.setdefault(str(names.index(name)), _UNDECLARED - most_dims)
    return resolved


def _no_batch(tree: Mapping[str, Any]) -> str:
    """What to do where no input is a tensor with a batch dimension."""
    advice = "If the batch lies in another dimension, name it: batch_dims={'x': 1}"
    arrays = [
        f"{name!r} is a {type(value).__module__}.{type(value).__name__}: give torch.as_tensor(…)"
        for name, value in tree.items()
        if not isinstance(value, Tensor) and hasattr(value, "__array__")
    ]
    if arrays:
        advice = f"Input {', '.join(arrays)}"
    return (
        "no input tensor with a batch dimension was given; expected at least one tensor of shape "
        f"(B, …). {advice}"
    )
