"""``sigmanens demo``: in two minutes, what the method does, on real data that needs no download.

Few handwritten digits, seen through noise, so that one network is over-confident; then one network,
four separate ones, the FiLM-Ensemble control, no penalty, and σN-Ens at several τ, under one
recipe, one order of pictures and one measuring.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor, nn

from sigmanens.baselines import SeparateNetworks, film_ensemble
from sigmanens.diversity import Diversity
from sigmanens.ensemble.convert import convert
from sigmanens.lab.backbones import build_backbone
from sigmanens.lab.config import DemoConfig, Recipe
from sigmanens.lab.digits import Labelled, digits_sets, noisy
from sigmanens.lab.plain import to_json
from sigmanens.lab.report import console_table, verdict, write_report
from sigmanens.lab.rows import EvaluationData, evaluate, member_logits, tempered
from sigmanens.lab.runs import Run, environment
from sigmanens.lab.training import members_of, parameters, train_network
from sigmanens.lab.workers import run_jobs
from sigmanens.training.loss import EnsembleLoss

__all__ = ["DemoConfig", "run_demo"]

NOISE = 3  # severity that training, validation and test pictures all have


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

    Raises:
        ConfigError: for a size the demo cannot run with. RunError: if the folder holds a run
            already or cannot be written to, or a worker process was killed.
    """
    config.check()
    data = digits_sets(train=config.train)
    console = console or Console()
    run = Run(out, {k: list(v) if isinstance(v, tuple) else v for k, v in vars(config).items()})
    try:
        begin = time.perf_counter()
        rows, tensors = _train(config, console)
        metrics = to_json(
            {
                "version": 1,
                "preset": "digits-demo",
                "command": command,
                "environment": environment(),
                "seconds": time.perf_counter() - begin,
                "data": {
                    "description": "scikit-learn's handwritten digits (8×8, real), with Gaussian "
                    f"noise of severity {NOISE} in training and test alike; another split for "
                    "every seed",
                    "train": len(data.train.labels),
                    "validation": len(data.validation.labels),
                    "test": len(data.test.labels),
                    "ood": {k: len(v) for k, v in data.ood.items()},
                },
                "rows": rows,
                "choice": _choice(rows),
            }
        )
        run.write_predictions(tensors)
        write_report(metrics, run.path("report.html"))
        run.write_metrics(metrics)
    except BaseException:
        run.discard()
        raise
    console.print(console_table(metrics))
    said = verdict(metrics)
    console.print(f"\n[bold]{said.headline}[/bold]")
    for line in said.lines:
        console.print(f"• {line}")
    return metrics


Results = tuple[list[dict[str, Any]], dict[str, Tensor]]


def _train(config: DemoConfig, console: Console) -> Results:
    """Rows and predictions of all seeds, with a progress bar on a terminal."""
    # What one network costs per epoch is 1; an ensemble of M costs about M.
    total = config.seeds * config.epochs * config.members * (3 + len(config.taus))
    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%"),
        TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    tensors: dict[str, Tensor] = {}
    hidden = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=hidden) as progress:
        task = progress.add_task(f"training, {config.seeds} seeds", total=total)
        seeds = [(config, seed) for seed in range(config.seeds)]
        done = run_jobs(_one_seed, seeds, config.workers, lambda c: progress.advance(task, c))
        for found, kept in done:
            rows += found
            tensors |= kept
    return rows, tensors


def _one_seed(given: tuple[DemoConfig, int], advance: Callable[[float], None]) -> Results:
    """All methods on one seed."""
    config, seed = given
    return _Trial(config, seed, advance).run()


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
            return Labelled(noisy(part.tensor, NOISE, generator), part.labels)

        self.train = seen(digits.train)
        validation, test = seen(digits.validation), seen(digits.test)
        more = {
            s: noisy(test.tensor, s, torch.Generator().manual_seed(2000 + seed))
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
        with torch.random.fork_rng(devices=[]):
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
