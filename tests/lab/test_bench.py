"""Studies: which trainings they consist of, that they are resumed, and what becomes of failures."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from scipy import stats
from torch import nn

pytest.importorskip("lightning")
pytest.importorskip("sklearn")

from sigmanens.conversion.config import ConversionConfig
from sigmanens.conversion.heads import find_heads
from sigmanens.ensemble.prediction import log_mean_exp
from sigmanens.errors import ConfigError, RunError
from sigmanens.evaluation import apply_temperature, fit_temperature, nll
from sigmanens.lab.bench import runner
from sigmanens.lab.bench.config import PRESETS, BenchConfig, MeasureConfig, Variant, preset_path
from sigmanens.lab.bench.gather import choose
from sigmanens.lab.bench.material import load_material
from sigmanens.lab.bench.methods import one_network
from sigmanens.lab.bench.runner import Job, run_bench
from sigmanens.lab.bench.trials import Trial, trials_of
from sigmanens.lab.bench.work import Workshop
from sigmanens.lab.cli import main
from sigmanens.lab.config import DataConfig, ModelConfig, Recipe
from sigmanens.lab.differences import differences, setting_name, value_of
from sigmanens.lab.findings import add_findings
from sigmanens.lab.report import summary
from sigmanens.lab.runs import read_config, read_metrics

TINY = BenchConfig(
    study="tiny",
    data=DataConfig(source="digits"),
    model=ModelConfig("digits", {"width": 4}),
    ensemble=ConversionConfig(members=2, init="normal", head="fresh"),
    recipe=Recipe(epochs=2, batch_size=50, lr=0.1, weight_decay=0.0),
    methods=["separate", "film", "sigmanens_lambda0", "sigmanens"],
    taus=[0.5, 2.0],
    seeds=[0, 1],
    measure=MeasureConfig(resamples=50),
)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("bench") / "run"
    return folder, run_bench(TINY, folder, command="sigmanens bench")


def without_times(found: dict[str, Any]) -> dict[str, Any]:
    kept = copy.deepcopy(found)
    for key in ("seconds", "environment", "command"):
        kept.pop(key)
    for row in kept["rows"]:
        row.pop("train_seconds")
    return kept


def test_every_method_and_seed_has_its_row(done: tuple[Path, dict[str, Any]]) -> None:
    _, found = done
    got = {(r["method"], r["members"], r["tau"], r["seed"]) for r in found["rows"]}
    methods = [("single", 1, None), ("single_temperature", 1, None), ("deep_ensemble", 2, None),
               ("film", 2, None), ("sigmanens_lambda0", 2, None), ("sigmanens", 2, 0.5),
               ("sigmanens", 2, 2.0)]  # fmt: skip
    assert got == {(*m, s) for m in methods for s in (0, 1)}
    assert len(found["rows"]) == len(got)
    assert found["failures"] == {}
    assert "σN-Ens" in summary(found).headline


def test_rows_follow_from_the_predictions_kept(done: tuple[Path, dict[str, Any]]) -> None:
    folder, found = done
    tensors = load_file(folder / "trials" / "separate-m2-seed1" / "predictions.safetensors")
    members, labels = tensors["deep_ensemble_m2.member_log_probs"], tensors["labels"]
    row = next(r for r in found["rows"] if r["method"] == "deep_ensemble" and r["seed"] == 1)
    assert row["nll"] == pytest.approx(nll(log_mean_exp(members), labels), rel=1e-5)
    one = tensors["deep_ensemble_m2.validation_member_log_probs"][0]
    temperature = fit_temperature(one, tensors["validation_labels"])
    alone = nll(apply_temperature(members[0], temperature), labels)
    assert row["curve"]["1"] == pytest.approx(alone, rel=1e-5)
    assert row["curve"]["2"] == pytest.approx(row["nll_calibrated"], rel=1e-5)


def test_the_choice_is_made_on_validation_data(done: tuple[Path, dict[str, Any]]) -> None:
    _, found = done
    means = {}
    for tau in (0.5, 2.0):
        mine = [r for r in found["rows"] if r["tau"] == tau]
        means[tau] = sum(r["validation"]["nll_calibrated"] for r in mine) / len(mine)
    assert found["choice"]["tau"] == min(means, key=lambda t: means[t])
    flattered = copy.deepcopy(found["rows"])
    for row in flattered:
        row["nll_calibrated"] = 0.0 if row["tau"] == max(means, key=lambda t: means[t]) else 9.0
    chosen = choose(flattered)
    assert chosen is not None
    assert chosen["tau"] == found["choice"]["tau"]


def test_a_setting_that_lacks_a_seed_is_not_chosen(done: tuple[Path, dict[str, Any]]) -> None:
    _, found = done
    best = found["choice"]["tau"]
    rows = [r for r in found["rows"] if not (r["tau"] == best and r["seed"] == 1)]
    chosen = choose(rows)
    assert chosen is not None
    assert chosen["tau"] != best


def test_differences_are_those_of_the_rows(done: tuple[Path, dict[str, Any]]) -> None:
    """Any two rows; two seeds by Student's t, what one seed has by its samples."""
    _, found = done
    rows: dict[str, list[dict[str, Any]]] = {}
    for row in found["rows"]:
        rows.setdefault(setting_name(row), []).append(row)
    assert len(found["differences"]) == len(rows) * (len(rows) - 1) // 2
    for pair in found["differences"]:
        assert pair["seeds"] == 2
        for metric in ("accuracy", "nll", "nll_calibrated", "brier", "ece", "ece_calibrated"):
            a, b = ([row[metric] for row in rows[pair[side]]] for side in "ab")
            gap = pair["metrics"][metric]
            assert (gap["basis"], gap["n"]) == ("seeds", 2)
            assert gap["value"] == pytest.approx(sum(a) / 2 - sum(b) / 2, abs=1e-7)
            x, y = a[0] - b[0], a[1] - b[1]
            if abs(x - y) > 1e-6:
                low, high = stats.ttest_rel(a, b).confidence_interval(0.95)
                assert (gap["low"], gap["high"]) == pytest.approx((low, high), rel=1e-4, abs=1e-6)
        for metric in ("nll_corrupted", "nll_calibrated_corrupted"):  # of the first seed alone
            a, b = (value_of(rows[pair[side]][0], metric) or 0.0 for side in "ab")
            gap = pair["metrics"][metric]
            assert gap["basis"] == "samples"
            assert gap["value"] == pytest.approx(a - b, abs=1e-5)
            assert gap["low"] <= gap["value"] <= gap["high"]


def test_networks_and_seeds_are_what_they_say(done: tuple[Path, dict[str, Any]]) -> None:
    folder, _ = done
    separate = folder / "trials" / "separate-m2-seed0" / "networks"
    first, second = (load_file(separate / f"network{i}.safetensors") for i in (0, 1))
    assert not torch.equal(first["networks.0.conv1.weight"], second["networks.0.conv1.weight"])
    assert not (folder / "trials" / "separate-m2-seed0" / "training").exists()


def test_a_finished_study_is_extended_without_doing_anything_twice(
    done: tuple[Path, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, before = done
    with pytest.raises(RunError, match="holds a run already"):
        run_bench(TINY, folder)
    ran: list[Trial] = []
    whole = runner.run_trial

    def counted(job: Job, advance: Callable[[float], None]) -> str:
        ran.append(job[1])
        return whole(job, advance)

    monkeypatch.setattr(runner, "run_trial", counted)
    again = run_bench(TINY, folder, resume=True)
    assert ran == []
    assert without_times(again) == without_times(before)
    more = replace(TINY, taus=[0.5, 2.0, 8.0], seeds=[0])
    extended = run_bench(more, folder, resume=True)
    assert [t.key for t in ran] == ["sigmanens-m2-tau8-weight0.01-seed0"]
    assert {r["seed"] for r in extended["rows"]} == {0}
    ran.clear()
    measured = run_bench(TINY, folder, resume=True, remeasure=True)
    assert len(ran) == len(trials_of(TINY))  # measured again, from the networks that were kept
    assert without_times(measured) == without_times(before)
    other = replace(TINY, recipe=replace(TINY.recipe, lr=0.2))
    with pytest.raises(RunError, match="another configuration"):
        run_bench(other, folder, resume=True)
    own = replace(TINY, settings={"film": {"recipe.lr": 0.2}})
    with pytest.raises(RunError, match=r"film was trained in .* with other settings"):
        run_bench(own, folder, resume=True)
    fewer = replace(TINY, measure=replace(TINY.measure, resamples=60))
    with pytest.raises(RunError, match="--remeasure"):
        run_bench(fewer, folder, resume=True)


def test_rows_without_their_network_are_not_lost_to_remeasuring(
    done: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(done[0], folder, ignore=shutil.ignore_patterns("networks", "*.safetensors"))
    before = sorted(folder.glob("trials/*/rows.json"))
    config = BenchConfig.from_dict(read_config(folder))
    with pytest.raises(RunError, match="no kept network"):
        run_bench(config, folder, resume=True, remeasure=True)
    assert sorted(folder.glob("trials/*/rows.json")) == before
    again = run_bench(config, folder, resume=True)
    first = read_metrics(done[0])
    assert again["rows"] == first["rows"]
    assert again["differences"] == first["differences"]  # found while there were predictions


@pytest.mark.slow
def test_separate_networks_may_have_the_heads_of_members(tmp_path: Path) -> None:
    change = {"options.separate": {"head": "fresh"}, "recipe.head_lr_mult": 3.0}
    config = replace(
        TINY, methods=["separate", "sigmanens_lambda0"], seeds=[0],
        variants={"fresh_head": Variant("separate", change)},
    )  # fmt: skip
    found = run_bench(config, tmp_path / "run")
    rows = {(r["method"], r["variant"]): r for r in found["rows"]}
    members = {(m, v): rows[m, v]["members"] for m, v in rows}
    assert members == {
        (m, v): 2 if m == "deep_ensemble" else 1
        for m in ("single", "single_temperature", "deep_ensemble")
        for v in (None, "fresh_head")
    } | {("sigmanens_lambda0", None): 2}
    changed = config.changed("fresh_head")
    shop = Workshop(changed, Trial(0, "separate", 2), load_material(changed, 0))
    plain, first, second = shop.base(0), one_network(shop)[0], one_network(shop, 1)[0]
    (name,) = find_heads(plain, None, "fresh")
    head = first.get_submodule(name)
    assert [type(m) for m in head] == [nn.LayerNorm, nn.Linear]
    again = one_network(shop)[0].state_dict()
    assert all(torch.equal(again[key], value) for key, value in first.state_dict().items())
    assert not torch.equal(head[1].weight, second.get_submodule(name)[1].weight)
    assert (
        rows["single", "fresh_head"]["params"] - rows["single", None]["params"]
        == 2 * head[0].weight.numel()
    )
    assert rows["single", "fresh_head"]["nll"] != rows["single", None]["nll"]
    wrong = replace(
        config, variants={"odd": Variant("separate", {"options.separate": {"head": 1}})}
    )
    with pytest.raises(ConfigError, match=r"'odd': .*expected \{head: fresh\}"):
        wrong.check()


def test_variants_of_separate_networks_are_no_reference_for_findings(
    done: tuple[Path, dict[str, Any]],
) -> None:
    rows = copy.deepcopy(done[1]["rows"])
    (single,) = (r for r in rows if (r["method"], r["seed"]) == ("single", 0))
    rows.append(single | {"variant": "better", "nll": -100.0})
    before = [row["findings"] for row in done[1]["rows"]]
    add_findings(rows, done[1]["histories"])
    assert [row["findings"] for row in rows[:-1]] == before
    rows[-1]["variant"] = None  # were it a reference, members would be weak
    add_findings(rows, done[1]["histories"])
    assert [row["findings"] for row in rows[:-1]] != before


def test_differences_are_kept_while_both_sides_are_what_they_were(
    done: tuple[Path, dict[str, Any]],
) -> None:
    earlier = done[1]
    rows = [row for row in earlier["rows"] if row["seed"] == 0]
    now = {"rows": rows, "differences": differences(rows, lambda row: None)}
    assert now["differences"] == []  # no predictions at hand
    kept = {"rows": rows, "differences": earlier["differences"]}
    found = differences(rows, lambda row: None, kept)
    assert [p["metrics"] for p in found] == [p["metrics"] for p in earlier["differences"]]
    changed = [row | {"nll": row["nll"] + (row["method"] == "film")} for row in rows]
    found = differences(changed, lambda row: None, kept)
    assert found
    assert not any("film" in pair["a"] + pair["b"] for pair in found)
    rounded = [row | {"nll": row["nll"] * (1 + 1e-9)} for row in rows]  # measured again
    assert len(differences(rounded, lambda row: None, kept)) == len(earlier["differences"])


def test_a_failed_training_is_reported_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(TINY, methods=["separate", "sigmanens"], seeds=[0], taus=[0.5])
    real = runner.train_method

    def broken(shop: Any) -> Any:
        if shop.trial.method == "sigmanens":
            raise ValueError("the disk\nis on fire")
        return real(shop)

    monkeypatch.setattr(runner, "train_method", broken)
    found = run_bench(config, tmp_path / "run")
    assert list(found["failures"]) == ["sigmanens-m2-tau0.5-weight0.01-seed0"]
    assert {r["method"] for r in found["rows"]} == {
        "single", "single_temperature", "deep_ensemble",
    }  # fmt: skip
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "is on fire" in page
    monkeypatch.setattr(runner, "train_method", real)
    found = run_bench(config, tmp_path / "run", resume=True)
    assert found["failures"] == {}
    assert "sigmanens" in {r["method"] for r in found["rows"]}


def test_all_failed_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(shop: Any) -> Any:
        raise ValueError("no luck")

    monkeypatch.setattr(runner, "train_method", broken)
    with pytest.raises(RunError, match=r"every training failed.*no luck"):
        run_bench(replace(TINY, methods=["separate"], seeds=[0]), tmp_path / "run")


def test_what_is_trained() -> None:
    config = replace(
        TINY, methods=["separate", "norm_tuning", "film", "sigmanens"], seeds=[3],
        members=[1, 2, 4], weights=[0.01, 0.1], taus=[0.5],
        variants={"slow": Variant(change={"recipe.scale_lr_mult": 1.0}, taus=[8.0])},
    )  # fmt: skip
    keys = [t.key for t in trials_of(config)]
    assert keys == [
        "separate-m4-seed3",
        "norm_tuning-m1-seed3",
        "film-m2-seed3",
        "film-m4-seed3",
        "sigmanens-m2-tau0.5-weight0.01-seed3",
        "sigmanens-m2-tau0.5-weight0.1-seed3",
        "sigmanens-m4-tau0.5-weight0.01-seed3",
        "sigmanens-m4-tau0.5-weight0.1-seed3",
        "sigmanens-m2-tau8-weight0.01-slow-seed3",
    ]
    assert config.changed("slow").recipe.scale_lr_mult == 1.0
    own = replace(
        config, weights=None, settings={
            "sigmanens": {"diversity.weight": 0.5, "recipe.lr": 0.3}, "film": {"recipe.epochs": 9},
        },
    )  # fmt: skip
    keys = [t.key for t in trials_of(own)]
    assert "sigmanens-m2-tau0.5-weight0.5-seed3" in keys
    assert own.changed("", "film").recipe.epochs == 9
    assert own.changed("", "separate") is own
    slow = own.changed("slow")
    assert (slow.recipe.lr, slow.recipe.scale_lr_mult) == (0.3, 1.0)
    assert config.recipe.scale_lr_mult is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"methods": ["separate", "magic"]}, "magic"),
        ({"methods": []}, "methods"),
        ({"seeds": [0, 0]}, "seeds"),
        ({"taus": [0.5, -1.0]}, "taus"),
        ({"members": [0]}, "members"),
        ({"weights": [-1.0]}, "weights"),
        ({"workers": 0}, "workers"),
        ({"options": {"magic": {}}}, "magic"),
        ({"variants": {"a": Variant(change={"recipe.nothing": 1})}}, r"recipe\.nothing"),
        ({"variants": {"a": Variant(method="magic")}}, "magic"),
        ({"settings": {"magic": {"recipe.lr": 0.1}}}, "settings has 'magic'"),
        ({"settings": {"film": {"recipe.no": 0.1}}}, r"settings of 'film' changes 'recipe\.no'"),
    ],
)
def test_settings_that_cannot_work_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(TINY, **change).check()


def test_a_configuration_survives_its_file(done: tuple[Path, dict[str, Any]]) -> None:
    config = replace(TINY, variants={"slow": Variant(change={"recipe.lr": 0.05})})
    assert BenchConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert BenchConfig.from_dict(read_config(done[0])).study == "tiny"


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_whole(name: str) -> None:
    import yaml

    config = BenchConfig.from_dict(yaml.safe_load(preset_path(name).read_text(encoding="utf-8")))
    config.check()
    assert config.study == name
    assert trials_of(config)


@pytest.mark.slow
def test_the_command_line_runs_a_preset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ["--methods", "[separate,sigmanens]", "--taus", "[2.0]", "--seeds", "[0]",
            "--recipe.epochs", "1", "--workers", "1", "--model.options", "{width: 4}"]  # fmt: skip
    assert main(["bench", "--preset", "digits", *size, "--dry-run"]) == 0
    assert "multiply-adds" in capsys.readouterr().out
    out = tmp_path / "run"
    assert main(["bench", "--preset=digits", *size, "--out", str(out)]) == 0
    assert "σN-Ens τ=2" in capsys.readouterr().out
    assert read_metrics(out)["preset"] == "digits"
    assert main(["bench", "--preset", "magic", "--out", str(out)]) == 2
    assert "there is no preset 'magic'" in capsys.readouterr().err
    assert main(["bench", "--preset", "digits"]) == 2
    assert "--out" in capsys.readouterr().err


KILLED = """
import sys
from sigmanens.lab.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_killed_and_resumed_ends_with_the_same_numbers(
    tmp_path: Path, done: tuple[Path, dict[str, Any]]
) -> None:
    """SIGKILL in the middle of a training; what is left is taken up where it was."""
    config = tmp_path / "study.yaml"
    import yaml

    config.write_text(yaml.safe_dump(TINY.to_dict()), encoding="utf-8")
    out = tmp_path / "run"
    arguments = ["bench", "--config", str(config), "--out", str(out)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", KILLED, *arguments],
        env=environment, stdout=subprocess.DEVNULL, start_new_session=True,
    ) as process:  # fmt: skip
        limit = time.monotonic() + 600  # a busy machine takes minutes
        while not list(out.glob("trials/film*/rows.json")):
            assert process.poll() is None, "it ended before it was killed"
            assert time.monotonic() < limit
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGKILL)
    assert not (out / "metrics.json").exists()
    resumed = run_bench(TINY, out, resume=True, command="sigmanens bench")
    assert without_times(resumed) == without_times(done[1])
