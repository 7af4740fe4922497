"""Heads: find the classification head of a network, and make one per member.

"copy" gives each member a deep copy of the base's head, whatever it is. "fresh" gives each a
randomly initialised LayerNorm and Linear (arXiv 2607.23860, which leaves the kind of norm open).
"shared" leaves the one head in place for all.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from sigmanens.errors import HeadNotFoundError
from sigmanens.passes.context import MemberAxis, MemberLayer
from sigmanens.passes.trees import join, map_tensors
from sigmanens.seeding import own_seed, seeded

HEADS = ("fresh", "copy", "shared")

# Attribute under which transformers' and torchvision's classifiers keep their head.
_TRANSFORMERS_HEADS = ("classifier", "score", "classification_head", "head", "qa_outputs")
_TORCHVISION_HEADS = ("fc", "classifier", "heads", "head")


class MemberHeads(MemberLayer):
    """M heads in the place of one. Member m's rows of the input (k·B, …) go through head m."""

    def __init__(self, heads: Sequence[nn.Module], axis: MemberAxis) -> None:
        super().__init__()
        self.axis = axis
        self.heads = nn.ModuleList(heads)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        made = self.axis.current
        k = made.stop - made.start
        if k == 1:
            return self.heads[made.start](*args, **kwargs)
        sizes: list[int] = []
        map_tensors(lambda x, _: sizes.extend(x.shape[:1]), (args, kwargs))
        size = sizes[0] // k

        def part(i: int) -> Any:
            def cut(x: Tensor, _: str) -> Tensor:
                return x.narrow(0, i * size, size) if x.dim() and x.shape[0] == sizes[0] else x

            a, kw = map_tensors(cut, (args, kwargs))
            return self.heads[made.start + i](*a, **kw)

        return join([part(i) for i in range(k)], [1] * k)

    def extra_repr(self) -> str:
        return f"members={self.axis.num_members}"


def head_lists(network: nn.Module, members: int) -> Iterator[tuple[str, nn.ModuleList]]:
    """The modules of an ensemble or a rival that hold M heads: dotted names, and the heads."""
    for name, module in network.named_modules():
        heads = getattr(module, "heads", None)
        if isinstance(heads, nn.ModuleList) and len(heads) == members:
            yield name, heads


def fresh_head(head: nn.Module, where: str) -> nn.Sequential:
    """Make a LayerNorm and a Linear with the sizes of ``head``, which has to hold a Linear."""
    linear = last_linear(head)
    if linear is None:
        raise HeadNotFoundError(
            f"head '{where}' is a {type(head).__name__} without a Linear; head='fresh' needs its "
            "sizes. Use head='copy' or head='shared', or name a Linear with head_name"
        )
    device, dtype = linear.weight.device, linear.weight.dtype
    size, classes, bias = linear.in_features, linear.out_features, linear.bias is not None
    # Drawn on the CPU: the same numbers on every device.
    fresh = nn.Sequential(
        nn.LayerNorm(size, device="cpu"), nn.Linear(size, classes, bias, device="cpu")
    )
    return fresh.to(device, dtype).train(head.training)


def last_linear(module: nn.Module) -> nn.Linear | None:
    """The last Linear in a module (or the module itself), in the order of registration."""
    found = [m for m in module.modules() if isinstance(m, nn.Linear)]
    return found[-1] if found else None


def member_heads(
    head: nn.Module, kind: str, axis: MemberAxis, where: str, generator: torch.Generator | None
) -> MemberHeads:
    """Make M copies of ``head``, or M fresh heads of its sizes, drawn from ``generator``."""
    members = range(axis.num_members)
    heads: list[nn.Module]
    if kind == "copy":
        heads = [copy.deepcopy(head) for _ in members]
    else:
        with nullcontext() if generator is None else own_seed(seeded(generator)):
            heads = [fresh_head(head, where) for _ in members]
    together = MemberHeads(heads, axis)
    together.training = head.training
    return together


def find_heads(model: nn.Module, head_name: str | Sequence[str] | None, kind: str) -> list[str]:
    """The dotted names of the modules that make the logits.

    The first that is there counts: ``head_name``, timm's ``get_classifier``, the attributes that
    transformers and torchvision use, a Linear that is the last module with parameters. Under
    ``kind="fresh"`` the last Linear within the head is taken. Else HeadNotFoundError.
    """
    names = {id(m): n for n, m in reversed(list(model.named_modules()))}
    if head_name is not None:
        wanted = [head_name] if isinstance(head_name, str) else list(head_name)
        modules = dict(model.named_modules())
        absent = [name for name in wanted if not name or name not in modules]
        if absent:
            last = [n for n, m in modules.items() if n and not list(m.children())][-5:]
            raise HeadNotFoundError(
                f"head_name={absent[0]!r} is no module of this {type(model).__name__}; its last "
                f"modules are {', '.join(last)}. For one head shared by all: head='shared'"
            )
        return _all_names(model, [_narrowed(model, n, kind) for n in wanted])

    heads: Sequence[nn.Module] = _timm_heads(model)
    if not heads and hasattr(getattr(model, "config", None), "num_labels"):
        children = (getattr(model, n, None) for n in _TRANSFORMERS_HEADS)
        heads = [h for h in children if isinstance(h, nn.Module)][:1]
    if not heads and type(model).__module__.startswith("torchvision."):
        children = (getattr(model, n, None) for n in _TORCHVISION_HEADS)
        linears = (last_linear(c) for c in children if isinstance(c, nn.Module))
        heads = [h for h in linears if h is not None][:1]
    if not heads:
        owners = [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]
        heads = [m for m in owners[-1:] if isinstance(m, nn.Linear)]
    if not heads or not all(names.get(id(h)) for h in heads):
        seen = [n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n]
        hint = f"; its last Linear is '{seen[-1]}'" if seen else ""
        raise HeadNotFoundError(
            f"no classification head found in this {type(model).__name__}: its last module with "
            f"parameters is not a Linear{hint}. Name the head with head_name=…, or use one head "
            "for all members: head='shared'"
        )
    return _all_names(model, [_narrowed(model, names[id(h)], kind) for h in heads])


def _timm_heads(model: nn.Module) -> list[nn.Module]:
    classifier = getattr(model, "get_classifier", None)
    got = classifier() if callable(classifier) else None
    heads = list(got) if isinstance(got, (tuple, list, nn.ModuleList)) else [got]
    if any(isinstance(h, nn.Identity) for h in heads):
        raise HeadNotFoundError(
            f"this {type(model).__name__} was made without a classification head: its "
            "get_classifier() is an Identity. Make it with num_classes, name the head with "
            "head_name=…, or use head='shared'"
        )
    return [h for h in heads if isinstance(h, nn.Module)]


def _narrowed(model: nn.Module, name: str, kind: str) -> str:
    """The name of the last Linear within a head under "fresh", else the name itself."""
    head = model.get_submodule(name)
    if kind != "fresh" or isinstance(head, nn.Linear):
        return name
    linears = [n for n, m in head.named_modules() if isinstance(m, nn.Linear)]
    return f"{name}.{linears[-1]}" if linears else name


def _all_names(model: nn.Module, names: list[str]) -> list[str]:
    """The names, and all other names of the same modules."""
    heads = {id(model.get_submodule(n)) for n in names}
    others = [n for n, m in model.named_modules(remove_duplicate=False) if id(m) in heads]
    for outer in others:
        inner = next((n for n in others if n.startswith(f"{outer}.")), None)
        if inner is not None:
            raise HeadNotFoundError(f"head '{inner}' lies within head '{outer}': name one of them")
    return [*names, *(n for n in others if n not in names)]
