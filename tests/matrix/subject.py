"""A network made fit for comparison: every piece of its state shows in what it answers."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from tests.matrix.entries import Entry
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import sigmanens as sn
from sigmanens.norms import RunningStatistics

MEMBERS = 3
BATCH = 4
# Largest error of an output, in parts of how far it moves over the inputs.
EXACT, SINGLE = 1e-5, 2e-3


class UpstreamError(Exception):
    """The base network itself does not do what is asked of the ensemble."""


class Subject:
    """One row of the matrix at work.

    Attributes:
        entry: the row.
        base: the base, its state drawn at random, in evaluation mode and float32.
        example: inputs for a batch of BATCH.
        notes: what sigmanens warned of on the way, and norms that stay as they are.
    """

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.example = entry.example(BATCH)
        self.notes: list[str] = []
        with self.quiet():
            torch.manual_seed(0)
            self.base = entry.build()
            without_chance(self.base)
            randomise(self.base, self.example)
            answer(self.base.eval(), self.example)  # some fill their tables in the first pass
        self.before = {k: v.clone() for k, v in tensors_of(self.base).items()}

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Collect sigmanens' warnings; other libraries' are theirs."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            yield
        for warning in caught:
            if issubclass(warning.category, sn.SigmaNensWarning):
                self.note(str(warning.message))

    def note(self, text: str) -> None:
        """Keep something for the reader of the matrix, once."""
        if text not in self.notes:
            self.notes.append(text)

    def convert(self, base: nn.Module | None = None, members: int = MEMBERS) -> sn.SigmaEnsemble:
        """An ensemble that starts from the base's function."""
        generator = torch.Generator().manual_seed(0)
        source = self.base if base is None else base
        ensemble = sn.convert(source, members, generator=generator, **self.entry.options)
        assert ensemble.plan.init == "preserve", ensemble.report.init_reason
        return ensemble

    @cached_property
    def exact(self) -> tuple[nn.Module, Any, float]:
        """The base and its inputs in float64 with a narrow tolerance, or float32 with a wide one.

        Rounding then cannot hide that a small piece of state is missing.
        """
        double = copy.deepcopy(self.base).double()
        example = cast(self.example, torch.float64)
        try:
            finite = all(y.isfinite().all() for y in answer(double, example))
        except Exception:
            finite = False
        if finite:
            return double, example, EXACT
        return copy.deepcopy(self.base), self.example, SINGLE

    def labels(self, logits: Tensor) -> Tensor:
        """Random classes for one member's logits."""
        dim = self.entry.class_dim
        shape = list(logits.shape)
        classes = shape.pop(dim)
        return torch.randint(classes, shape, generator=torch.Generator().manual_seed(1))


# -- calling and comparing ------------------------------------------------------------------------


def call(network: nn.Module, example: Any) -> Any:
    return network(**example) if isinstance(example, Mapping) else network(example)


@torch.no_grad()
def answer(network: nn.Module, example: Any) -> list[Tensor]:
    return leaves(call(network, example))


def leaves(output: Any) -> list[Tensor]:
    """The floating tensors with at least one dimension in a network's result, in order."""
    if isinstance(output, Tensor):
        return [output] if output.dim() and output.is_floating_point() else []
    if isinstance(output, Mapping):
        parts: list[Any] = list(output.values())
    elif isinstance(output, (tuple, list)):
        parts = list(output)
    elif dataclasses.is_dataclass(output):
        parts = [getattr(output, f.name) for f in dataclasses.fields(output)]
    else:
        return []
    return [leaf for part in parts for leaf in leaves(part)]


def cast(example: Any, dtype: torch.dtype) -> Any:
    """Inputs with their floating tensors in another precision."""
    if isinstance(example, Mapping):
        return {k: cast(v, dtype) for k, v in example.items()}
    return example.to(dtype) if example.is_floating_point() else example


def gap(got: list[Tensor], expected: list[Tensor]) -> float:
    """Largest difference, in parts of the spread of the expected outputs over the inputs."""
    assert len(got) == len(expected), f"{len(got)} results instead of {len(expected)}"
    worst = 0.0
    for ours, theirs in zip(got, expected, strict=True):
        assert ours.shape == theirs.shape, f"shape {[*ours.shape]} instead of {[*theirs.shape]}"
        difference = float((ours.double() - theirs.double()).abs().amax())
        assert difference == difference, "NaN"
        worst = max(worst, difference / spread(theirs))
    return worst


def spread(y: Tensor) -> float:
    """How far outputs (B, …) move over the inputs."""
    y = y.double()
    moved = float((y - y.mean(0)).abs().amax())
    assert moved > 1e-6 * float(y.abs().amax()), "the randomised base hardly reads its inputs"
    return moved


def close(got: list[Tensor], expected: list[Tensor], tolerance: float, what: str) -> None:
    error = gap(got, expected)
    assert error <= tolerance, f"{what}: differs by {error:.1e} of the spread over inputs"


# -- state ----------------------------------------------------------------------------------------


def tensors_of(network: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers, those that are not saved included."""
    return dict(network.named_parameters()) | dict(network.named_buffers())


def counted_norms(network: nn.Module) -> dict[str, nn.Module]:
    """Normalisation layers by what they are called and hold, whatever sigmanens thinks of them."""

    def claims(module: nn.Module) -> bool:
        if isinstance(
            module,
            (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm),
        ):
            return True
        held = [n for n, _ in (*module.named_parameters(recurse=False), *module.named_buffers())]
        return "norm" in type(module).__name__.lower() and "weight" in held

    return {
        name: module
        for name, module in network.named_modules()
        if claims(module) and not any(claims(m) for m in list(module.modules())[1:])
    }


def without_chance(network: nn.Module) -> None:
    """Set every dropout and stochastic depth to 0, so that two passes can be compared."""
    for module in network.modules():
        for key, value in vars(module).items():
            if isinstance(value, float) and (key == "p" or "drop" in key):
                setattr(module, key, 0.0)
        for key, value in vars(getattr(module, "config", None) or object).items():
            if isinstance(value, float) and "drop" in key:
                setattr(module.config, key, 0.0)


def randomise(network: nn.Module, example: Any, seed: int = 1) -> None:
    """Draw norms, running statistics and every tensor that initialisation left constant.

    Scales have both signs; statistics lie near those of the inputs, without being them, so that
    deep networks stay finite and go on reading their inputs.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator).to(like.dtype)

    def scale(like: Tensor) -> Tensor:
        size = 0.5 + torch.rand(like.shape, generator=generator)
        return (size * torch.where(normal(size) < -0.5, -1.0, 1.0)).to(like.dtype)

    norms = {id(m) for m in counted_norms(network).values()}
    with torch.no_grad():
        for module in network.modules():
            for name, p in module.named_parameters(recurse=False):
                if not p.is_floating_point() or not p.numel():
                    continue
                if id(module) in norms:
                    p.copy_(0.3 * normal(p) if name == "bias" else scale(p))
                elif bool((p == p.flatten()[0]).all()):  # LayerScale, zero biases, zero heads
                    shift = "bias" in name or p.dim() > 1
                    p.copy_(normal(p) / max(p.shape[-1], 4) ** 0.5 if shift else scale(p))
                elif p.dim() > 1:
                    # Spreads made for wide networks leave narrow ones deaf to their inputs.
                    usual = (p.shape[0] / p.numel()) ** 0.5
                    p.mul_(max(1.0, 0.5 * usual / max(float(p.std()), 1e-6)))
        _near_statistics(network, example, normal)


def _near_statistics(network: nn.Module, example: Any, normal: Any) -> None:
    tracked = [m for m in network.modules() if _tracks(m)]
    momenta = [m.momentum for m in tracked]
    for m in tracked:
        m.momentum = 1.0
    mode = network.training
    try:
        if tracked:
            call(network.train(), example)
    finally:
        network.train(mode)
        for m, momentum in zip(tracked, momenta, strict=True):
            m.momentum = momentum
    for m in network.modules():
        mean, var = getattr(m, "running_mean", None), getattr(m, "running_var", None)
        if isinstance(mean, Tensor) and isinstance(var, Tensor):
            mean.add_(0.3 * normal(mean) * (var + 1e-3).sqrt())
            var.mul_((0.3 * normal(var)).exp()).add_(1e-3)
        if isinstance(getattr(m, "num_batches_tracked", None), Tensor):
            m.num_batches_tracked.fill_(7)


def _tracks(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._NormBase) and bool(module.track_running_stats)


def apart(ensemble: sn.SigmaEnsemble) -> sn.SigmaEnsemble:
    """Give the members scales, statistics and heads that differ, as training does."""
    generator = torch.Generator().manual_seed(2)

    def normal(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator).to(like.dtype)

    with torch.no_grad():
        for layer in ensemble.sigma_norms().values():
            layer.logit.add_(0.5 * normal(layer.logit))
        for module in ensemble.modules():
            if isinstance(module, RunningStatistics) and module.running_mean is not None:
                module.running_mean.add_(0.1 * normal(module.running_mean))
                module.running_var.mul_((0.1 * normal(module.running_var)).exp())
        for heads in ensemble.member_heads().values():
            for p in heads.parameters():
                p.add_(0.1 * normal(p))
    return ensemble


class FunctionalNorms(TorchFunctionMode):
    """Counts normalisation by functions that no norm module of a network calls."""

    NAMES = ("batch_norm", "group_norm", "instance_norm", "layer_norm", "rms_norm")

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.within = 0
        self.calls = 0
        self.hooks = []
        for module in counted_norms(network).values():
            self.hooks += [
                module.register_forward_pre_hook(lambda *_: self._step(1)),
                module.register_forward_hook(lambda *_: self._step(-1), always_call=True),
            ]

    def _step(self, by: int) -> None:
        self.within += by

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self.hooks:
            hook.remove()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.within and getattr(func, "__name__", "") in self.NAMES:
            self.calls += 1
        return func(*args, **(kwargs or {}))
