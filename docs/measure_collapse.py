"""Measure what ``ens.collapse()`` costs on the digits of the demo; put the table into export.md.

    python docs/measure_collapse.py            # train, measure, write (some minutes on one core)
    python docs/measure_collapse.py --table    # write the table anew from the stored numbers
    python docs/measure_collapse.py --check    # exit with 1 if the document has another table

Data, noise, network and rate are those of ``sigmanens demo``, for 60 epochs. Two starts: *scratch*,
as in the demo, random scales and fresh heads; *preserve*, a network that is trained first and then
converted with copied heads and trained for a third of its epochs at a tenth of its rate. Numbers go
to docs/results/collapse.json.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import update_bn
from torch.utils.data import DataLoader

import sigmanens as sn
from sigmanens.baselines import SeparateNetworks
from sigmanens.ensemble.prediction import log_mean_exp
from sigmanens.evaluation import fit_temperature, summarize
from sigmanens.lab.backbones import build_backbone
from sigmanens.lab.bench.material import DIGITS_NOISE as NOISE
from sigmanens.lab.config import DemoConfig, Recipe
from sigmanens.lab.digits import Labelled, digits_sets, noisy
from sigmanens.lab.runs import environment
from sigmanens.lab.training import train_network

HERE = Path(__file__).parent
RESULT, PAGE = HERE / "results" / "collapse.json", HERE / "export.md"
BEGIN, END = "<!-- collapse -->", "<!-- /collapse -->"

CONFIG = DemoConfig(seeds=2, epochs=60)
SETTINGS = (None, *CONFIG.taus)  # None: no penalty
WHAT = {
    "ensemble": "the ensemble",
    "member": "a member (mean of the four)",
    "collapsed": "collapsed",
    "reestimated": "collapsed, statistics re-estimated",
}
COLUMNS = {"accuracy": "accuracy", "nll": "NLL", "nll_calibrated": "NLL (T)", "ece": "ECE"}


def main(arguments: Sequence[str]) -> int:
    """Measure, or write, or compare, as asked."""
    if not {"--table", "--check"} & set(arguments):
        RESULT.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")
    text = page(json.loads(RESULT.read_text(encoding="utf-8")))
    if PAGE.read_text(encoding="utf-8") == text:
        return 0
    if "--check" in arguments:
        print(f"{PAGE.name} is not what docs/measure_collapse.py writes")
        return 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


# -- measuring ---------------------------------------------------------------------------------


def measure() -> dict[str, Any]:
    """Everything, as collapse.json holds it."""
    torch.set_num_threads(1)
    begin = time.perf_counter()
    rows = [row for seed in range(CONFIG.seeds) for row in one_seed(seed)]
    sets = digits_sets(train=CONFIG.train)
    parts = {"train": sets.train, "validation": sets.validation, "test": sets.test}
    return {
        "version": 1,
        "preset": "collapse of the digits ensembles",
        "command": "python docs/measure_collapse.py",
        "environment": environment(),
        "seconds": time.perf_counter() - begin,
        "members": CONFIG.members,
        "data": {name: len(part.labels) for name, part in parts.items()} | {"noise": NOISE},
        "rows": rows,
    }


def one_seed(seed: int) -> list[dict[str, Any]]:
    """Rows of both starts and all settings on one split of the digits."""
    digits = digits_sets(train=CONFIG.train, seed=seed)
    generator = torch.Generator().manual_seed(1000 + seed)
    train, validation, test = (
        Labelled(noisy(part.images, NOISE, generator), part.labels)
        for part in (digits.train, digits.validation, digits.test)
    )
    recipe = Recipe(epochs=CONFIG.epochs, batch_size=50, lr=0.3, weight_decay=0.0)
    tuning = replace(recipe, epochs=CONFIG.epochs // 3, lr=recipe.lr / 10)
    rows = []
    for start in ("scratch", "preserve"):
        base = network(seed)
        if start == "preserve":
            train_network(SeparateNetworks([base]), train, recipe, sn.EnsembleLoss(), seed=seed)
        for tau in SETTINGS:
            draw = torch.Generator().manual_seed(100 * seed)
            ensemble = sn.convert(base, CONFIG.members, generator=draw)
            diversity = None if tau is None else sn.Diversity(tau, CONFIG.weight)
            loss_fn = sn.EnsembleLoss(diversity=diversity)
            used = recipe if start == "scratch" else tuning
            train_network(ensemble, train, used, loss_fn, seed=100 * seed)
            weight = None if tau is None else CONFIG.weight
            cosine = sn.diversity.cosine(ensemble)
            for what, found in compare(ensemble, train, validation, test).items():
                row: dict[str, Any] = {
                    "start": start,
                    "tau": tau,
                    "weight": weight,
                    "seed": seed,
                    "what": what,
                }
                rows.append(row | {"cosine": cosine} | found)
    return rows


def network(seed: int) -> nn.Module:
    """The demo's network with the initial weights it has for this seed."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(100 * seed)
        return build_backbone("digits", width=CONFIG.width)


def compare(
    ensemble: sn.SigmaEnsemble, train: Labelled, validation: Labelled, test: Labelled
) -> dict[str, dict[str, float]]:
    """Scores of the ensemble, of a member, and of the collapsed network in both ways."""
    members = [ensemble.member(m).eval() for m in range(ensemble.num_members)]
    each = [scores([one], validation, test) for one in members]
    collapsed = ensemble.collapse().eval()
    found = {
        "ensemble": scores(members, validation, test),
        "member": {key: mean(s[key] for s in each) for key in COLUMNS},
        "collapsed": scores([collapsed], validation, test),
    }
    update_bn(DataLoader(train.images, 50), collapsed)  # type: ignore[arg-type]
    return found | {"reestimated": scores([collapsed.eval()], validation, test)}


def scores(networks: Sequence[nn.Module], validation: Labelled, test: Labelled) -> dict[str, float]:
    """Of the average of the networks' distributions on the test pictures."""

    def logits(images: Tensor) -> Tensor:
        with torch.no_grad():
            return torch.stack([network(images) for network in networks])

    held_out = log_mean_exp(logits(validation.images).double().log_softmax(2))
    temperature = fit_temperature(held_out, validation.labels)
    row = summarize(logits(test.images), test.labels, temperature=temperature)
    return {key: row[key] for key in COLUMNS}


# -- the page ----------------------------------------------------------------------------------


def page(result: Mapping[str, Any]) -> str:
    """The document with its table put in again."""
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{table(result)}\n{END}{rest.partition(END)[2]}"


def table(result: Mapping[str, Any]) -> str:
    """Mean ± standard deviation over seeds, a block of rows for each start and setting."""
    lines = [
        "| start | τ | λ | cosine | | " + " | ".join(COLUMNS.values()) + " |",
        "| --- " * (5 + len(COLUMNS)) + "|",
    ]
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for row in result["rows"]:
        groups.setdefault((row["start"], row["tau"], row["weight"], row["what"]), []).append(row)
    for (start, tau, weight, what), rows in groups.items():
        first = what == next(iter(WHAT))
        setting = [
            start,
            "" if tau is None else f"{tau:g}",
            "0" if weight is None else f"{weight:g}",
            f"{mean(r['cosine'] for r in rows):.2f}",
        ]
        cells = [*(setting if first else [""] * 4), WHAT[what]]
        cells += [_spread([r[key] for r in rows]) for key in COLUMNS]
        lines.append("| " + " | ".join(cells) + " |")
    data, env = result["data"], result["environment"]
    lines.append(
        f"\nM = {result['members']}, {data['train']} training and {data['test']:,} test pictures, "
        f"mean ± standard deviation over {len({r['seed'] for r in result['rows']})} seeds; NLL in "
        "nats, (T): with a temperature fitted on other pictures; cosine: of the members' scales "
        f"after training. `{result['command']}`, {result['seconds'] / 60:.1f} minutes on "
        f"{env['cpu']}; numbers in [results/collapse.json](results/collapse.json)."
    )
    return "\n".join(lines)


def _spread(values: Sequence[float]) -> str:
    return f"{mean(values):.3f} ± {stdev(values):.3f}" if len(values) > 1 else f"{values[0]:.3f}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
