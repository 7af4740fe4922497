"""What the tests of all rivals share: data, a small network, and every rival of it by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from sigmanens import baselines
from sigmanens.lab.backbones import build_backbone

MEMBERS = 4
X = torch.randn(6, 1, 8, 8, generator=torch.Generator().manual_seed(0))
Y = torch.tensor([0, 1, 2, 3, 4, 5])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def digits(width: int = 16, seed: int = 1) -> nn.Module:
    """Convolutions, batch norms, a shortcut that pads channels, and a head called ``linear``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_backbone("digits", width=width)


def vit(seed: int = 1) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_backbone(
            "timm/vit_tiny_patch16_224", img_size=8, patch_size=4, in_chans=1, embed_dim=24,
            depth=2, num_heads=2, num_classes=10,
        )  # fmt: skip


def drawn(build: Callable[..., nn.Module], **options: Any) -> Callable[[nn.Module], nn.Module]:
    return lambda base: build(base, MEMBERS, generator=generator(), **options)


RIVALS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "heads_only": drawn(baselines.heads_only),
    "heads_only_copied": drawn(baselines.heads_only, head="copy"),
    "fixed_masks": drawn(baselines.fixed_masks, keep=2),
    "mc_dropout": partial(baselines.mc_dropout, samples=MEMBERS, p=0.2),
    "norm_tuning": baselines.norm_tuning,
    "film": drawn(baselines.film_ensemble),
    "batchensemble": drawn(baselines.batchensemble),
    "packed": drawn(baselines.packed),
    "masksembles": drawn(baselines.masksembles),
    "mimo": drawn(baselines.mimo),
    "mimo_apart": drawn(baselines.mimo, rho=0.0, repetitions=2),
    "lora_ensemble": drawn(baselines.lora_ensemble),
}


def base_of(name: str) -> nn.Module:
    return vit() if name == "lora_ensemble" else digits()


def trained_statistics(network: nn.Module, x: Tensor = X) -> nn.Module:
    """Give every norm running statistics of its own, as a training leaves them."""
    network.train()
    with torch.no_grad():
        for _ in range(3):
            network(x)
    return network.eval()


def count(network: nn.Module, trained: bool = False) -> int:
    return sum(p.numel() for p in network.parameters() if p.requires_grad or not trained)
