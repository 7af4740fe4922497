"""What the commands can be told: each field is an option and a key of the YAML file.

The command line reads this module before anything else, so it imports none of the large libraries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sigmanens.conversion.config import ConversionConfig
from sigmanens.diversity import Diversity, Ramp
from sigmanens.diversity.defaults import DEFAULTS, Default
from sigmanens.errors import ConfigError
from sigmanens.lab.plain import from_plain

MEMBER_BATCHES = ("same", "own", "share")
CONTROLS = ("single", "single_temperature", "single_finetuned", "sigmanens_lambda0")


@dataclass
class ModelConfig:
    """The network.

    Attributes:
        name: a backbone ("resnet20", "resnet18", "wrn28_10", …), "timm/<name>",
            "torchvision/<name>", for texts "transformers/<hub name or folder>", or a function of
            your own file, "module:function", that takes ``options`` and ``num_classes``.
        options: further arguments of the backbone.
        weights: file with pretrained weights (safetensors or torch); none: random ones.
    """

    name: str = "resnet20"
    options: dict[str, Any] = field(default_factory=dict)
    weights: str | None = None

    @property
    def pretrained(self) -> bool:
        """Whether the network starts from trained weights."""
        return bool(self.weights or self.options.get("pretrained"))


@dataclass
class DataConfig:
    """The pictures or texts: a hub name or a local folder that ``datasets.load_dataset`` reads.

    Attributes:
        source: hub name, or folder: of parquet files, of class folders of pictures below
            ``train/`` and ``test/``, or of ``train.csv`` and ``test.csv`` (or ``.json``) with a
            column of texts and one of labels, which may be words; a hub name that holds several
            data sets is followed by which, as in ``ufldl-stanford/svhn:cropped_digits``.
        tokenizer: for texts: hub name or folder of a tokenizer of transformers, or "minilm"; none:
            the data are pictures.
        length: tokens that a text is cut to.
        label_column: column of the labels, where several of the source could hold them.
        train_split: split to train on; "train+test" joins two.
        test_split: split to report on; "rest": what of ``train_split`` is neither trained on
            (``limit``) nor held out (``validation_from_train``).
        classes: take only the first so many classes; none: all.
        validation_split: split for the temperature and every choice; none: ``holdout`` of test.
        validation_from_train: take so many pictures of the training split, never trained on, as
            validation pictures; the test split then stays whole.
        holdout: share of the test split that is set apart for choices when there are no other
            validation pictures; metrics come from the rest.
        channels: 3 or 1.
        size: height and width to resize to.
        crop: share of the shorter side that the square shown holds, such as 0.875 for the middle
            224 of 256 pixels; none: the whole picture is brought to ``size``.
        lazy: keep pictures encoded, and decode a batch when it is needed: for sets that memory does
            not hold. Needs ``size``.
        readers: threads that decode ahead under ``lazy``.
        mean: channels' means of pixels in [0, 1].
        std: channels' standard deviations.
        limit: take only so many training pictures, drawn with ``seed``.
        test_limit: likewise of the test split.
        stratify: draw ``limit``, ``validation_from_train`` and ``test_limit`` so that all classes
            are there in proportion.
        ood: out-of-distribution sets, by name: hub names or folders, taken at the size of the test
            pictures.
        ood_splits: their splits, where those are not called like ``test_split``.
        ood_without: classes of theirs to leave out, because they are classes of the data as well.
        ood_limit: take only so many pictures of each.
        shift: sets with the same classes from elsewhere, by name, measured like the test split.
        seed: of these draws and of the split.
    """

    source: str = ""
    tokenizer: str | None = None
    length: int = 128
    label_column: str | None = None
    train_split: str = "train"
    test_split: str = "test"
    classes: int | None = None
    validation_split: str | None = None
    validation_from_train: int | None = None
    holdout: float = 0.5
    channels: int = 3
    size: int | None = None
    crop: float | None = None
    lazy: bool = False
    readers: int = 0
    mean: list[float] | None = None
    std: list[float] | None = None
    limit: int | None = None
    test_limit: int | None = None
    stratify: bool = False
    ood: dict[str, str] = field(default_factory=dict)
    ood_splits: dict[str, str] = field(default_factory=dict)
    ood_without: dict[str, list[str]] = field(default_factory=dict)
    ood_limit: int | None = 2000
    shift: dict[str, str] = field(default_factory=dict)
    seed: int = 0


@dataclass
class Recipe:
    """How to train.

    Attributes:
        epochs: passes over the training pictures.
        batch_size: pictures in a step.
        member_batches: which of them a member of σN-Ens sees: "same" = all, the same for every
            member; "own" = each member has a batch of its own, ordered and augmented for it alone
            (the cost is that of "same"); "share" = the members divide the batch (an epoch costs
            about what it costs one network), the last one of an epoch cut to a multiple of M.
        optimizer: "sgd", "adam" or "adamw".
        lr: base learning rate.
        scale_lr_mult: factor on the rate of scales; None: 100 for batch norms, 10 for others.
        head_lr_mult: factor on the rate of the members' own heads, whose gradient is 1/M of that of
            one network's head; None: 1.
        momentum: of SGD.
        nesterov: Nesterov momentum.
        weight_decay: on weights of convolutions and linear layers only.
        lr_schedule: "onecycle", "cosine", "multistep" or "constant".
        rise: share of the training in which the one-cycle rate rises.
        milestones: epochs after which the multistep rate falls.
        gamma: factor by which it falls.
        flip_crop: greatest shift in pixels of the random crop, which comes with random mirroring;
            0: no augmentation.
        resized_crop: least share of a picture's area that a random window shows, which is brought
            to ``data.size`` and mirrored at random, in the place of ``flip_crop``; 0: none. Needs
            ``data.lazy``, which has the pictures as they are stored.
        border: what the crop shows beyond the picture: "zero" or "reflect".
        drop_last: leave out an epoch's last batch where it is smaller than the others; the few
            pictures of such a batch would move batch statistics far.
        averaging: decay of an exponential average of all weights and statistics, which takes the
            place of the network (arXiv 1803.05407 averages likewise), such as 0.98; 0: none.
        keep: "last" = the network after the last epoch, "best" = the one of the epoch whose
            temperature-scaled NLL on the validation examples is lowest.
        precision: "32-true" or "bf16-mixed".
        channels_last: memory format of pictures and network.
    """

    epochs: int = 40
    batch_size: int = 128
    member_batches: str = "same"
    optimizer: str = "sgd"
    lr: float = 0.1
    scale_lr_mult: float | None = None
    head_lr_mult: float | None = None
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 5e-4
    lr_schedule: str = "onecycle"
    rise: float = 0.2
    milestones: list[int] = field(default_factory=list)
    gamma: float = 0.1
    flip_crop: int = 0
    resized_crop: float = 0.0
    border: str = "zero"
    drop_last: bool = False
    averaging: float = 0.0
    keep: str = "last"
    precision: str = "32-true"
    channels_last: bool = False


@dataclass
class DiversityConfig:
    """The penalty (see ``sigmanens.Diversity``).

    Attributes:
        tau: softmax temperature τ; none: the default for a network that is trained from scratch, or
            for one with pretrained weights (docs/dial.md).
        weight: λ, or a ramp ``{value: 0.01, start: 0.25, length: 0.25}`` in shares of the training;
            0: no penalty; none: the default, likewise.
        layers: "auto" (the paper's rule), "all" or a regex.
        form: "sum" or "mean".
    """

    tau: float | None = None
    weight: float | Ramp | None = None
    layers: str = "auto"
    form: str = "sum"

    def tau_for(self, pretrained: bool) -> float:
        """τ of a training that starts from trained weights, or from random ones."""
        return _default(pretrained).tau if self.tau is None else self.tau

    def weight_for(self, pretrained: bool) -> float:
        """λ at the end of such a training."""
        if isinstance(self.weight, Ramp):
            return self.weight.value
        return _default(pretrained).weight if self.weight is None else self.weight

    def penalty(self, tau: float, weight: float) -> Diversity:
        """The penalty at this τ and λ, with the ramp if there is one."""
        ramp = isinstance(self.weight, Ramp)
        dial = replace(self.weight, value=weight) if ramp else weight  # type: ignore[type-var]
        return Diversity(tau, dial, self.layers, self.form)  # type: ignore[arg-type]


def _default(pretrained: bool) -> Default:
    return DEFAULTS["pretrained" if pretrained else "scratch"]


@dataclass
class TrainConfig:
    """One run of ``sigmanens train``.

    Attributes:
        data: the pictures.
        model: the network.
        ensemble: the conversion.
        diversity: the penalty.
        recipe: the training.
        controls: what stands beside the ensemble in the results; none: one network to compare with:
            "single", or "single_finetuned" where the pretrained head is new. "single" (the
            pretrained network as loaded; without pretrained weights, one network trained as long),
            "single_temperature" (the same with a temperature fitted on held-out data),
            "single_finetuned" (the pretrained network fine-tuned as long, with a fresh head where
            the members' are fresh), "sigmanens_lambda0"
            (the ensemble without the penalty).
        control_recipe: what the recipe of a control that is one network has otherwise, such as
            ``{lr: 2.0e-4}``: whole networks need a lower rate than members on a frozen backbone.
        seed: of γ, heads, order and augmentation.
        threads: CPU threads; none: torch's choice.
    """

    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    ensemble: ConversionConfig = field(default_factory=ConversionConfig)
    diversity: DiversityConfig = field(default_factory=DiversityConfig)
    recipe: Recipe = field(default_factory=Recipe)
    controls: list[str] | None = None
    control_recipe: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    threads: int | None = None

    def check(self) -> None:
        """Raise ConfigError for values that no part could use, before anything is loaded."""
        if not self.data.source:
            raise ConfigError("data.source is missing: a hub name or a folder of parquet files")
        unknown = [c for c in self.controls or () if c not in CONTROLS]
        if unknown:
            raise ConfigError(
                f"controls names {unknown[0]!r}; expected any of {', '.join(CONTROLS)}"
            )
        if "single_finetuned" in (self.controls or ()) and not self.model.pretrained:
            raise ConfigError(
                "controls names 'single_finetuned', but model names no pretrained weights: use "
                "'single', one network trained as long"
            )
        if not 0 < self.data.holdout < 1:
            raise ConfigError(f"data.holdout is {self.data.holdout}; expected between 0 and 1")
        if self.recipe.epochs < 1 or self.recipe.batch_size < 1:
            raise ConfigError(
                f"recipe.epochs is {self.recipe.epochs} and recipe.batch_size "
                f"{self.recipe.batch_size}; both must be at least 1"
            )
        if self.recipe.precision not in ("32-true", "bf16-mixed"):
            raise ConfigError(
                f"recipe.precision is {self.recipe.precision!r}; expected '32-true' or 'bf16-mixed'"
            )
        members, size = self.ensemble.members, self.recipe.batch_size
        if self.recipe.member_batches not in MEMBER_BATCHES:
            raise ConfigError(
                f"recipe.member_batches is {self.recipe.member_batches!r}; expected one of "
                f"{', '.join(MEMBER_BATCHES)}"
            )
        if self.recipe.member_batches == "share" and size % members:
            raise ConfigError(
                f"recipe.member_batches is 'share', but {members} members do not divide a batch of "
                f"{size}: give recipe.batch_size a multiple of {members}"
            )
        if self.recipe.keep not in ("last", "best") or not 0 <= self.recipe.averaging < 1:
            raise ConfigError(
                f"recipe.keep is {self.recipe.keep!r} and recipe.averaging {self.recipe.averaging}"
                "; expected 'last' or 'best', and a decay in [0, 1)"
            )
        if self.recipe.flip_crop < 0:
            raise ConfigError(f"recipe.flip_crop is {self.recipe.flip_crop}; expected at least 0")
        if not 0 <= self.weight < math.inf:
            raise ConfigError(f"diversity.weight is {self.weight:g}; expected λ of at least 0")
        self._check_pictures()
        self._check_texts()
        if self.control_recipe:
            try:
                recipe = from_plain(Recipe, asdict(self.recipe) | self.control_recipe)
                replace(self, recipe=recipe, control_recipe={}).check()
            except ConfigError as e:
                raise ConfigError(f"control_recipe: {e}") from e
        if self.threads is not None and self.threads < 1:
            raise ConfigError(f"threads is {self.threads}; expected at least 1")
        if self.penalised and self.ensemble.scale == "linear":
            raise ConfigError(
                "ensemble.scale is 'linear', to which no penalty applies; set diversity.weight to 0"
            )
        if not self.penalised and "sigmanens_lambda0" in (self.controls or ()):
            raise ConfigError(
                "controls names 'sigmanens_lambda0', but the ensemble itself has no penalty: "
                "diversity.weight is 0, or ensemble.members 1"
            )

    def _check_pictures(self) -> None:
        """Raise ConfigError for ways of reading and showing pictures that do not go together."""
        data, recipe = self.data, self.recipe
        if data.crop is not None and (data.size is None or not 0 < data.crop <= 1):
            raise ConfigError(
                f"data.crop is {data.crop} and data.size {data.size}; expected a share in (0, 1], "
                "and the size that the square is brought to"
            )
        if data.lazy and data.size is None:
            raise ConfigError("data.lazy needs data.size: the batches hold pictures of one size")
        if data.readers < 0:
            raise ConfigError(f"data.readers is {data.readers}; expected at least 0")
        if recipe.resized_crop and not (0 < recipe.resized_crop <= 1 and data.lazy):
            raise ConfigError(
                f"recipe.resized_crop is {recipe.resized_crop} and data.lazy {data.lazy}; expected "
                "a share in (0, 1], and data.lazy: true, which has the pictures as they are stored"
            )
        if recipe.resized_crop and recipe.flip_crop:
            raise ConfigError(
                "recipe.resized_crop and recipe.flip_crop are both given; expected one augmentation"
            )

    def _check_texts(self) -> None:
        """Raise ConfigError for what is done to pictures alone."""
        if self.data.tokenizer is None:
            return
        for key, given in (
            ("data.ood_without", self.data.ood_without),
            ("data.size", self.data.size),
            ("data.crop", self.data.crop),
            ("data.lazy", self.data.lazy),
            ("recipe.flip_crop", self.recipe.flip_crop),
            ("recipe.channels_last", self.recipe.channels_last),
        ):
            if given:
                raise ConfigError(
                    f"{key} is {given}, which is for pictures, but data.tokenizer says that the "
                    "data are texts"
                )

    @property
    def starts_trained(self) -> bool:
        """Whether the network has trained weights; encoders of texts come with theirs."""
        return self.model.pretrained or self.data.tokenizer is not None

    @property
    def tau(self) -> float:
        """τ of this training."""
        return self.diversity.tau_for(self.model.pretrained)

    @property
    def weight(self) -> float:
        """λ of this training, at its end."""
        return self.diversity.weight_for(self.model.pretrained)

    @property
    def penalised(self) -> bool:
        """Whether the ensemble is trained with the penalty."""
        return self.weight > 0 and self.ensemble.members > 1

    def to_dict(self) -> dict[str, Any]:
        """Plain types, as in the YAML file."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> TrainConfig:
        """Inverse of :meth:`to_dict`; unknown keys and values of another type raise ConfigError."""
        return from_plain(cls, data)


@dataclass
class DemoConfig:
    """Size of the demo.

    Attributes:
        members: M.
        taus: temperatures τ of the penalty.
        weight: λ.
        train: number of training pictures.
        epochs: passes over them.
        width: channels of the network's first stage.
        seeds: number of repetitions with other data splits, weights and orders.
        workers: seeds trained side by side, each in a process of its own with one CPU thread
            (more threads do not help networks this small); 1: in this process.
    """

    members: int = 4
    taus: tuple[float, ...] = (0.1, 0.5, 2.0)
    weight: float = 1e-2
    train: int = 200
    epochs: int = 40
    width: int = 16
    seeds: int = 4
    workers: int = 2

    def check(self) -> None:
        """Raise ConfigError for sizes the demo cannot run with."""
        if self.members < 2:
            raise ConfigError(f"members is {self.members}; the demo compares at least 2")
        for key in ("train", "width", "seeds"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key} is {getattr(self, key)}; expected at least 1")
