"""Presets of the paper's size: what they build, and that a step of them runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import yaml

pytest.importorskip("lightning")

from sigmanens.lab.bench.config import PRESETS, BenchConfig, preset_path
from sigmanens.lab.bench.material import Material
from sigmanens.lab.bench.methods import BUILDERS
from sigmanens.lab.bench.trials import Trial
from sigmanens.lab.bench.work import Workshop
from sigmanens.lab.digits import Labelled
from sigmanens.lab.rows import EvaluationData
from sigmanens.lab.training import parameters

COUNTS = {
    "paper-cifar10-resnet18": (10, 11.20e6, 11.20e6),
    "paper-cifar100-resnet18": (100, 11.39e6, 11.39e6),
    "paper-cifar100-resnet50": (100, 24.37e6, 24.39e6),
    "paper-cifar100-wrn28-10": (100, 36.757e6, 36.762e6),
}
"""Classes, and the range that the parameters of σN-Ens have to lie in (arXiv 2607.23860)."""


def preset(name: str) -> BenchConfig:
    return BenchConfig.from_dict(yaml.safe_load(preset_path(name).read_text(encoding="utf-8")))


def synthetic(config: BenchConfig, classes: int, size: int) -> Material:
    """Two pictures of the right shape, with labels."""
    images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(0))
    pair = Labelled(images, torch.tensor([0, classes - 1]))
    return Material(pair, EvaluationData(pair, pair), classes)


@pytest.mark.parametrize("name", COUNTS)
def test_parameters_are_the_paper_s(name: str) -> None:
    config = preset(name)
    classes, low, high = COUNTS[name]
    trial = Trial(0, "sigmanens", 4, config.taus[0], config.diversity.weight)
    network = BUILDERS["sigmanens"](Workshop(config, trial, synthetic(config, classes, 32)))
    assert low - 5e3 <= parameters(network) <= high + 5e3


@pytest.mark.parametrize("name", ["paper-cifar10-resnet18", "paper-cifar100-resnet18"])
def test_a_step_runs(name: str) -> None:
    """One step of σN-Ens on pictures of the right shape, by the preset's own recipe."""
    config = preset(name)
    config = replace(config, recipe=replace(config.recipe, epochs=1, batch_size=2, milestones=[1]))
    trial = Trial(0, "sigmanens", 4, config.taus[0], config.diversity.weight)
    shop = Workshop(config, trial, synthetic(config, COUNTS[name][0], 32))
    network = BUILDERS["sigmanens"](shop)
    done = shop.fit(network, diversity=shop.diversity())
    assert len(done.history) == 1
    assert done.history[0]["penalty"] < 0  # λ Σ log softmax is negative
    assert done.history[0]["cosine"] < 0.95


def test_a_vision_transformer_starts() -> None:
    """The ViT preset's methods on a small network of the same kind, with random weights."""
    pytest.importorskip("timm")
    config = preset("paper-cifar100-vit-b16")
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
    config = replace(
        config,
        model=replace(config.model, name="timm/vit_tiny_patch16_224", options=options),
        recipe=replace(config.recipe, epochs=1, batch_size=2, flip_crop=2),
    )
    assert not config.pretrained
    for method in ("sigmanens", "sigmanens_lambda0"):
        tau = config.taus[0] if method == "sigmanens" else None
        trial = Trial(0, method, 4, tau, None if tau is None else config.diversity.weight)
        shop = Workshop(config, trial, synthetic(config, 100, 32))
        network = BUILDERS[method](shop)
        shop.fit(network, diversity=shop.diversity())
        assert network(shop.material.train.images).shape == (4, 2, 100)


def test_every_preset_of_the_paper_has_its_settings() -> None:
    found = {name: preset(name) for name in PRESETS if name.startswith("paper-")}
    assert len(found) == 8
    for name, config in found.items():
        assert config.ensemble.members == (3 if "bert" in name else 4)
        from_scratch = "resnet" in name or "wrn" in name
        tau = 0.1 if from_scratch else 0.5
        assert (config.taus, config.diversity.weight) == ([tau], 1e-2 if from_scratch else 1e-3)
