"""Trees of tensors: fold members into the batch dimension, unfold them again.

Inside the network the members ride in dimension 0, member-major: of ``k`` members in a pass
over ``B`` samples, row ``m·B + b`` is sample ``b`` seen by the ``m``-th of them. Outside, results
carry the members in a dimension of their own: ``(M, B, …)``.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from sigmanens.errors import InputError

__all__ = ["join", "map_tensors", "opaque", "unfold"]


def map_tensors(fn: Callable[[Tensor, str], Any], tree: Any, path: str = "") -> Any:
    """Apply ``fn(tensor, path)`` to every tensor in tuples, lists, mappings and dataclasses.

    The containers are rebuilt with their own classes (named tuples, ``ModelOutput``,
    ``BatchEncoding``, dataclasses); whatever is not a tensor or a container is passed through.
    ``path`` names a leaf as in ``"0.attention_mask"``.
    """

    def below(key: object) -> str:
        return f"{path}.{key}" if path else str(key)

    if isinstance(tree, Tensor):
        return fn(tree, path)
    if isinstance(tree, PackedSequence):  # a tuple, but not one of batches
        return tree
    if isinstance(tree, tuple):
        items = [map_tensors(fn, v, below(i)) for i, v in enumerate(tree)]
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, list):
        return [map_tensors(fn, v, below(i)) for i, v in enumerate(tree)]
    if isinstance(tree, Mapping):
        mapped = {k: map_tensors(fn, v, below(k)) for k, v in tree.items()}
        if type(tree) is dict:
            return mapped
        if dataclasses.is_dataclass(tree):  # transformers' ModelOutput is both
            return type(tree)(**mapped)
        if isinstance(tree, MutableMapping):
            rebuilt = copy.copy(tree)  # keeps what the class has besides its items
            rebuilt.update(mapped)
            return rebuilt
        return type(tree)(mapped)  # type: ignore[call-arg]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = {
            f.name: map_tensors(fn, getattr(tree, f.name), below(f.name))
            for f in dataclasses.fields(tree)
            if f.init
        }
        return dataclasses.replace(tree, **fields)
    return tree


def opaque(tree: Any, path: str = "") -> dict[str, Any]:
    """Leaves of a tree that hold tensors in an object of their own class, by path.

    Nothing is known about their batch: packed sequences, sparse and nested tensors, graphs,
    distributions, classes of the user's.
    """
    if isinstance(tree, Tensor):
        strided = tree.layout == torch.strided and not tree.is_nested
        return {} if strided else {path: tree}
    if isinstance(tree, PackedSequence):
        return {path: tree}
    items: list[tuple[object, Any]] = []
    if isinstance(tree, Mapping):
        items = list(tree.items())
    elif isinstance(tree, (tuple, list)):
        items = list(enumerate(tree))
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        items = [(f.name, getattr(tree, f.name)) for f in dataclasses.fields(tree) if f.init]
    elif _holds_tensors(tree):
        return {path: tree}
    found: dict[str, Any] = {}
    for key, value in items:
        found |= opaque(value, f"{path}.{key}" if path else str(key))
    return found


def _holds_tensors(x: Any, depth: int = 2) -> bool:
    """Whether an object has tensors among its attributes, or among theirs."""
    if isinstance(x, Tensor):
        return True
    if depth == 0 or isinstance(x, (type, nn.Module, torch.Generator)) or callable(x):
        return False
    slots = [getattr(x, n, None) for c in type(x).__mro__ for n in getattr(c, "__slots__", ())]
    values = [*getattr(x, "__dict__", {}).values(), *slots]
    for value in list(values):
        if isinstance(value, (list, tuple)):
            values += value
        elif isinstance(value, dict):
            values += value.values()
    return any(_holds_tensors(v, depth - 1) for v in values)


def unfold(tree: Any, members: int, size: int) -> Any:
    """Turn every result ``(k·B, …)`` into ``(k, B, …)``; one member's is taken as it is.

    Scalars (a mean loss computed inside the network) are left as they are: the mean over folded
    rows is the mean over members. The caches of transformers' decoders are left out.

    Raises:
        InputError: if a result does not carry the ``k·B`` rows in dimension 0, or holds tensors in
            an object of an unknown class.
    """
    unknown = {} if torch.compiler.is_compiling() else opaque(tree)
    if unknown:
        tree = _without_caches(tree, unknown)

    def split(y: Tensor, path: str) -> Tensor:
        if y.dim() == 0:
            return y
        if members == 1:
            return y.unsqueeze(0)
        if y.shape[0] != members * size:
            where = f"result '{path}'" if path else "the result"
            raise InputError(
                f"{where} has shape {tuple(y.shape)}; expected {members * size} rows in dimension "
                f"0 ({members} members × {size} samples). The network moves or drops its batch "
                "dimension: use schedule='sequential'"
            )
        return y.unflatten(0, (members, size))

    return map_tensors(split, tree)


def _without_caches(tree: Any, unknown: Mapping[str, Any]) -> Any:
    """The results without transformers' caches of keys and values; an error for other objects."""
    caches = {p: x for p, x in unknown.items() if "cache" in type(x).__module__}
    for path, x in unknown.items():
        if path not in caches or "." in path:
            where = f"result '{path}'" if path else "the result"
            kind = f"{type(x).__module__}.{type(x).__qualname__}"
            raise InputError(
                f"{where} is a {kind}, an object that holds tensors: it is not known how it "
                "carries the members. Return a tensor, tuple, dict or dataclass from forward"
            )
    if isinstance(tree, MutableMapping):
        kept = copy.copy(tree)
        for path in caches:
            kept[path] = None
        return kept
    if isinstance(tree, (tuple, list)):
        return type(tree)(None if str(i) in caches else x for i, x in enumerate(tree))
    return dataclasses.replace(tree, **dict.fromkeys(caches))


def join(blocks: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Join results of several passes: leaves ``(k_i, B, …)`` are concatenated to ``(M, B, …)``.

    Scalars are averaged, weighted by the members of their pass.

    Args:
        blocks: unfolded results of the passes, of the same structure.
        sizes: members k_i in each pass.
    """
    if len(blocks) == 1:
        return blocks[0]
    leaves: list[list[Tensor]] = []
    for block in blocks:
        row: list[Tensor] = []

        def take(t: Tensor, _: str, row: list[Tensor] = row) -> Tensor:
            row.append(t)
            return t

        map_tensors(take, block)
        leaves.append(row)

    def merge(group: tuple[Tensor, ...]) -> Tensor:
        if group[0].dim() == 0:
            total = sum(sizes)
            return torch.stack([t * (k / total) for t, k in zip(group, sizes, strict=True)]).sum(0)
        return torch.cat(group)

    merged = iter([merge(group) for group in zip(*leaves, strict=True)])
    return map_tensors(lambda *_: next(merged), blocks[0])
