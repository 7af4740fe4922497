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
from sigmanens.lab.bench.material import Material, load_base_pictures, load_material, unread
from sigmanens.lab.bench.methods import builder_of, one_network
from sigmanens.lab.bench.pretraining import build_base
from sigmanens.lab.bench.trials import Trial, trials_of
from sigmanens.lab.bench.work import Workshop
from sigmanens.lab.report.naming import label
from sigmanens.lab.training import parameters, steps_of_epoch
from sigmanens.training.loss import EnsembleLoss


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
    with _saved(network) as sizes:
        EnsembleLoss()(network(x.clone()), y)  # x may be a part of all training pictures
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
def _saved(network: nn.Module) -> Iterator[dict[int, int]]:
    """Bytes of every storage that autograd keeps, by address; parameters have their own count."""
    sizes: dict[int, int] = {}
    alive: list[Any] = []
    own = {p.untyped_storage().data_ptr() for p in network.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        alive.append(storage)  # an address is used again once it is free
        if storage.data_ptr() not in own:  # a weight is kept as its transpose, too
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
    config = unread(config)
    trials = [t for t in trials_of(config) if t.seed == config.seeds[0]]
    table = Table(title=f"{config.study}: what each training costs", box=box.SIMPLE_HEAD)
    table.add_column("training")
    for name in ("parameters", "multiply-adds", "memory of a step", "steps"):
        table.add_column(name, justify="right", no_wrap=True)
    if config.pretrain is not None:
        table.add_row(*_base_row(config))
    for trial in trials:
        changed = config.changed(trial.variant, trial.method)
        material = load_material(changed, trial.seed)
        batch = changed.recipe.batch_size
        steps = _steps(changed, trial, len(material.train.labels))
        shop = Workshop(changed, trial, material)
        cost = cost_of(_network(shop), *_two(material), steps)
        several = f" × {trial.members} networks" if trial.method == "separate" else ""
        table.add_row(_name(trial), *_cells(cost, batch, several))
    seeds = "one seed" if len(config.seeds) == 1 else f"{len(config.seeds)} seeds"
    table.caption = (
        "multiply-adds: of the prediction of one example by all members; memory: what the backward "
        "pass of a batch keeps, members folded, with parameters, gradients and "
        f"momentum in float32; {seeds} of each"
    )
    return table


def _two(material: Material) -> tuple[Tensor, Tensor]:
    return material.train.images[:2], material.train.labels[:2]


def _cells(cost: Cost, batch: int, several: str = "") -> tuple[str, ...]:
    return (
        f"{cost.params:,}",
        f"{cost.multiply_adds / 1e6:,.1f} M",
        f"{(cost.saved_bytes * batch + cost.state_bytes) / 2**20:,.0f} MiB",
        f"{cost.steps:,}{several}",
    )


def _base_row(config: BenchConfig) -> tuple[str, ...]:
    """The line of the network that is trained first, once for all seeds."""
    assert config.pretrain is not None
    recipe, (data, classes) = config.pretrain.recipe, load_base_pictures(config)
    network = SeparateNetworks([build_base(config, classes)])
    steps = recipe.epochs * steps_of_epoch(len(data.labels), recipe)
    cost = cost_of(network, *_two(load_material(config, config.seeds[0])), steps)
    return ("the base, once for all seeds", *_cells(cost, recipe.batch_size))


def _steps(config: BenchConfig, trial: Trial, examples: int) -> int:
    """Optimizer steps of one training."""
    recipe = config.recipe
    if trial.method == "laplace" and config.pretrained:
        return 0
    members = 1 if trial.method == "separate" else trial.members
    return steps_of_epoch(examples, recipe, members) * recipe.epochs


def _network(shop: Workshop) -> nn.Module:
    method = shop.trial.method
    if method == "separate":
        return SeparateNetworks([one_network(shop)[0]])
    if method == "laplace":
        return SeparateNetworks([shop.base()])
    return builder_of(method)(shop)


def _name(trial: Trial) -> str:
    if trial.method == "separate":
        text = "one network of the separate ones"
    else:
        text = label(trial.method, trial.members, trial.tau)
    return f"{text} ({trial.variant})" if trial.variant else text
