"""What each training of a study would cost, before anyone pays it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sigmanens.baselines import SeparateNetworks
from sigmanens.lab.bench.config import BenchConfig
from sigmanens.lab.bench.material import load_material
from sigmanens.lab.bench.methods import BUILDERS
from sigmanens.lab.bench.trials import Trial, trials_of
from sigmanens.lab.bench.work import Workshop
from sigmanens.lab.report.naming import label
from sigmanens.lab.training import parameters
from sigmanens.objective import EnsembleLoss

__all__ = ["Cost", "cost_of", "cost_table", "multiply_adds"]


@dataclass(frozen=True)
class Cost:
    """What one training costs.

    Attributes:
        params: number of parameters.
        multiply_adds: of convolutions and matrix products, for the prediction of one picture.
        saved_bytes: what the backward pass of one picture keeps in memory, all members at once.
        state_bytes: parameters, gradients and one momentum, in float32.
        steps: of the training.
    """

    params: int
    multiply_adds: int
    saved_bytes: int
    state_bytes: int
    steps: int


@torch.no_grad()
def multiply_adds(network: nn.Module, x: Tensor) -> int:
    """Of convolutions and matrix products, for the prediction of one picture by all members.

    Args:
        network: maps pictures to member logits (M, B, K); set to evaluation mode.
        x: pictures (B, C, H, W), or what else the network takes.
    """
    network.eval()
    network(x)  # some verify themselves in their first pass
    with FlopCounterMode(display=False) as counter:
        network(x)
    return int(counter.get_total_flops()) // 2 // len(x)


def cost_of(network: nn.Module, x: Tensor, y: Tensor, steps: int) -> Cost:
    """Measure one forward pass of a few pictures, in training mode for memory.

    Args:
        network: maps pictures to member logits (M, B, K); not changed.
        x: pictures (B, C, H, W).
        y: labels (B,).
        steps: of the training.
    """
    network = copy.deepcopy(network)
    counted = multiply_adds(network, x)
    network.train()
    with _saved() as sizes:
        EnsembleLoss()(network(x), y)
    count = parameters(network)
    trained = sum(p.numel() for p in network.parameters() if p.requires_grad)
    return Cost(
        params=count,
        multiply_adds=counted,
        saved_bytes=sum(sizes.values()) // len(x),
        state_bytes=4 * (count + 2 * trained),
        steps=steps,
    )


@contextmanager
def _saved() -> Iterator[dict[int, int]]:
    """Bytes of every storage that autograd keeps, by address."""
    sizes: dict[int, int] = {}
    alive: list[Any] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        alive.append(storage)  # an address is used again once it is free
        if not isinstance(tensor, nn.Parameter):
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield sizes


def cost_table(config: BenchConfig) -> Table:
    """One line for each training of the first seed.

    Raises:
        ConfigError: for a study that no part could run. What building a network raises.
    """
    config.check()
    trials = [t for t in trials_of(config) if t.seed == config.seeds[0]]
    table = Table(title=f"{config.study}: what each training costs", box=box.SIMPLE_HEAD)
    table.add_column("training")
    for name in ("parameters", "multiply-adds", "memory of a step", "steps"):
        table.add_column(name, justify="right", no_wrap=True)
    for trial in trials:
        changed = config.changed(trial.variant)
        material = load_material(changed, trial.seed)
        batch = changed.recipe.batch_size
        steps = _steps(changed, trial, len(material.train.labels))
        shop = Workshop(changed, trial, material)
        x, y = material.train.images[:2], material.train.labels[:2]
        network = _network(shop)
        cost = cost_of(network, x, y, steps)
        table.add_row(
            _name(trial),
            f"{cost.params:,}",
            f"{cost.multiply_adds / 1e6:,.1f} M",
            f"{(cost.saved_bytes * batch + cost.state_bytes) / 2**20:,.0f} MiB",
            f"{steps:,}" + (f" × {trial.members} networks" if trial.method == "separate" else ""),
        )
    table.caption = (
        "multiply-adds: of the prediction of one picture by all members; memory: what the backward "
        "pass of a batch keeps, members folded, with parameters, gradients and "
        f"momentum in float32; {len(config.seeds)} seeds of each"
    )
    return table


def _steps(config: BenchConfig, trial: Trial, examples: int) -> int:
    """Optimizer steps of one training, the continuations of a warm path included."""
    recipe = config.recipe
    if trial.method == "laplace" and config.pretrained:
        return 0
    whole, rest = divmod(examples, recipe.batch_size)
    steps = whole + (rest > 0 and not (recipe.drop_last and whole))
    more = config.path.epochs * (len(config.taus) - 1) if trial.method == "warm_path" else 0
    return steps * (recipe.epochs + more)


def _network(shop: Workshop) -> nn.Module:
    method = shop.trial.method
    if method in ("separate", "laplace"):
        return SeparateNetworks([shop.base()])
    return BUILDERS["sigmanens" if method == "warm_path" else method](shop)


def _name(trial: Trial) -> str:
    if trial.method == "separate":
        return "one network of the separate ones"
    if trial.method == "warm_path":
        text = label("sigmanens", trial.members, None) + ", all τ by continuation"
    else:
        text = label(trial.method, trial.members, trial.tau)
    return f"{text} ({trial.variant})" if trial.variant else text
