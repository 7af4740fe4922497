"""Which part of a picture is shown: windows against a slow resampling, and laws of random ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from sigmanens.lab.data.framing import RandomView, central_window, random_window, show

SIZES = st.integers(8, 400)


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    """Smooth noise in colour."""
    rng = np.random.default_rng(seed)
    rough = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(rough)


def resampled(pixels: np.ndarray, window: tuple[float, ...], size: int) -> np.ndarray:
    """Triangle filter as wide as an output pixel (at least an input pixel), pixel by pixel."""

    def weights(low: float, high: float, length: int) -> np.ndarray:
        step = (high - low) / size
        reach = max(step, 1.0)
        centres = low + (np.arange(size) + 0.5) * step
        away = np.abs(np.arange(length)[None] + 0.5 - centres[:, None]) / reach
        found = np.maximum(0.0, 1.0 - away)
        return found / found.sum(1, keepdims=True)

    left, top, right, bottom = window
    across = weights(left, right, pixels.shape[1])
    down = weights(top, bottom, pixels.shape[0])
    return np.einsum("ih,jw,hwc->ijc", down, across, pixels.astype(float))


@pytest.mark.parametrize("window", [(3.25, 1.5, 33.0, 25.75), (0, 0, 40, 30), (10, 5, 18, 13)])
def test_a_window_is_resampled_as_the_textbook_says(window: tuple[float, ...]) -> None:
    given = picture(30, 40)
    shown = np.asarray(show(given, window, 12)).astype(float)
    # Pillow rounds to 8 bits after each of the two directions.
    assert np.abs(shown - resampled(np.asarray(given), window, 12)).max() <= 1.5


def test_the_middle_of_a_picture_that_fits_is_cut_out_exactly() -> None:
    given = picture(256, 300)
    shown = show(given, central_window(*given.size, 224 / 256), 224)
    assert np.array_equal(np.asarray(shown), np.asarray(given)[16:240, 38:262])


@given(SIZES, SIZES, st.floats(0.01, 1.0), st.integers(0, 1000))
@settings(max_examples=60)
def test_random_windows_lie_in_the_picture(
    width: int, height: int, least: float, seed: int
) -> None:
    left, top, right, bottom = random_window(width, height, least, np.random.default_rng(seed))
    slack = 1e-9 * max(width, height)
    assert -slack <= left < right <= width + slack
    assert -slack <= top < bottom <= height + slack
    ratio = (right - left) / (bottom - top)
    assert 3 / 4 - 1e-9 <= ratio <= 4 / 3 + 1e-9
    share = (right - left) * (bottom - top) / (width * height)
    flat = max(width, height) / min(width, height) > 4 / 3
    assert share <= 1 + 1e-9
    assert flat or share >= least - 1e-9  # a flat picture may have no window that large


def test_areas_and_shapes_of_random_windows_are_uniform() -> None:
    rng = np.random.default_rng(0)
    windows = np.array([random_window(1000, 1000, 0.1, rng) for _ in range(4000)])
    across, down = (windows[:, 2:] - windows[:, :2]).T
    small = across * down / 1e6 < 0.5  # these always fit, so that none was drawn again
    area = across[small] * down[small] / 1e6
    assert area.mean() == pytest.approx(0.3, abs=0.01)
    shape = np.log(across[small] / down[small])
    assert shape.mean() == pytest.approx(0.0, abs=0.02)
    assert shape.std() == pytest.approx(2 * math.log(4 / 3) / math.sqrt(12), abs=0.01)


def test_a_random_view_depends_on_the_seed_and_the_picture_s_number_alone() -> None:
    given = picture(30, 40)

    def seen(seed: int, number: int) -> bytes:
        return RandomView(0.2, seed).show(given, number, 16).tobytes()

    assert seen(1, 2) == seen(1, 2)
    assert len({seen(s, n) for s in range(5) for n in range(5)}) == 25


def test_half_of_the_random_views_are_mirrored() -> None:
    ramp = Image.fromarray(np.tile(np.arange(64, dtype=np.uint8) * 4, (64, 1)))
    rising = 0
    for number in range(200):
        row = np.asarray(RandomView(1.0, 0).show(ramp, number, 16))[8].astype(int)
        rising += row[-1] > row[0]
    assert 75 <= rising <= 125
