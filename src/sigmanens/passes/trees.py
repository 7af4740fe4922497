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
from torch import Tensor

from sigmanens.errors import InputError

__all__ = ["expand", "join", "map_tensors", "narrow", "unfold"]


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


def expand(tree: Any, batched: Mapping[str, int], members: int) -> Any:
    """Repeat every batched tensor (B, …) to (k·B, …), member-major, along its batch dimension."""
    if members == 1:
        return tree

    def repeat(x: Tensor, path: str) -> Tensor:
        if path not in batched:
            return x
        return torch.cat([x] * members, dim=batched[path])  # unlike expand, keeps the memory format

    return map_tensors(repeat, tree)


def narrow(tree: Any, batched: Mapping[str, int], start: int, length: int) -> Any:
    """Rows ``start … start+length-1`` of every batched tensor along its batch dimension."""

    def cut(x: Tensor, path: str) -> Tensor:
        return x.narrow(batched[path], start, length) if path in batched else x

    return map_tensors(cut, tree)


def unfold(tree: Any, members: int, size: int) -> Any:
    """Turn every result ``(k·B, …)`` into ``(k, B, …)``; one member's is taken as it is.

    Scalars (a mean loss computed inside the network) are left as they are: the mean over folded
    rows is the mean over members.

    Raises:
        InputError: if a result does not carry the ``k·B`` rows in dimension 0.
    """

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
