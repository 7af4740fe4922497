"""The networks of the matrix: random weights, no download, the smallest sizes that are valid."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from tests.matrix.entries import CLASSES, Entry, noise, picture, text
from tests.matrix.language import TINY_TEXT, tiny_transformer, transformers_networks
from tests.matrix.vision import TOKENS, timm_model, timm_networks, torchvision_networks
from tests.networks import Encoder, Recurrent, Tied, dense
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

__all__ = ["Entry", "networks"]


def _conv(
    conv: type[nn.Module], norm: Callable[[int], nn.Module], pool: type[nn.Module]
) -> nn.Module:
    return nn.Sequential(
        conv(2, 6, 3, padding=1), norm(6), nn.ReLU(), conv(6, 8, 3, padding=1), norm(8), nn.SiLU(),
        pool(1), nn.Flatten(), nn.Linear(8, CLASSES),
    )  # fmt: skip


def _normed(by: Callable[[nn.Module], nn.Module]) -> nn.Module:
    return nn.Sequential(
        by(nn.Linear(4, 6)), nn.LayerNorm(6), nn.Tanh(), by(nn.Linear(6, 6)), nn.LayerNorm(6),
        nn.Tanh(), nn.Linear(6, CLASSES),
    )  # fmt: skip


class _Absolute(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w.abs() + 0.1


def _parametrised_norm() -> nn.Module:
    network = dense(batch_norm=False)
    parametrize.register_parametrization(network[1], "weight", _Absolute())
    return network


def _lora(base: Callable[[], nn.Module], kind: str | None, targets: list[str]) -> nn.Module:
    import peft

    config = peft.LoraConfig(r=2, target_modules=targets, task_type=kind, init_lora_weights=False)
    network: nn.Module = peft.get_peft_model(base(), config)
    return network


def torch_networks() -> list[Entry]:
    flat = noise(4)
    make = partial(Entry, library="torch", example=flat)
    bert = partial(tiny_transformer, "BertForSequenceClassification", "BertConfig", TINY_TEXT)
    vit = partial(timm_model, "vit_tiny_patch16_224", **TOKENS)
    instance = partial(nn.InstanceNorm2d, affine=True, track_running_stats=True)
    pictures = noise(2, 9, 9)
    return [
        make("MLP, BatchNorm1d", build=dense, core=True),
        make("MLP, SyncBatchNorm", build=lambda: nn.SyncBatchNorm.convert_sync_batchnorm(dense())),
        make("MLP, tied LayerNorm", build=Tied),
        make("MLP, weight_norm", build=partial(_normed, parametrizations.weight_norm)),
        make("MLP, spectral_norm", build=partial(_normed, parametrizations.spectral_norm)),
        make("MLP, parametrised LayerNorm", build=_parametrised_norm,
             refused="UnsupportedNormError"),
        make("TransformerEncoder, post-norm", build=partial(Encoder, False), example=noise(7, 8),
             core=True),
        make("TransformerEncoder, pre-norm", build=partial(Encoder, True), example=noise(7, 8)),
        make("LSTM, LayerNorm", build=partial(Recurrent, True), example=noise(7, 4), core=True),
        make("LSTM, LayerNorm, time first", build=partial(Recurrent, False),
             example=noise(7, 4, batch_dim=1), options={"batch_dims": {"x": 1}}),
        make("Conv1d, BatchNorm1d", example=noise(2, 9),
             build=partial(_conv, nn.Conv1d, nn.BatchNorm1d, nn.AdaptiveAvgPool1d)),
        make("Conv2d, InstanceNorm2d", example=pictures,
             build=partial(_conv, nn.Conv2d, instance, nn.AdaptiveAvgPool2d)),
        make("Conv2d, GroupNorm", example=pictures,
             build=partial(_conv, nn.Conv2d, partial(nn.GroupNorm, 2), nn.AdaptiveAvgPool2d)),
        make("Conv3d, BatchNorm3d", example=noise(2, 5, 5, 5), core=True,
             build=partial(_conv, nn.Conv3d, nn.BatchNorm3d, nn.AdaptiveAvgPool3d)),
        Entry("LoRA on BERT", "peft", partial(_lora, bert, "SEQ_CLS", ["query", "value"]), text()),
        Entry("LoRA on ViT", "peft", partial(_lora, vit, None, ["qkv"]), picture(32)),
    ]  # fmt: skip


def networks() -> list[Entry]:
    """All rows, grouped by library."""
    return [
        *torch_networks(),
        *torchvision_networks(),
        *timm_networks(),
        *transformers_networks(),
    ]
