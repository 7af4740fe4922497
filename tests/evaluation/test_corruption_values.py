"""Corruption of pictures: each against a slow version that shares nothing but the draws."""

from __future__ import annotations

import math
from io import BytesIO

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image
from tests.evaluation.photographs import photographs
from tests.oracles import corruption as oracle

from sigmanens.evaluation.corruption import TABLES, blur, corrupt, digital, extra, noise, weather
from sigmanens.evaluation.corruption.frost import PANES, textures
from sigmanens.evaluation.corruption.operators import as_bytes, gaussian, grey, motion, plasma, zoom

EXACT = {"rtol": 0, "atol": 1e-9}


@pytest.fixture(scope="module")
def x() -> np.ndarray:
    """A real picture (32, 32, 3) in [0, 1]."""
    return photographs(32, 64)[0].permute(1, 2, 0).numpy() / 255


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("sigma", [0, 0.05, 0.7, 6.0])
@pytest.mark.parametrize(("mode", "truncate"), [("nearest", 4.0), ("reflect", 3.0)])
def test_gaussian(x: np.ndarray, sigma: float, mode: str, truncate: float) -> None:
    part = x[:, :20]
    expected = oracle.gaussian(part, sigma, mode, truncate) if sigma else part
    np.testing.assert_allclose(gaussian(part, sigma, mode, truncate), expected, **EXACT)


@pytest.mark.parametrize("factor", [1.0, 1.01, 1.13, 1.26, 1.75, 2.25, 3.0, 4.5])
def test_zoom(x: np.ndarray, factor: float) -> None:
    np.testing.assert_allclose(zoom(x, factor), oracle.clipped_zoom(x, factor), **EXACT)


def test_zoom_blur_counts_the_clean_picture_twice(x: np.ndarray) -> None:
    factors = [1 + 0.01 * i for i in range(7)]  # the last, 1.06, is one of them
    total = x + sum(oracle.clipped_zoom(x, factor) for factor in factors)
    np.testing.assert_allclose(blur.zoom_blur(x, rng(), 1.06, 0.01), total / 8, **EXACT)


@pytest.mark.parametrize("degrees", [-135, -90, -45, -20.5, 0, 31, 45])
def test_motion(x: np.ndarray, degrees: float) -> None:
    part = x[:12, :16]
    for radius, sigma in ((6, 1), (14, 12)):
        expected = oracle.motion(part, radius, sigma, degrees)
        np.testing.assert_allclose(motion(part, radius, sigma, degrees), expected, **EXACT)


def test_motion_blur_turns_at_most_45_degrees(x: np.ndarray) -> None:
    draw = rng(3).uniform(-45, 45)
    expected = oracle.motion(x, 9, 2.5, draw)
    np.testing.assert_allclose(blur.motion_blur(x, rng(3), 9, 2.5), expected, **EXACT)


@pytest.mark.parametrize(
    ("radius", "soft"),
    [(0.3, 0.4), (0.5, 0.6), (1, 0.2), (1.5, 0.1), (3, 0.1), (8, 0.5), (10, 0.5)],
)
def test_defocus_blur(x: np.ndarray, radius: float, soft: float) -> None:
    part = x[:13, :15]
    got = blur.defocus_blur(part, rng(), radius, soft)
    np.testing.assert_allclose(got, oracle.disk_blur(part, radius, soft), **EXACT)
    # At the border of its grid the published softening counts some weight twice.
    assert blur.disk(radius, soft).sum() == pytest.approx(1, abs=1e-9 if radius < 8 else 0.014)


@pytest.mark.parametrize(("sigma", "reach", "passes"), [(0.05, 1, 1), (0.4, 1, 2), (0.9, 3, 2)])
def test_glass_blur(x: np.ndarray, sigma: float, reach: int, passes: int) -> None:
    part = x[:20, :24]
    got = blur.glass_blur(part, rng(1), sigma, reach, passes)
    expected = oracle.glass(part, rng(1), sigma, reach, passes)
    np.testing.assert_allclose(got, expected, **EXACT)


def test_brightness_and_saturation_keep_the_hue(x: np.ndarray) -> None:
    part = x[:16, :16].copy()
    part[0, 0], part[0, 1], part[0, 2] = 0, 1, 0.5  # black, white, grey
    brighter = oracle.hsv(part, lambda h, s, v: (h, s, min(v + 0.3, 1)))
    np.testing.assert_allclose(weather.brightness(part, rng(), 0.3), brighter, **EXACT)
    for factor, offset in TABLES[32]["saturate"]:
        vivid = oracle.hsv(part, lambda h, s, v: (h, min(s * factor + offset, 1), v))  # noqa: B023
        np.testing.assert_allclose(extra.saturate(part, rng(), factor, offset), vivid, **EXACT)


@pytest.mark.parametrize("size", [2, 8, 32])
@pytest.mark.parametrize("decay", [3, 1.75])
def test_plasma(size: int, decay: float) -> None:
    expected = oracle.plasma(size, decay, rng(2))
    np.testing.assert_allclose(plasma(size, decay, rng(2)), expected, **EXACT)


def test_fog(x: np.ndarray) -> None:
    part = x[:, :20]
    cloud = oracle.plasma(32, 2, rng(4))[:, :20, None]
    expected = (part + cloud) * part.max() / (part.max() + 1)
    np.testing.assert_allclose(weather.fog(part, rng(4), 1, 2), expected, **EXACT)


@pytest.mark.parametrize("severity", range(5))
def test_elastic_transform(x: np.ndarray, severity: int) -> None:
    part, parameters = x[:18, :21], TABLES[32]["elastic_transform"][severity]
    if severity == 0:
        parameters = (0, 1.0, parameters[2])  # scipy's filter has no σ of 0; strength 0 hides it
    got = digital.elastic_transform(part, rng(5), *parameters)
    expected = oracle.elastic(part, rng(5), *parameters)
    np.testing.assert_allclose(got, expected, **EXACT)


def test_elastic_transform_without_shift_or_strength_changes_nothing(x: np.ndarray) -> None:
    np.testing.assert_allclose(digital.elastic_transform(x, rng(), 0, 0, 0), x, **EXACT)


def test_noise_has_the_moments_of_its_definition() -> None:
    x = np.full((300, 300, 3), 0.5)
    gaussian_noise = noise.gaussian_noise(x, rng(), 0.1) - x
    assert gaussian_noise.mean() == pytest.approx(0, abs=1e-3)
    assert gaussian_noise.std() == pytest.approx(0.1, rel=0.01)
    speckle = noise.speckle_noise(x, rng(), 0.1) - x
    assert speckle.std() == pytest.approx(0.05, rel=0.01)
    shot = noise.shot_noise(x, rng(), 50)
    assert shot.mean() == pytest.approx(0.5, abs=1e-3)
    assert shot.var() == pytest.approx(0.5 / 50, rel=0.02)
    impulse = noise.impulse_noise(x, rng(), 0.1)
    assert (impulse == 0).mean() == pytest.approx(0.05, abs=2e-3)
    assert (impulse == 1).mean() == pytest.approx(0.05, abs=2e-3)
    assert (impulse == 0.5).mean() == pytest.approx(0.9, abs=3e-3)


def test_contrast(x: np.ndarray) -> None:
    got = digital.contrast(x, rng(), 0.3)
    np.testing.assert_allclose(got.mean((0, 1)), x.mean((0, 1)), **EXACT)
    np.testing.assert_allclose(got.std((0, 1)), 0.3 * x.std((0, 1)), **EXACT)


def test_pixelate_averages_whole_blocks(x: np.ndarray) -> None:
    got = digital.pixelate(x, rng(), 0.25)
    blocks = x.reshape(8, 4, 8, 4, 3).mean((1, 3)).repeat(4, 0).repeat(4, 1)
    np.testing.assert_allclose(got, blocks, rtol=0, atol=1.01 / 255)  # two passes


def test_jpeg_is_a_round_trip_through_a_file(x: np.ndarray) -> None:
    file = BytesIO()
    Image.fromarray(np.rint(x * 255).astype(np.uint8)).save(file, "JPEG", quality=40)
    expected = np.asarray(Image.open(file))
    assert np.array_equal(as_bytes(digital.jpeg_compression(x, rng(), 40)), expected)


layers = arrays(
    np.uint8, st.tuples(st.integers(3, 9), st.integers(3, 9)),
    elements=st.sampled_from([0, 0, 0, 20, 100, 175, 180, 190, 255]),
)  # fmt: skip


@settings(max_examples=60)
@given(layers)
def test_edges_and_equalisation_equal_loops(layer: np.ndarray) -> None:
    assert np.array_equal(extra.edges(layer, 50, 150), oracle.edges(layer, 50, 150))
    assert np.array_equal(extra.equalise(layer), oracle.equalise(layer))


def test_edges_of_a_square_go_round_it() -> None:
    layer = np.zeros((12, 12), dtype=np.uint8)
    layer[4:8, 4:8] = 200
    found = extra.edges(layer)
    rows, columns = np.nonzero(found)
    assert found.sum() >= 12
    assert rows.min() in (3, 4)
    assert columns.max() in (7, 8)
    assert not found[5:7, 5:7].any()


def test_water_lightens_towards_turquoise_and_mud_covers(x: np.ndarray) -> None:
    water = extra.spatter(x, rng(6), 0.65, 0.3, 1, 0.69, 0.5, 0) - x
    assert water.min() >= 0
    wet = water[..., 1] > 0
    assert 0.02 < wet.mean() < 0.5
    assert water.max() == pytest.approx(0.5 * 238 / 255)
    np.testing.assert_allclose(water[wet][:, 0] / water[wet][:, 1], 175 / 238, **EXACT)
    mud = extra.spatter(x, rng(6), 0.65, 0.1, 0.5, 0.68, 0.6, 1)
    dirty = np.abs(mud - x).sum(2) > 0
    assert 0.005 < dirty.mean() < 0.5
    assert (np.abs(mud - extra.MUD) <= np.abs(x - extra.MUD) + 1e-12).all()


def test_snow_adds_flakes_that_fall_and_whitens(x: np.ndarray) -> None:
    dark = np.zeros_like(x)
    only_white = weather.snow(dark, rng(7), 0.1, 0.2, 1, 9.0, 8, 3, 0.8)  # no flake reaches 9
    np.testing.assert_allclose(only_white, 0.2 * 0.5, **EXACT)
    flakes = weather.snow(dark, rng(7), 0.1, 0.2, 1, 0.5, 10, 4, 1.0)
    assert (flakes >= 0).all()
    assert 0.01 < flakes.mean() < 0.5
    np.testing.assert_allclose(flakes, flakes[::-1, ::-1], **EXACT)
    layer = flakes[..., 0]
    along, across = np.abs(np.diff(layer, axis=0)).mean(), np.abs(np.diff(layer, axis=1)).mean()
    assert along < across  # trails are closer to the vertical


@pytest.mark.parametrize("scale", [0.2, 0.3, 1])
def test_textures_of_frost(scale: float) -> None:
    panes = textures(scale)
    assert len(panes) == 5
    for pane, texture in zip(PANES, panes, strict=True):
        side = round(512 * scale)
        assert texture.shape == (side, side, 3)
        assert texture.min() >= 0
        assert texture.max() <= 1
        np.testing.assert_allclose(texture.mean((0, 1)), pane.colour, atol=0.02)
        brightness = grey(texture)[..., 0]
        if scale == 1:
            assert brightness.std() == pytest.approx(pane.spread, rel=0.15)
        # Periodic: the step across the border is like any other.
        step = np.abs(np.diff(brightness, axis=0)).mean()
        assert np.abs(brightness[0] - brightness[-1]).mean() < 1.5 * step


def test_frost_blends_a_part_of_a_texture(x: np.ndarray) -> None:
    added = (weather.frost(x, rng(8), 0.75, 0.45, 0.2) - 0.75 * x) / 0.45
    errors = []
    for texture in textures(0.2):
        side = len(texture)
        doubled = np.pad(texture, ((0, 31), (0, 31), (0, 0)), "wrap")
        windows = np.lib.stride_tricks.sliding_window_view(doubled[..., 0], (32, 32))
        errors.append(np.abs(windows - added[..., 0]).max((2, 3)).min())
        assert windows.shape[:2] == (side, side)
    assert min(errors) < 1e-9


def test_a_channel_is_what_its_function_says(x: np.ndarray) -> None:
    """``corrupt`` hands over the parameters of the table, clips and rounds down."""
    images = torch.from_numpy(np.rint(x * 255).astype(np.uint8)).permute(2, 0, 1)[None]
    got = corrupt(images, "brightness", 5)[0].permute(1, 2, 0).numpy()
    expected = 255 * oracle.hsv(x, lambda h, s, v: (h, s, min(v + 0.3, 1)))
    assert np.array_equal(got, np.floor(expected + 1e-6).astype(np.uint8))
    assert math.isclose(TABLES[32]["brightness"][4][0], 0.3)
