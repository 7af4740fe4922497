r"""LoRA-Ensemble (arXiv 2405.14438): a frozen transformer with M low-rank updates and M heads.

.. math:: y_m = x W^\top + \frac{\alpha}{r}\, x A_m^\top B_m^\top

on the query, key and value projections of every attention layer. The layers are PEFT's.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sigmanens.baselines.base import (
    Rival,
    base_network,
    check_count,
    import_library,
    is_trained,
    repeated,
    unfolded,
)
from sigmanens.conversion.heads import find_heads, member_heads
from sigmanens.errors import ConversionError, InputError
from sigmanens.passes.context import MemberAxis
from sigmanens.seeding import own_seed, seeded

__all__ = ["LoRAEnsemble", "lora_ensemble"]

# Last part of the names of query, key and value projections.
_PROJECTIONS = {
    *("query", "key", "value"),  # transformers: BERT, RoBERTa, ELECTRA, ViT, DeiT, BEiT, Swin
    *("q_proj", "k_proj", "v_proj"),  # transformers: CLIP, SigLIP, Llama, BART, OPT
    *("q_lin", "k_lin", "v_lin"),  # transformers: DistilBERT
    *("query_proj", "key_proj", "value_proj"),  # transformers: DeBERTa
    *("q", "k", "v"),  # transformers: MPNet, T5; timm: CaiT and others
}
_FUSED = "qkv"  # timm: one Linear for all three


class LoRAEnsemble(Rival):
    """M low-rank updates of one frozen network; made by :func:`lora_ensemble`."""

    def __init__(self, network: nn.Module, num_members: int, axis: MemberAxis) -> None:
        super().__init__(network, num_members)
        self.axis = axis  # of the heads

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Logits (M, B, C): every member sees the whole batch, in training too."""
        args, kwargs = repeated(self.network, args, kwargs, self.num_members)  # type: ignore[assignment]
        with self.axis.running(0, self.num_members):
            return unfolded(self.network(*args, **kwargs), self.num_members)


class SplitProjection(nn.Module):
    """A fused projection (…, F) → (…, 3F′) as its three parts, each a Linear of its own."""

    def __init__(self, fused: nn.Linear) -> None:
        super().__init__()
        biases = (None,) * 3 if fused.bias is None else fused.bias.detach().chunk(3)
        weights = fused.weight.detach().chunk(3)
        for name, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
            outputs, inputs = weight.shape
            part = nn.Linear(inputs, outputs, bias=bias is not None, device="meta")
            part.weight = nn.Parameter(weight.clone())
            if bias is not None:
                part.bias = nn.Parameter(bias.clone())
            self.add_module(name, part)

    def forward(self, x: Tensor) -> Tensor:
        """Query, key and value side by side, as the fused layer gives them."""
        return torch.cat([part(x) for part in self.children()], -1)


class _MemberRows:
    """Before a LoRA layer runs: say which of its rows belong to which member."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rows, rest = divmod(len(args[0]), len(self.names))
        if rest:
            raise InputError(
                f"a LoRA layer got {len(args[0])} rows in dimension 0, which {len(self.names)} "
                "members do not divide: the network moves its batch dimension"
            )
        return args, kwargs | {"adapter_names": [n for n in self.names for _ in range(rows)]}


def lora_ensemble(
    model_or_factory: nn.Module | Callable[[], nn.Module],
    members: int,
    *,
    rank: int = 8,
    targets: str | Sequence[str] = "auto",
    head: str = "fresh",
    head_name: str | Sequence[str] | None = None,
    generator: torch.Generator | None = None,
) -> LoRAEnsemble:
    """Freeze a transformer and give it M sets of PEFT's LoRA layers and heads (arXiv 2405.14438).

    α/r is 1. A starts as PEFT draws it and B at 0, so each member starts as the base up to its
    head; the members part because their A differ.

    Args:
        model_or_factory: a network, which is copied, or a function that makes one.
        members: M ≥ 1.
        rank: r ≥ 1.
        targets: "auto" for the query, key and value projections, found by name (a fused ``qkv`` is
            split into three first); or a regex (``re.search`` on the dotted name) or list of names
            of ``nn.Linear`` modules.
        head: "fresh" or "copy", as in :func:`sigmanens.convert`, or "auto": copy where the norms of
            the base have been trained, fresh otherwise.
        head_name: where the head is, if it is not found by itself.
        generator: source of A and of fresh heads.

    Returns:
        a network from (B, …) to (M, B, C). Trained: M·r(in + out) parameters for each target, and
        M heads.

    Raises:
        MissingPackageError: without PEFT. ConversionError: if no target is found.
        HeadNotFoundError: if no head is found. InputError: for an argument out of its range.
    """
    check_count("members", members)
    check_count("rank", rank)
    if head not in ("fresh", "copy", "auto"):
        raise InputError(f"head is {head!r}; expected 'fresh', 'copy' or 'auto'")
    peft = import_library("peft", "peft")
    network = base_network(model_or_factory)
    if head == "auto":
        head = "copy" if is_trained(network) else "fresh"
    if targets == "auto":
        _split_fused(network)
    chosen = _targets(network, targets)
    heads = find_heads(network, head_name, head)
    network.requires_grad_(False)
    names = [f"member{m}" for m in range(members)]
    with own_seed(seeded(generator)), warnings.catch_warnings():
        # Several adapters in one network are the point.
        warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
        for name in names:
            config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=chosen)
            peft.inject_adapter_in_model(config, network, adapter_name=name)
    for module in network.modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            for part in (module.lora_A, module.lora_B):
                part.requires_grad_(True)
            assert isinstance(module, nn.Module)
            module.train(network.training)
            module.register_forward_pre_hook(_MemberRows(names), with_kwargs=True)
    axis = MemberAxis(members)
    _own_heads(network, heads, head, axis, generator)
    return LoRAEnsemble(network, members, axis)


def _split_fused(network: nn.Module) -> None:
    for name, module in list(network.named_modules()):
        if name.rpartition(".")[2] == _FUSED and type(module) is nn.Linear:
            parent = network.get_submodule(name.rpartition(".")[0])
            setattr(parent, _FUSED, SplitProjection(module).train(module.training))


def _targets(network: nn.Module, targets: str | Sequence[str]) -> list[str]:
    """Dotted names of the layers that get LoRA."""
    linears = [n for n, m in network.named_modules() if type(m) is nn.Linear]
    if isinstance(targets, str):
        found = [
            n
            for n in linears
            if (
                n.rpartition(".")[2] in _PROJECTIONS
                if targets == "auto"
                else re.search(targets, n) is not None
            )
        ]
    else:
        found = list(targets)
        unknown = sorted(set(found) - set(linears))
        if unknown:
            raise ConversionError(
                f"targets name {', '.join(map(repr, unknown))}: no nn.Linear of this "
                f"{type(network).__name__}"
            )
    if not found:
        raise ConversionError(
            f"targets={targets!r} finds no nn.Linear in this {type(network).__name__}; its linear "
            f"layers are {', '.join(linears[:8]) or 'none'}"
        )
    return found


def _own_heads(
    network: nn.Module,
    names: Sequence[str],
    kind: str,
    axis: MemberAxis,
    generator: torch.Generator | None,
) -> None:
    modules = dict(network.named_modules(remove_duplicate=False))
    made: dict[int, nn.Module] = {}
    for name in names:
        source = modules[name]
        if id(source) not in made:
            made[id(source)] = member_heads(source, kind, axis, name, generator)
            made[id(source)].requires_grad_(True)
        parent, _, leaf = name.rpartition(".")
        setattr(network.get_submodule(parent), leaf, made[id(source)])
