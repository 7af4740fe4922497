"""An ensemble trained on real digits, and held-out digits for other libraries to measure it on."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import sigmanens as sn

MEMBERS = 3


@dataclass(frozen=True)
class Fitted:
    """An ensemble in evaluation mode, and noisy digits (B, 64) with labels (B,) it has not seen."""

    ensemble: sn.SigmaEnsemble
    x: Tensor
    y: Tensor


@pytest.fixture(scope="session")
def fitted() -> Fitted:
    generator = torch.Generator().manual_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.from_numpy(pixels).float() / 16, torch.from_numpy(labels).long()
    x = x + 0.6 * torch.randn(x.shape, generator=generator)  # hard enough to be wrong at times
    order = torch.randperm(len(x), generator=generator)
    train, test = order[:600], order[600:1111]
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 10))
    ensemble = sn.convert(base, MEMBERS, generator=generator)
    loss_fn = sn.EnsembleLoss(diversity=sn.Diversity(tau=0.5, weight=1e-3))
    optimizer = torch.optim.SGD(sn.param_groups(ensemble, lr=0.05), momentum=0.9)
    for _ in range(60):
        optimizer.zero_grad()
        loss_fn(ensemble(x[train]), y[train], ensemble).backward()
        optimizer.step()
    return Fitted(ensemble.eval(), x[test], y[test])
