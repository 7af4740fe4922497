"""Trees of tensors: fold members into the batch dimension, unfold them again.

Inside the network the members ride in dimension 0, member-major: of ``k`` members in a pass
over ``B`` samples, row ``m·B + b`` is sample ``b`` seen by the ``m``-th of them. Outside, results
carry the members in a dimension of their own: ``(M, B, …)``.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
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

    def mapped(key: object, value: Any) -> Any:
        return map_tensors(fn, value, f"{path}.{key}" if path else str(key))

    if isinstance(tree, Tensor):
        return fn(tree, path)
    if isinstance(tree, PackedSequence):  # a tuple, but not one of batches
        return tree
    if isinstance(tree, (tuple, list)):
        items = [mapped(i, v) for i, v in enumerate(tree)]
        if isinstance(tree, list):
            return items
        return type(tree)(*items) if hasattr(tree, "_fields") else type(tree)(items)
    if isinstance(tree, Mapping):
        return _same_mapping(tree, {k: mapped(k, v) for k, v in tree.items()})
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return dataclasses.replace(tree, **{k: mapped(k, v) for k, v in _fields(tree)})
    return tree


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


def _fields(data: Any) -> list[tuple[str, Any]]:
    """Name and value of each field of a dataclass that its constructor takes."""
    return [(f.name, getattr(data, f.name)) for f in dataclasses.fields(data) if f.init]


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
    items: Iterable[tuple[object, Any]]
    if isinstance(tree, Mapping):
        items = tree.items()
    elif isinstance(tree, (tuple, list)):
        items = enumerate(tree)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        items = _fields(tree)
    else:
        return {path: tree} if _holds_tensors(tree) else {}
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
    if isinstance(tree, Mapping):
        kept = {k: None if str(k) in caches else x for k, x in tree.items()}
        return _same_mapping(tree, kept)
    if isinstance(tree, (tuple, list)):
        return type(tree)(None if str(i) in caches else x for i, x in enumerate(tree))
    return dataclasses.replace(tree, **dict.fromkeys(caches))


def join(blocks: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Join results of several passes: leaves ``(k_i, B, …)`` are concatenated to ``(M, B, …)``.

    Scalars are averaged, weighted by the members of their pass: ``sizes`` are the k_i.
    """
    if len(blocks) == 1:
        return blocks[0]

    def merge(group: tuple[Tensor, ...]) -> Tensor:
        if group[0].dim() == 0:
            total = sum(sizes)
            return torch.stack([t * (k / total) for t, k in zip(group, sizes, strict=True)]).sum(0)
        return torch.cat(group)

    merged = iter([merge(group) for group in zip(*map(_leaves, blocks), strict=True)])
    return map_tensors(lambda *_: next(merged), blocks[0])


def _leaves(tree: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_tensors(lambda t, _: found.append(t), tree)
    return found
