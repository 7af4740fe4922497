"""The command line: ``sigmanens demo | train | evaluate``.

Exit status 0; 2 for wrong usage, be it an option or a configuration file; 1 for a failure; 130 when
interrupted. The reason is one line.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Read when ``datasets`` is imported: its progress bars would stand among the results.
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")

from jsonargparse import ArgumentParser, Namespace

from sigmanens import __version__
from sigmanens.errors import ConfigError, SigmaNensError
from sigmanens.lab.config import DemoConfig, TrainConfig

__all__ = ["main"]


def demo(config: Namespace, command: str) -> None:
    """Train and compare one network, four networks and σN-Ens on digits, and write a report."""
    from sigmanens.lab.demo import run_demo

    values = {k: v for k, v in vars(config).items() if k not in ("config", "out")}
    values["taus"] = tuple(values["taus"])
    run_demo(DemoConfig(**values), Path(config.out), command=command)
    print(f"\nReport: {Path(config.out) / 'report.html'}")


def train(config: Namespace, command: str) -> None:
    """Convert a network, fine-tune or train it, measure it beside its controls, save it."""
    from rich.console import Console

    from sigmanens.lab.pipeline import train_run
    from sigmanens.lab.report import console_table

    plain = config.as_dict()
    for key in ("config", "out", "resume"):
        plain.pop(key, None)
    out = Path(config.out)
    metrics = train_run(TrainConfig.from_dict(plain), out, resume=config.resume, command=command)
    Console().print(console_table(metrics))
    print(f"Members on disk: {metrics['checkpoint_bytes']:,} bytes in {out / 'checkpoint'}")
    print(f"Report: {out / 'report.html'}")


def evaluate(config: Namespace, command: str) -> None:
    """Measure a finished run again from its checkpoint."""
    from rich.console import Console

    from sigmanens.lab.pipeline import evaluate_run
    from sigmanens.lab.report import console_table, write_report
    from sigmanens.lab.runs import Run

    run = None
    if config.out is not None:
        run = Run(Path(config.out), {"run": str(config.run), "members": config.members})
    try:
        metrics = evaluate_run(Path(config.run), members=config.members, command=command)
        if run is not None:
            write_report(metrics, run.path("report.html"))
            run.write_metrics(metrics)
    except BaseException:
        if run is not None:
            run.discard()
        raise
    if config.json:
        print(json.dumps(metrics["rows"][0], allow_nan=False))
    else:
        Console().print(console_table(metrics))


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="sigmanens",
        description="A network's normalisation layers become M members, "
        "its probabilities calibrated.",
        version=__version__,
    )
    commands = parser.add_subcommands(required=True, dest="command")

    sub = ArgumentParser(description=demo.__doc__, usage="sigmanens demo --out DIR [options]")
    sub.add_argument("--config", action="config", help="YAML file with any of these options")
    sub.add_argument("--out", type=str, required=True, help="folder for the run, new or empty")
    sub.add_class_arguments(DemoConfig)
    commands.add_subcommand("demo", sub, help=demo.__doc__)

    sub = ArgumentParser(description=train.__doc__, usage="sigmanens train --out DIR [options]")
    sub.add_argument("--config", action="config", help="YAML file with any of these options")
    sub.add_argument("--out", type=str, required=True, help="folder for the run, new or empty")
    sub.add_argument("--resume", action="store_true", help="continue an interrupted run")
    sub.add_class_arguments(TrainConfig)
    commands.add_subcommand("train", sub, help=train.__doc__)

    sub = ArgumentParser(description=evaluate.__doc__, usage="sigmanens evaluate RUN [options]")
    sub.add_argument("--config", action="config", help="YAML file with any of these options")
    sub.add_argument("run", type=str, help="folder of a finished run of 'sigmanens train'")
    sub.add_argument("--out", type=str | None, default=None, help="folder for the results")
    sub.add_argument("--members", type=int | None, default=None, help="first k members only")
    sub.add_argument("--json", action="store_true", help="print the row as JSON")
    commands.add_subcommand("evaluate", sub, help=evaluate.__doc__)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; see the module's text for the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = shlex.join(["sigmanens", *arguments])
    config: Any = _parser().parse_args(arguments)
    # Libraries deprecate one another; a user can do nothing about it.
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    run = {"demo": demo, "train": train, "evaluate": evaluate}[config.command]
    try:
        run(config[config.command], command)
    except SigmaNensError as e:
        print(f"sigmanens {config.command}: {' '.join(str(e).split())}", file=sys.stderr)
        return 2 if isinstance(e, ConfigError) else 1
    except KeyboardInterrupt:
        print(f"\nsigmanens {config.command}: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
