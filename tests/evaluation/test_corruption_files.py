"""The layouts of the published corrupted sets, written small and read back."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tests.evaluation.photographs import photographs

from sigmanens.errors import DataError, InputError
from sigmanens.evaluation.corruption import SEVERITIES, corrupt, read_cifar_c, read_imagenet_c

CLEAN = photographs(32, 64)[:12]
LABELS = torch.arange(12) * 7 % 10


@pytest.fixture
def cifar_c(tmp_path: Path) -> Path:
    """A folder in the layout of CIFAR-10-C: 5 × 12 rows instead of 5 × 10,000."""
    for name in ("gaussian_noise", "contrast"):
        rows = [corrupt(CLEAN, name, s).permute(0, 2, 3, 1).numpy() for s in SEVERITIES]
        np.save(tmp_path / f"{name}.npy", np.concatenate(rows))
    np.save(tmp_path / "labels.npy", np.tile(LABELS.numpy().astype(np.uint8), 5))
    return tmp_path


@pytest.mark.case("P9")
@pytest.mark.parametrize("name", ["gaussian_noise", "contrast"])
def test_cifar_c_is_read_by_severity(cifar_c: Path, name: str) -> None:
    distances = []
    for severity in SEVERITIES:
        pictures, labels = read_cifar_c(cifar_c, name, severity)
        assert pictures.shape == (12, 3, 32, 32)
        assert pictures.dtype == torch.uint8
        assert labels.dtype == torch.int64
        assert torch.equal(pictures, corrupt(CLEAN, name, severity))
        assert torch.equal(labels, LABELS)
        distances.append((pictures.float() - CLEAN.float()).abs().mean().item())
    assert distances == sorted(set(distances))
    pictures, labels = read_cifar_c(str(cifar_c), name)
    assert pictures.shape == (5, 12, 3, 32, 32)
    assert torch.equal(pictures[3], read_cifar_c(cifar_c, name, 4)[0])
    assert torch.equal(labels, LABELS.expand(5, -1))


def test_cifar_c_refuses_other_layouts(cifar_c: Path) -> None:
    with pytest.raises(DataError, match=r"fog\.npy.*contrast, gaussian_noise, labels"):
        read_cifar_c(cifar_c, "fog", 1)
    with pytest.raises(InputError, match="severity is 0"):
        read_cifar_c(cifar_c, "contrast", 0)
    rows = np.load(cifar_c / "contrast.npy")

    def replaced(array: np.ndarray) -> str:
        np.save(cifar_c / "odd.npy", array)
        return "odd"

    with pytest.raises(DataError, match=r"59 rows.*five times"):
        read_cifar_c(cifar_c, replaced(rows[:-1]), 1)
    with pytest.raises(DataError, match="expected 55 integers"):
        read_cifar_c(cifar_c, replaced(rows[:-5]), 1)
    with pytest.raises(DataError, match="float32"):
        read_cifar_c(cifar_c, replaced(rows.astype(np.float32)), 1)
    with pytest.raises(DataError, match="height, width, channels"):
        read_cifar_c(cifar_c, replaced(rows.transpose(0, 3, 1, 2)), 1)
    (cifar_c / "odd.npy").write_bytes(b"not an array")
    with pytest.raises(DataError, match="not a numpy file"):
        read_cifar_c(cifar_c, "odd", 1)
    np.save(cifar_c / "labels.npy", np.sort(np.load(cifar_c / "labels.npy")))
    with pytest.raises(DataError, match="ordered by severity"):
        read_cifar_c(cifar_c, "contrast", 1)


@pytest.fixture
def imagenet_c(tmp_path: Path) -> Path:
    """A folder in the layout of ImageNet-C: three classes of two pictures, written as JPEG."""
    for severity in (1, 5):
        pictures = corrupt(photographs(64, 40)[:6], "contrast", severity)
        for i, picture in enumerate(pictures):
            place = tmp_path / "contrast" / str(severity) / f"n0{2 - i // 2}"
            place.mkdir(parents=True, exist_ok=True)
            image = Image.fromarray(picture.permute(1, 2, 0).numpy())
            image.save(place / f"val_{i}.JPEG", quality=85)
            (place / "notes.txt").write_text("not a picture")
    return tmp_path


@pytest.mark.case("P9")
def test_imagenet_c_is_read_by_folder(imagenet_c: Path) -> None:
    found = read_imagenet_c(imagenet_c, "contrast", 5)
    assert found.classes == ("n00", "n01", "n02")
    assert found.labels.tolist() == [0, 0, 1, 1, 2, 2]
    assert [f"{p.parent.name}/{p.stem}" for p in found.paths] == [
        "n00/val_4", "n00/val_5", "n01/val_2", "n01/val_3", "n02/val_0", "n02/val_1",
    ]  # fmt: skip
    assert {path.parent.parent.name for path in found.paths} == {"5"}
    spread = [
        np.mean([np.asarray(Image.open(path)).std() for path in read_imagenet_c(*where).paths])
        for where in ((imagenet_c, "contrast", 1), (str(imagenet_c), "contrast", 5))
    ]
    assert spread[1] < spread[0]
    order = ["n02", "other", "n01", "n00"]
    ordered = read_imagenet_c(imagenet_c, "contrast", 5, classes=order)
    assert ordered.labels.tolist() == [3, 3, 2, 2, 0, 0]
    assert ordered.classes == tuple(order)


def test_imagenet_c_refuses_other_layouts(imagenet_c: Path) -> None:
    with pytest.raises(DataError, match="WordNet id"):
        read_imagenet_c(imagenet_c, "contrast", 2)
    with pytest.raises(DataError, match="'rain' is not the name"):
        read_imagenet_c(imagenet_c, "rain", 2)
    with pytest.raises(DataError, match="not in classes: n02"):
        read_imagenet_c(imagenet_c, "contrast", 1, classes=["n00", "n01"])
    with pytest.raises(InputError, match="severity is None"):
        read_imagenet_c(imagenet_c, "contrast", None)  # type: ignore[arg-type]
    (imagenet_c / "contrast" / "3" / "n00").mkdir(parents=True)
    with pytest.raises(DataError, match="no pictures below"):
        read_imagenet_c(imagenet_c, "contrast", 3)
