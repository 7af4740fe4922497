"""Which pictures a run trains on, chooses with and is measured on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("datasets")
pytest.importorskip("sklearn")

import datasets
from tests.lab.pictures import digits_rgb, write_digits, write_split

from sigmanens.errors import ConfigError, DataError
from sigmanens.lab.config import DataConfig
from sigmanens.lab.data import load_images
from sigmanens.lab.data.sets import load_sets, without_classes


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sets")
    write_digits(root / "digits", train=(0, 120), test=(120, 240))
    return root


def config(folder: Path, **changes: Any) -> DataConfig:
    return replace(DataConfig(source=str(folder / "digits")), **changes)


def pixels(images: Any) -> set[bytes]:
    return {bytes(image.flatten().tolist()) for image in images.images}


def test_validation_pictures_come_from_the_permutation_after_those_trained_on(
    folder: Path,
) -> None:
    """The training pictures are those that the limit alone would give; test stays whole."""
    sets = load_sets(config(folder, limit=60, validation_from_train=20, seed=3))
    alone = load_images(folder / "digits", "train", limit=60, seed=3)
    whole = load_images(folder / "digits", "train")
    order = torch.randperm(120, generator=torch.Generator().manual_seed(3))
    assert torch.equal(sets.train.images, alone.images)
    assert torch.equal(sets.validation.images, whole.images[order[60:80]])
    assert torch.equal(sets.validation.labels, whole.labels[order[60:80]])
    assert len(sets.test) == 120
    assert torch.equal(sets.test.images, load_images(folder / "digits", "test").images)


def test_the_rest_of_joined_splits_is_reported_on(folder: Path) -> None:
    """Two splits as one, cut into three disjoint parts that hold the first classes only."""
    given = {"train_split": "train+test", "test_split": "rest", "stratify": True, "classes": 4}
    sets = load_sets(config(folder, limit=20, validation_from_train=12, seed=3, **given))
    labels = torch.cat([load_images(folder / "digits", s).labels for s in ("train", "test")])
    wanted = (labels < 4).nonzero().flatten()
    parts = [sets.train, sets.validation, sets.test]
    assert [len(p) for p in parts] == [20, 12, len(wanted) - 32]
    positions = torch.cat([p.positions for p in parts])
    assert torch.equal(positions.sort().values, wanted)
    assert all(torch.equal(p.labels, labels[p.positions]) for p in parts)
    assert torch.bincount(sets.train.labels).min() >= 4
    assert len(sets.classes) == 4
    images = torch.cat([load_images(folder / "digits", s).images for s in ("train", "test")])
    assert all(torch.equal(p.images, images[p.positions]) for p in parts)


def test_without_a_limit_the_rest_is_trained_on(folder: Path) -> None:
    sets = load_sets(config(folder, validation_from_train=20, seed=1))
    assert (len(sets.train), len(sets.validation)) == (100, 20)
    whole = load_images(folder / "digits", "train")
    assert pixels(sets.train) | pixels(sets.validation) == pixels(whole)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"validation_from_train": 20, "validation_split": "test"}, "one place"),
        ({"validation_from_train": 0}, "to share between them"),
        ({"validation_from_train": 120}, "to share between them"),
        ({"validation_from_train": 30, "limit": 100}, "to share between them"),
        ({"ood_without": {"other": ["x"]}}, "'other'"),
        ({"ood_splits": {"other": "validation"}}, "'other'"),
        ({"validation_split": "test"}, r"data\.test_split and data\.validation_split are both"),
        ({"validation_split": "train"}, r"data\.train_split and data\.validation_split are both"),
        ({"train_split": "test"}, "has to differ"),
        ({"test_split": "rest"}, r"give data\.limit and data\.validation_from_train"),
        ({"test_split": "rest", "limit": 100, "validation_from_train": 20}, "nothing is left"),
        ({"train_split": "train+more"}, "no split 'more'"),
        ({"classes": 11}, "classes is 11; expected 2 to 10"),
        ({"tokenizer": "./none"}, "the tokenizer ./none cannot be loaded"),
    ],
)
def test_what_contradicts_itself_is_named(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        load_sets(config(folder, **changes))


def test_classes_that_are_not_ood_are_left_out(tmp_path: Path, folder: Path) -> None:
    images, labels = digits_rgb()
    names = [f"thing {i}" for i in range(10)]
    write_split(tmp_path / "other", "validation", images[:80], labels[:80], names)
    other = str(tmp_path / "other")
    sets = load_sets(
        config(
            folder, ood={"other": other}, ood_splits={"other": "validation"},
            ood_without={"other": ["thing 3", "thing 7"]}, ood_limit=20,
        )
    )  # fmt: skip
    kept = sets.ood["other"]
    assert len(kept) == 20
    assert not {3, 7} & set(kept.labels.tolist())
    whole = load_images(other, "validation")
    assert pixels(kept) <= pixels(whole)
    with pytest.raises(ConfigError, match="no class 'thing 99'"):
        without_classes(whole, ["thing 99"])


def test_a_shift_has_the_same_classes(tmp_path: Path, folder: Path) -> None:
    images, labels = digits_rgb()
    own = load_images(folder / "digits", "test").classes
    write_split(tmp_path / "same", "test", images[200:260], labels[200:260], list(own))
    write_split(tmp_path / "else", "test", images[:60], labels[:60], [f"x{i}" for i in range(10)])
    sets = load_sets(config(folder, shift={"same": str(tmp_path / "same")}))
    assert len(sets.shift["same"]) == 60
    with pytest.raises(DataError, match="'else'"):
        load_sets(config(folder, shift={"else": str(tmp_path / "else")}))


def test_ood_pictures_need_not_be_of_every_class(tmp_path: Path, folder: Path) -> None:
    images, labels = digits_rgb()
    few = labels < 3
    names = [f"thing {i}" for i in range(10)]
    write_split(tmp_path / "few", "train", images[few][:30], labels[few][:30], names)
    sets = load_sets(
        config(folder, ood={"few": str(tmp_path / "few")}, ood_splits={"few": "train"})
    )
    assert len(sets.ood["few"]) == 30


def test_pictures_of_many_sizes_are_corrupted_at_that_of_the_network(tmp_path: Path) -> None:
    """Those of one size are corrupted at their own, and then resized."""
    pytest.importorskip("lightning")
    import pyarrow as pa
    import pyarrow.parquet as parquet

    from sigmanens.lab.bench.config import BenchConfig, MeasureConfig
    from sigmanens.lab.bench.material import load_material

    write_digits(tmp_path / "mixed", train=(0, 120), test=(120, 160))
    images, labels = digits_rgb()
    names = [f"digit {i}" for i in range(10)]
    wide = images[160:200].repeat_interleave(2, 3)
    write_split(tmp_path / "wide", "test", wide, labels[160:200], names)
    parts = [parquet.read_table(tmp_path / n / "test.parquet") for n in ("mixed", "wide")]
    parquet.write_table(pa.concat_tables(parts), tmp_path / "mixed" / "test.parquet")
    study = BenchConfig(
        data=DataConfig(source=str(tmp_path / "mixed"), size=16),
        measure=MeasureConfig(corruptions=["brightness"], corruption_limit=20),
    )
    material = load_material(study, 0)
    assert material.corrupt is not None
    changed = material.corrupt("brightness", 3)
    assert changed.images.shape == (20, 3, 16, 16)
    assert torch.equal(changed.labels, material.data.test.labels[:20])


def test_one_of_several_label_columns_is_named(tmp_path: Path) -> None:
    """As CIFAR-100 has them on the hub: fine and coarse."""
    import pyarrow.parquet as parquet

    write_digits(tmp_path / "two", train=(0, 120), test=(120, 200))
    for split in ("train", "test"):
        path = tmp_path / "two" / f"{split}.parquet"
        table = parquet.read_table(path).replace_schema_metadata(None)
        names = ["image", "fine_label"]
        table = table.rename_columns(names).append_column("coarse_label", table.column(1))
        parquet.write_table(table, path)
    source = str(tmp_path / "two")
    with pytest.raises(DataError, match="several columns could hold labels"):
        load_sets(DataConfig(source=source))
    sets = load_sets(DataConfig(source=source, label_column="fine_label", limit=100))
    assert len(sets.train) == 100


def test_a_part_of_a_hub_name_is_asked_for(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    from sigmanens.lab.bench.config import BenchConfig
    from sigmanens.lab.bench.material import located

    asked: list[Any] = []
    monkeypatch.setattr(datasets, "load_dataset", lambda *given: asked.append(given) or {})
    for source in ("owner/name:part", "owner/name", str(folder / "digits")):
        with pytest.raises(DataError, match="no split"):
            load_images(source, "train")
    assert asked == [("owner/name", "part"), ("owner/name",), (str(folder / "digits"),)]
    study = BenchConfig(data=DataConfig(source="owner/name:part"), data_root=str(folder))
    assert located(study).source == str(folder / "name")
