"""``sigmanens demo``: in two minutes, what the method does, on real data that needs no download.

Few handwritten digits, seen through noise, so that one network is over-confident; then one network,
four separate ones, the FiLM-Ensemble control, no penalty, and σN-Ens at several τ. A small study:
the same code as ``sigmanens bench``.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from rich.console import Console

from sigmanens.conversion.config import ConversionConfig
from sigmanens.errors import RunError
from sigmanens.lab.bench.config import BenchConfig, MeasureConfig
from sigmanens.lab.bench.gather import collect
from sigmanens.lab.bench.runner import run_bench
from sigmanens.lab.bench.trials import trials_of
from sigmanens.lab.config import (
    DataConfig,
    DemoConfig,
    DiversityConfig,
    ModelConfig,
    Recipe,
)
from sigmanens.lab.digits import digits_sets
from sigmanens.lab.runs import RUN_FILES


def demo_study(config: DemoConfig) -> BenchConfig:
    """The demo as a study of ``sigmanens bench``."""
    return BenchConfig(
        study="digits-demo",
        data=DataConfig(source="digits", limit=config.train),
        model=ModelConfig("digits", {"width": config.width}),
        ensemble=ConversionConfig(members=config.members, head="fresh", init="normal"),
        diversity=DiversityConfig(weight=config.weight),
        recipe=Recipe(epochs=config.epochs, batch_size=50, lr=0.3, weight_decay=0.0),
        methods=["separate", "film", "sigmanens_lambda0", "sigmanens"],
        taus=list(config.taus),
        seeds=list(range(config.seeds)),
        measure=MeasureConfig(detailed_seeds=None, features=False, watched=0),
        workers=config.workers,
    )


def run_demo(
    config: DemoConfig, out: Path, *, command: str = "", console: Console | None = None
) -> dict[str, Any]:
    """Run the demo and write its folder.

    Args:
        config: its size.
        out: the run folder.
        command: the command line, for the record.
        console: where progress is printed; the terminal by default.

    Returns:
        what ``metrics.json`` holds.

    Raises:
        ConfigError: for a size the demo cannot run with. RunError: if the folder holds a run
            already or cannot be written to, or a training failed; nothing then stays of it.
    """
    config.check()
    digits_sets(train=config.train)  # refuses a size at once
    free = not out.exists() or not any((out / name).exists() for name in RUN_FILES)
    study = demo_study(config)
    try:
        metrics = run_bench(study, out, command=command, console=console)
        if metrics["failures"]:
            key, reason = next(iter(metrics["failures"].items()))
            raise RunError(f"{key} failed: {reason}")
        collect(
            {t: out / "trials" / t.key for t in trials_of(study)}, out / "predictions.safetensors"
        )
        shutil.rmtree(out / "trials")
    except BaseException:
        if free:
            _remove(out)
        raise
    return metrics


def _remove(out: Path) -> None:
    for name in (*RUN_FILES, "trials"):
        path = out / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    if out.is_dir() and not any(out.iterdir()):
        out.rmdir()
