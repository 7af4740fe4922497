"""What is compared: a training step and a prediction of M members, each way of having them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sigmanens as sn
from benchmarks.subjects import Subject
from sigmanens.baselines import batchensemble, masksembles, packed
from sigmanens.ensemble.inputs import call_arguments
from sigmanens.ensemble.prediction import Prediction, logits_of

__all__ = ["OURS", "RIVALS", "Contestant", "build"]

OURS = ("sigmanens folded", "sigmanens sequential", "sigmanens 2 a pass", "sigmanens auto")
RIVALS = ("separate", "vmap", "batchensemble", "packed", "masksembles")
RATE = 1e-3


@dataclass
class Contestant:
    """One way of having M members.

    Attributes:
        step: trains on a batch (x, y): forward, backward, optimizer.
        predict: probabilities and their decomposition for x.
        parameters: number of trained parameters.
    """

    step: Callable[[Any, Tensor], object]
    predict: Callable[[Any], object]
    parameters: int


def build(
    name: str,
    subject: Subject,
    members: int,
    *,
    precision: str = "fp32",
    compiled: bool = False,
    layers: str | None = None,
) -> Contestant:
    """A contestant by name, with the network in training mode.

    Args:
        name: one of ``OURS`` or ``RIVALS``, or "one network".
        subject: the network.
        members: M.
        precision: "fp32", or "bf16" for autocast.
        compiled: through ``torch.compile``.
        layers: regex of the norms to convert (ours only).
    """
    torch.manual_seed(0)
    cast = _autocast(precision)
    if name in ("separate", "one network"):
        networks = [subject.make().train() for _ in range(members if name == "separate" else 1)]
        return _separate(networks, cast, compiled)
    if name == "vmap":
        return _vmap([subject.make().train() for _ in range(members)], cast)
    if name in OURS:
        schedule: Any = {"2 a pass": 2}.get(name.removeprefix("sigmanens "), name.split()[1])
        ensemble = sn.convert(subject.make(), members, layers=layers, schedule=schedule).train()
        return _sigmanens(ensemble, cast, compiled)
    rivals: dict[str, Callable[..., nn.Module]] = {
        "batchensemble": batchensemble, "packed": packed, "masksembles": masksembles
    }  # fmt: skip
    return _rival(rivals[name](subject.make(), members).train(), cast, compiled)


def _autocast(precision: str) -> Callable[[], AbstractContextManager[Any]]:
    if precision == "fp32":
        return nullcontext
    return lambda: torch.autocast("cpu", dtype=torch.bfloat16)


def _call(network: Callable[..., Any], x: Any) -> Tensor:
    args, kwargs = call_arguments(x)
    return logits_of(network(*args, **kwargs))


def _sgd(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=RATE, momentum=0.9)


def _count(*networks: nn.Module) -> int:
    return sum(p.numel() for n in networks for p in n.parameters())


def _predict(
    network: nn.Module, logits: Callable[[Any], Tensor], cast: Any
) -> Callable[[Any], Any]:
    @torch.no_grad()
    def predict(x: Any) -> Prediction:
        network.eval()
        with cast():
            return Prediction.from_logits(logits(x))

    return predict


def _separate(networks: Sequence[nn.Module], cast: Any, compiled: bool) -> Contestant:
    optimizers = [_sgd(n.parameters()) for n in networks]
    calls = [torch.compile(n) if compiled else n for n in networks]
    together = nn.ModuleList(networks)

    def step(x: Any, y: Tensor) -> None:
        together.train()
        for call, optimizer in zip(calls, optimizers, strict=True):
            optimizer.zero_grad()
            with cast():
                loss = F.cross_entropy(_call(call, x), y)
            loss.backward()
            optimizer.step()

    predict = _predict(together, lambda x: torch.stack([_call(c, x) for c in calls]), cast)
    return Contestant(step, predict, _count(*networks))


def _vmap(networks: Sequence[nn.Module], cast: Any) -> Contestant:
    """Stacked weights and one batched call, as in PyTorch's tutorial on ensembles."""
    parameters, buffers = torch.func.stack_module_state(list(networks))
    skeleton = copy.deepcopy(networks[0])
    optimizer = _sgd(parameters.values())

    def call(p: Any, b: Any, x: Any) -> Tensor:
        args, kwargs = call_arguments(x)
        return logits_of(torch.func.functional_call(skeleton, (p, b), args, kwargs))

    def logits(x: Any) -> Tensor:
        return torch.vmap(call, in_dims=(0, 0, None), randomness="different")(
            parameters, buffers, x
        )

    def step(x: Any, y: Tensor) -> None:
        skeleton.train()
        optimizer.zero_grad()
        with cast():
            out = logits(x)
            loss = F.cross_entropy(out.flatten(0, 1), y.repeat(len(networks))) * len(networks)
        loss.backward()
        optimizer.step()

    return Contestant(step, _predict(skeleton, logits, cast), _count(*networks))


def _sigmanens(ensemble: sn.SigmaEnsemble, cast: Any, compiled: bool) -> Contestant:
    loss_fn = sn.EnsembleLoss(diversity=sn.Diversity(tau=0.1, weight=1e-4))
    optimizer = _sgd(sn.param_groups(ensemble, lr=RATE))
    one_by_one = ensemble.schedule == "sequential"
    call: Callable[..., Any] = ensemble
    if compiled and one_by_one:
        ensemble.network.compile()  # one graph for all members
    elif compiled:
        call = torch.compile(ensemble)
    fixed = ExitStack()

    def step(x: Any, y: Tensor) -> None:
        fixed.close()
        ensemble.train()
        optimizer.zero_grad()
        with cast():
            if one_by_one:
                ensemble.backward(x, y, loss_fn)
            else:
                loss_fn(_call(call, x), y, ensemble).backward()
        optimizer.step()

    def predict(x: Any) -> Prediction:
        fixed.enter_context(ensemble.fixed())  # as around a loop over a loader; once is enough
        with cast():
            return ensemble.predict(x)

    if compiled and not one_by_one:
        predict = _predict(ensemble, lambda x: _call(call, x), cast)  # type: ignore[assignment]
    return Contestant(step, predict, _count(ensemble))


def _rival(rival: nn.Module, cast: Any, compiled: bool) -> Contestant:
    optimizer = _sgd(rival.parameters())
    loss_fn = sn.EnsembleLoss()
    call = torch.compile(rival) if compiled else rival

    def step(x: Any, y: Tensor) -> None:
        rival.train()
        optimizer.zero_grad()
        with cast():
            loss = loss_fn(_call(call, x), y)
        loss.backward()
        optimizer.step()

    return Contestant(step, _predict(rival, lambda x: _call(call, x), cast), _count(rival))
