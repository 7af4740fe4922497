"""``sigmanens train`` and ``sigmanens evaluate``: a study of one method and its controls.

The networks, trainings and measures are those of ``sigmanens bench``; what a training adds is the
checkpoint of its ensemble.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

import sigmanens
from sigmanens.ensemble.ensemble import SigmaEnsemble
from sigmanens.errors import RunError
from sigmanens.lab.backbones.registry import pretrained_classes
from sigmanens.lab.bench.config import BenchConfig, MeasureConfig, Variant
from sigmanens.lab.bench.gather import gather
from sigmanens.lab.bench.material import check_trained_head, load_material, unread
from sigmanens.lab.bench.measure import measure_outcome, prediction_name
from sigmanens.lab.bench.methods import Outcome, builder_of
from sigmanens.lab.bench.runner import do_trial, progress
from sigmanens.lab.bench.trials import Trial
from sigmanens.lab.bench.work import Workshop
from sigmanens.lab.config import TrainConfig
from sigmanens.lab.plain import to_json
from sigmanens.lab.report import write_report
from sigmanens.lab.rows import member_logits
from sigmanens.lab.runs import Run, environment, read_config, read_metrics, write_tensors

_OWN_HEAD = "fresh_head"
"""The variant of one network whose head is like a member's under ``head="fresh"``."""


def study_of(config: TrainConfig) -> BenchConfig:
    """A training and its controls as a study."""
    return BenchConfig(
        study=f"{config.model.name} on {Path(config.data.source).name}",
        data=config.data,
        model=config.model,
        ensemble=config.ensemble,
        diversity=config.diversity,
        recipe=config.recipe,
        settings={"separate": {f"recipe.{k}": v for k, v in config.control_recipe.items()}},
        variants={_OWN_HEAD: Variant("separate", {"options.separate": {"head": "fresh"}})},
        seeds=[config.seed],
        measure=MeasureConfig(features=False),
    )


def train_run(
    config: TrainConfig,
    out: Path,
    *,
    resume: bool = False,
    command: str = "",
    console: Console | None = None,
) -> dict[str, Any]:
    """Convert, train, measure, save: everything one configuration asks for.

    Args:
        config: what to do.
        out: the run folder.
        resume: continue an interrupted run at its last finished epoch.
        command: the command line, for the record.
        console: where progress is printed; the terminal by default.

    Returns:
        what ``metrics.json`` holds.

    Raises:
        SigmaNensError: as named; the folder then holds no ``metrics.json``.
    """
    config.check()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    run = Run(
        out, config.to_dict(), resume,
        complete=lambda stored: TrainConfig.from_dict(stored).to_dict(),
    )  # fmt: skip
    study, ours = study_of(config), _ensemble_trial(config)
    try:
        shop = Workshop(study, ours, load_material(study, config.seed))
        if {"single", "single_temperature"} & set(config.controls or ()):
            check_trained_head(
                study, shop.material.classes, "Leave 'single' and 'single_temperature' out of "
                "controls; 'single_finetuned' is one network trained as long",
            )  # fmt: skip
        head = _convertible(shop).plan.head
    except BaseException:
        run.discard()
        raise
    wanted = _beside(config, shop.material.classes, head) | {ours: [ours.method]}
    finished = {trial: run.path("training") / trial.key for trial in wanted}
    for trial, folder in finished.items():
        if not (folder / "rows.json").exists():
            _do(study, trial, folder, wanted[trial], console or Console())
    metrics = gather(study, finished, {}, command)
    ensemble = builder_of(ours.method)(shop)
    assert isinstance(ensemble, SigmaEnsemble)
    shop.folder = finished[ours]
    shop.fit(ensemble)  # which finds it trained
    ensemble.temperature.fill_(metrics["rows"][-1]["temperature"])
    size = ensemble.save_pretrained(run.path("checkpoint")).stat().st_size
    metrics |= {"environment": environment(), "checkpoint_bytes": size, "choice": None}
    tensors: dict[str, Tensor] = {}
    for folder in finished.values():
        tensors |= load_file(folder / "predictions.safetensors")
    write_tensors(run.path("predictions.safetensors"), tensors)
    write_report(metrics, run.path("report.html"))
    told = {"version": 1, "predictions": prediction_name(metrics["rows"][-1])}
    run.write_json("inputs.json", told | dict(shop.material.inputs))
    run.write_metrics(metrics)
    shutil.rmtree(run.path("training"), ignore_errors=True)
    return metrics


def _convertible(shop: Workshop) -> SigmaEnsemble:
    """The untrained ensemble: what cannot work shows before anything is trained."""
    ensemble, diversity = builder_of(shop.trial.method)(shop), shop.diversity()
    assert isinstance(ensemble, SigmaEnsemble)
    if diversity is not None:
        diversity.progress = 0.0
        diversity(ensemble)
    return ensemble


def _ensemble_trial(config: TrainConfig) -> Trial:
    """The training of the ensemble itself, by the name that it has in ``metrics.json``."""
    members = config.ensemble.members
    if config.ensemble.scale == "linear":
        return Trial(config.seed, "film", members)
    if not config.penalised:
        return Trial(config.seed, "sigmanens_lambda0", members)
    return Trial(config.seed, "sigmanens", members, config.tau, config.weight)


def _beside(config: TrainConfig, classes: int, head: str) -> dict[Trial, list[str]]:
    """The trainings of what stands beside the ensemble, and the rows that each gives."""
    controls, model = config.controls, config.model
    if controls is None:  # one network, with a head like the members'
        known = None if model.weights else pretrained_classes(model.name)
        new = head == "fresh" or known not in (None, classes)
        controls = ["single_finetuned" if model.pretrained and new else "single"]
    trained = "single_finetuned" if model.pretrained else "single"  # the row of such a network
    own_head = head == "fresh" and config.starts_trained and trained in controls
    plain = [c for c in controls if c.startswith("single")]
    found: dict[Trial, list[str]] = {}
    if own_head:
        plain.remove(trained)
    if plain:
        found[Trial(config.seed, "separate", 1)] = plain
    if own_head:
        found[Trial(config.seed, "separate", 1, variant=_OWN_HEAD)] = [trained]
    if "sigmanens_lambda0" in controls:
        trial = Trial(config.seed, "sigmanens_lambda0", config.ensemble.members)
        found[trial] = ["sigmanens_lambda0"]
    return found


def _do(study: BenchConfig, trial: Trial, folder: Path, rows: list[str], console: Console) -> None:
    """One training: a bar on a terminal, a line for each epoch in a file."""
    total = study.changed(trial.variant, trial.method).recipe.epochs
    name, done = rows[-1], 0

    def told(advance: Callable[[float], None], cost: float) -> None:
        nonlocal done
        done += 1
        advance(1.0)
        if not console.is_terminal:
            console.print(f"epoch {done} of {total}")

    console.print(f"training {name}")
    with progress(console, name, total) as advance:
        do_trial(study, trial, folder, lambda cost: told(advance, cost), rows)


def load_run(folder: Path) -> tuple[SigmaEnsemble, Workshop]:
    """The trained ensemble of a run, and what it was made from and is measured on.

    Raises:
        RunError: if the folder holds no finished training. CheckpointError: if it does not fit.
    """
    stored = read_config(folder)
    if not (folder / "checkpoint").is_dir():
        raise RunError(f"{folder} holds no checkpoint: it is no finished run of 'sigmanens train'")
    config = TrainConfig.from_dict(stored)
    study = unread(study_of(config))
    shop = Workshop(study, _ensemble_trial(config), load_material(study, config.seed))
    return sigmanens.load(folder / "checkpoint", base=shop.base()), shop


def evaluate_run(folder: Path, *, members: int | None = None, command: str = "") -> dict[str, Any]:
    """Measure a run's ensemble again, from its checkpoint.

    Args:
        folder: a finished run of ``sigmanens train``.
        members: use the first k members only.
        command: the command line, for the record.

    Returns:
        an object like ``metrics.json`` with one row.

    Raises:
        RunError, CheckpointError: as :func:`load_run`. InputError: if members is not 1 to M.
    """
    stored = read_metrics(folder)
    ensemble, shop = load_run(folder)
    ensemble.to(shop.device)
    of_all = ("cosine", "owners", "owners_by_layer", "saturation", "multiply_adds")
    fewer = {} if members is None else {"members": members} | dict.fromkeys(of_all)
    logits = member_logits(ensemble, members=members)
    outcome = Outcome(shop.trial.method, ensemble, None, logits, extra=fewer)
    row, _ = measure_outcome(shop, outcome, detailed=True)
    kept = {k: stored[k] for k in ("version", "preset", "data", "choice")}
    found = kept | {"command": command, "environment": environment(), "rows": [row]}
    return to_json(found)
