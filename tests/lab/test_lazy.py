"""Pictures that are decoded when asked for: the same as in memory, and few at a time."""

from __future__ import annotations

import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("datasets")
pytest.importorskip("sklearn")

from tests.lab.pictures import write_digits, write_noise
from tests.lab.small import equal, snapshot

from sigmanens.conversion.config import ConversionConfig
from sigmanens.errors import ConfigError, DataError, InputError
from sigmanens.lab.config import DataConfig, Recipe, TrainConfig
from sigmanens.lab.data import LazyPictures, batches, lazy, load_images, open_images, take
from sigmanens.lab.data.sets import load_sets
from sigmanens.lab.digits import Labelled

NORMAL: dict[str, Any] = {"mean": [0.5, 0.4, 0.3], "std": [0.2, 0.3, 0.4]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("lazy")
    write_digits(root / "digits", train=(0, 120), test=(120, 240))
    write_noise(root / "noise", 30)
    return root


def config(folder: Path, **changes: Any) -> DataConfig:
    given = DataConfig(source=str(folder / "digits"), size=12, limit=60, **NORMAL)
    return replace(given, ood={"noise": str(folder / "noise")}, **changes)


@pytest.fixture
def pictures(folder: Path) -> LazyPictures:
    return open_images(folder / "digits", "train", size=12, **NORMAL).normalized()


@pytest.mark.parametrize("crop", [None, 0.75])
@pytest.mark.parametrize("channels", [1, 3])
def test_batches_are_those_of_the_set_in_memory(
    folder: Path, crop: float | None, channels: int
) -> None:
    normal = {key: values[:channels] for key, values in NORMAL.items()}
    given: dict[str, Any] = {"size": 12, "crop": crop, "channels": channels} | normal
    whole = load_images(folder / "digits", "train", **given)
    opened = open_images(folder / "digits", "train", **given)
    assert (opened.classes, opened.name, opened.side) == (whole.classes, whole.name, 12)
    assert torch.equal(opened.labels, whole.labels)
    pictures = opened.normalized()
    expected = whole.normalized()
    assert pictures.shape == tuple(expected.shape)
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))
    for index in (slice(5, 20), order[:17], [3, 3, 0]):
        assert torch.equal(pictures[index], expected[index])
    assert torch.equal(torch.cat(list(pictures.split(32))), expected)
    assert torch.equal(pictures.take(order)[:9], expected[order[:9]])


def test_parts_of_a_run_are_those_of_sets_in_memory(folder: Path) -> None:
    """Held out, drawn in proportion, OOD without a class: by one path, whatever keeps pictures."""
    given = config(folder, validation_from_train=20, stratify=True, ood_limit=10)
    kept, opened = load_sets(given), load_sets(replace(given, lazy=True))
    for name in ("train", "validation", "test"):
        one, other = getattr(kept, name), getattr(opened, name)
        assert torch.equal(one.labels, other.labels), name
        assert torch.equal(one.normalized(), other.normalized()[:]), name
    assert torch.equal(kept.ood["noise"].normalized(), opened.ood["noise"].normalized()[:])
    halves = [s.test.split(0.5, seed=3) for s in (kept, opened)]
    for one, other in zip(*halves, strict=True):
        assert torch.equal(one.normalized(), other.normalized()[:])


@pytest.mark.parametrize("readers", [0, 1, 3])
@pytest.mark.parametrize("drop_last", [False, True])
def test_shuffled_batches_are_those_of_a_tensor(
    pictures: LazyPictures, readers: int, drop_last: bool
) -> None:
    labels = torch.arange(len(pictures))
    tensor = pictures[:]

    def epoch(images: Any) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(5)
        return list(batches(images, labels, 50, generator, drop_last))

    found = epoch(replace(pictures, readers=readers))
    expected = epoch(tensor)
    assert len(found) == len(expected) == (2 if drop_last else 3)
    for (x, y), (x0, y0) in zip(found, expected, strict=True):
        assert torch.equal(x, x0)
        assert torch.equal(y, y0)
    in_order = batches(replace(pictures, readers=readers), labels, 50)
    assert torch.equal(torch.cat([x for x, _ in in_order]), tensor)


def test_only_what_is_asked_for_is_decoded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[int] = []
    real = lazy.decoded

    def counted(record: Any, channels: int, where: str, frame: Any) -> Any:
        decoded.append(int(where.split()[-1]))
        return real(record, channels, where, frame)

    monkeypatch.setattr(lazy, "decoded", counted)
    opened = open_images(folder / "digits", "train", size=12, limit=40, seed=1)
    pictures = opened.subset(slice(10, 30)).normalized()
    some = take(pictures, torch.tensor([4, 2]))
    assert decoded == []
    assert len(some) == 2
    assert isinstance(some, LazyPictures)
    some[:]
    order = torch.randperm(len(opened.records), generator=torch.Generator().manual_seed(1))
    assert decoded == order[[14, 12]].tolist()  # by their places in the split


@pytest.mark.parametrize("readers", [0, 2])
def test_few_batches_are_in_memory(pictures: LazyPictures, readers: int) -> None:
    """The one in use and those that wait, however long the set."""
    alive: weakref.WeakSet[Tensor] = weakref.WeakSet()
    most = 0

    class Counted:
        def make(self, rows: Tensor, view: Any) -> Tensor:
            made = pictures.source.make(rows, view)
            alive.add(made)
            return made

    counted = replace(pictures, source=Counted(), readers=readers)
    for batch in counted.split(4):
        assert len(batch) == 4
        most = max(most, len(alive))
    assert 1 <= most <= readers + 2  # the one before is let go of when the next is there


def test_who_stops_early_waits_for_nothing(pictures: LazyPictures) -> None:
    first = next(iter(replace(pictures, readers=2).split(4)))
    assert torch.equal(first, pictures[:4])


def test_random_views_follow_the_picture_into_every_batch(pictures: LazyPictures) -> None:
    seen = pictures.viewed(0.3, seed=9)
    everything = seen[:]
    order = torch.tensor([7, 3, 90])
    assert torch.equal(seen[order], everything[order])
    assert torch.equal(seen.take(order)[:], everything[order])
    ahead = replace(seen, readers=2)
    assert torch.equal(torch.cat(list(ahead.split(25))), everything)
    other = pictures.viewed(0.3, seed=10)[:]
    assert (other != everything).flatten(1).any(1).float().mean() > 0.95


def test_pictures_that_cannot_be_decoded_are_named(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    (tmp_path / "bad").mkdir()
    table = pa.table({"png": [b"no picture"] * 3, "label": [0, 1, 0]})
    parquet.write_table(table, tmp_path / "bad" / "train.parquet")
    opened = open_images(tmp_path / "bad", "train", size=8, readers=2)
    with pytest.raises(DataError, match="bad/train: picture 2 cannot be decoded"):
        opened.normalized()[2:]
    with pytest.raises(DataError, match="bad/train: picture 0 cannot be decoded"):
        list(opened.normalized().split(1))


def test_what_needs_all_pictures_at_once_says_so(pictures: LazyPictures) -> None:
    examples = Labelled(pictures, torch.zeros(len(pictures), dtype=torch.int64))
    with pytest.raises(InputError, match="120 pictures are read batch by batch"):
        _ = examples.tensor
    assert Labelled(pictures[:2], examples.labels[:2]).tensor.shape == (2, 3, 12, 12)


@pytest.mark.parametrize(
    ("data", "recipe", "message"),
    [
        ({"lazy": True, "size": None}, {}, r"data\.lazy needs data\.size"),
        ({"crop": 1.5}, {}, r"data\.crop is 1\.5"),
        ({"crop": 0.9, "size": None}, {}, r"data\.crop is 0\.9 and data\.size None"),
        ({"readers": -1}, {}, r"data\.readers is -1"),
        ({}, {"resized_crop": 0.1}, r"recipe\.resized_crop is 0\.1 and data\.lazy False"),
        ({"lazy": True}, {"resized_crop": 1.5}, r"recipe\.resized_crop is 1\.5"),
        ({"lazy": True}, {"resized_crop": 0.1, "flip_crop": 2}, "one augmentation"),
    ],
)
def test_settings_that_do_not_go_together(
    data: dict[str, Any], recipe: dict[str, Any], message: str
) -> None:
    given = TrainConfig(replace(DataConfig("x", size=8), **data), recipe=Recipe(**recipe))
    with pytest.raises(ConfigError, match=message):
        given.check()


# --- trained on and measured on ------------------------------------------------------------------


def trained(examples: Labelled, recipe: Recipe) -> dict[str, Tensor]:
    from sigmanens.baselines import SeparateNetworks
    from sigmanens.lab.backbones import build_backbone
    from sigmanens.lab.training import train_network
    from sigmanens.training.loss import EnsembleLoss

    torch.manual_seed(0)
    network = SeparateNetworks([build_backbone("digits", width=4, in_channels=3)])
    train_network(network, examples, recipe, EnsembleLoss(), seed=1)
    return snapshot(network)


def test_training_is_that_on_a_tensor(pictures: LazyPictures, folder: Path) -> None:
    pytest.importorskip("lightning")
    labels = load_images(folder / "digits", "train").labels
    recipe = Recipe(epochs=2, batch_size=32, lr=0.05, flip_crop=1)
    ahead = Labelled(replace(pictures, readers=2), labels)
    assert equal(trained(ahead, recipe), trained(Labelled(pictures[:], labels), recipe))
    random = replace(recipe, flip_crop=0, resized_crop=0.3)
    first = trained(Labelled(pictures, labels), random)
    assert equal(first, trained(ahead, random))
    assert not equal(first, trained(ahead, replace(random, resized_crop=0.4)))
    with pytest.raises(ConfigError, match=r"load them with data\.lazy"):
        trained(Labelled(pictures[:], labels), random)


def test_a_study_finds_the_same_numbers(folder: Path, tmp_path: Path) -> None:
    """Trained, measured, corrupted and scored on OOD pictures, in memory and not."""
    pytest.importorskip("lightning")
    from sigmanens.lab.bench.config import BenchConfig, MeasureConfig
    from sigmanens.lab.bench.runner import run_bench
    from sigmanens.lab.config import ModelConfig

    study = BenchConfig(
        study="lazy",
        data=config(folder, crop=0.9, ood_limit=20),
        model=ModelConfig("digits", {"width": 4, "in_channels": 3}),
        ensemble=ConversionConfig(members=2, init="normal", head="fresh"),
        recipe=Recipe(epochs=1, batch_size=30, lr=0.05, weight_decay=0.0),
        methods=["sigmanens"],
        taus=[0.5],
        seeds=[0],
        measure=MeasureConfig(corruptions=["brightness"], corruption_limit=20, resamples=50),
    )
    found = []
    for lazily in (False, True):
        data = replace(study.data, lazy=lazily, readers=2 * lazily)
        out = run_bench(replace(study, data=data), tmp_path / str(lazily))
        assert out["failures"] == {}
        (row,) = out["rows"]
        row.pop("train_seconds")
        found.append(row)
    assert found[0] == found[1]
    assert found[0]["corruption"]["brightness"]["5"]["accuracy"] is not None
    with pytest.raises(ConfigError, match="laplace"):
        replace(study, data=replace(study.data, lazy=True), methods=["laplace"]).check()


# --- real data -----------------------------------------------------------------------------------


def test_real_pictures_of_imagenet(shared: Path) -> None:
    """The usual crop of pictures of 256 pixels is their middle, in memory or not."""
    source = shared / "imagenet_samples"
    given: dict[str, Any] = {"limit": 24, "allow_missing_classes": True}
    opened = open_images(source, "train", size=224, crop=224 / 256, readers=2, **given)
    whole = load_images(source, "train", **given)
    assert whole.images.shape == (24, 3, 256, 256)
    middle = whole.images[:, :, 16:240, 16:240]
    assert torch.equal(opened.pixels(torch.arange(24)), middle)
    assert torch.equal(torch.cat(list(opened.normalized().split(10))), middle.float() / 255)
    assert torch.equal(opened.labels, whole.labels)
