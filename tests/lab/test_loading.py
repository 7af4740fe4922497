"""The load path: folders of parquet files, from encoded pictures to checked tensors."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from sigmanens.errors import ConfigError, DataError
from sigmanens.lab.data import load_images, resize_images

datasets = pytest.importorskip("datasets")
pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

PICTURE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])


def encode(pixels: np.ndarray, mode: str | None = None) -> bytes:
    picture = Image.fromarray(pixels)
    buffer = io.BytesIO()
    (picture if mode is None else picture.convert(mode)).save(buffer, "PNG")
    return buffer.getvalue()


PIXELS = np.random.default_rng(0).integers(0, 256, (6, 8, 8, 3), dtype=np.uint8)
PNGS = [encode(pixels) for pixels in PIXELS]
TENSOR = torch.from_numpy(PIXELS).permute(0, 3, 1, 2)
PETS = {"image": datasets.Image(), "label": datasets.ClassLabel(names=["cat", "dog", "owl"])}

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write one parquet file a split; ``features`` are stored as on the hub."""

    def build(features: dict[str, Any] | None = None, **splits: dict[str, list[Any]]) -> Path:
        folder = tmp_path / "pets"
        folder.mkdir()
        for split, columns in splits.items():
            types = {"image": PICTURE, "label": pa.int64(), "kind": pa.int64()} if features else {}
            table = pa.table({k: pa.array(v, type=types.get(k)) for k, v in columns.items()})
            if features:
                info = {"info": {"features": datasets.Features(features).to_dict()}}
                table = table.replace_schema_metadata({"huggingface": json.dumps(info)})
            parquet.write_table(table, folder / f"{split}.parquet")
        return folder

    return build


def pets(labels: list[Any], encoded: list[bytes] = PNGS) -> dict[str, list[Any]]:
    used = encoded[: len(labels)]
    return {"image": [{"bytes": png, "path": None} for png in used], "label": labels}


def test_hub_layout_is_decoded_exactly(write: Write) -> None:
    folder = write(PETS, train=pets([0, 1, 2, 2, 1, 0]), test=pets([2, 1]))
    train = load_images(folder, "train", mean=[0.5, 0.4, 0.3], std=[1, 1, 1])
    assert torch.equal(train.images, TENSOR)
    assert train.labels.tolist() == [0, 1, 2, 2, 1, 0]
    assert train.labels.dtype == torch.int64
    assert (train.classes, train.name) == (("cat", "dog", "owl"), "pets/train")
    assert (train.mean, train.std) == ((0.5, 0.4, 0.3), (1, 1, 1))
    test = load_images(str(folder), "test")
    assert torch.equal(test.images, TENSOR[:2])
    assert test.labels.tolist() == [2, 1]


def test_plain_bytes_and_string_labels_sorted_over_all_splits(write: Write) -> None:
    folder = write(
        train={"png": PNGS, "kind": ["owl", "cat", "owl", "dog", "ant", "cat"]},
        test={"png": PNGS[:2], "kind": ["owl", "dog"]},
    )
    test = load_images(folder, "test")
    assert test.classes == ("ant", "cat", "dog", "owl")
    assert test.labels.tolist() == [3, 2]
    assert torch.equal(test.images, TENSOR[:2])


def test_integer_labels_become_consecutive_class_numbers(write: Write) -> None:
    folder = write(train={"png": PNGS, "fold": [0] * 6, "label": [10, 2, 30, 2, 10, 30]})
    train = load_images(folder, "train")
    assert train.classes == ("2", "10", "30")
    assert train.labels.tolist() == [1, 0, 2, 0, 1, 2]


def test_columns_can_be_chosen(write: Write) -> None:
    folder = write(
        train={"left": PNGS, "right": PNGS[::-1], "fine": list("abcabc"), "coarse": list("xxyxxy")}
    )
    chosen = load_images(folder, "train", image_column="right", label_column="coarse")
    assert torch.equal(chosen.images, TENSOR.flip(0))
    assert chosen.classes == ("x", "y")
    with pytest.raises(DataError, match=r"several columns could hold images \(left, right\)"):
        load_images(folder, "train")
    with pytest.raises(DataError, match=r"hold labels \(fine, coarse\); say which with label_col"):
        load_images(folder, "train", image_column="left")
    with pytest.raises(DataError, match=r"no column 'label'. The columns are: left, right, fine"):
        load_images(folder, "train", image_column="left", label_column="label")
    with pytest.raises(DataError, match="column 'fine' cannot hold images"):
        load_images(folder, "train", image_column="fine")


def test_class_label_goes_before_other_columns(write: Write) -> None:
    features = {
        "image": datasets.Image(),
        "kind": PETS["label"],
        "file": datasets.Value("string"),
    }
    columns = {
        "image": pets([0, 1, 2])["image"],
        "kind": [0, 1, 2],
        "file": ["1.png", "2.png", "3.png"],
    }
    folder = write(features, train=columns)
    assert load_images(folder, "train").classes == ("cat", "dog", "owl")
    assert load_images(folder, "train", label_column="file").classes[0] == "1.png"


def test_channels_are_converted(write: Write) -> None:
    grey = [encode(PIXELS[0], "L"), encode(PIXELS[1], "RGBA"), PNGS[2]]
    folder = write(PETS, train=pets([0, 1, 2], grey))
    luma = np.asarray(Image.fromarray(PIXELS[0]).convert("L"))
    colour = load_images(folder, "train")
    assert torch.equal(colour.images[0], torch.tensor(luma).expand(3, 8, 8))
    assert torch.equal(colour.images[1:], TENSOR[1:3])
    single = load_images(folder, "train", channels=1)
    assert single.images.shape == (3, 1, 8, 8)
    assert torch.equal(single.images[0, 0], torch.tensor(luma))


def test_pictures_of_different_sizes_need_a_size(write: Write) -> None:
    tall = np.random.default_rng(1).integers(0, 256, (16, 12, 3), dtype=np.uint8)
    folder = write(PETS, train=pets([0, 1, 2], [*PNGS[:2], encode(tall)]))
    with pytest.raises(DataError, match=r"picture 2 has \(16, 12\) pixels, the first \(8, 8\)"):
        load_images(folder, "train")
    resized = load_images(folder, "train", size=4).images
    assert torch.equal(resized[:2], resize_images(TENSOR[:2], 4))
    assert torch.equal(resized[2:], resize_images(torch.tensor(tall).permute(2, 0, 1)[None], 4))


def test_more_pictures_than_one_chunk_stay_in_order(write: Write) -> None:
    shades = [encode(np.full((2, 2), i % 256, dtype=np.uint8)) for i in range(1100)]
    images = load_images(write(train={"png": shades, "label": [0] * 1100}), "train").images
    assert images[:, 0, 0, 0].tolist() == [i % 256 for i in range(1100)]


def test_limit_takes_the_first_of_a_seeded_permutation(write: Write) -> None:
    folder = write(PETS, test=pets([0, 1, 2, 2, 1, 0]))
    for seed in (0, 1):
        order = torch.randperm(6, generator=torch.Generator().manual_seed(seed))[:4]
        part = load_images(folder, "test", limit=4, seed=seed)
        assert torch.equal(part.images, TENSOR[order])
        assert part.labels.tolist() == [[0, 1, 2, 2, 1, 0][i] for i in order]
    assert len(load_images(folder, "test", limit=100)) == 6


def test_the_square_in_the_middle_is_shown(write: Write) -> None:
    """Exactly, where its side is the size; the aspect ratio is kept."""
    tall = np.random.default_rng(1).integers(0, 256, (16, 8, 3), dtype=np.uint8)
    folder = write(PETS, train=pets([0, 1, 2], [*PNGS[:2], encode(tall)]))
    images = load_images(folder, "train", size=6, crop=0.75).images
    assert torch.equal(images[:2], TENSOR[:2, :, 1:7, 1:7])
    assert torch.equal(images[2], torch.tensor(tall[5:11, 1:7]).permute(2, 0, 1))


def test_folders_of_picture_files_take_the_same_path(tmp_path: Path) -> None:
    for i, kind in enumerate(["dog", "cat", "dog"]):
        (tmp_path / "train" / kind).mkdir(parents=True, exist_ok=True)
        (tmp_path / "train" / kind / f"{i}.png").write_bytes(PNGS[i])
    train = load_images(tmp_path, "train")
    assert train.classes == ("cat", "dog")
    assert torch.equal(train.images, TENSOR[[1, 0, 2]])


# --- bad input ----------------------------------------------------------------------------------


def test_missing_class_of_a_training_split_is_named(write: Write) -> None:
    folder = write(PETS, train=pets([0, 2, 0]), validation=pets([0, 2, 0]))
    with pytest.raises(DataError, match=r"1 of 3 classes have no example .* is 'dog'. Complete"):
        load_images(folder, "train")
    with pytest.raises(DataError, match=r"2 of 3 classes have no example .*. Raise limit"):
        load_images(folder, "train", limit=1)
    assert len(load_images(folder, "train", allow_missing_classes=True)) == 3
    assert len(load_images(folder, "validation")) == 3


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1, 3], "1 labels lie outside 0..2; the first is 3 in row 2"),
        ([0, -1, 2], "the first is -1 in row 1. A label of -1 marks a row without one"),
        ([0, 1, None], "row 2 has no label"),
    ],
)
def test_labels_out_of_range_are_named(
    labels: list[int | None], message: str, write: Write
) -> None:
    with pytest.raises(DataError, match=f"pets/train: .*{message}"):
        load_images(write(PETS, train=pets(labels)), "train")


@pytest.mark.parametrize(
    ("encoded", "message"),
    [
        (b"no picture", "picture 1 cannot be decoded: cannot identify"),
        (PNGS[0][:60], "picture 1 cannot be decoded: .*truncated"),
        (None, "picture 1 is missing"),
        (encode(np.full((8, 8), 60_000, dtype=np.uint16)), "picture 1 has mode I;16; expected 8"),
    ],
    ids=["noise", "truncated", "null", "16 bit"],
)
def test_pictures_that_cannot_be_used_are_named(
    encoded: bytes | None, message: str, write: Write
) -> None:
    folder = write(train={"png": [PNGS[0], encoded, PNGS[2]], "label": list("aba")})
    with pytest.raises(DataError, match=f"pets/train: {message}"):
        load_images(folder, "train")


def test_unknown_split_lists_the_splits(write: Write) -> None:
    folder = write(PETS, train=pets([0, 1, 2]), test=pets([0]))
    with pytest.raises(DataError, match="has no split 'val'; it has: train, test"):
        load_images(folder, "val")


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"sentence": list("ab"), "label": [0, 1]}, "no image column was found. .*sentence, label"),
        ({"png": PNGS[:2], "size": [0.5, 0.5]}, "no label column was found. .*png, size"),
    ],
)
def test_missing_columns_are_named(
    columns: dict[str, list[Any]], message: str, write: Write
) -> None:
    with pytest.raises(DataError, match=f"pets/train: {message}"):
        load_images(write(train=columns), "train")


def test_empty_split_is_named(write: Write) -> None:
    with pytest.raises(DataError, match="a split is empty"):
        load_images(write(PETS, train=pets([0, 1, 2]), test=pets([])), "train")


def test_loaded_split_without_rows_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = datasets.Dataset.from_dict({"image": [], "label": []}, datasets.Features(PETS))
    monkeypatch.setattr(datasets, "load_dataset", lambda path: {"test": nothing})
    with pytest.raises(DataError, match="pets/test: the data set is empty"):
        load_images("pets", "test")


def test_sources_that_are_no_data_set_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"There is no data folder .*absent"):
        load_images(tmp_path / "absent", "train")
    with pytest.raises(DataError, match=r"There is no data folder ./absent"):
        load_images("./absent", "train")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"cannot be loaded: .*doesn't contain any data files"):
        load_images(tmp_path / "empty", "train")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "train.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"cannot be loaded: .*not a parquet file"):
        load_images(tmp_path / "broken", "train")
    with pytest.raises(DataError, match="no_such_owner/no_such_set cannot be loaded"):
        load_images("no_such_owner/no_such_set", "train")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"channels": 2}, "channels must be 1 or 3; got 2"),
        ({"limit": 0}, "limit must be at least"),
        ({"crop": 0.9}, "crop is 0.9 and size None"),
        ({"crop": 1.1, "size": 8}, "crop is 1.1 and size 8"),
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_images("anything", "train", **options)


# --- real data ----------------------------------------------------------------------------------


def test_real_cifar10_pixels(shared: Path) -> None:
    test = load_images(shared / "cifar10", "test")
    pixels = test.images.permute(0, 2, 3, 1).contiguous().numpy().tobytes()
    assert hashlib.sha256(pixels).hexdigest() == (
        "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04"
    )
    assert test.classes[:3] == ("airplane", "automobile", "bird")
    choose, report = test.split(0.5, seed=0)
    assert (
        torch.bincount(choose.labels).tolist()
        == [500] * 10
        == torch.bincount(report.labels).tolist()
    )


def test_real_grey_digits_as_an_ood_set(shared: Path) -> None:
    mnist = load_images(shared / "mnist", "test", size=32, limit=50)
    assert mnist.images.shape == (50, 3, 32, 32)
    assert torch.equal(mnist.images[:, 0], mnist.images[:, 2])
    assert mnist.images.max() > 200
