"""``sigmanens train`` and ``sigmanens evaluate``: from a configuration to a run folder."""

from __future__ import annotations

import copy
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sigmanens
from sigmanens.baselines import SeparateNetworks
from sigmanens.ensemble.convert import convert
from sigmanens.ensemble.ensemble import SigmaEnsemble
from sigmanens.ensemble.prediction import log_mean_exp
from sigmanens.errors import RunError
from sigmanens.lab.backbones import build_backbone, load_weights
from sigmanens.lab.backbones.registry import check_trained_head, pretrained_classes
from sigmanens.lab.bench.config import BenchConfig
from sigmanens.lab.bench.material import check_padding, load_material
from sigmanens.lab.bench.methods import with_fresh_head
from sigmanens.lab.config import TrainConfig
from sigmanens.lab.data.sets import PictureSet, load_sets
from sigmanens.lab.differences import Samples, differences
from sigmanens.lab.digits import Labelled
from sigmanens.lab.findings import ONE_RUN, add_findings
from sigmanens.lab.plain import to_json
from sigmanens.lab.report import write_report
from sigmanens.lab.rows import EvaluationData, MemberLogits, evaluate, member_logits, tempered
from sigmanens.lab.runs import Run, environment, read_config, read_metrics
from sigmanens.lab.training import TrainingResult, drawn, members_of, parameters, train_network
from sigmanens.training.loss import EnsembleLoss

__all__ = ["evaluate_run", "load_run", "load_trained", "train_run"]

WATCHED = 500
"""Validation examples whose scores are followed while training."""


def train_run(
    config: TrainConfig, out: Path, *, resume: bool = False, command: str = "", bar: bool = True
) -> dict[str, Any]:
    """Convert, train, measure, save: everything one configuration asks for.

    Args:
        config: what to do.
        out: the run folder.
        resume: continue an interrupted run at its last finished epoch.
        command: the command line, for the record.
        bar: show progress.

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
    begin = time.perf_counter()
    try:
        train, data, classes, padding = _load(config, training=True)
        assert train is not None
        _check_single(config, classes)
        base = _base(config, classes, padding)
        penalised = config.penalised
        diversity = config.diversity.penalty(config.tau, config.weight) if penalised else None
        trial = _convert(base, config)  # what cannot work shows before anything is trained
        if diversity is not None:
            diversity.progress = 0.0
            diversity(trial)
        head = trial.plan.head
        controls = _controls(config, classes, head)
        del trial
    except BaseException:
        run.discard()
        raise
    rows: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    samples: dict[str, Samples] = {}

    def fit(name: str, network: nn.Module, loss_fn: EnsembleLoss) -> TrainingResult:
        terminal = sys.stdout.isatty()
        if bar:
            print(f"training {name}", flush=True)
        return train_network(
            network, train, config.recipe, loss_fn, seed=config.seed,
            watched=drawn(data.validation, WATCHED), folder=run.path(f"training/{name}"),
            bar=bar and terminal, lines=bar and not terminal,
        )  # fmt: skip

    def measure(
        method: str,
        network: nn.Module,
        seconds: float | None,
        logits: MemberLogits | None = None,
        tau: float | None = None,
        weight: float | None = None,
        **more: Any,
    ) -> None:
        row, kept = evaluate(
            logits or member_logits(network),
            data,
            method=method,
            network=network,
            members=members_of(network),
            params=parameters(network),
            tau=tau,
            weight=weight,
            seed=config.seed,
            train_seconds=seconds,
        )
        rows.append(row | more)
        tensors.update({f"{method}.{k}": v for k, v in kept.items() if "labels" not in k})
        tensors.update({k: v for k, v in kept.items() if "labels" in k})
        mean = log_mean_exp(kept["member_log_probs"].double())
        samples[method] = {"log_probs": mean, "labels": kept["labels"]}

    single, seconds = SeparateNetworks([base]), None
    pretrained = config.model.pretrained
    if not pretrained and {"single", "single_temperature"} & set(controls):
        base_start = copy.deepcopy(base)  # σN-Ens starts from the same random weights
        seconds = fit("single", single, EnsembleLoss()).seconds
        base = base_start
    if "single" in controls:
        measure("single", single, seconds)
    if "single_temperature" in controls:
        logits = tempered(member_logits(single), data.validation)
        measure("single_temperature", single, seconds, logits)
    if "single_finetuned" in controls:
        network, variant = copy.deepcopy(base), None
        if head == "fresh":
            network = with_fresh_head(network, config.ensemble.head_name, config.seed)
            variant = "fresh_head"
        tuned = SeparateNetworks([network])
        took = fit("single_finetuned", tuned, EnsembleLoss()).seconds
        own = "fresh" if variant else None
        measure("single_finetuned", tuned, took, head=own, variant=variant)
    if "sigmanens_lambda0" in controls:
        free = _convert(base, config)
        took = fit("sigmanens_lambda0", free, EnsembleLoss()).seconds
        measure("sigmanens_lambda0", free, took, head=head)
    ensemble = _convert(base, config)
    method = _method(config)
    done = fit(method, ensemble, EnsembleLoss(diversity=diversity))
    tau, weight = (config.tau, config.weight) if penalised else (None, None)
    measure(method, ensemble, done.seconds, tau=tau, weight=weight, head=head)
    add_findings(rows, [{k: rows[-1].get(k) for k in ONE_RUN} | {"epochs": done.history}])
    temperature = rows[-1]["temperature"]
    ensemble.temperature.fill_(temperature)
    size = ensemble.save_pretrained(run.path("checkpoint")).stat().st_size
    metrics = {
        "version": 1,
        "preset": f"{config.model.name} on {Path(config.data.source).name}",
        "command": command,
        "environment": environment(),
        "seconds": time.perf_counter() - begin,
        "data": {
            "description": f"{Path(config.data.source).name}: "
            f"{len(train.labels)} training examples, {classes} classes",
            "train": len(train.labels),
            "validation": len(data.validation.labels),
            "test": len(data.test.labels),
            "ood": {name: len(pictures) for name, pictures in data.ood.items()},
        },
        "rows": rows,
        "differences": differences(rows, lambda row: samples[row["method"]]),
        "history": done.history,
        "checkpoint_bytes": size,
        "choice": None,
    }
    metrics = to_json(metrics)
    run.write_predictions(tensors)
    write_report(metrics, run.path("report.html"))
    run.write_metrics(metrics)
    shutil.rmtree(run.path("training"), ignore_errors=True)
    return metrics


def load_run(folder: Path) -> tuple[SigmaEnsemble, TrainConfig]:
    """The trained ensemble of a run, on its base network.

    Raises:
        RunError: if the folder holds no finished training. CheckpointError: if it does not fit.
    """
    ensemble, config, _ = _restore(folder)
    return ensemble, config


def load_trained(folder: Path) -> tuple[SigmaEnsemble, TrainConfig, Tensor]:
    """The same, with a few test pictures (B, C, H, W) as its example.

    Raises:
        as :func:`load_run`.
    """
    ensemble, config, data = _restore(folder)
    return ensemble, config, data.test.images[:4]


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
    ensemble, _, data = _restore(folder)
    last = stored["rows"][-1]
    row, _ = evaluate(
        member_logits(ensemble, members=members),
        data,
        method=last["method"],
        network=ensemble if members is None else None,
        members=ensemble.num_members if members is None else members,
        params=parameters(ensemble),
        tau=last["tau"],
        weight=last["weight"],
        seed=last["seed"],
    )
    kept = {k: stored[k] for k in ("version", "preset", "data", "choice")}
    found = kept | {"command": command, "environment": environment(), "rows": [row]}
    return to_json(found)


def _restore(folder: Path) -> tuple[SigmaEnsemble, TrainConfig, EvaluationData]:
    """The ensemble of a run, its configuration, and what it is measured on."""
    stored = read_config(folder)
    if not (folder / "checkpoint").is_dir():
        raise RunError(f"{folder} holds no checkpoint: it is no finished run of 'sigmanens train'")
    config = TrainConfig.from_dict(stored)
    _, data, classes, padding = _load(config, training=False)
    base = _base(config, classes, padding)
    return sigmanens.load(folder / "checkpoint", base=base), config, data


def _load(
    config: TrainConfig, training: bool
) -> tuple[Labelled | None, EvaluationData, int, int | None]:
    """Training, validation and test examples, the number of classes, and of the padding token.

    Training pictures only if wanted.
    """
    if config.data.tokenizer is not None or config.data.source == "digits":
        found = load_material(BenchConfig(data=config.data), config.seed)
        return found.train, found.data, found.classes, found.padding
    sets = load_sets(config.data, training)
    others = {name: images.normalized() for name, images in sets.ood.items()}
    data = EvaluationData(_labelled(sets.validation), _labelled(sets.test), others)
    train = None if sets.train is None else _labelled(sets.train)
    return train, data, len(sets.classes), None


def _labelled(images: PictureSet) -> Labelled:
    return Labelled(images.normalized(), images.labels)


def _base(config: TrainConfig, classes: int, padding: int | None) -> nn.Module:
    """The network before its conversion; where it is random, by the seed alone."""
    model = config.model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        network = build_backbone(model.name, **({"num_classes": classes} | model.options))
    check_padding(network, padding, model.name)
    return load_weights(network, model.weights) if model.weights else network


def _check_single(config: TrainConfig, classes: int) -> None:
    """Raise ConfigError if a network with a random head would stand beside the ensemble."""
    model = config.model
    if model.weights or not model.pretrained:
        return  # a file that does not fit is refused by itself
    if {"single", "single_temperature"} & set(config.controls or ()):
        check_trained_head(
            model.name, classes, "Leave 'single' and 'single_temperature' out of controls; "
            "'single_finetuned' is one network trained as long",
        )  # fmt: skip


def _controls(config: TrainConfig, classes: int, head: str) -> list[str]:
    """What stands beside the ensemble; one network, where nothing is asked for."""
    if config.controls is not None:
        return config.controls
    model = config.model
    known = None if model.weights else pretrained_classes(model.name)
    new = head == "fresh" or known not in (None, classes)
    return ["single_finetuned" if model.pretrained and new else "single"]


def _convert(base: nn.Module, config: TrainConfig) -> SigmaEnsemble:
    generator = torch.Generator().manual_seed(config.seed)
    return convert(base, config.ensemble, generator=generator)


def _method(config: TrainConfig) -> str:
    """What the ensemble is called in ``metrics.json``."""
    if config.ensemble.scale == "linear":
        return "film"
    return "sigmanens" if config.penalised else "sigmanens_lambda0"
