"""Pictures in memory: normalising, resizing, stratified parts, batches and augmentation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torch import Tensor

from sigmanens.errors import DataError, InputError
from sigmanens.lab.data import (
    ImageSet,
    augment_flip_crop,
    batches,
    draw_order,
    resize_images,
    stratified_split,
)


def picture_set(labels: list[int], side: int = 4, channels: int = 3, **fields: Any) -> ImageSet:
    images = torch.randint(0, 256, (len(labels), channels, side, side), dtype=torch.uint8)
    return ImageSet(images, torch.tensor(labels), ("cat", "dog", "owl"), "pets", **fields)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- ImageSet -----------------------------------------------------------------------------------


def test_normalized_is_the_textbook_formula() -> None:
    pets = picture_set([0, 1], mean=(0.5, 0.4, 0.3), std=(0.1, 0.2, 0.3))
    pixels = pets.images.double() / 255
    expected = (pixels - torch.tensor([0.5, 0.4, 0.3]).view(3, 1, 1)) / torch.tensor(
        [0.1, 0.2, 0.3]
    ).view(3, 1, 1)
    assert pets.normalized().dtype == torch.float32
    torch.testing.assert_close(pets.normalized().double(), expected, atol=1e-5, rtol=1e-5)


def test_normalized_without_constants_scales_to_the_unit_interval() -> None:
    pets = picture_set([0, 1, 2])
    before = pets.images.clone()
    assert torch.equal(pets.normalized(), pets.images.float() / 255)
    assert torch.equal(pets.images, before)


@pytest.mark.parametrize(
    ("mean", "std", "message"),
    [
        ((0.5,), None, "pets: mean needs 3 values, one per channel; got 1"),
        (None, (0.5, 0.5), "pets: std needs 3 values, one per channel; got 2"),
        (None, (0.5, 0.0, 0.5), "pets: std must be positive"),
        (None, (0.5, float("nan"), 0.5), "pets: std must be positive"),
    ],
)
def test_normalized_refuses_wrong_constants(mean: Any, std: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        picture_set([0, 1], mean=mean, std=std).normalized()


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: picture_set([0, 3]), "1 labels lie outside 0..2; the first is 3 in row 1"),
        (lambda: picture_set([0, -1, -1]), "2 labels lie outside 0..2; the first is -1 in row 1"),
        (lambda: picture_set([]), "labels must be int64"),
        (
            lambda: ImageSet(
                torch.zeros(0, 3, 4, 4, dtype=torch.uint8), torch.zeros(0).long(), ("a",)
            ),
            "the data set is empty",
        ),
        (
            lambda: ImageSet(torch.zeros(2, 3, 4, 4), torch.zeros(2).long(), ("a",)),
            r"images must be uint8 .* got torch.float32",
        ),
        (
            lambda: ImageSet(
                torch.zeros(2, 4, 4, dtype=torch.uint8), torch.zeros(2).long(), ("a",)
            ),
            r"shape \(N, C, H, W\); .* of shape \(2, 4, 4\)",
        ),
        (
            lambda: ImageSet(
                torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.zeros(3).long(), ("a",)
            ),
            r"labels must be int64 of shape \(2,\); got torch.int64 of shape \(3,\)",
        ),
    ],
)
def test_sets_that_do_not_fit_are_refused(build: Callable[[], ImageSet], message: str) -> None:
    with pytest.raises(DataError, match=message):
        build()


@pytest.mark.parametrize(
    "index",
    [
        [2, 0],
        torch.tensor([2, 0]),
        torch.tensor([True, False, True, False]),
        np.array([2, 0]),
        slice(1, 3),
    ],
    ids=["list", "tensor", "mask", "numpy", "slice"],
)
def test_subset_takes_pictures_with_their_labels(index: Any) -> None:
    pets = picture_set([0, 1, 2, 1], mean=(0.1, 0.2, 0.3))
    part = pets.subset(index)
    rows = torch.arange(4)[index]
    assert torch.equal(part.images, pets.images[rows])
    assert torch.equal(part.labels, pets.labels[rows])
    assert (part.classes, part.name, part.mean) == (pets.classes, "pets", (0.1, 0.2, 0.3))


def test_subset_of_nothing_is_refused() -> None:
    with pytest.raises(DataError, match="pets: the data set is empty"):
        picture_set([0, 1]).subset(slice(0, 0))


# --- resizing -----------------------------------------------------------------------------------


def test_integer_factors_average_the_pixels() -> None:
    images = torch.randint(0, 256, (3, 2, 8, 12), dtype=torch.uint8)
    blocks = images.numpy().reshape(3, 2, 4, 2, 4, 3).astype(np.float64).mean(axis=(3, 5))
    ours = resize_images(images, 4).numpy().astype(np.float64)
    assert np.abs(ours - blocks).max() <= 0.5 + 1e-4


@pytest.mark.parametrize("size", [5, 11, 40])
def test_other_sizes_agree_with_pillow(size: int) -> None:
    smooth = torch.linspace(0, 3, 28).sin().outer(torch.linspace(0, 5, 28).cos() + 1) * 120
    images = smooth.clamp(0, 255).to(torch.uint8)[None, None]
    pillow = Image.fromarray(images[0, 0].numpy()).resize((size, size), Image.Resampling.BILINEAR)
    ours = resize_images(images, size)[0, 0].numpy().astype(int)
    assert np.abs(ours - np.asarray(pillow).astype(int)).max() <= 1


def test_resizing_more_than_one_chunk_keeps_order_and_extremes() -> None:
    images = torch.arange(2500).remainder(256).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 6, 6)
    for size in (3, 4, 6):
        assert torch.equal(resize_images(images, size), images[:, :, :size, :size])


def test_resizing_to_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="size must be a positive number of pixels; got 0"):
        resize_images(torch.zeros(1, 1, 4, 4, dtype=torch.uint8), 0)


# --- stratified parts ---------------------------------------------------------------------------


@given(
    labels=st.lists(st.integers(0, 3), min_size=1, max_size=60),
    share=st.floats(0, 1),
    seed=st.integers(0, 10),
)
def test_stratified_split_properties(labels: list[int], share: float, seed: int) -> None:
    all_labels = torch.tensor(labels)
    count = round(share * len(labels))
    first, second = stratified_split(all_labels, count, seeded(seed))
    assert len(first) == count
    assert torch.cat([first, second]).sort().values.tolist() == list(range(len(labels)))
    for value in set(labels):
        quota = count * labels.count(value) / len(labels)
        assert abs((all_labels[first] == value).sum().item() - quota) < 1


def test_split_is_stratified_disjoint_and_seeded() -> None:
    pets = picture_set([0] * 40 + [1] * 20 + [2] * 10, side=8)
    first, second = pets.split(0.3, seed=1)
    assert torch.bincount(first.labels).tolist() == [12, 6, 3]
    assert torch.bincount(second.labels).tolist() == [28, 14, 7]
    rows = {tuple(image.flatten().tolist()) for image in torch.cat([first.images, second.images])}
    assert len(rows) == 70
    again, _ = pets.split(0.3, seed=1)
    other, _ = pets.split(0.3, seed=2)
    assert torch.equal(first.images, again.images)
    assert not torch.equal(first.images, other.images)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.5, 1.5, 0.01, float("nan")])
def test_split_must_leave_two_parts(fraction: float) -> None:
    with pytest.raises(InputError, match="pets: fraction must lie in"):
        picture_set([0, 1, 2]).split(fraction)


# --- batches ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [4, 4, 2]), (True, [4, 4])])
@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_visit_each_example_once(shuffle: bool, drop_last: bool, sizes: list[int]) -> None:
    images, labels = torch.arange(10.0).view(10, 1), torch.arange(10)
    seen = list(batches(images, labels, 4, seeded(0) if shuffle else None, drop_last))
    assert [len(x) for x, _ in seen] == sizes
    x, y = torch.cat([x for x, _ in seen]), torch.cat([y for _, y in seen])
    assert torch.equal(x.flatten(), y.float())
    assert len(set(y.tolist())) == sum(sizes)
    assert (y.tolist() == sorted(y.tolist())) is not shuffle


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_batch_comes_from_one_group_and_every_example_once(drop_last: bool) -> None:
    labels = torch.arange(22)
    groups = torch.arange(22).flip(0).split(8)
    seen = list(batches(labels, labels, 4, seeded(0), drop_last, groups, seeded(1)))
    kept = [y for _, y in seen]
    assert all(any(set(y.tolist()) <= set(g.tolist()) for g in groups) for y in kept)
    assert len(set(torch.cat(kept).tolist())) == (20 if drop_last else 22)
    again = batches(labels, labels, 4, seeded(5), drop_last, groups, seeded(1))
    for y, (_, other) in zip(kept, again, strict=True):  # other texts, of the same group in turn
        assert [g for g in groups if y[0] in g] == [g for g in groups if other[0] in g]


def test_batches_follow_the_generator() -> None:
    x = torch.arange(50)

    def order(generator: torch.Generator) -> list[int]:
        return torch.cat([y for _, y in batches(x, x, 8, generator)]).tolist()

    generator = seeded(3)
    first = order(generator)
    assert order(generator) != first
    assert order(seeded(3)) == first


# --- augmentation -------------------------------------------------------------------------------


def augment_one_by_one(x: Tensor, padding: int, generator: torch.Generator) -> Tensor:
    """The oracle: write every picture into a black canvas, cut, and mirror, pixel by pixel."""
    count, _, height, width = x.shape
    tops = torch.randint(2 * padding + 1, (count,), generator=generator).tolist()
    lefts = torch.randint(2 * padding + 1, (count,), generator=generator).tolist()
    flips = (torch.rand(count, generator=generator) < 0.5).tolist()
    out = torch.zeros_like(x)
    for i in range(count):
        for row in range(height):
            for column in range(width):
                source_row = row + tops[i] - padding
                cut_column = width - 1 - column if flips[i] else column
                source_column = cut_column + lefts[i] - padding
                if 0 <= source_row < height and 0 <= source_column < width:
                    out[i, :, row, column] = x[i, :, source_row, source_column]
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8])
@pytest.mark.parametrize("padding", [0, 2, 4])
def test_augmentation_equals_the_oracle(padding: int, dtype: torch.dtype) -> None:
    x = torch.randint(1, 255, (24, 2, 5, 7)).to(dtype)
    before = x.clone()
    ours = augment_flip_crop(x, padding, seeded(5))
    assert ours.dtype == dtype
    assert torch.equal(ours, augment_one_by_one(x, padding, seeded(5)))
    assert torch.equal(x, before)


def test_augmentation_draws_each_shift_and_flip_evenly() -> None:
    place = torch.zeros(4000, 1, 6, 6)
    place[:, :, 2, 2] = 1
    found = augment_flip_crop(place, 1, seeded(0)).flatten(1).argmax(1)
    rows, columns = found // 6, found % 6
    row_counts = torch.bincount(rows, minlength=6).tolist()
    assert row_counts[0] == row_counts[4] == row_counts[5] == 0
    assert all(abs(count / 4000 - 1 / 3) < 0.04 for count in row_counts[1:4])
    # column 1, 2, 3 as it is, 4, 3, 2 mirrored
    shares = [count / 4000 for count in torch.bincount(columns, minlength=6).tolist()]
    assert shares == pytest.approx([0, 1 / 6, 1 / 3, 1 / 3, 1 / 6, 0], abs=0.04)


@pytest.mark.parametrize(
    ("shape", "padding", "message"),
    [((3, 4, 4), 1, "must have shape"), ((1, 3, 4, 4), -1, "must not be negative; got -1")],
)
def test_augmentation_refuses_wrong_input(
    shape: tuple[int, ...], padding: int, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        augment_flip_crop(torch.zeros(shape), padding)


def test_a_reflected_border_shows_the_picture_itself() -> None:
    x = torch.arange(1, 2 * 3 * 6 * 6 + 1, dtype=torch.float32).view(2, 3, 6, 6)
    drawn = augment_flip_crop(x, 2, torch.Generator().manual_seed(0), border="reflect")
    assert drawn.min() >= 1  # no zero came in
    whole = torch.nn.functional.pad(x, (2,) * 4, "reflect")
    for picture, source in zip(drawn, whole, strict=True):
        windows = [
            source[:, top : top + 6, left : left + 6] for top in range(5) for left in range(5)
        ]
        assert any(torch.equal(picture, w) or torch.equal(picture, w.flip(2)) for w in windows)
    with pytest.raises(InputError, match="border"):
        augment_flip_crop(x, 2, border="wrap")
    with pytest.raises(InputError, match="reflects more"):
        augment_flip_crop(x, 6, border="reflect")


# --- drawing a part ------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(0, 5))
def test_a_drawn_order_has_every_picture_once(labels: list[int], seed: int) -> None:
    given = torch.tensor(labels)
    for stratify in (False, True):
        order = draw_order(given, seed, stratify)
        assert sorted(order.tolist()) == list(range(len(labels)))
        assert torch.equal(order, draw_order(given, seed, stratify))
    plain = torch.randperm(len(labels), generator=seeded(seed))
    assert torch.equal(draw_order(given, seed), plain)


@given(st.integers(1, 6), st.integers(2, 8), st.integers(0, 5), st.data())
def test_the_first_of_a_drawn_order_hold_equal_classes_in_equal_numbers(
    classes: int, each: int, seed: int, data: st.DataObject
) -> None:
    labels = torch.arange(classes).repeat(each)
    order = draw_order(labels, seed, stratify=True)
    count = data.draw(st.integers(1, len(labels)))
    found = torch.bincount(labels[order[:count]], minlength=classes)
    assert int(found.max() - found.min()) <= 1


def test_classes_of_unequal_size_are_drawn_in_proportion() -> None:
    labels = torch.tensor([0] * 60 + [1] * 30 + [2] * 10)
    order = draw_order(labels, 0, stratify=True)
    for count in (10, 50, 90):
        found = torch.bincount(labels[order[:count]], minlength=3)
        assert (found - count * torch.tensor([0.6, 0.3, 0.1])).abs().max() <= 1
    other = draw_order(labels, 1, stratify=True)
    assert set(order[:50].tolist()) != set(other[:50].tolist())
