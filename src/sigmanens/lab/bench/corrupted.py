"""Test pictures of a study under corruption: kept where they are few, else made in batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from sigmanens.errors import ConfigError, MixedSizesError
from sigmanens.lab.config import DataConfig
from sigmanens.lab.data import EncodedSet, ImageSet, LazyPictures, resize_images
from sigmanens.lab.data.framing import RandomView
from sigmanens.lab.data.images import normalize
from sigmanens.lab.data.sets import PictureSet, load_test
from sigmanens.lab.data.texts import TokenSet, encode, load_tokenizer
from sigmanens.lab.digits import Labelled

KEPT_BYTES = 2**30
"""Corrupted pictures are kept if all kinds and severities of a study take at most so much."""

_SEVERITIES = 5


@dataclass(frozen=True, eq=False)
class CorruptedPictures:
    """Pictures under a corruption, made when asked for.

    They are corrupted as ``whole`` gives them and then brought to the size of the network. The
    random numbers of each depend on its position alone, so that batches do not matter.

    Attributes:
        whole: the clean pictures.
        name, severity, seed: of :func:`sigmanens.evaluation.corruption.corrupt`.
        size: of the network's pictures.
    """

    whole: PictureSet
    name: str
    severity: int
    seed: int
    size: int

    def pixels(self, rows: Tensor) -> Tensor:
        """Pixels (B, C, size, size), uint8, at the positions ``rows`` (B,)."""
        from sigmanens.evaluation.corruption import corrupt

        clean = self.whole.pixels(rows)
        changed = corrupt(clean, self.name, self.severity, seed=self.seed, indices=rows.tolist())
        return resize_images(changed, self.size)

    def make(self, rows: Tensor, view: RandomView | None = None) -> Tensor:
        """The same, normalised (B, C, size, size), float32; never through a random window."""
        return normalize(self.pixels(rows), self.whole.mean, self.whole.std, self.whole.name)


def picture_corrupter(
    config: DataConfig, rows: Mapping[str, Tensor]
) -> Callable[[str, int], Labelled]:
    """A function that gives test pictures under a corruption, by its name and severity.

    They are corrupted at their own size. Pictures that differ in size, or of which a part is shown,
    are brought to that of the network first, as ImageNet-C is made.

    Args:
        config: the data.
        rows: which test pictures, by the name of the corruption: (n,), as :func:`draw_rows` gives.
    """
    used = torch.cat(list(rows.values())).unique()
    clean = _clean(config, used)
    size = config.size or clean.side
    pixels_of_one = config.channels * size * size
    keep = _SEVERITIES * sum(map(len, rows.values())) * pixels_of_one <= KEPT_BYTES

    def made(name: str, severity: int) -> CorruptedPictures:
        own = clean.subset(torch.searchsorted(used, rows[name]))
        return CorruptedPictures(own, name, severity, config.seed, size)

    @cache
    def kept(name: str, severity: int) -> Tensor:
        return made(name, severity).pixels(torch.arange(len(rows[name])))

    def corrupted(name: str, severity: int) -> Labelled:
        source = made(name, severity)
        if keep:
            pixels = normalize(kept(name, severity), clean.mean, clean.std, clean.name)
            return Labelled(pixels, source.whole.labels)
        shape = (len(rows[name]), config.channels, size, size)
        every = torch.arange(shape[0])
        pictures = LazyPictures(source, every, shape, readers=config.readers)
        return Labelled(pictures, source.whole.labels)

    return corrupted


def _clean(config: DataConfig, rows: Tensor) -> PictureSet:
    """Test pictures at their own size, or at that of the network where they differ."""
    if config.crop is None and config.size is not None:
        own = replace(config, size=None)
        with suppress(MixedSizesError):
            found = _in_memory(load_test(own)[1].subset(rows))
            if isinstance(found, ImageSet):
                return found
    return _in_memory(load_test(config)[1].subset(rows))


def _in_memory(pictures: PictureSet) -> PictureSet:
    """Decoded once for all corruptions, where they fit."""
    if isinstance(pictures, EncodedSet) and pictures.nbytes() <= KEPT_BYTES:
        return pictures.decoded()
    return pictures


def text_corrupter(
    config: DataConfig, test: TokenSet, rows: Mapping[str, Tensor]
) -> Callable[[str, int], Labelled]:
    """The same of test texts."""
    from sigmanens.evaluation.corruption import corrupt_text

    tokenizer = load_tokenizer(str(config.tokenizer))

    def corrupted(name: str, severity: int) -> Labelled:
        some = test.subset(rows[name])
        changed = corrupt_text(some.texts, name, severity, seed=config.seed)
        return Labelled(encode(changed, tokenizer, config.length), some.labels)

    return corrupted


def corruption_names(given: list[str], texts: bool = False) -> tuple[str, ...]:
    """The corruptions that a study names, each once: "standard" and "all" are groups.

    Raises:
        ConfigError: for a name that is none.
    """
    if not given:
        return ()
    from sigmanens.evaluation.corruption import CORRUPTIONS, EXTRA_CORRUPTIONS, TEXT_CORRUPTIONS

    known = {"standard": tuple(CORRUPTIONS), "all": (*CORRUPTIONS, *EXTRA_CORRUPTIONS)}
    if texts:
        known = dict.fromkeys(known, tuple(TEXT_CORRUPTIONS))
    names = tuple(dict.fromkeys(name for g in given for name in known.get(g, (g,))))
    unknown = [n for n in names if n not in known["all"]]
    if unknown:
        raise ConfigError(
            f"measure.corruptions names {unknown[0]!r}; known here: {', '.join(known['all'])}"
        )
    return names


def draw_rows(
    labels: Tensor, limit: int, names: Sequence[str], draw: str = "own", seed: int = 0
) -> dict[str, Tensor]:
    """Which examples each kind of corruption is measured on.

    With "own" the kinds take one stretch after another of the examples, and begin again where these
    end: no example serves twice as long as there are enough. With "same" all take the first ones.

    Args:
        labels: class numbers (N,).
        limit: examples of a kind, at most.
        names: of the corruptions.
        draw: "own" or "same".
        seed: of the draw where classes come in turn, see :func:`first_of`.

    Returns:
        ascending positions (min(N, limit),), int64, by name.
    """
    if draw == "same":
        return dict.fromkeys(names, first_of(labels, limit, seed))
    total, count = len(labels), min(len(labels), limit)
    order = torch.arange(total) if not _in_turn(labels) else _shuffled(total, seed)
    turns = {n: (k * count + torch.arange(count)) % total for k, n in enumerate(names)}
    return {name: order[turn].sort().values for name, turn in turns.items()}


def first_of(labels: Tensor, count: int, seed: int = 0) -> Tensor:
    """Positions of the first so many examples, or of a random draw where classes come in turn.

    Sets that were read from folders of classes are sorted by class: the first examples of those
    are all of one class.

    Args:
        labels: class numbers (N,).
        count: how many, at most.
        seed: of the draw.

    Returns:
        ascending positions (min(N, count),), int64.
    """
    if count < len(labels) and _in_turn(labels):
        return _shuffled(len(labels), seed)[:count].sort().values
    return torch.arange(min(len(labels), count))


def _in_turn(labels: Tensor) -> bool:
    """Whether the examples are sorted by class."""
    return bool((labels.diff() >= 0).all())


def _shuffled(count: int, seed: int) -> Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))
