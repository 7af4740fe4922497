"""Which converted norms the diversity penalty acts on: the paper's rules by name, or your own.

The paper (arXiv 2607.23860) regularises one norm per residual block (ResNet-18: the second;
WideResNet: the first; ResNet-50: first and last) and, in transformers, the norm of each
feed-forward block. Blocks are recognised by the names their libraries give them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import nn

from sigmanens.audit import LayerSelector, check_selector, matches
from sigmanens.errors import DiversityError
from sigmanens.norms import SigmaNorm

__all__ = ["paper_rule", "select"]

_FEED_FORWARD = (
    r"blocks\.\d+\.norm2$",  # timm ViT, DeiT, BEiT, Swin, Mixer
    r"layers\.\d+\.norm2$",  # torch.nn.TransformerEncoder
    r"(?:^|\.)norm2$",
    r"encoder_layer_\d+\.ln_2$",  # torchvision ViT
    r"layernorm_after$",  # transformers ViT, BEiT, Swin
    r"(?<!attention\.)output\.LayerNorm$",  # BERT, RoBERTa, ELECTRA, DeBERTa
    r"output_layer_norm$",  # DistilBERT
    r"post_attention_layernorm$",  # Llama
    r"\.ln_2$",  # GPT-2
    r"final_layer_norm$",  # BART, CLIP
)


def paper_rule(model: nn.Module, norms: Mapping[str, SigmaNorm]) -> tuple[str, list[str]]:
    """The paper's choice of regularised norms R for a network.

    Args:
        model: the converted network.
        norms: its converted norms by dotted name.

    Returns:
        the rule's name and the chosen names; ("all norms", all of them) where no block is known.
    """
    wide = any("wide" in type(m).__name__.lower() for m in model.modules())
    residual: list[str] = []
    rules: set[str] = set()
    for name in norms:
        parent, _, leaf = name.rpartition(".")
        if not re.fullmatch(r"bn[123]", leaf) or not parent:
            continue
        block = model.get_submodule(parent)
        last = max((i for i in (1, 2, 3) if hasattr(block, f"bn{i}")), default=1)
        if last == 1:
            continue
        if last == 3:
            wanted, rule = {"bn1", "bn3"}, "bottleneck block: first and last norm"
        elif wide:
            wanted, rule = {"bn1"}, "wide residual block: first norm"
        else:
            wanted, rule = {"bn2"}, "residual block: second norm"
        if leaf in wanted:
            residual.append(name)
            rules.add(rule)
    if residual:
        return " + ".join(sorted(rules)), residual
    for pattern in _FEED_FORWARD:
        chosen = [n for n in norms if re.search(pattern, n)]
        if len(chosen) > 0:
            return "transformer: norm of each feed-forward block", chosen
    return "all norms (no known block)", list(norms)


def select(
    model: nn.Module, norms: Mapping[str, SigmaNorm], layers: LayerSelector
) -> tuple[str, list[str]]:
    """Names of the regularised norms for "auto", "all", a regex, a list of names or a callable.

    Raises:
        DiversityError: if nothing is selected.
    """
    if layers is None or layers == "auto":
        return paper_rule(model, norms)
    if isinstance(layers, str) and layers == "all":
        return "all norms", list(norms)
    check_selector(layers)
    chosen = [n for n, m in norms.items() if matches(layers, n, m)]
    unknown = (
        sorted(set(layers) - set(norms))
        if isinstance(layers, Sequence) and not isinstance(layers, str)
        else []
    )
    if not chosen or unknown:
        seen = ", ".join(list(norms)[:12])
        raise DiversityError(
            f"Diversity(layers={layers!r}) "
            + (f"names {unknown}, which are no converted norms" if unknown else "selects no norm")
            + f"; the {len(norms)} converted norms are {seen}{', …' if len(norms) > 12 else ''}"
        )
    return "given", chosen
