"""Parts of a study's configuration, and the names of what can be trained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sigmanens.errors import ConfigError
from sigmanens.lab.config import Recipe
from sigmanens.lab.plugins import imported, is_import

METHODS = (
    "separate",
    "mc_dropout",
    "laplace",
    "norm_tuning",
    "heads_only",
    "fixed_masks",
    "film",
    "batchensemble",
    "packed",
    "masksembles",
    "mimo",
    "lora_ensemble",
    "sigmanens_lambda0",
    "sigmanens",
)
"""What can be trained. "separate" trains M networks and gives the rows single, single_temperature
and deep_ensemble; on pretrained weights also single_finetuned."""


Rival = Callable[..., Any]
"""From a network, M and a dict of options to a module that gives (M, B, C)."""
_REGISTERED: dict[str, Rival] = {}


def register(name: str, build: Rival) -> None:
    """Add a method of your own to the studies of this process.

    Args:
        name: what ``methods`` calls it.
        build: ``build(network, members, options)`` gives a module from inputs to member logits
            (M, B, C), in training and evaluation mode. ``network`` may be changed in place;
            ``options`` is what the study's ``options`` has under this name. Draws are seeded. A
            worker process knows only what it can import: with several workers write
            ``module:function`` in the place of a registered name.

    Raises:
        ConfigError: if there is a method of that name.
    """
    if name in METHODS or name in _REGISTERED or is_import(name):
        raise ConfigError(f"there is a method {name!r} already; register it under another name")
    _REGISTERED[name] = build


def rival(name: str) -> Rival | None:
    """The function of a registered method or of a ``module:function``; None for another name.

    Raises:
        ConfigError: if it cannot be imported.
    """
    return imported(name, "methods") if is_import(name) else _REGISTERED.get(name)


DRAWS = ("own", "same")
"""Which test examples the kinds of corruption are measured on, see ``MeasureConfig``."""


@dataclass
class MeasureConfig:
    """What is measured besides the test pictures.

    Attributes:
        corruptions: kinds of corruption, or "standard" (15) or "all" (19); none: not measured.
        corruption_limit: measure each corruption on so many test pictures, at most.
        corruption_draw: "own": each kind of corruption has other pictures, as far as they go, so
            that numbers over all kinds rest on as many as can be; "same": all have the first ones.
            Methods and severities share them either way.
        detailed_seeds: measure OOD sets and corruptions for the first so many seeds; none: all.
        features: fit OOD scores on features as well (Mahalanobis, k-NN, ViM).
        resamples: of each bootstrap interval.
        watched: follow NLL and Jensen gap of so many validation examples while training; 0: none.
            They choose nothing.
    """

    corruptions: list[str] = field(default_factory=list)
    corruption_limit: int = 2000
    corruption_draw: str = "own"
    detailed_seeds: int | None = 1
    features: bool = True
    resamples: int = 500
    watched: int = 500


@dataclass
class PretrainConfig:
    """The network that all trainings of a study start from, trained once for the study.

    It sees all training pictures that are not held out for validation, whatever ``data.limit`` is.

    Attributes:
        recipe: how.
        limit: take only so many of the pictures, drawn with ``data.seed``; none: all.
        seed: of its weights, order and augmentation; the same for all seeds of the study.
    """

    recipe: Recipe = field(default_factory=Recipe)
    limit: int | None = None
    seed: int = 0


@dataclass
class Variant:
    """One more way to train a method, told apart in the results by its name.

    Attributes:
        method: which method it is a variant of.
        change: dotted keys of this configuration with their other values, such as
            ``{"recipe.scale_lr_mult": 10.0, "ensemble.shift": true}``. Keys that say which
            trainings there are (``seeds``, ``members``, ``weights``, …) are the study's alone; M is
            ``ensemble.members``, λ ``diversity.weight``.
        taus: τ to train it at; none: those of the study.
    """

    method: str = "sigmanens"
    change: dict[str, Any] = field(default_factory=dict)
    taus: list[float] | None = None
