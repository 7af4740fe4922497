"""Which trainings a study consists of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sigmanens.errors import ConfigError
from sigmanens.lab.bench.config import BenchConfig

_ONE = ("norm_tuning", "laplace")
"""Methods of a single network, which do not depend on M."""


@dataclass(frozen=True, order=True)
class Trial:
    """One training of a study.

    Attributes:
        seed: of data order, weights and scales.
        method: a name of ``METHODS``.
        members: M.
        tau, weight: of the penalty; None for methods without one.
        variant: a name of the study's variants, or "".
    """

    seed: int
    method: str
    members: int
    tau: float | None = None
    weight: float | None = None
    variant: str = ""

    @property
    def key(self) -> str:
        """Name of its folder: what tells it apart from the others."""
        parts = [self.method.replace(":", "."), f"m{self.members}"]
        parts += [f"tau{self.tau:g}"] if self.tau is not None else []
        parts += [f"weight{self.weight:g}"] if self.weight is not None else []
        parts += [self.variant] if self.variant else []
        return "-".join([*parts, f"seed{self.seed}"])


def trials_of(config: BenchConfig) -> list[Trial]:
    """All trainings of a study, seed by seed, so that one seed is whole before the next begins.

    Raises:
        ConfigError: if there are none, or two have the same key.
    """
    members = config.members or [config.ensemble.members]
    found: dict[Trial, None] = {}
    for seed in config.seeds:
        for method in config.methods:
            counts = [m for m in members if m > 1]  # one member of anything is one network
            if method == "separate":
                counts = [max(members)]  # the first k of them are the k networks
            elif method in _ONE:
                counts = [1]
            for count in counts:
                own = config.changed("", method)
                found.update(dict.fromkeys(_settings(own, method, count, seed, config.taus)))
        for name, variant in config.variants.items():
            changed = config.changed(name)
            taus = variant.taus if variant.taus is not None else config.taus
            count = changed.ensemble.members
            found.update(dict.fromkeys(_settings(changed, variant.method, count, seed, taus, name)))
    if not found:
        raise ConfigError(
            f"nothing is to be trained: {', '.join(config.methods)} needs at least 2 members, and "
            f"members is {members}"
        )
    keys = [trial.key for trial in found]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ConfigError(
            f"two trainings are called {twice}: values of τ or λ differ after the sixth digit only"
        )
    return list(found)


def _settings(
    config: BenchConfig,
    method: str,
    members: int,
    seed: int,
    taus: Sequence[float],
    variant: str = "",
) -> list[Trial]:
    """One method at every τ and λ that apply to it."""
    if method != "sigmanens":
        return [Trial(seed, method, members, variant=variant)]
    weights = [config.weight]
    if config.weights is not None and not variant:
        weights = config.weights
    return [Trial(seed, method, members, t, w, variant) for w in weights for t in taus]
