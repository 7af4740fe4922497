"""What a study can be told: each field is an option of ``sigmanens bench`` and a YAML key."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from sigmanens.conversion.config import ConversionConfig
from sigmanens.errors import ConfigError
from sigmanens.lab.bench.settings import (
    DRAWS,
    METHODS,
    MeasureConfig,
    PretrainConfig,
    Variant,
    register,
    rival,
)
from sigmanens.lab.config import (
    DataConfig,
    DiversityConfig,
    ModelConfig,
    Recipe,
    TrainConfig,
)
from sigmanens.lab.plain import from_plain

__all__ = [
    "METHODS",
    "PRESETS",
    "BenchConfig",
    "MeasureConfig",
    "PretrainConfig",
    "Variant",
    "preset_path",
    "register",
]

_NAME = re.compile(r"\w[\w.-]*")

_FIXED = {
    "study": "It is the name of all results",
    "methods": "A variant names its method",
    "variants": "Add another variant",
    "seeds": "All methods have the same",
    "workers": "It changes no training",
    "pretrain": "All trainings start from the same network",
    "taus": "Give the variant's own taus",
    "diversity.tau": "Give the variant's taus",
    "weights": "Change diversity.weight",
    "members": "Change ensemble.members",
    "measure.detailed_seeds": "All methods are measured on the same",
}
"""What no variant can change, and what to do."""

_FOLDER = Path(__file__).parent / "presets"
PRESETS = tuple(sorted(p.stem for p in _FOLDER.glob("*.yaml")))


def preset_path(name: str) -> Path:
    """The YAML file of a preset.

    Raises:
        ConfigError: if there is none of that name.
    """
    if name not in PRESETS:
        raise ConfigError(f"there is no preset {name!r}; there are {', '.join(PRESETS)}")
    return _FOLDER / f"{name}.yaml"


def _usable(taus: Sequence[float]) -> bool:
    """Whether there is a τ, each is a number > 0, and none is given twice."""
    return bool(taus) and len(set(taus)) == len(taus) and all(0 < t < math.inf for t in taus)


@dataclass
class BenchConfig:
    """One study of ``sigmanens bench``.

    Attributes:
        study: what the study is called in the results.
        data: the pictures.
        data_root: folder that holds the sets as folders, by the last part of their names; it
            takes the place of hub names.
        model: the network.
        pretrain: train a network first, which all trainings start from; none: they start from
            what ``model`` says.
        trained_head: whether pretrained weights answer in the classes of the data; if not, one
            network is trained before it stands for itself.
        ensemble: the conversion; its ``members`` is M of every method.
        diversity: the penalty; ``taus`` takes the place of its τ.
        recipe: the training, the same for all methods.
        methods: what to train, see ``METHODS``; also ``module:function`` of a file of your own, a
            function (network, members, options) → module with (M, B, C) logits.
        options: further arguments of a method's builder, by method.
        taus: temperatures τ of "sigmanens".
        weights: λ of "sigmanens"; none: that of ``diversity``.
        members: numbers of members, one after the other; none: that of ``ensemble``.
        settings: what a method has otherwise than the study, by method: dotted keys with their
            values, such as ``{"separate": {"recipe.lr": 0.001}}``; its variants have it too.
        variants: further trainings, by name.
        seeds: one training of everything for each.
        redraw: each seed draws training and validation examples of its own (``data.seed`` + seed).
        measure: what is measured.
        workers: trainings side by side, each in a process with one CPU thread.
    """

    study: str = "study"
    data: DataConfig = field(default_factory=DataConfig)
    data_root: str | None = None
    model: ModelConfig = field(default_factory=ModelConfig)
    pretrain: PretrainConfig | None = None
    trained_head: bool = True
    ensemble: ConversionConfig = field(default_factory=ConversionConfig)
    diversity: DiversityConfig = field(default_factory=DiversityConfig)
    recipe: Recipe = field(default_factory=Recipe)
    methods: list[str] = field(
        default_factory=lambda: ["separate", "sigmanens_lambda0", "sigmanens"]
    )
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    taus: list[float] = field(default_factory=lambda: [0.1, 0.5, 2.0])
    weights: list[float] | None = None
    members: list[int] | None = None
    settings: dict[str, dict[str, Any]] = field(default_factory=dict)
    variants: dict[str, Variant] = field(default_factory=dict)
    seeds: list[int] = field(default_factory=lambda: [0, 1, 2])
    redraw: bool = False
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    workers: int = 1

    def check(self) -> None:
        """Raise ConfigError for values that no part could use, before anything is loaded."""
        self.training().check()
        named = [*self.methods, *(v.method for v in self.variants.values())]
        unknown = [m for m in named if m not in METHODS and rival(m) is None]
        if unknown:
            raise ConfigError(
                f"methods names {unknown[0]!r}; expected any of {', '.join(METHODS)}, a registered "
                "name or module:function"
            )
        stray = sorted(set(self.options) - {*METHODS, *named})
        if stray:
            raise ConfigError(f"options has {stray[0]!r}, which is none of {', '.join(METHODS)}")
        for key in ("methods", "seeds"):
            values = getattr(self, key)
            if not values or len(set(values)) < len(values):
                raise ConfigError(f"{key} is {values}; expected at least one, each once")
        if "sigmanens" in self.methods and not _usable(self.taus):
            raise ConfigError(f"taus is {self.taus}; expected at least one τ > 0, each once")
        if self.members is not None and (not self.members or min(self.members) < 1):
            raise ConfigError(f"members is {self.members}; expected numbers of at least 1")
        if self.weights is not None and (not self.weights or min(self.weights) < 0):
            raise ConfigError(f"weights is {self.weights}; expected λ of at least 0")
        if self.workers < 1:
            raise ConfigError(f"workers is {self.workers}; expected at least 1")
        if self.measure.watched < 0:
            raise ConfigError(f"measure.watched is {self.measure.watched}; expected at least 0")
        if self.measure.corruption_limit < 1 or self.measure.resamples < 1:
            raise ConfigError("measure.corruption_limit and measure.resamples must be at least 1")
        if self.measure.corruption_draw not in DRAWS:
            raise ConfigError(
                f"measure.corruption_draw is {self.measure.corruption_draw!r}; expected "
                f"{' or '.join(map(repr, DRAWS))}"
            )
        if self.options.get("separate", {}) not in ({}, {"head": "fresh"}):
            raise ConfigError(
                f"options has 'separate': {self.options['separate']}; expected {{head: fresh}} "
                "(heads of a norm and a Linear) or nothing (the plain network)"
            )
        for method in self.settings:
            if method not in METHODS and method not in named:
                raise ConfigError(f"settings has {method!r}; expected any of {', '.join(METHODS)}")
            changed = self.changed("", method)
            replace(changed, settings={}, variants={}).check()
        for name in self.variants:
            self._check_variant(name)
        self._check_pretrain()
        if self.data.lazy and "laplace" in (
            *self.methods, *(v.method for v in self.variants.values()),
        ):  # fmt: skip
            raise ConfigError(
                "methods names 'laplace', which needs all training pictures at once, but data.lazy "
                "reads them batch by batch: leave one of them out"
            )

    def _check_pretrain(self) -> None:
        """Raise ConfigError for a base that cannot be trained, or would not be started from."""
        if self.pretrain is None:
            return
        if self.model.pretrained:
            raise ConfigError(
                "pretrain trains the network that all trainings start from, but model names "
                "pretrained weights already: leave one of them out"
            )
        if not self.trained_head:
            raise ConfigError(
                "trained_head is false, but pretrain trains the head on the data's own classes"
            )
        if self.data.tokenizer is not None or self.data.source == "digits":
            raise ConfigError(
                "pretrain is for pictures that all seeds share: texts start from the weights of "
                "model.name, and each seed cuts the digits in another way"
            )
        if self.pretrain.limit is not None and self.pretrain.limit < 1:
            raise ConfigError(f"pretrain.limit is {self.pretrain.limit}; expected at least 1")
        try:
            replace(self.training(), recipe=self.pretrain.recipe).check()
        except ConfigError as e:
            raise ConfigError(f"pretrain: {e}") from e

    def _check_variant(self, name: str) -> None:
        """Raise ConfigError for a variant that could not be trained, or not be told apart."""
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"a variant is called {name!r}; expected letters, digits, '_', '-' and '.', as in "
                "the name of a folder"
            )
        changed, taus = self.changed(name), self.variants[name].taus
        if taus is not None and not _usable(taus):
            raise ConfigError(f"variant {name!r} has taus {taus}; expected τ > 0, each once")
        try:
            replace(changed, settings={}, variants={}).check()
        except ConfigError as e:
            raise ConfigError(f"variant {name!r}: {e}") from e

    def training(self) -> TrainConfig:
        """The same as a configuration of one training."""
        return TrainConfig(
            self.data, self.model, self.ensemble, self.diversity, self.recipe, threads=1
        )

    @property
    def pretrained(self) -> bool:
        """Whether the methods start from a network that answers already."""
        return (self.model.pretrained or self.pretrain is not None) and self.trained_head

    @property
    def weight(self) -> float:
        """λ where ``weights`` gives none."""
        return self.diversity.weight_for(self.model.pretrained or self.pretrain is not None)

    def started_from(self, weights: str) -> BenchConfig:
        """The study once its base is trained, and lies in a file."""
        return replace(self, model=replace(self.model, weights=weights), pretrain=None)

    def changed(self, variant: str, method: str = "") -> BenchConfig:
        """The configuration of a variant, or of a method where the variant is "".

        Raises:
            ConfigError: if the variant is unknown, or a key that is changed does not exist.
        """
        if variant and variant not in self.variants:
            raise ConfigError(f"there is no variant {variant!r}: {', '.join(self.variants)}")
        own = self.variants.get(variant) or Variant(method)
        settings = self.settings.get(own.method, {})
        if not variant and not settings:
            return self
        plain = self.to_dict()
        if own.taus is not None:
            plain["taus"] = list(own.taus)
        where = f"variant {variant!r}" if variant else f"settings of {method!r}"
        for dotted, value in (settings | own.change).items():
            fixed = "pretrain" if dotted.startswith("pretrain.") else dotted
            if fixed in _FIXED:
                raise ConfigError(
                    f"{where} changes {dotted!r}, which is the study's alone. {_FIXED[fixed]}"
                )
            *path, last = dotted.split(".")
            place: Any = plain
            for step in path:
                place = place.get(step) if isinstance(place, Mapping) else None
            if not isinstance(place, dict) or (last not in place and path[:1] != ["options"]):
                raise ConfigError(f"{where} changes {dotted!r}, which does not exist")
            place[last] = value
        return BenchConfig.from_dict(plain)

    def to_dict(self) -> dict[str, Any]:
        """Plain types, as in the YAML file."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> BenchConfig:
        """Inverse of :meth:`to_dict`; unknown keys and values of another type raise ConfigError."""
        plain = dict(data)
        given = plain.get("variants") or {}
        variants = {str(k): from_plain(Variant, v or {}) for k, v in given.items()}
        plain["variants"] = {}
        config = from_plain(cls, plain)
        config.variants = variants
        return config
