"""The diversity of the members: the penalty, its measures, its theory and a diagnosis."""

from sigmanens.diversity.diagnosis import Finding, diagnose, dropout_disagreement, pull_norms
from sigmanens.diversity.measures import (
    cosine,
    disagreement,
    jensen_gap,
    owners,
    owners_per_channel,
    pairwise_kl,
    saturation,
    symmetric,
)
from sigmanens.diversity.penalty import Diversity, Ramp
from sigmanens.diversity.theory import (
    flat_range,
    owners_per_doubling,
    preferred_owners,
    reached_cosine,
    reached_owners,
    tau_for_owners,
)

__all__ = [
    "Diversity", "Finding", "Ramp", "cosine", "diagnose", "disagreement", "dropout_disagreement",
    "flat_range", "jensen_gap", "owners", "owners_per_channel", "owners_per_doubling",
    "pairwise_kl", "preferred_owners", "pull_norms", "reached_cosine", "reached_owners",
    "saturation", "symmetric", "tau_for_owners",
]  # fmt: skip
