"""The command line: ``sigmanens demo | train | predict | evaluate | sweep | bench | report | …``.

Exit status 0; 2 for wrong usage, be it an option or a configuration file; 1 for a failure; 130 when
interrupted. The reason is one line.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import warnings
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

# Read when ``datasets`` is imported: its progress bars would stand among the results.
os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")

from jsonargparse import ArgumentParser, Namespace
from jsonargparse.typing import OpenUnitInterval, PositiveInt

from sigmanens import __version__
from sigmanens.errors import ConfigError, RunError, SigmaNensError, SigmaNensWarning
from sigmanens.lab.bench.config import PRESETS, BenchConfig, preset_path
from sigmanens.lab.config import DemoConfig, TrainConfig
from sigmanens.lab.explain import ExplainConfig
from sigmanens.lab.recipes import RECIPES, recipe_path

Command = Callable[[Namespace, str], None]
"""Does what its options say; it is also told the command line, for the record."""

_FILE = "YAML file with any of these options"
_TRAINED = "folder of a finished run of 'sigmanens train'"


def demo(config: Namespace, command: str) -> None:
    """Train and compare one network, four networks and σN-Ens on digits, and write a report."""
    from sigmanens.lab.demo import demo_study

    keys = {f.name for f in fields(DemoConfig)}
    values = {k: v for k, v in vars(config).items() if k in keys}
    values["taus"] = tuple(values["taus"])
    _run_study(demo_study(DemoConfig(**values)), Path(config.out), command, resume=config.resume)


def _tell(metrics: dict[str, Any], out: Path) -> None:
    """Print what a run shows, and where its report is."""
    from rich.console import Console

    from sigmanens.lab.report import print_run

    print_run(metrics, Console())
    print(f"Report: {out / 'report.html'}")


def train(config: Namespace, command: str) -> None:
    """Convert a network, fine-tune or train it, measure it beside its controls, save it."""
    from sigmanens.lab.pipeline import train_run

    out, plain = Path(config.out), _training(config)
    metrics = train_run(TrainConfig.from_dict(plain), out, resume=config.resume, command=command)
    _tell(metrics, out)
    print(f"Members on disk: {metrics['checkpoint_bytes']:,} bytes in {out / 'checkpoint'}")
    print(f"New inputs: sigmanens predict {shlex.quote(str(out))} FILES")


def _training(config: Namespace) -> dict[str, Any]:
    """The options of ``train`` that are keys of its configuration."""
    return {k: v for k, v in config.as_dict().items() if k not in ("config", "out", "resume")}


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


def predict(config: Namespace, command: str) -> None:
    """Predict new pictures or texts with a finished training: class, probability, uncertainty."""
    from sigmanens.lab.predicting import TrainedRun, told_inputs
    from sigmanens.lab.runs import write_file

    out, page = (None if p is None else Path(p) for p in (config.out, config.page))
    for path, option in ((out, "--out"), (page, "--page")):
        if path is not None and path.exists():
            raise RunError(f"{path} exists already; give another {option}")
    run = TrainedRun.load(config.run)
    given = told_inputs(config.inputs, sys.stdin, run.inputs["kind"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SigmaNensWarning)  # what it would say is said below
        answers = run.predict(given, abstain_at_risk=config.abstain_at_risk)
    if answers.abstention is not None:
        print(f"sigmanens predict: {answers.abstention}", file=sys.stderr)
    if config.least_certain is not None:
        answers = answers.least_certain(config.least_certain)
    if page is not None:
        print(f"Page: {answers.write_page(page)}", file=sys.stderr)
    text = answers.text(config.format)
    if out is None:
        sys.stdout.write(text)
    else:
        write_file(out, text.encode())
        print(f"{out}: {len(answers)} predictions")


def bench(config: Namespace, command: str) -> None:
    """Train σN-Ens and its rivals under one recipe, and compare them with intervals."""
    _study(config, command, BenchConfig.from_dict(_plain(config)))


def sweep(config: Namespace, command: str) -> None:
    """Train σN-Ens at several τ (and λ, and M): the frontier, and the choice on held-out data."""
    from sigmanens.lab.bench.grid import geometric

    if "--methods" in command:
        raise ConfigError("sweep trains σN-Ens and its --references; it takes no --methods")
    plain = _plain(config)
    plain["methods"] = [*config.references, "sigmanens"]
    if config.tau_range is not None:
        plain["taus"] = geometric(config.tau_range)
    _study(config, command, BenchConfig.from_dict(plain))


def _plain(config: Namespace) -> dict[str, Any]:
    """The options that are keys of the study's configuration."""
    keys = {f.name for f in fields(BenchConfig)}
    return {k: v for k, v in config.as_dict().items() if k in keys}


def _study(config: Namespace, command: str, given: BenchConfig) -> None:
    """Run a study as its options say, or print what it would cost."""
    if config.dry_run:
        from rich.console import Console

        from sigmanens.lab.bench.cost import cost_table

        Console().print(cost_table(given))
        return
    if config.out is None:
        raise ConfigError("--out DIR is missing: the folder for the study, new or empty")
    execute = None
    if config.ray is not None:
        from sigmanens.lab.bench.cluster import ray_execute

        execute = ray_execute(None if config.ray == "local" else config.ray, given.workers)
    _run_study(
        given, Path(config.out), command, resume=config.resume, remeasure=config.remeasure,
        execute=execute,
    )  # fmt: skip


def _run_study(given: BenchConfig, out: Path, command: str, **options: Any) -> None:
    """Run a study, and say what it shows and what failed."""
    from sigmanens.lab.bench.runner import run_bench

    metrics = run_bench(given, out, command=command, **options)
    _tell(metrics, out)
    failed = metrics["failures"]
    if failed:
        key, reason = next(iter(failed.items()))
        raise RunError(
            f"{len(failed)} trainings failed and are not in the results; the first, {key}: "
            f"{reason}. --resume tries them again"
        )


def report(config: Namespace, command: str) -> None:
    """Write the report of a finished run, sweep or bench again from its metrics.json."""
    from sigmanens.lab.report import write_report
    from sigmanens.lab.runs import read_metrics

    folder = Path(config.run)
    metrics = read_metrics(folder)
    target = Path(config.out) if config.out is not None else folder / "report.html"
    if config.out is not None and target.exists():
        raise RunError(f"{target} exists already; give another --out")
    print(f"Report: {write_report(metrics, target)}")


def explain(config: Namespace, command: str) -> None:
    """Say what τ and λ do to M members, how hard and how fast, before anything is trained."""
    from sigmanens.lab.explain import as_config
    from sigmanens.lab.explain import explain as explanation
    from sigmanens.lab.explain_words import print_explanation

    out = None if config.out is None else Path(config.out)
    if out is not None and out.suffix != ".html":
        out = out / "explain.html"
    if out is not None and out.exists():
        raise RunError(f"{out} exists already; give another --out")
    found = explanation(as_config(vars(config)))
    print_explanation(found)
    if out is not None:
        from sigmanens.lab.explain_page import write_explanation

        print(f"\nPage: {write_explanation(found, out)}")


def export(config: Namespace, command: str) -> None:
    """Export the ensemble of a finished training: ONNX, torch.export or one plain network."""
    from sigmanens.lab.exporting import export_run

    path = export_run(Path(config.run), Path(config.out), config.format, config.layout)
    print(f"{path}: {path.stat().st_size:,} bytes")


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="sigmanens",
        description="A network's normalisation layers become M members, "
        "its probabilities calibrated.",
        version=__version__,
    )
    commands = parser.add_subcommands(required=True, dest="command")

    def add(command: Command, usage: str, epilog: str | None = None) -> ArgumentParser:
        name = command.__name__
        sub = ArgumentParser(description=command.__doc__, usage=f"sigmanens {name} {usage}")
        sub.epilog = epilog
        commands.add_subcommand(name, sub, help=command.__doc__)
        return sub

    sub = add(demo, "--out DIR [options]")
    sub.add_argument("--config", action="config", help=_FILE)
    sub.add_argument("--out", type=str, required=True, help="folder for the run, new or empty")
    sub.add_argument("--resume", action="store_true", help="continue an interrupted run")
    sub.add_class_arguments(DemoConfig)

    named = f"--recipe NAME stands for the YAML file of one of: {', '.join(RECIPES)}."
    sub = add(train, "--out DIR [options]", named)
    sub.add_argument("--config", action="config", help=_FILE)
    sub.add_argument("--out", type=str, required=True, help="folder for the run, new or empty")
    sub.add_argument("--resume", action="store_true", help="continue an interrupted run")
    sub.add_class_arguments(TrainConfig)

    sub = add(evaluate, "RUN [options]")
    sub.add_argument("--config", action="config", help=_FILE)
    sub.add_argument("run", type=str, help=_TRAINED)
    sub.add_argument("--out", type=str | None, default=None, help="folder for the results")
    sub.add_argument("--members", type=int | None, default=None, help="first k members only")
    sub.add_argument("--json", action="store_true", help="print the row as JSON")

    sub = add(predict, "RUN INPUT [INPUT ...] [options]")
    sub.add_argument("run", type=str, help=_TRAINED)
    sub.add_argument(
        "inputs", type=str, nargs="+",
        help="pictures and folders of them, or .csv, .jsonl and .txt files of texts; - reads one "
        "path or text from each line of standard input",
    )  # fmt: skip
    sub.add_argument("--format", type=Literal["csv", "jsonl"], default="csv", help="of the result")
    sub.add_argument(
        "--out", type=str | None, default=None, help="new file; standard output if not given"
    )
    sub.add_argument(
        "--least-certain", type=PositiveInt | None, default=None,
        help="only the N inputs of highest entropy, the highest first: what to look at or label",
    )  # fmt: skip
    sub.add_argument(
        "--page", type=str | None, default=None,
        help="new .html file that shows the inputs of the result, with small pictures",
    )  # fmt: skip
    sub.add_argument(
        "--abstain-at-risk", type=OpenUnitInterval | None, default=None,
        help="abstain so that at most this share of the answers is wrong, with confidence 0.95",
    )  # fmt: skip

    named = f"--preset NAME stands for the YAML file of one of: {', '.join(PRESETS)}."
    _study_arguments(add(bench, "--preset NAME --out DIR [options]", named))

    sub = add(sweep, "--preset NAME --out DIR [options]", named)
    _study_arguments(sub)
    sub.add_argument(
        "--tau_range", type=str | None, default=None,
        help="LOW:HIGH:COUNT, τ in equal ratios; takes the place of --taus",
    )  # fmt: skip
    sub.add_argument(
        "--references", type=list[str], default=["separate", "sigmanens_lambda0"],
        help="methods that stand beside the sweep",
    )  # fmt: skip

    sub = add(report, "RUN [--out FILE]")
    sub.add_argument("run", type=str, help="folder of a finished run")
    sub.add_argument(
        "--out", type=str | None, default=None, help="file; RUN/report.html if not given"
    )

    sub = add(explain, "--members M [--tau TAU] [options]")
    sub.add_argument("--config", action="config", help=_FILE)
    sub.add_argument("--out", type=str | None, default=None, help="folder or new .html for a page")
    sub.add_class_arguments(ExplainConfig)

    sub = add(export, "RUN --out FILE [--format onnx]")
    sub.add_argument("run", type=str, help=_TRAINED)
    sub.add_argument("--out", type=str, required=True, help="file to write")
    sub.add_argument(
        "--format", type=str, default="onnx", help="onnx, program, collapse or member:<i>"
    )
    sub.add_argument("--layout", type=str, default="fast", help="of ONNX: fast or small")
    return parser


def _study_arguments(sub: ArgumentParser) -> None:
    """What bench and sweep have in common."""
    sub.add_argument("--config", action="config", help=_FILE)
    sub.add_argument("--out", type=str | None, default=None, help="folder, new or empty")
    sub.add_argument("--resume", action="store_true", help="continue or extend a study")
    sub.add_argument(
        "--remeasure", action="store_true", help="with --resume: measure all networks again"
    )
    sub.add_argument(
        "--dry-run", action="store_true", help="print what every training would cost; no training"
    )
    sub.add_argument(
        "--ray", type=str | None, default=None,
        help="run trainings on a Ray cluster: its address, 'auto', or 'local' for one here",
    )  # fmt: skip
    sub.add_class_arguments(BenchConfig)


def _with_files(arguments: list[str]) -> list[str]:
    """``--preset NAME`` and, of train, ``--recipe NAME`` as ``--config FILE``."""
    places = {"--preset": preset_path}
    if arguments[:1] == ["train"]:
        places["--recipe"] = recipe_path
    found: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        flag, equals, name = argument.partition("=")
        if flag not in places:
            found.append(argument)
            continue
        name = name if equals else next(rest, "")
        found += ["--config", str(places[flag](name))]
    return found


def _with_recipe(parser: ArgumentParser, arguments: list[str]) -> list[str]:
    """For a training from trained weights that names no recipe, the recipe that suits them."""
    chosen = {argument.partition("=")[0] for argument in arguments}
    if arguments[:1] != ["train"] or chosen & {"--recipe", "--config", "--help", "-h"}:
        return arguments
    asked = [a for a in arguments[1:] if not a.startswith("--print_config")]
    parsed: Any = parser.parse_args(["train", "--out", "", *asked])
    config = TrainConfig.from_dict(_training(parsed.train))
    if not config.starts_trained:
        return arguments
    name = "finetune" if config.data.tokenizer is None else "finetune-texts"
    print(f"recipe: {name}, for pretrained weights (--recipe NAME takes another)", file=sys.stderr)
    return ["train", "--recipe", name, *arguments[1:]]


COMMANDS = {
    f.__name__: f for f in (demo, train, predict, evaluate, bench, sweep, report, explain, export)
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; see the module's text for the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = shlex.join(["sigmanens", *arguments])
    try:
        parser = _parser()
        config: Any = parser.parse_args(_with_files(_with_recipe(parser, arguments)))
    except ConfigError as e:
        print(f"sigmanens: {e}", file=sys.stderr)
        return 2
    # Libraries deprecate one another; a user can do nothing about it.
    warnings.filterwarnings("ignore", category=FutureWarning)
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    run = COMMANDS[config.command]
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
