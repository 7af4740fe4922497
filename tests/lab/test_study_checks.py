"""What a study refuses before it trains, and what it must not take for another training."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lightning")
pytest.importorskip("sklearn")

from rich.console import Console
from tests.lab.test_bench import TINY

from sigmanens.conversion.config import ConversionConfig
from sigmanens.errors import ConfigError, RunError
from sigmanens.lab.bench.config import BenchConfig, Variant
from sigmanens.lab.bench.corrupted import first_of
from sigmanens.lab.bench.cost import cost_table
from sigmanens.lab.bench.material import check_trained_head, load_material, located
from sigmanens.lab.bench.methods import BUILDERS
from sigmanens.lab.bench.runner import run_bench
from sigmanens.lab.bench.trials import Trial, trials_of
from sigmanens.lab.bench.work import Workshop
from sigmanens.lab.config import DataConfig, ModelConfig


def with_variant(**given: Any) -> BenchConfig:
    return replace(TINY, variants={"a": Variant(**given)})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (with_variant(change={"seeds": [5]}), "'seeds'"),
        (with_variant(change={"members": [8]}), r"ensemble\.members"),
        (with_variant(change={"diversity.tau": 0.3}), "variant's taus"),
        (with_variant(change={"recipe.epochs": 0}), r"variant 'a'.*recipe\.epochs"),
        (with_variant(taus=[-1.0]), "variant 'a' has taus"),
        (replace(TINY, variants={"../a": Variant()}), "name of a folder"),
        (replace(TINY, options={"separate": {"width": 2}}), "'separate'"),
        (replace(TINY, data=DataConfig("x", tokenizer="y"), recipe=replace(TINY.recipe,
         flip_crop=2)), r"recipe\.flip_crop"),
        (replace(TINY, data=DataConfig("x", tokenizer="y", size=8)), r"data\.size"),
    ],
)  # fmt: skip
def test_what_would_be_dropped_in_silence_is_refused(config: BenchConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config.check()


def test_a_study_of_nothing_is_refused(tmp_path: Path) -> None:
    config = replace(TINY, methods=["sigmanens"], members=[1])
    with pytest.raises(ConfigError, match="nothing is to be trained"):
        run_bench(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_two_trainings_in_one_folder_are_refused() -> None:
    with pytest.raises(ConfigError, match="sixth digit"):
        trials_of(replace(TINY, taus=[0.5, 0.5000001]))


def test_a_pretrained_head_of_other_classes_does_not_stand_for_itself() -> None:
    pytest.importorskip("timm")
    model = ModelConfig("timm/resnet18", {"pretrained": True})
    config = replace(TINY, model=model)
    check_trained_head(config, 1000)
    with pytest.raises(ConfigError, match=r"1000 classes, the data have 10.*trained_head: false"):
        check_trained_head(config, 10)
    check_trained_head(replace(config, trained_head=False), 10)


def test_classes_that_come_in_turn_are_drawn_from() -> None:
    labels = torch.arange(5).repeat_interleave(20)
    assert len(labels[first_of(labels, 40)].unique()) == 5
    assert len(first_of(labels, 40).unique()) == 40
    mixed = labels[torch.randperm(100, generator=torch.Generator().manual_seed(0))]
    assert first_of(mixed, 40).tolist() == list(range(40))
    assert first_of(labels, 1000).tolist() == list(range(100))


def test_a_home_folder_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    config = replace(TINY, data=DataConfig("hub/set", ood={"o": "other"}), data_root="~/data")
    assert located(config).source == str(tmp_path / "data" / "set")
    assert located(config).ood == {"o": str(tmp_path / "data" / "other")}


def test_the_cost_of_a_variant_is_its_own() -> None:
    config = replace(
        TINY, methods=["sigmanens"],
        variants={"long": Variant("film", {"recipe.epochs": 50, "recipe.drop_last": True})},
    )  # fmt: skip
    said = io.StringIO()
    Console(width=160, file=said).print(cost_table(config))
    lines = {line.split("  ")[1].strip(): line.split()[-1] for line in said.getvalue().splitlines()
             if "MiB" in line}  # fmt: skip
    steps = -(-len(load_material(config, 0).train.labels) // TINY.recipe.batch_size)
    found = {name: int(count.replace(",", "")) for name, count in lines.items()}
    assert next(iter(found.values())) == steps * TINY.recipe.epochs
    assert next(count for name, count in found.items() if "(long)" in name) == steps * 50


def test_the_conversion_is_the_controls_too() -> None:
    """What the study says of the conversion holds for the controls that are converted likewise."""
    ensemble = ConversionConfig(members=2, init="normal", head="fresh", shift=True)
    config = replace(TINY, ensemble=ensemble, methods=["sigmanens_lambda0", "fixed_masks"])
    material = load_material(config, 0)
    made = {}
    for method in config.methods:
        network = BUILDERS[method](Workshop(config, Trial(0, method, 2), material))
        made[method] = sum(n.endswith(".shift") for n, _ in network.named_parameters())
    assert made["fixed_masks"] == made["sigmanens_lambda0"] > 0


@pytest.mark.parametrize(
    "method", ["heads_only", "mc_dropout", "norm_tuning", "packed", "mimo", "fixed_masks"]
)
def test_rivals_are_told_where_the_head_is(method: str) -> None:
    config = replace(TINY, ensemble=replace(TINY.ensemble, head_name="nowhere"))
    config = replace(config, options={"norm_tuning": {"train_head": True}})
    shop = Workshop(config, Trial(0, method, 2), load_material(config, 0))
    with pytest.raises(Exception, match="nowhere"):
        BUILDERS[method](shop)


@pytest.mark.parametrize(("head", "layers"), [("copy", 1), ("fresh", 2), ("shared", 2)])
def test_lora_has_the_heads_of_the_study(head: str, layers: int) -> None:
    pytest.importorskip("peft")
    sizes = {
        "img_size": 8,
        "patch_size": 4,
        "embed_dim": 24,
        "depth": 1,
        "num_heads": 2,
        "in_chans": 1,
    }
    config = replace(
        TINY, model=ModelConfig("timm/vit_tiny_patch16_224", options=sizes),
        ensemble=replace(TINY.ensemble, head=head),
    )  # fmt: skip
    shop = Workshop(config, Trial(0, "lora_ensemble", 2), load_material(config, 0))
    own = BUILDERS["lora_ensemble"](shop).network.head.heads[0]
    assert (
        sum(isinstance(m, (torch.nn.Linear, torch.nn.LayerNorm)) for m in own.modules()) == layers
    )


@pytest.mark.slow
def test_resumed_studies_do_not_mix_what_differs(tmp_path: Path) -> None:
    out = tmp_path / "run"
    recipe = replace(TINY.recipe, epochs=1)
    slow = {"slow": Variant("sigmanens_lambda0", {"recipe.lr": 0.05})}
    config = replace(
        TINY, recipe=recipe, methods=["separate", "sigmanens"], seeds=[0], members=[3],
        taus=[0.5, 2.0], variants=slow,
    )  # fmt: skip
    before = run_bench(config, out)
    assert {r["members"] for r in before["rows"] if r["method"] == "deep_ensemble"} == {3}
    parts = [r for r in before["rows"] if r["method"] not in ("single", "single_temperature")]
    assert before["seconds"] == pytest.approx(sum(r["train_seconds"] for r in parts))
    faster = {"slow": Variant("sigmanens_lambda0", {"recipe.lr": 0.5})}
    with pytest.raises(RunError, match="another name"):
        run_bench(replace(config, variants=faster), out, resume=True)
    more = replace(config, methods=["separate"], members=[2, 3], variants={})
    after = run_bench(more, out, resume=True)
    rows = {r["members"]: r for r in after["rows"] if r["method"] == "deep_ensemble"}
    assert set(rows) == {2, 3}
    old = next(r for r in before["rows"] if r["method"] == "deep_ensemble")
    assert rows[3]["nll"] == old["nll"]
    assert rows[3]["train_seconds"] == old["train_seconds"]  # the kept networks, measured again
    assert after["seconds"] == pytest.approx(old["train_seconds"])  # not once for each row
