"""Small networks for tests, and what tests do to networks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

import sigmanens as sn


def randomise(network: nn.Module, seed: int = 1) -> nn.Module:
    """Give every norm scales of both signs, shifts and statistics as training leaves them."""
    generator = torch.Generator().manual_seed(seed)

    def draw(like: Tensor) -> Tensor:
        return torch.randn(like.shape, generator=generator).to(like.dtype)

    with torch.no_grad():
        for module in network.modules():
            name = type(module).__name__
            if "Norm" not in name:
                continue
            for key in ("weight", "bias"):
                value = getattr(module, key, None)
                if value is not None:
                    value.copy_(draw(value))
            if isinstance(module, _NormBase) and module.running_mean is not None:
                module.running_mean.copy_(draw(module.running_mean))
                module.running_var.copy_(draw(module.running_var).exp())
                module.num_batches_tracked.fill_(7)
    return network


def dense(batch_norm: bool = True, width: int = 6, classes: int = 3) -> nn.Sequential:
    """(B, 4) → (B, classes), two norms: '1' and '4'."""

    def norm() -> nn.Module:
        return nn.BatchNorm1d(width) if batch_norm else nn.LayerNorm(width)

    return nn.Sequential(
        nn.Linear(4, width), norm(), nn.ReLU(), nn.Linear(width, width), norm(), nn.ReLU(),
        nn.Linear(width, classes),
    )  # fmt: skip


class Pictures(nn.Module):
    """(B, 1, 8, 8) → (B, classes), with two batch norms and a head called ``fc``."""

    def __init__(self, classes: int = 10, width: int = 8, dropout: float = 0.0) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride=2, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.dropout = nn.Dropout(dropout)
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.bn1(self.conv1(x)))
        h = torch.relu(self.bn2(self.conv2(h)))
        return self.fc(self.dropout(h.mean((2, 3))))


class Words(nn.Module):
    """ids (B, T), mask (B, T) or (1, 1, T, T) → (B, classes): attention, layer norms, a head."""

    def __init__(self, classes: int = 3, width: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, width)
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.norm2 = nn.LayerNorm(width)
        self.classifier = nn.Linear(width, classes)

    def forward(self, ids: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.norm1(self.embedding(ids))
        allowed = torch.ones(1, 1, 1, ids.shape[1]) if mask is None else mask.float()
        if allowed.dim() == 2:
            allowed = allowed[:, None, None, :]
        scores = h @ h.transpose(1, 2) + (1 - allowed.squeeze(1)) * -9.0
        h = self.norm2(h + torch.softmax(scores, -1) @ h)
        return self.classifier(h.mean(1))


class Recurrent(nn.Module):
    """A sequence, then (hidden, cell) states (1, B, width) → (B, classes); batch or time first."""

    def __init__(self, batch_first: bool, classes: int = 3, width: int = 5) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.lstm = nn.LSTM(4, width, batch_first=batch_first)
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)
        self.time = 1 if batch_first else 0

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor] | None = None) -> Tensor:
        h, _ = self.lstm(self.norm(x), state)
        return self.head(self.last(h.select(self.time, -1)))


@dataclass
class Outcome:
    """A result as a dataclass."""

    logits: Tensor
    features: Tensor
    note: str = "kept"


class Wrapped(nn.Module):
    """Any network, its tensors taken from a nested input and its result put into a container."""

    def __init__(self, network: nn.Module, container: str) -> None:
        super().__init__()
        self.network = network
        self.container = container

    def forward(self, x: object) -> object:
        while not isinstance(x, Tensor):
            x = next(iter(x.values())) if isinstance(x, dict) else getattr(x, "logits", None)
        logits = self.network(x)
        return {
            "tensor": lambda: logits,
            "tuple": lambda: (logits, logits * 2),
            "dict": lambda: {"logits": logits, "more": {"twice": [logits * 2]}},
            "dataclass": lambda: Outcome(logits, logits * 2),
        }[self.container]()


class Block(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.inner = Block(depth - 1) if depth else nn.LayerNorm(4)
        self.norm = nn.RMSNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.inner(x))


class Nested(nn.Module):
    """Norms in a Sequential, a ModuleList, a ModuleDict and deep custom modules."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4), nn.ReLU()))
        self.blocks = nn.ModuleList([Block(3), nn.ModuleList([nn.GroupNorm(2, 4), nn.Identity()])])
        self.paths = nn.ModuleDict({"a": nn.BatchNorm1d(4), "b": nn.ModuleDict({"c": Block(1)})})
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](self.stem(x))
        x = self.blocks[1][0](x)
        return self.head(self.paths["b"]["c"](self.paths["a"](x)))


class Tied(nn.Module):
    """One norm at two places, under three names."""

    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(4) if batch_norm else nn.LayerNorm(4)
        self.again = self.first
        self.layers = nn.ModuleList([self.first])
        self.other = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.other(self.layers[0](torch.relu(self.again(x)) - 0.2)))


def encoder(norm_first: bool = False, layers: int = 2) -> nn.Module:
    layer = nn.TransformerEncoderLayer(
        8, 2, 16, dropout=0.0, batch_first=True, norm_first=norm_first
    )
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=not norm_first)


class Encoder(nn.Module):
    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.encoder = encoder(norm_first)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        return self.head(self.encoder(x, src_key_padding_mask=padding)[:, 0])


def apart(ens: sn.SigmaEnsemble, seed: int = 0) -> sn.SigmaEnsemble:
    """Give the members scales that differ in function, as training does."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in ens.sigma_norms().values():
            layer.logit.copy_(torch.randn(layer.logit.shape, generator=generator))
    return ens


def snapshot(network: nn.Module) -> dict[str, Any]:
    return {
        "text": str(network),
        "state": {k: v.clone() for k, v in network.state_dict().items()},
        "modules": [(n, id(m), m.training) for n, m in network.named_modules()],
        "parameters": [(n, id(p), p.requires_grad) for n, p in network.named_parameters()],
    }


def unchanged(network: nn.Module, before: dict[str, Any]) -> bool:
    now = snapshot(network)
    states = now.pop("state"), before.pop("state")
    same = states[0].keys() == states[1].keys() and all(
        torch.equal(v, states[1][k]) for k, v in states[0].items()
    )
    before["state"] = states[1]
    return same and now == {k: v for k, v in before.items() if k != "state"}
