"""Selection of the norms that the diversity penalty acts on: by the paper's rules, or by your own.

The paper (arXiv 2607.23860) regularises one norm per residual block (ResNet-18: the second;
WideResNet: the first; ResNet-50: first and last) and, in transformers, the norm of each
feed-forward block. A block is a numbered module (``layer1.0``, ``blocks.3``, ``encoder_layer_2``)
whose norms have the names that its library gives them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn

from sigmanens.conversion.config import (
    LayerSelector,
    check_selector,
    matches,
    some_names,
    unknown_names,
)
from sigmanens.errors import DiversityError
from sigmanens.norms import SigmaNorm

# Names of the norm of a block's feed-forward part. If a block has several, the first here counts.
_FEED_FORWARD = (
    "pre_feedforward_layernorm",  # transformers: Gemma 2 and 3
    "mlp_norm",  # transformers: ModernBERT
    "norm2",  # timm and torchvision ViT-like, torch.nn.TransformerEncoder, transformers: DINOv2
    "ln_2",  # torchvision ViT, transformers: GPT-2
    "layer_norm2",  # transformers: CLIP, SigLIP
    "layernorm_after",  # transformers: ViT, DeiT, BEiT, Swin
    "output.LayerNorm",  # transformers: BERT, RoBERTa, ELECTRA, DeBERTa, MPNet
    "output_layer_norm",  # transformers: DistilBERT
    "full_layer_layer_norm",  # transformers: ALBERT
    "ff.layer_norm",  # transformers: XLNet
    "post_attention_layernorm",  # transformers: Llama, Mistral, Qwen, GPT-NeoX
    "final_layer_norm",  # transformers: BART, OPT, Whisper
)


def paper_rule(model: nn.Module, norms: Mapping[str, SigmaNorm]) -> tuple[str, list[str]]:
    """The paper's choice of regularised norms R for a network: the rule's name, and their names.

    All of ``norms``, the converted ones by dotted name, if no block is known.
    """
    wide = any("wide" in type(m).__name__.lower() for m in model.modules())
    chosen: dict[str, str] = {}
    feed_forward: dict[str, tuple[int, str]] = {}
    for name in norms:
        rule = _residual_rule(model, name, wide)
        if rule is not None:
            chosen[name] = rule
            continue
        block, place = _feed_forward_place(model, name)
        if place is not None and (block not in feed_forward or place < feed_forward[block][0]):
            feed_forward[block] = (place, name)
    for _, name in feed_forward.values():
        chosen[name] = "transformer: norm of each feed-forward block"
    if not chosen:
        return "all norms (no known block)", list(norms)
    return " + ".join(sorted(set(chosen.values()))), [n for n in norms if n in chosen]


def _residual_rule(model: nn.Module, name: str, wide: bool) -> str | None:
    """The rule that chooses ``bn1 … bn3``, or ``norm1 … norm3`` beside convolutions, or None."""
    parent, _, leaf = name.rpartition(".")
    found = re.fullmatch(r"(bn|norm)([123])", leaf)
    if found is None or not re.search(r"\d$", parent):
        return None
    stem, index = found[1], int(found[2])
    block = model.get_submodule(parent)
    if stem == "norm" and not _has_convolution(block):
        return None
    last = max(i for i in (1, 2, 3) if hasattr(block, f"{stem}{i}"))
    if last == 3:
        rule, chosen = "block of three norms: first and last", {1, 3}
    elif last == 2 and wide:
        rule, chosen = "wide block of two norms: the first", {1}
    else:
        rule, chosen = "block of two norms: the second", {2}
    return rule if index in chosen else None


def _feed_forward_place(model: nn.Module, name: str) -> tuple[str, int | None]:
    """The numbered block around a norm, and the norm's place in ``_FEED_FORWARD``, or None."""
    parts = name.split(".")
    numbered = [i for i, part in enumerate(parts[:-1]) if re.fullmatch(r"(.*_)?\d+", part)]
    if not numbered:
        return "", None
    cut = numbered[-1] + 1
    block, leaf = ".".join(parts[:cut]), ".".join(parts[cut:])
    module = model.get_submodule(block)
    if isinstance(module, nn.TransformerDecoderLayer):  # norm2 goes with its cross-attention
        return block, 0 if leaf == "norm3" else None
    if leaf not in _FEED_FORWARD or _has_convolution(module):
        return block, None
    return block, _FEED_FORWARD.index(leaf)


def _has_convolution(block: nn.Module) -> bool:
    return any(isinstance(child, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) for child in block.children())


def select(
    model: nn.Module, norms: Mapping[str, SigmaNorm], layers: LayerSelector
) -> tuple[str, list[str]]:
    """The norms that "auto", "all" (or None), a regex, names or a callable choose.

    ``norms`` are the converted ones by dotted name. A tied norm, used in several places, has its
    first name there; any of its names selects it.

    Returns:
        the rule's name and the chosen names in the order of ``norms``.

    Raises:
        DiversityError: if nothing is selected, or a name in a list is no converted norm.
        InputError: if ``layers`` is no selector.
    """
    if not norms:
        raise DiversityError("no norm is converted, so members have no scales to keep apart")
    if isinstance(layers, str) and layers == "auto":
        return paper_rule(model, norms)
    if layers is None or (isinstance(layers, str) and layers == "all"):
        return "all norms", list(norms)
    check_selector(layers)
    first = {id(m): n for n, m in norms.items()}
    names = {
        n: first[id(m)]
        for n, m in model.named_modules(remove_duplicate=False)
        if isinstance(m, SigmaNorm) and id(m) in first
    }
    picked = {first for n, first in names.items() if matches(layers, n, norms[first])}
    unknown = unknown_names(layers, names)
    if not picked or unknown:
        what = f"names {', '.join(map(repr, unknown))}:" if unknown else "selects"
        raise DiversityError(
            f"layers={layers!r} {what} no converted norm; the {len(names)} converted norms are "
            f"{some_names(list(names))}"
        )
    return "given", [n for n in norms if n in picked]
