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


def map_leaves(fn: Callable[[Any, str], Any], tree: Any, path: str = "") -> Any:
    """Apply ``fn(leaf, path)`` to all that tuples, lists, mappings and dataclasses hold.

    The containers are rebuilt with their own classes (named tuples, ``ModelOutput``,
    ``BatchEncoding``, dataclasses). ``path`` names a leaf as in ``"0.attention_mask"``.
    """

    def mapped(key: object, value: Any) -> Any:
        return map_leaves(fn, value, f"{path}.{key}" if path else str(key))

    if isinstance(tree, (Tensor, PackedSequence)):  # a tuple too, but not one of batches
        return fn(tree, path)
    if isinstance(tree, (tuple, list)):
        items = [mapped(i, v) for i, v in enumerate(tree)]
        if isinstance(tree, list):
            return items
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, Mapping):
        return _same_mapping(tree, {k: mapped(k, v) for k, v in tree.items()})
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        taken = [f.name for f in dataclasses.fields(tree) if f.init]
        return dataclasses.replace(tree, **{n: mapped(n, getattr(tree, n)) for n in taken})
    return fn(tree, path)


def _same_mapping(tree: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    """A mapping of the class of ``tree`` with other values."""
    if type(tree) is dict:
        return items
    if dataclasses.is_dataclass(tree):  # transformers' ModelOutput is both
        return type(tree)(**items)
    if isinstance(tree, MutableMapping):
        rebuilt = copy.copy(tree)  # keeps what the class has besides its items
        rebuilt.update(items)
        return rebuilt
    return type(tree)(items)  # type: ignore[call-arg]


def map_tensors(fn: Callable[[Tensor, str], Any], tree: Any) -> Any:
    """Apply ``fn(tensor, path)`` to every tensor; other leaves are passed through."""
    return map_leaves(lambda x, path: fn(x, path) if isinstance(x, Tensor) else x, tree)


def tensors(tree: Any) -> list[tuple[str, Tensor]]:
    """All tensors of a tree, each with its path."""
    found: list[tuple[str, Tensor]] = []

    def look(x: Tensor, path: str) -> Tensor:
        found.append((path, x))
        return x

    map_tensors(look, tree)
    return found


def opaque(tree: Any) -> dict[str, Any]:
    """Leaves of a tree that hold tensors in an object of their own class, by path.

    Nothing is known about their batch: packed sequences, sparse and nested tensors, graphs,
    distributions, classes of the user's.
    """
    found: dict[str, Any] = {}

    def look(x: Any, path: str) -> Any:
        if isinstance(x, Tensor):
            unknown = x.layout != torch.strided or x.is_nested
        else:
            unknown = isinstance(x, PackedSequence) or _holds_tensors(x)
        if unknown:
            found[path] = x
        return x

    map_leaves(look, tree)
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
    for path, x in unknown.items():
        if "." in path or not path or "cache" not in type(x).__module__:
            kind = f"{type(x).__module__}.{type(x).__qualname__}"
            raise InputError(
                f"{_named(path)} is a {kind}, an object that holds tensors: it is not known how it "
                "carries the members. Return a tensor, tuple, dict or dataclass from forward"
            )

    def split(y: Any, path: str) -> Any:
        if path in unknown:
            return None
        if not isinstance(y, Tensor) or y.dim() == 0:
            return y
        if members == 1:
            return y.unsqueeze(0)
        if y.shape[0] != members * size:
            raise InputError(
                f"{_named(path)} has shape {tuple(y.shape)}; expected {members * size} rows in "
                f"dimension 0 ({members} members × {size} samples). The network moves or drops its "
                "batch dimension: use schedule='sequential'"
            )
        return y.unflatten(0, (members, size))

    return map_leaves(split, tree)


def _named(path: str) -> str:
    return f"result '{path}'" if path else "the result"


def join(blocks: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Join results of several passes: leaves ``(k_i, B, …)`` are concatenated to ``(M, B, …)``.

    Scalars are averaged, weighted by the members of their pass: ``sizes`` are the k_i.
    """
    if len(blocks) == 1:
        return blocks[0]

    def merge(group: list[Tensor]) -> Tensor:
        if group[0].dim() == 0:
            total = sum(sizes)
            return torch.stack([t * (k / total) for t, k in zip(group, sizes, strict=True)]).sum(0)
        return torch.cat(group)

    groups = zip(*map(tensors, blocks), strict=True)
    merged = iter([merge([t for _, t in group]) for group in groups])
    return map_tensors(lambda *_: next(merged), blocks[0])
