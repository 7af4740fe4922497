"""Slow, obvious rivals: each member as a plain network with its own explicit weights."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

Network = nn.Module


def batch_ensemble_member(net: Any, base: Network, member: int) -> Network:
    """W_m = s_m W r_m and b_m in a copy of the base; norms as they are in the ensemble."""
    plain = copy.deepcopy(base)
    for name, layer in plain.named_modules():
        theirs = net.network.get_submodule(name)
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            weight = (theirs.conv if isinstance(layer, nn.Conv2d) else theirs.linear).weight
            r, s = theirs.r_group[member], theirs.s_group[member]
            rest = (1,) * (weight.dim() - 2)
            groups = getattr(layer, "groups", 1)
            # A channel of the output sees the inputs of its own group only.
            r = r.view(groups, 1, -1, *rest).expand(-1, len(weight) // groups, -1, *rest)
            layer.weight.data = s.view(-1, 1, *rest) * weight * r.flatten(0, 1)
            if layer.bias is not None:
                layer.bias.data = theirs.bias[member].clone()
        elif isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.load_state_dict(theirs.state_dict())
    return plain


def packed_member(net: Any, narrow: Network, member: int) -> Network:
    """The member's slices of all weights in a network of α / M times the width (γ = 1)."""
    members = net.num_members
    plain = copy.deepcopy(narrow)
    theirs = {k.replace("conv.weight", "weight"): v for k, v in net.network.state_dict().items()}
    state = plain.state_dict()
    for name, value in state.items():
        source = theirs[name.replace("conv.weight", "weight")]
        if source.dim() == 3:  # PackedLinear: (groups, out, in)
            part = source[member]
        elif source.dim() == 0:
            part = source
        else:
            part = source.chunk(members)[member]
        assert part.shape == value.shape, name
        state[name] = part
    plain.load_state_dict(state)
    return plain


def masked_member(net: Any, base: Network, member: int) -> Network:
    """The masks folded into the weights of a copy of the base."""
    plain = copy.deepcopy(base)
    for name, layer in plain.named_modules():
        theirs = net.network.get_submodule(name)
        if hasattr(theirs, "mask"):
            inner = theirs.conv if isinstance(layer, nn.Conv2d) else theirs.linear
            mask = theirs.mask.masks[member]
            layer.weight.data = inner.weight * mask.view(1, -1, *(1,) * (inner.weight.dim() - 2))
    return plain


def lora_member(net: Any, base: Network, member: int, head: str) -> Network:
    """W + B A of one member in a copy of the base, a fused projection put together again."""
    plain = copy.deepcopy(base)

    def merged(layer: Any) -> Tensor:
        a, b = layer.lora_A[f"member{member}"], layer.lora_B[f"member{member}"]
        return layer.base_layer.weight + b.weight @ a.weight

    for name, layer in plain.named_modules():
        if name == head:
            continue
        theirs = net.network.get_submodule(name) if name else net.network
        if hasattr(theirs, "lora_A"):
            layer.weight.data = merged(theirs)
        elif name.endswith("qkv"):
            layer.weight.data = torch.cat([merged(part) for part in theirs.children()])
    parent, _, leaf = head.rpartition(".")
    setattr(plain.get_submodule(parent), leaf, net.network.get_submodule(head).heads[member])
    return plain


def last_layer_laplace(
    features: Tensor, weight: Tensor, bias: Tensor, x: Tensor, delta: float
) -> Tensor:
    """Probit prediction of a Gaussian over (W, b), by the full Gauss-Newton matrix in a loop.

    Args:
        features: of the training data (N, F). weight: (C, F). bias: (C,). x: features (B, F).
        delta: prior precision.

    Returns:
        probabilities (B, C).
    """
    classes, width = weight.shape

    def jacobian(phi: Tensor) -> Tensor:
        """Of the logits with respect to (W, b): (C, C·F + C)."""
        return torch.cat([torch.kron(torch.eye(classes), phi[None]), torch.eye(classes)], 1)

    precision = delta * torch.eye(classes * width + classes)
    for phi in features:
        p = torch.softmax(weight @ phi + bias, 0)
        j = jacobian(phi)
        precision += j.T @ (p.diag() - p[:, None] * p[None]) @ j
    covariance = torch.linalg.inv(precision)
    rows = []
    for phi in x:
        j = jacobian(phi)
        variance = (j @ covariance @ j.T).diagonal()
        logits = (weight @ phi + bias) / torch.sqrt(1 + torch.pi / 8 * variance)
        rows.append(torch.softmax(logits, 0))
    return torch.stack(rows)
