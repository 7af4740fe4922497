"""Corrupted test pictures of a study: kept or made batch by batch, they are the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("datasets")
pytest.importorskip("lightning")
pytest.importorskip("sklearn")

from tests.lab.pictures import write_digits

from sigmanens.errors import ConfigError
from sigmanens.evaluation.corruption import CORRUPTIONS, EXTRA_CORRUPTIONS, corrupt
from sigmanens.lab.bench import corrupted
from sigmanens.lab.bench.corrupted import (
    corruption_names,
    draw_rows,
    first_of,
    picture_corrupter,
)
from sigmanens.lab.config import DataConfig
from sigmanens.lab.data import LazyPictures, load_images, resize_images
from sigmanens.lab.digits import Labelled


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    folder = write_digits(tmp_path_factory.mktemp("corrupted"), train=(0, 120), test=(120, 200))
    return DataConfig(source=str(folder), size=8, mean=[0.5] * 3, std=[0.2] * 3, seed=4)


def first(data: DataConfig, name: str, severity: int, kinds: int = 1) -> Labelled:
    """The first 20 test pictures, as one of so many kinds of a study."""
    names = [name, *(f"other {i}" for i in range(kinds - 1))]
    return picture_corrupter(data, dict.fromkeys(names, torch.arange(20)))(name, severity)


def test_they_are_the_first_test_pictures_corrupted_at_their_own_size(data: DataConfig) -> None:
    found = first(data, "gaussian_noise", 3)
    whole = load_images(data.source, "test")
    # The validation pictures are a part of the test split.
    held, rest = whole.split(data.holdout, data.seed)
    assert len(held) == len(rest) == 40
    changed = corrupt(rest.images[:20], "gaussian_noise", 3, seed=4)
    expected = (resize_images(changed, 8).float() / 255 - 0.5) / 0.2
    torch.testing.assert_close(found.images, expected)
    assert torch.equal(found.labels, rest.labels[:20])


def test_those_too_many_to_keep_are_made_in_batches(
    data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = first(data, "gaussian_noise", 3)
    assert isinstance(kept.images, torch.Tensor)
    monkeypatch.setattr(corrupted, "KEPT_BYTES", 20 * 3 * 8 * 8 * 5 - 1)
    made = first(replace(data, readers=2), "gaussian_noise", 3)
    assert isinstance(made.images, LazyPictures)
    assert torch.equal(torch.cat(list(made.images.split(6))), kept.images)
    assert torch.equal(made.labels, kept.labels)
    monkeypatch.setattr(corrupted, "KEPT_BYTES", 20 * 3 * 8 * 8 * 5)
    assert isinstance(first(data, "fog", 1).images, torch.Tensor)
    assert isinstance(first(data, "fog", 1, kinds=2).images, LazyPictures)


@pytest.mark.parametrize("kept_bytes", [2**30, 20 * 3 * 16 * 16])
def test_encoded_pictures_are_corrupted_as_those_in_memory(
    data: DataConfig, monkeypatch: pytest.MonkeyPatch, kept_bytes: int
) -> None:
    """At their own size, whether all corruptions are kept or only the clean pictures are."""
    expected = first(data, "gaussian_noise", 3)
    monkeypatch.setattr(corrupted, "KEPT_BYTES", kept_bytes)
    made = first(replace(data, lazy=True), "gaussian_noise", 3, kinds=15)
    assert isinstance(made.images, LazyPictures) == (kept_bytes < 2**30)
    assert torch.equal(made.images[:], expected.images)


def test_a_part_of_a_picture_is_corrupted_at_the_size_of_the_network(
    data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = replace(data, size=12, crop=0.75)
    kept = first(given, "fog", 2)
    monkeypatch.setattr(corrupted, "KEPT_BYTES", 0)
    made = first(replace(given, lazy=True), "fog", 2)
    assert torch.equal(made.images[:], kept.images)
    middle = load_images(data.source, "test", size=12, crop=0.75).split(data.holdout, data.seed)[1]
    pixels = corrupt(middle.images[:20], "fog", 2, seed=4).float()
    torch.testing.assert_close(kept.images, (pixels / 255 - 0.5) / 0.2)


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("kept_bytes", [2**30, 30 * 3 * 16 * 16])
def test_kinds_have_their_own_pictures(
    data: DataConfig, monkeypatch: pytest.MonkeyPatch, lazy: bool, kept_bytes: int
) -> None:
    monkeypatch.setattr(corrupted, "KEPT_BYTES", kept_bytes)
    rest = load_images(data.source, "test").split(data.holdout, data.seed)[1]
    rows = draw_rows(rest.labels, 15, ["fog", "contrast"])
    made = picture_corrupter(replace(data, lazy=lazy), rows)
    for name, start in (("fog", 0), ("contrast", 15)):
        own = rest.subset(torch.arange(start, start + 15))
        changed = corrupt(own.images, name, 5, seed=4)
        expected = (resize_images(changed, 8).float() / 255 - 0.5) / 0.2
        found = made(name, 5)
        torch.testing.assert_close(found.images[:], expected)
        assert torch.equal(found.labels, own.labels)


@given(
    total=st.integers(1, 60), limit=st.integers(1, 70), kinds=st.integers(1, 8),
    ordered=st.booleans(),
)  # fmt: skip
def test_no_example_serves_twice_before_all_have_served(
    total: int, limit: int, kinds: int, ordered: bool
) -> None:
    labels = torch.arange(total) if ordered else torch.arange(total).flip(0) % 3
    names = [str(i) for i in range(kinds)]
    own, same = (draw_rows(labels, limit, names, d, seed=1) for d in ("own", "same"))
    uses = torch.zeros(total, dtype=torch.int64)
    for name in names:
        assert len(own[name]) == min(total, limit)
        assert bool((own[name].diff() > 0).all())
        uses[own[name]] += 1
        assert torch.equal(same[name], first_of(labels, limit, 1))
    assert uses.max() - uses.min() <= 1
    assert torch.equal(own[names[0]], same[names[0]])  # one kind has the same either way


def test_names_of_corruptions() -> None:
    assert corruption_names([]) == ()
    assert corruption_names(["fog", "standard"]) == ("fog", *(c for c in CORRUPTIONS if c != "fog"))
    assert len(corruption_names(["all"])) == len(CORRUPTIONS) + len(EXTRA_CORRUPTIONS) == 19
    with pytest.raises(ConfigError, match="'fgo'"):
        corruption_names(["fgo"])
