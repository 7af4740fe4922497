"""Corruption of pictures: the published parameters, severity, seeding, refusals."""

from __future__ import annotations

import math
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.evaluation.photographs import photographs

from sigmanens.errors import InputError
from sigmanens.evaluation.corruption import (
    CORRUPTIONS,
    EXTRA_CORRUPTIONS,
    SEVERITIES,
    TABLES,
    corrupt,
    nearest_table,
)

NAMES = CORRUPTIONS + EXTRA_CORRUPTIONS

# What the published parameters themselves do not hold: severities whose mean distance to the clean
# picture is below that of the severity before, and those where it is about the same.
FALLS = {
    (32, "elastic_transform"): {2, 3, 4, 5},
    (32, "spatter"): {4},
    (32, "saturate"): {3},
    (64, "elastic_transform"): {2, 4},
    (64, "spatter"): {4},
    (64, "saturate"): {3},
    (224, "elastic_transform"): {3},
    (224, "saturate"): {3},
}
FLAT = {
    (32, "glass_blur"): {2, 3, 5},
    (32, "motion_blur"): {4},
    (32, "frost"): {4, 5},
    (64, "glass_blur"): {2, 4},
    (64, "frost"): {3, 4},
    (64, "elastic_transform"): {3, 5},
    (224, "glass_blur"): {2, 4},
    (224, "snow"): {3},
    (224, "frost"): {4, 5},
    (224, "fog"): {4, 5},
    (224, "elastic_transform"): {4, 5},
}
COUNT = {32: 64, 64: 40, 224: 6}
VARIED = {"elastic_transform", "fog", "frost", "motion_blur", "spatter"}  # much depends on the draw


def distances(side: int, name: str) -> list[float]:
    """Mean |corrupted − clean| over real pictures, for each severity."""
    clean = photographs(side, COUNT[side] * (3 if name in VARIED else 1))
    return [
        (corrupt(clean, name, s).float() - clean.float()).abs().mean().item() for s in SEVERITIES
    ]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", TABLES)
@pytest.mark.case("P9")
def test_severity_grows(side: int, name: str) -> None:
    found = distances(side, name)
    falls, flat = FALLS.get((side, name), set()), FLAT.get((side, name), set())
    assert found[0] > 0.5
    for severity in SEVERITIES[1:]:
        before, here = found[severity - 2], found[severity - 1]
        if severity in falls:
            assert here < before
        elif severity in flat:
            assert abs(math.log(here / before)) < 0.15
        else:
            assert here > before, (severity, found)


def test_all_steps_back_are_listed_by_a_severity_that_exists() -> None:
    for listed in (FALLS, FLAT):
        for (side, name), severities in listed.items():
            assert name in TABLES[side]
            assert severities <= {2, 3, 4, 5}
    listed = sum(len(s) for where in (FALLS, FLAT) for s in where.values())
    assert listed <= 0.15 * 4 * len(NAMES) * len(TABLES)


@pytest.mark.parametrize("name", NAMES)
def test_type_shape_and_determinism(name: str) -> None:
    clean = photographs(32, 64)[:3, :, :, :24].contiguous()
    before = clean.clone()
    out = corrupt(clean, name, 3)
    assert out.dtype == torch.uint8
    assert out.shape == clean.shape
    assert out.is_contiguous()
    assert torch.equal(clean, before)
    assert not torch.equal(out, clean)
    assert torch.equal(corrupt(clean, name, 3), out)
    transposed = clean.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    assert torch.equal(corrupt(transposed, name, 3), out)


DRAWN = [
    name
    for name in NAMES
    if name
    not in {
        "defocus_blur", "zoom_blur", "brightness", "contrast", "pixelate", "jpeg_compression",
        "gaussian_blur", "saturate",
    }
]  # fmt: skip


@pytest.mark.parametrize("name", DRAWN)
def test_each_picture_has_its_own_draws(name: str) -> None:
    twice = photographs(32, 64)[:1].repeat(2, 1, 1, 1)
    out = corrupt(twice, name, 4)
    assert not torch.equal(out[0], out[1])
    assert not torch.equal(corrupt(twice, name, 4, seed=1)[0], out[0])


@settings(max_examples=10)
@given(st.sampled_from(NAMES), st.permutations(range(6)), st.integers(0, 6))
def test_chunks_and_order_do_not_matter(name: str, order: list[int], cut: int) -> None:
    clean = photographs(32, 64)[:6]
    whole = corrupt(clean, name, 2, seed=5)
    parts = [
        corrupt(clean[chunk], name, 2, seed=5, indices=chunk)
        for chunk in (order[:cut], order[cut:])
    ]
    assert torch.equal(torch.cat(parts), whole[order])
    assert torch.equal(
        corrupt(clean[4:], name, 2, seed=5, indices=torch.arange(4, 6)), whole[range(4, 6)]
    )


def test_no_global_random_state_is_read_or_changed() -> None:
    clean = photographs(32, 64)[:2]

    def states() -> tuple[object, ...]:
        kind, keys, *rest = np.random.get_state()
        return random.getstate(), kind, keys.tobytes(), *rest, torch.get_rng_state().tolist()

    first = {}
    for name in NAMES:
        before = states()
        first[name] = corrupt(clean, name, 5)
        assert states() == before
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    assert all(torch.equal(corrupt(clean, name, 5), first[name]) for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_grey_pictures(name: str) -> None:
    colour = photographs(32, 64)[:2]
    one = colour.float().mean(1, keepdim=True).to(torch.uint8)
    if name == "saturate":
        with pytest.raises(InputError, match="grey"):
            corrupt(one, name, 3)
        return
    out = corrupt(one, name, 3)
    assert out.shape == one.shape
    assert not torch.equal(out, one)
    if name not in DRAWN and name != "jpeg_compression":
        three = corrupt(one.expand(-1, 3, -1, -1), name, 3)
        assert torch.equal(three, out.expand(-1, 3, -1, -1))


def test_published_parameters() -> None:
    assert set(TABLES) == {32, 64, 224}
    for table in TABLES.values():
        assert set(table) == set(NAMES)
        assert all(len(severities) == 5 for severities in table.values())
    assert len(CORRUPTIONS) == 15
    assert len(EXTRA_CORRUPTIONS) == 4
    cifar, tiny, imagenet = TABLES[32], TABLES[64], TABLES[224]
    assert [c for (c,) in cifar["gaussian_noise"]] == [0.04, 0.06, 0.08, 0.09, 0.10]
    assert [c for (c,) in cifar["jpeg_compression"]] == [80, 65, 58, 50, 40]
    assert cifar["defocus_blur"][4] == (1.5, 0.1)
    assert cifar["glass_blur"][3] == (0.25, 1, 2)
    assert cifar["elastic_transform"][1] == pytest.approx((1.6, 6.4, 2.24))
    assert cifar["saturate"][4] == (2.5, 0.2)
    assert [c for (c,) in tiny["shot_noise"]] == [250, 100, 50, 30, 15]
    assert [c for (c,) in tiny["pixelate"]] == [0.9, 0.8, 0.7, 0.6, 0.5]
    assert tiny["motion_blur"][4] == (12, 3)
    assert tiny["snow"][2] == (0.15, 0.3, 1.75, 0.55, 10, 4, 0.7)
    assert tiny["frost"][4][:2] == (0.7, 0.55)
    assert [c for (c,) in imagenet["gaussian_noise"]] == [0.08, 0.12, 0.18, 0.26, 0.38]
    assert [c for (c,) in imagenet["impulse_noise"]] == [0.03, 0.06, 0.09, 0.17, 0.27]
    assert [c for (c,) in imagenet["contrast"]] == [0.4, 0.3, 0.2, 0.1, 0.05]
    assert imagenet["fog"] == ((1.5, 2), (2, 2), (2.5, 1.7), (2.5, 1.5), (3, 1.4))
    assert imagenet["zoom_blur"][3] == (1.26, 0.02)
    assert imagenet["spatter"][4] == (0.67, 0.4, 1, 0.65, 1.5, 1)


def test_the_table_goes_by_the_ratio_of_the_sides() -> None:
    sides = {16: 32, 32: 32, 45: 32, 46: 64, 64: 64, 96: 64, 119: 64, 120: 224, 224: 224, 512: 224}
    assert {side: nearest_table(side, 2 * side) for side in sides} == sides
    clean = photographs(32, 64)[:2]
    own, forced = corrupt(clean, "contrast", 1), corrupt(clean, "contrast", 1, table=224)
    assert torch.equal(own, corrupt(clean, "contrast", 1, table=32))
    mean = clean.double().mean((2, 3), keepdim=True)
    assert torch.equal(forced, ((clean - mean) * 0.4 + mean + 1e-6).floor().to(torch.uint8))


@pytest.mark.parametrize("name", NAMES)
def test_sides_that_differ_and_small_pictures_with_large_kernels(name: str) -> None:
    clean = photographs(64, 40)[:1, :, :8, :45].contiguous()
    assert corrupt(clean, name, 5, table=224).shape == clean.shape


def test_an_empty_set_stays_empty() -> None:
    assert corrupt(torch.zeros(0, 3, 32, 32, dtype=torch.uint8), "fog", 1).shape == (0, 3, 32, 32)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("level", [0, 255])
def test_pictures_without_content(name: str, level: int) -> None:
    flat = torch.full((1, 3, 32, 32), level, dtype=torch.uint8)
    out = corrupt(flat, name, 4)
    assert out.shape == flat.shape
    blurs = {"defocus_blur", "glass_blur", "motion_blur", "zoom_blur", "gaussian_blur"}
    if name in blurs | {"contrast", "elastic_transform", "pixelate"}:
        assert torch.equal(out, flat)


IMAGES = torch.zeros(2, 3, 32, 32, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: corrupt(IMAGES, "rain", 1), "rain.*gaussian_noise.*saturate"),
        (lambda: corrupt(IMAGES, "fog", 0), "severity is 0"),
        (lambda: corrupt(IMAGES, "fog", 6), "severity is 6"),
        (lambda: corrupt(IMAGES, "fog", 1.0), "severity is 1.0"),  # type: ignore[arg-type]
        (lambda: corrupt(IMAGES, "fog", True), "severity is True"),
        (lambda: corrupt(IMAGES, "fog", 1, seed=-1), "seed is -1"),
        (lambda: corrupt(IMAGES, "fog", 1, table=48), "table is 48.*32, 64, 224"),
        (lambda: corrupt(IMAGES.float(), "fog", 1), "torch.float32.*uint8"),
        (lambda: corrupt(IMAGES[0], "fog", 1), r"\(3, 32, 32\).*\(N, C, H, W\)"),
        (lambda: corrupt(IMAGES.permute(0, 2, 3, 1), "fog", 1), "permute"),
        (lambda: corrupt(IMAGES[:, :2], "fog", 1), "C = 1 or 3"),
        (lambda: corrupt(IMAGES[..., :7], "fog", 1), "at least 8"),
        (lambda: corrupt(IMAGES.numpy(), "fog", 1), "ndarray"),  # type: ignore[arg-type]
        (lambda: corrupt(IMAGES, "fog", 1, indices=[0]), "1 indices for 2 images"),
        (lambda: corrupt(IMAGES, "fog", 1, indices=[0, -3]), "index is -3"),
        (lambda: corrupt(IMAGES, "fog", 1, indices=[0, 1.5]), "several integers"),  # type: ignore[list-item]
    ],
)  # fmt: skip
def test_refusals(call, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


ABSENT = """
import sys

sys.modules.update({"scipy": None, "PIL": None})
import sigmanens.evaluation
assert "sigmanens.evaluation.corruption" not in sys.modules
from sigmanens.errors import MissingPackageError
try:
    import sigmanens.evaluation.corruption
except MissingPackageError as e:
    print(e)
"""


def test_without_scipy_the_import_says_what_is_missing() -> None:
    result = subprocess.run([sys.executable, "-c", ABSENT], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "needs scipy and pillow" in result.stdout
    assert "sigmanens[lab]" in result.stdout
