"""``sigmanens demo``: in two minutes, what the method does, on real data that needs no download.

Few handwritten digits, seen through noise, so that one network is over-confident; then one network,
four separate ones, the FiLM-Ensemble control, no penalty, and σN-Ens at several τ, under one
recipe, one order of pictures and one measuring.
"""

from __future__ import annotations

import multiprocessing
import queue
import time
import warnings
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn

from sigmanens.baselines import SeparateNetworks, film_ensemble
from sigmanens.convert import convert
from sigmanens.diversity import Diversity
from sigmanens.errors import ConfigError
from sigmanens.lab.backbones import build_backbone
from sigmanens.lab.digits import Labelled, digits_sets, noisy
from sigmanens.lab.report import console_table, verdict, write_report
from sigmanens.lab.rows import EvaluationData, evaluate, member_logits, tempered
from sigmanens.lab.runs import Run, environment, read_metrics
from sigmanens.lab.training import Recipe, members_of, parameters, train_network
from sigmanens.objective import EnsembleLoss

__all__ = ["DemoConfig", "run_demo"]

NOISE = 3  # severity that training, validation and test pictures all have


@dataclass
class DemoConfig:
    """Size of the demo.

    Attributes:
        members: M.
        taus: temperatures τ of the penalty.
        weight: λ.
        train: number of training pictures.
        epochs: passes over them.
        width: channels of the network's first stage.
        seeds: number of repetitions with other data splits, weights and orders.
        workers: seeds trained side by side, each in a process of its own with one CPU thread
            (more threads do not help networks this small); 1: in this process.
    """

    members: int = 4
    taus: tuple[float, ...] = (0.1, 0.5, 2.0)
    weight: float = 1e-2
    train: int = 200
    epochs: int = 60
    width: int = 16
    seeds: int = 4
    workers: int = 2

    def check(self) -> None:
        """Raise ConfigError for sizes the demo cannot run with."""
        if self.members < 2:
            raise ConfigError(f"members is {self.members}; the demo compares at least 2")
        if not self.taus:
            raise ConfigError("taus is empty; expected at least one τ")
        for key in ("epochs", "width", "seeds", "workers"):
            if getattr(self, key) < 1:
                raise ConfigError(f"{key} is {getattr(self, key)}; expected at least 1")


def run_demo(
    config: DemoConfig, out: Path, *, command: str = "", console: Console | None = None
) -> dict[str, Any]:
    """Run the demo and write its folder.

    Args:
        config: its size.
        out: the run folder.
        command: the command line, for the record.
        console: where progress, table and verdict are printed; the terminal by default.

    Returns:
        what ``metrics.json`` holds.
    """
    config.check()
    console = console or Console()
    run = Run(out, {k: list(v) if isinstance(v, tuple) else v for k, v in vars(config).items()})
    begin = time.perf_counter()
    rows: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    # What one network costs per epoch is 1; an ensemble of M costs about M.
    total = config.seeds * config.epochs * config.members * (3 + len(config.taus))
    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(f"training, {config.seeds} seeds", total=total)
        for found, kept in _all_seeds(config, lambda cost: progress.advance(task, cost)):
            rows += found
            tensors |= kept
    data = digits_sets(train=config.train)
    metrics: dict[str, Any] = {
        "version": 1,
        "preset": "digits-demo",
        "command": command,
        "environment": environment(),
        "seconds": time.perf_counter() - begin,
        "data": {
            "description": "scikit-learn's handwritten digits (8×8, real), with Gaussian noise "
            f"of severity {NOISE} in training and test alike; another split for every seed",
            "train": len(data.train.labels),
            "validation": len(data.validation.labels),
            "test": len(data.test.labels),
            "ood": {k: len(v) for k, v in data.ood.items()},
        },
        "rows": rows,
        "choice": _choice(rows),
    }
    run.write_predictions(tensors)
    run.write_metrics(metrics)
    stored = read_metrics(run.folder)
    write_report(stored, run.path("report.html"))
    console.print(console_table(stored))
    said = verdict(stored)
    console.print(f"\n[bold]{said.headline}[/bold]")
    for line in said.lines:
        console.print(f"• {line}")
    return metrics


Results = tuple[list[dict[str, Any]], dict[str, Tensor]]


def _all_seeds(config: DemoConfig, advance: Callable[[float], None]) -> list[Results]:
    """Rows and predictions of every seed, in the order of the seeds."""
    if config.workers == 1 or config.seeds == 1:
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(1)
            return [_Trial(config, seed, advance).run() for seed in range(config.seeds)]
        finally:
            torch.set_num_threads(before)
    context = multiprocessing.get_context("spawn")
    with context.Manager() as manager:
        costs = manager.Queue()
        with ProcessPoolExecutor(config.workers, mp_context=context) as pool:
            jobs: list[Future[Results]] = [
                pool.submit(_one_seed, config, seed, costs) for seed in range(config.seeds)
            ]
            pending = set(jobs)
            while pending:
                done, pending = wait(pending, timeout=0.2, return_when=FIRST_EXCEPTION)
                if any(job.exception() for job in done):
                    for job in pending:
                        job.cancel()
                    break
                while True:
                    try:
                        advance(costs.get_nowait())
                    except queue.Empty:
                        break
            return [job.result() for job in jobs]


def _one_seed(config: DemoConfig, seed: int, costs: Any) -> Results:
    """A worker process: all methods on one seed."""
    warnings.simplefilter("ignore")  # what libraries tell each other was told in the main process
    torch.set_num_threads(1)
    return _Trial(config, seed, costs.put).run()


class _Trial:
    """All methods on one seed: its split, its noise, its initial weights."""

    def __init__(self, config: DemoConfig, seed: int, advance: Callable[[float], None]) -> None:
        self.config, self.seed, self.advance = config, seed, advance
        self.recipe = Recipe(epochs=config.epochs, batch_size=50, lr=0.3, weight_decay=0.0)
        self.rows: list[dict[str, Any]] = []
        self.tensors: dict[str, Tensor] = {}
        digits = digits_sets(train=config.train, seed=seed)
        generator = torch.Generator().manual_seed(1000 + seed)

        def seen(part: Labelled) -> Labelled:
            return Labelled(noisy(part.images, NOISE, generator), part.labels)

        self.train = seen(digits.train)
        validation, test = seen(digits.validation), seen(digits.test)
        more = {
            s: noisy(test.images, s, torch.Generator().manual_seed(2000 + seed))
            for s in range(1, 6)
        }
        self.data = EvaluationData(validation, test, digits.ood, {"gaussian_noise": more})

    def run(self) -> Results:
        """Train and measure every method."""
        members = self.config.members
        networks, seconds = [], []
        for i in range(members):
            networks.append(self._network(i))
            seconds.append(self._train(SeparateNetworks(networks[i:]), EnsembleLoss(), i, cost=1))
        single, deep = SeparateNetworks(networks[:1]), SeparateNetworks(networks)
        typical = sorted(seconds)[members // 2]  # the first training also warms up
        self._measure("single", single, typical)
        self._measure("single_temperature", single, typical, temper=True)
        self._measure("deep_ensemble", deep, typical * members)

        film = film_ensemble(self._network(0), members, head="fresh", generator=self._generator())
        taken = self._train(film, EnsembleLoss(), cost=members, scale_lr_mult=1.0)
        self._measure("film", film, taken)

        for tau in (None, *self.config.taus):
            ensemble = convert(self._network(0), members, generator=self._generator())
            diversity = None if tau is None else Diversity(tau, self.config.weight)
            taken = self._train(ensemble, EnsembleLoss(diversity=diversity), cost=members)
            method = "sigmanens_lambda0" if tau is None else "sigmanens"
            weight = None if tau is None else self.config.weight
            self._measure(method, ensemble, taken, tau=tau, weight=weight)
        return self.rows, self.tensors

    def _train(
        self,
        network: nn.Module,
        loss_fn: EnsembleLoss,
        index: int = 0,
        *,
        cost: float,
        scale_lr_mult: float | None = None,
    ) -> float:
        """Train under the common recipe; seconds taken."""
        recipe = replace(self.recipe, scale_lr_mult=scale_lr_mult)
        done = train_network(
            network, self.train, recipe, loss_fn, seed=self._seed(index),
            advance=lambda: self.advance(cost),
        )  # fmt: skip
        return done.seconds

    def _seed(self, index: int) -> int:
        return 100 * self.seed + index

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self._seed(0))

    def _network(self, index: int) -> nn.Module:
        """A network with initial weights of its own; number 0 is also the base of the ensembles."""
        with torch.random.fork_rng():
            torch.manual_seed(self._seed(index))
            return build_backbone("digits", width=self.config.width)

    def _measure(
        self,
        method: str,
        network: nn.Module,
        seconds: float,
        *,
        tau: float | None = None,
        weight: float | None = None,
        temper: bool = False,
    ) -> None:
        logits = member_logits(network)
        if temper:
            logits = tempered(logits, self.data.validation)
        row, kept = evaluate(
            logits, self.data, method=method, network=network, members=members_of(network),
            params=parameters(network), tau=tau, weight=weight, seed=self.seed,
            train_seconds=seconds,
        )  # fmt: skip
        self.rows.append(row)
        name = method if tau is None else f"{method}_tau{tau:g}"
        self.tensors[f"seed{self.seed}.labels"] = kept["labels"]
        self.tensors[f"seed{self.seed}.{name}.member_log_probs"] = kept["member_log_probs"]


def _choice(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The τ with the lowest temperature-scaled NLL on validation pictures, mean over seeds."""
    scores: dict[float, list[float]] = {}
    for row in rows:
        if row["method"] == "sigmanens":
            scores.setdefault(row["tau"], []).append(row["validation"]["nll_calibrated"])
    means = {tau: sum(v) / len(v) for tau, v in scores.items()}
    best = min(means, key=lambda tau: means[tau])
    listed = ", ".join(f"τ={tau:g}: {value:.3f}" for tau, value in sorted(means.items()))
    return {
        "criterion": "validation nll_calibrated",
        "tau": best,
        "reason": listed,
    }
