"""Run the trainings of a study, each a folder of its own; what is finished is never done twice."""

from __future__ import annotations

import json
import shutil
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from torch import Tensor

from sigmanens.errors import RunError, SigmaNensError
from sigmanens.lab.bench.config import BenchConfig
from sigmanens.lab.bench.gather import gather
from sigmanens.lab.bench.material import check_trained_head, load_material
from sigmanens.lab.bench.measure import measure_outcome, prediction_name
from sigmanens.lab.bench.methods import train_method
from sigmanens.lab.bench.pretraining import Base, train_base
from sigmanens.lab.bench.trials import Trial, trials_of
from sigmanens.lab.bench.work import Workshop
from sigmanens.lab.plain import to_json
from sigmanens.lab.report import write_report
from sigmanens.lab.runs import Run, read_config, read_metrics, write_file, write_tensors
from sigmanens.lab.workers import Advance, run_jobs

EXTENDABLE = (
    "data_root", "measure", "members", "methods", "options", "seeds", "settings", "taus",
    "variants", "weights", "workers",
)  # fmt: skip
"""Keys of the configuration that may change when a study is resumed."""

Job = tuple[dict[str, Any], Trial, str]
"""A configuration in plain types, a trial of it, and the trial's folder."""
Execute = Callable[[list[Job], Advance], list[str]]
"""Runs jobs, telling the cost of what is done; the errors, "" for what went well."""


def run_bench(
    config: BenchConfig,
    out: Path,
    *,
    resume: bool = False,
    remeasure: bool = False,
    command: str = "",
    console: Console | None = None,
    execute: Execute | None = None,
) -> dict[str, Any]:
    """Train and measure everything a study asks for, and write its folder.

    Args:
        config: the study.
        out: its folder; each training has a folder under ``trials``, and the network that they
            start from, where the study trains one, is in ``base``.
        resume: go on with a study: trainings that are finished are kept, those that were
            interrupted go on at their last finished epoch, those that failed are tried again. The
            configuration is the same, but for what adds or leaves out trainings.
        remeasure: under ``resume``, measure all trained networks again.
        command: the command line, for the record.
        console: where progress is printed; the terminal by default.
        execute: runs the trainings; by default here, ``config.workers`` side by side.

    Returns:
        what ``metrics.json`` holds. A training that failed is one of its ``failures``.

    Raises:
        ConfigError: for a study that no part could run. RunError: if the folder holds a run
            already, or every training failed. What the training of a base raises.
    """
    config.check()
    trials = trials_of(config)
    if resume:
        _check_resumed(config, out, remeasure)
    console = console or Console()
    earlier = read_metrics(out) if resume and (out / "metrics.json").exists() else {}
    run = Run(
        out, config.to_dict(), resume, extendable=EXTENDABLE,
        complete=lambda stored: BenchConfig.from_dict(stored).to_dict(),
    )  # fmt: skip
    try:
        material = load_material(config, config.seeds[0])  # what cannot be read shows at once
        check_trained_head(config, material.classes)
    except BaseException:
        run.discard()
        raise
    folders = {t: run.path("trials") / t.key for t in trials}
    if remeasure:
        _check_kept(config, folders)
        for folder in folders.values():
            (folder / "rows.json").unlink(missing_ok=True)
    todo = [t for t in trials if not _finished(folders[t], t, config)]
    plain = config.to_dict()
    if config.data_root is not None:  # a worker elsewhere has another current folder
        plain["data_root"] = str(Path(config.data_root).expanduser().resolve())
    if len(todo) < len(trials):
        console.print(f"{len(trials) - len(todo)} of {len(trials)} trainings are finished already")
    execute = execute or (lambda js, advance: run_jobs(run_trial, js, config.workers, advance))
    base = None
    if todo and config.pretrain is not None:
        with progress(console, "the base network", config.pretrain.recipe.epochs) as advance:
            base = train_base(config, run.path("base"), lambda: advance(1.0))
        plain = BenchConfig.from_dict(plain).started_from(str(base.path.resolve())).to_dict()
    jobs: list[Job] = [(plain, t, str(folders[t].resolve())) for t in todo]
    if jobs:
        total = config.recipe.epochs * sum(t.members for t in todo)
        with progress(console, f"{len(todo)} trainings", total) as advance:
            execute(jobs, advance)
    finished = {t: folders[t] for t in trials if (folders[t] / "rows.json").exists()}
    failures = {t.key: _last_line(folders[t] / "error.txt") for t in trials if t not in finished}
    if not finished:
        key, reason = next(iter(failures.items()))
        raise RunError(f"every training failed; the first, {key}: {reason}")
    metrics = gather(config, finished, failures, command, earlier)
    if config.pretrain is not None:
        metrics["base"] = _told(config, base, earlier)
    if config.redraw:
        _write_splits(finished, out / "splits.json")
    write_report(metrics, run.path("report.html"))
    run.write_metrics(metrics)
    return metrics


def _write_splits(finished: Mapping[Trial, Path], path: Path) -> None:
    """Write which examples of the training split each seed trained on and held out: positions."""
    found = {}
    for trial, folder in finished.items():
        if str(trial.seed) not in found:
            rows = json.loads((folder / "rows.json").read_text(encoding="utf-8"))
            found[str(trial.seed)] = rows["drawn"]
    write_file(path, (json.dumps(found) + "\n").encode())


@contextmanager
def progress(console: Console, name: str, total: float) -> Iterator[Advance]:
    """A bar while something runs, where the console is a terminal, and what moves it."""
    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as p:
        task = p.add_task(name, total=total)
        yield lambda cost: p.advance(task, cost)


def _told(config: BenchConfig, base: Base | None, earlier: Mapping[str, Any]) -> Any:
    """What the results say of the base; that of an earlier call where nothing was trained now."""
    if base is None or config.pretrain is None:
        return earlier.get("base")
    return to_json(
        {
            "seed": config.pretrain.seed,
            "train": base.train,
            "train_seconds": base.seconds,
            "epochs": base.history,
        }
    )


def _check_resumed(config: BenchConfig, out: Path, remeasure: bool) -> None:
    """Raise RunError if trainings that are kept would stand for other ones than they were."""
    if not (out / "config.yaml").exists():
        return
    before = BenchConfig.from_dict(read_config(out))
    measured = any((out / "trials").glob("*/rows.json"))
    if before.measure != config.measure and measured and not remeasure:
        raise RunError(
            f"the rows in {out} were measured with other settings: {before.measure}. Add "
            "--remeasure, which measures all kept networks anew"
        )
    for method in set(before.methods) & set(config.methods):
        told = [[c.settings.get(method), c.options.get(method)] for c in (before, config)]
        if told[0] != told[1]:
            raise RunError(
                f"{method} was trained in {out} with other settings and options: {told[0]}. Make "
                "the new ones a variant"
            )
    for name in set(before.variants) & set(config.variants):
        old, new = before.variants[name], config.variants[name]
        if (old.method, old.change) != (new.method, new.change):
            raise RunError(
                f"variant {name!r} was trained in {out} as another: {old}. Give the new one "
                "another name"
            )


def _check_kept(config: BenchConfig, folders: Mapping[Trial, Path]) -> None:
    """Raise RunError if a trial has rows, and no network is kept to measure them again."""
    for trial, folder in folders.items():
        untrained = trial.method == "laplace" and config.pretrained
        if (folder / "rows.json").exists() and not (folder / "networks").exists() and not untrained:
            raise RunError(
                f"{folder} has rows and no kept network: --remeasure would train it again. Leave "
                "--remeasure out, or remove that folder to train it anew"
            )


def _finished(folder: Path, trial: Trial, config: BenchConfig) -> bool:
    """Whether a trial has all its rows; networks that are kept are not trained again."""
    if not (folder / "rows.json").exists():
        return False
    if trial.method != "separate":
        return True
    rows = json.loads((folder / "rows.json").read_text(encoding="utf-8"))["rows"]
    present = {row["members"] for row in rows}
    return {m for m in config.members or [] if m <= trial.members} <= present


def run_trial(job: Job, advance: Advance) -> str:
    """Train and measure one trial, and write its folder; "" or why it failed.

    The folder holds ``rows.json``, written last, and ``predictions.safetensors``; or ``error.txt``.
    """
    plain, trial, place = job
    folder = Path(place)
    (folder / "error.txt").unlink(missing_ok=True)
    try:
        do_trial(BenchConfig.from_dict(plain), trial, folder, advance)
    except Exception as e:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "error.txt").write_text(traceback.format_exc(), encoding="utf-8")
        known = isinstance(e, SigmaNensError)
        return str(e) if known else f"{type(e).__name__}: {e}"
    return ""


def do_trial(
    config: BenchConfig,
    trial: Trial,
    folder: Path,
    advance: Advance,
    wanted: Collection[str] | None = None,
) -> None:
    """Train and measure one trial, and write its rows and predictions.

    Args:
        config: the study.
        trial: which training.
        folder: of the trial; what an earlier call left there is used.
        advance: told the cost of each epoch of one network.
        wanted: methods of the rows to make; what none of them needs is not trained. None: all.

    Raises:
        what building, training and measuring raise.
    """
    changed = config.changed(trial.variant, trial.method)
    shop = Workshop(changed, trial, load_material(changed, trial.seed), folder, advance)
    few = config.measure.detailed_seeds
    detailed = few is None or config.seeds.index(trial.seed) < few
    rows: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    for outcome in train_method(shop):
        if wanted is not None and outcome.method not in wanted:
            continue
        row, kept = measure_outcome(shop, outcome, detailed)
        name = prediction_name(row)
        rows.append(row)
        tensors |= {k if "labels" in k else f"{name}.{k}": v for k, v in kept.items()}
        if wanted is not None and {r["method"] for r in rows} >= set(wanted):
            break
    write_tensors(folder / "predictions.safetensors", tensors)
    found: dict[str, Any] = {"trial": asdict(trial), "rows": rows}
    if config.redraw:
        found["drawn"] = shop.material.positions
    text = json.dumps(to_json(found), indent=1, ensure_ascii=False, allow_nan=False)
    write_file(folder / "rows.json", (text + "\n").encode())
    shutil.rmtree(folder / "training", ignore_errors=True)


def _last_line(path: Path) -> str:
    """The error itself, from a traceback."""
    if not path.exists():
        return "it ended before it could say why"
    lines = path.read_text(encoding="utf-8").strip().splitlines()
    return lines[-1] if lines else "unknown"
