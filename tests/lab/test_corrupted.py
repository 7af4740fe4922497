"""Corrupted test pictures of a study: kept or made batch by batch, they are the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("datasets")
pytest.importorskip("lightning")
pytest.importorskip("sklearn")

from tests.lab.pictures import write_digits

from sigmanens.errors import ConfigError
from sigmanens.evaluation.corruption import CORRUPTIONS, EXTRA_CORRUPTIONS, corrupt
from sigmanens.lab.bench import corrupted
from sigmanens.lab.bench.corrupted import corruption_names, picture_corrupter
from sigmanens.lab.config import DataConfig
from sigmanens.lab.data import LazyPictures, load_images, resize_images


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataConfig:
    folder = write_digits(tmp_path_factory.mktemp("corrupted"), train=(0, 120), test=(120, 200))
    return DataConfig(source=str(folder), size=8, mean=[0.5] * 3, std=[0.2] * 3, seed=4)


def test_they_are_the_first_test_pictures_corrupted_at_their_own_size(data: DataConfig) -> None:
    found = picture_corrupter(data, 20, 1)("gaussian_noise", 3)
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
    kept = picture_corrupter(data, 20, 1)("gaussian_noise", 3)
    assert isinstance(kept.images, torch.Tensor)
    monkeypatch.setattr(corrupted, "KEPT_BYTES", 20 * 3 * 8 * 8 * 5 - 1)
    made = picture_corrupter(replace(data, readers=2), 20, 1)("gaussian_noise", 3)
    assert isinstance(made.images, LazyPictures)
    assert torch.equal(torch.cat(list(made.images.split(6))), kept.images)
    assert torch.equal(made.labels, kept.labels)
    monkeypatch.setattr(corrupted, "KEPT_BYTES", 20 * 3 * 8 * 8 * 5)
    assert isinstance(picture_corrupter(data, 20, 1)("fog", 1).images, torch.Tensor)
    assert isinstance(picture_corrupter(data, 20, 2)("fog", 1).images, LazyPictures)


@pytest.mark.parametrize("kept_bytes", [2**30, 20 * 3 * 16 * 16])
def test_encoded_pictures_are_corrupted_as_those_in_memory(
    data: DataConfig, monkeypatch: pytest.MonkeyPatch, kept_bytes: int
) -> None:
    """At their own size, whether all corruptions are kept or only the clean pictures are."""
    expected = picture_corrupter(data, 20, 1)("gaussian_noise", 3)
    monkeypatch.setattr(corrupted, "KEPT_BYTES", kept_bytes)
    made = picture_corrupter(replace(data, lazy=True), 20, 15)("gaussian_noise", 3)
    assert isinstance(made.images, LazyPictures) == (kept_bytes < 2**30)
    assert torch.equal(made.images[:], expected.images)


def test_a_part_of_a_picture_is_corrupted_at_the_size_of_the_network(
    data: DataConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = replace(data, size=12, crop=0.75)
    kept = picture_corrupter(given, 20, 1)("fog", 2)
    monkeypatch.setattr(corrupted, "KEPT_BYTES", 0)
    made = picture_corrupter(replace(given, lazy=True), 20, 1)("fog", 2)
    assert torch.equal(made.images[:], kept.images)
    middle = load_images(data.source, "test", size=12, crop=0.75).split(data.holdout, data.seed)[1]
    pixels = corrupt(middle.images[:20], "fog", 2, seed=4).float()
    torch.testing.assert_close(kept.images, (pixels / 255 - 0.5) / 0.2)


def test_names_of_corruptions() -> None:
    assert corruption_names([]) == ()
    assert corruption_names(["fog", "standard"]) == ("fog", *(c for c in CORRUPTIONS if c != "fog"))
    assert len(corruption_names(["all"])) == len(CORRUPTIONS) + len(EXTRA_CORRUPTIONS) == 19
    with pytest.raises(ConfigError, match="'fgo'"):
        corruption_names(["fgo"])
