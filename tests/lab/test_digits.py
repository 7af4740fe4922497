"""The embedded digits: disjoint stratified parts, real OOD patches, graded corruptions."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from sigmanens.errors import ConfigError, InputError
from sigmanens.lab.digits import DigitsData, digits_sets, noisy, photo_patches

sklearn_datasets = pytest.importorskip("sklearn.datasets")


@pytest.fixture(scope="module")
def data() -> DigitsData:
    return digits_sets(seed=3)


def rows(images: Tensor, labels: Tensor) -> list[tuple[float, ...]]:
    return [
        (*image.flatten().tolist(), label)
        for image, label in zip(images, labels.tolist(), strict=True)
    ]


def test_parts_together_are_the_digits(data: DigitsData) -> None:
    digits = sklearn_datasets.load_digits()
    whole = rows(torch.tensor(digits.images / 16), torch.tensor(digits.target))
    parts = [row for part in (data.train, data.validation, data.test) for row in rows(*part)]
    assert len(set(whole)) == len(whole)
    assert sorted(parts) == sorted(whole)
    assert [len(p.labels) for p in (data.train, data.validation, data.test)] == [200, 400, 1197]
    assert data.classes == tuple("0123456789")


def test_parts_are_stratified(data: DigitsData) -> None:
    shares = np.bincount(sklearn_datasets.load_digits().target) / 1797
    for part, slack in ((data.train, 1), (data.validation, 1), (data.test, 2)):
        counts = torch.bincount(part.labels).numpy()
        assert np.abs(counts - shares * len(part.labels)).max() < slack


def test_pictures_are_floats_in_the_unit_interval(data: DigitsData) -> None:
    assert set(data.ood) == {"photo_patches", "uniform_noise", "gaussian_noise"}
    for images in (data.train.images, data.validation.images, data.test.images, *data.ood.values()):
        assert images.shape[1:] == (1, 8, 8)
        assert images.dtype == torch.float32
        assert images.min() >= 0
        assert images.max() <= 1
    assert all(len(images) == 600 for images in data.ood.values())
    assert data.train.labels.dtype == torch.int64


def test_seed_decides_every_part(data: DigitsData) -> None:
    again, other = digits_sets(seed=3), digits_sets(seed=4)
    assert torch.equal(data.train.images, again.train.images)
    assert torch.equal(data.test.images, again.test.images)
    assert not torch.equal(data.train.images, other.train.images)
    for name, images in data.ood.items():
        assert torch.equal(images, again.ood[name])
        assert not torch.equal(images, other.ood[name])


def test_patches_are_pieces_of_the_photographs_at_three_scales() -> None:
    patches = photo_patches(30, torch.Generator().manual_seed(0))
    assert torch.equal(patches.amin((1, 2, 3)), torch.zeros(30))
    assert torch.equal(patches.amax((1, 2, 3)), torch.ones(30))
    luma = [
        photo.astype(np.float64) @ (0.299, 0.587, 0.114)
        for photo in sklearn_datasets.load_sample_images().images
    ]
    known = []
    for scale in (1, 2, 4):
        tiles = []
        for grey in luma:
            h, w = (8 * (side // scale // 8) for side in grey.shape)
            small = grey[: h * scale, : w * scale].reshape(h, scale, w, scale).mean((1, 3))
            tiles.append(small.reshape(h // 8, 8, w // 8, 8).swapaxes(1, 2).reshape(-1, 64))
        known.append(np.concatenate(tiles))
    for i, patch in enumerate(patches.flatten(1).numpy()):
        tiles = known[i // 10]
        low, high = tiles.min(1, keepdims=True), tiles.max(1, keepdims=True)
        stretched = (tiles - low) / np.maximum(high - low, 1e-9)
        nearest = np.abs(stretched - patch).max(1).argmin()
        np.testing.assert_allclose(stretched[nearest], patch, atol=1e-4)
        assert (high - low)[nearest] > 15


@pytest.mark.parametrize(
    "sizes",
    [
        {"train": 9},
        {"validation": 5},
        {"train": 1000, "validation": 790},
        {"train": -5},
        {"ood": 0},
    ],
)
def test_parts_too_small_are_refused(sizes: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="Of 1797 digits, train="):
        digits_sets(**sizes)


def test_more_patches_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"give \d+ patches at scale 4, fewer than the 1000"):
        photo_patches(3000, torch.Generator())


# --- corruptions --------------------------------------------------------------------------------


def test_noise_moves_every_pixel_further_with_severity(data: DigitsData) -> None:
    clean = data.test.images
    moved = [
        (noisy(clean, severity, torch.Generator().manual_seed(1)) - clean).abs()
        for severity in range(1, 6)
    ]
    for weaker, stronger in itertools.pairwise(moved):
        assert (stronger >= weaker - 1e-6).all()
        assert stronger.mean() > 1.2 * weaker.mean()


def test_noise_has_the_stated_deviation_and_is_clipped() -> None:
    grey = torch.full((500, 1, 8, 8), 0.5)
    mild = noisy(grey, 1, torch.Generator().manual_seed(0))
    assert (mild - 0.5).std().item() == pytest.approx(0.08, rel=0.03)
    hard = noisy(grey, 5, torch.Generator().manual_seed(0))
    assert hard.min() == 0
    assert hard.max() == 1
    assert torch.equal(hard, noisy(grey, 5, torch.Generator().manual_seed(0)))
    assert torch.equal(grey, torch.full_like(grey, 0.5))


@pytest.mark.parametrize("severity", [0, 6, -1, 1.5, 3.0])
def test_unknown_severity_is_refused(severity: Any) -> None:
    with pytest.raises(InputError, match=f"severity must be 1 to 5; got {severity}"):
        noisy(torch.zeros(1, 1, 8, 8), severity)
