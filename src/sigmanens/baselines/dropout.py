"""MC dropout (arXiv 1506.02142): one network, whose dropout stays active in evaluation."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from sigmanens.baselines.base import Rival, base_network, check_count
from sigmanens.conversion.heads import find_heads
from sigmanens.ensemble.prediction import logits_of
from sigmanens.errors import InputError
from sigmanens.seeding import device_of, own_random_state, seed_device

__all__ = ["MCDropout", "mc_dropout"]


class MCDropout(Rival):
    """One network in training, S samples of it in evaluation; made by :func:`mc_dropout`.

    Sample s uses the random state ``seed + s`` in every call, so evaluation is repeatable and
    leaves the random state outside as it was; rows of a batch have masks of their own.
    """

    def __init__(self, network: nn.Module, samples: int, seed: int = 0) -> None:
        super().__init__(network, samples)
        self.seed = seed

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Logits (1, B, C, …) in training mode, (S, B, C, …) in evaluation mode."""
        if self.training:
            return logits_of(self.network(*args, **kwargs)).unsqueeze(0)
        with _dropping(self.network), own_random_state(device_of(self.network)):
            return torch.stack([self._sample(s, args, kwargs) for s in range(self.num_members)])

    def _sample(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        seed_device(device_of(self.network), self.seed + index)
        return logits_of(self.network(*args, **kwargs))


def mc_dropout(
    model_or_factory: nn.Module | Callable[[], nn.Module],
    samples: int,
    p: float | None = 0.1,
    *,
    head_name: str | Sequence[str] | None = None,
    seed: int = 0,
) -> MCDropout:
    """Dropout before the head, and the base's own, active in evaluation too (arXiv 1506.02142).

    Args:
        model_or_factory: a network, which is copied, or a function that makes one.
        samples: S ≥ 1, the number of members in evaluation.
        p: probability of dropping a feature before the head; None to use only the dropout modules
            that the base has (``nn.Dropout`` and kin; dropout called as a function is not seen).
        head_name: where the head is, if it is not found by itself.
        seed: of the masks in evaluation.

    Returns:
        a network from (B, …) to (1, B, C) in training, (S, B, C) in evaluation; its parameters are
        the base's.

    Raises:
        InputError: for a number out of its range, or ``p=None`` with no dropout in the base.
        HeadNotFoundError: if no head is found.
    """
    check_count("samples", samples)
    network = base_network(model_or_factory)
    if p is None:
        if not _dropouts(network):
            raise InputError(
                f"this {type(network).__name__} has no dropout module with p > 0; give p, the "
                "probability of dropping a feature before the head"
            )
        return MCDropout(network, samples, seed)
    if not 0 < p < 1:
        raise InputError(f"p is {p!r}; expected a probability in (0, 1), or None")
    modules = dict(network.named_modules(remove_duplicate=False))
    made: dict[int, nn.Module] = {}
    for name in find_heads(network, head_name, "copy"):
        head = modules[name]
        if id(head) not in made:
            parts = OrderedDict(dropout=nn.Dropout(p), head=head)
            made[id(head)] = nn.Sequential(parts).train(head.training)
        parent, _, leaf = name.rpartition(".")
        setattr(network.get_submodule(parent), leaf, made[id(head)])
    return MCDropout(network, samples, seed)


def _dropouts(network: nn.Module) -> list[_DropoutNd]:
    return [m for m in network.modules() if isinstance(m, _DropoutNd) and m.p > 0]


@contextmanager
def _dropping(network: nn.Module) -> Iterator[None]:
    """Put the dropout modules, and nothing else, into training mode for a while."""
    modules = _dropouts(network)
    modes = [m.training for m in modules]
    try:
        for m in modules:
            m.training = True
        yield
    finally:
        for m, mode in zip(modules, modes, strict=True):
            m.training = mode
