"""Networks of timm and torchvision: at least one of each family, as small as it can be made."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

from tests.matrix.entries import CLASSES, Entry, picture
from torch import nn

_ONCE = (1, 1, 1, 1)
_THIN = {"layers": _ONCE, "channels": (16, 16, 24, 32)}
_NARROW = {"depths": _ONCE, "dims": (8, 16, 24, 32)}
TOKENS = {"img_size": 32, "depth": 2, "embed_dim": 48, "num_heads": 3}
_WINDOWS = {
    "img_size": 32, "window_size": 4, "depths": (1, 1), "embed_dim": 24, "num_heads": (2, 2),
}  # fmt: skip

# Model (or module.Class of timm.models), size of its pictures, keywords that make it smaller.
_TIMM: tuple[tuple[str, int, dict[str, Any]], ...] = (
    ("resnet10t", 64, _THIN),
    ("resnet50", 64, _THIN),
    ("resnext50_32x4d", 64, {"layers": _ONCE, "channels": (64, 64, 64, 64), "cardinality": 4}),
    ("seresnet18", 64, _THIN),
    ("skresnet18", 64, _THIN),
    ("resnest14d", 64, _THIN),
    ("res2net50_14w_8s", 64, _THIN),
    ("resnetv2_18", 64, _THIN),
    ("regnetx_002", 64, {}),
    ("densenet121", 64, {"growth_rate": 8, "block_config": (2, 2, 2, 2)}),
    ("dpn48b", 64, {"k_sec": _ONCE}),
    ("dla46x_c", 64, {}),
    ("hrnet_w18_small", 32, {}),
    ("hgnetv2_b0", 64, {}),
    ("inception_v3", 75, {}),
    (
        "vgg.VGG",
        32,
        {"cfg": [8, "M", 16, "M", 64], "norm_layer": nn.BatchNorm2d, "mlp_ratio": 0.01},
    ),
    ("ese_vovnet19b_slim", 64, {}),
    ("cs3darknet_focus_s", 64, {}),
    ("efficientnet_b0", 32, {}),
    ("tf_efficientnet_lite0", 32, {}),
    ("mnasnet_small", 64, {}),
    ("mobilenetv2_035", 64, {}),
    ("mobilenetv3_small_050", 64, {}),
    ("mobilenetv4_conv_small_035", 64, {}),
    ("lcnet_050", 64, {}),
    ("tinynet_e", 64, {}),
    ("rexnet_100", 32, {"depth_mult": 0.3}),
    ("ghostnet_050", 64, {}),
    ("ghostnetv3_050", 64, {}),
    ("repghostnet_050", 64, {}),
    ("repvit_m0_9", 64, {"depth": _ONCE}),
    ("mobileone_s0", 64, {}),
    ("fastvit_t8", 64, {"layers": _ONCE}),
    ("starnet_s050", 64, {}),
    ("fasternet_t0", 64, {"depths": _ONCE}),
    ("swiftformer_xs", 64, {}),
    ("convnext_atto", 64, _NARROW),
    ("convnextv2_atto", 64, _NARROW),
    ("inception_next_atto", 64, {"depths": _ONCE}),
    ("edgenext_xx_small", 64, {}),
    ("mambaout_femto", 32, _NARROW),
    ("convmixer.ConvMixer", 32, {"dim": 16, "depth": 2, "patch_size": 4}),
    ("metaformer.MetaFormer", 64, _NARROW),
    ("vit_tiny_patch16_224", 32, TOKENS),
    ("vit_srelpos_small_patch16_224", 32, TOKENS),
    ("vit_tiny_r_s16_p8_224", 32, {"img_size": 32, "depth": 1}),
    ("deit_tiny_distilled_patch16_224", 32, TOKENS),
    ("deit3_small_patch16_224", 32, TOKENS),
    ("beit_base_patch16_224", 32, TOKENS),
    ("eva02_tiny_patch14_224", 28, {"img_size": 28, "depth": 2}),
    ("naflexvit_base_patch16_gap", 32, {"depth": 2, "embed_dim": 48, "num_heads": 3}),
    ("swin_tiny_patch4_window7_224", 32, _WINDOWS),
    ("swinv2_tiny_window8_256", 32, _WINDOWS),
    ("cait_xxs24_224", 32, {"img_size": 32, "depth": 2, "embed_dim": 48}),
    ("convit_tiny", 32, {"img_size": 32, "depth": 2}),
    ("xcit_nano_12_p16_224", 32, {"img_size": 32, "depth": 1}),
    ("crossvit_9_240", 32, {"embed_dim": (32, 32), "depth": ((1, 1, 0),)}),
    ("coat_lite_tiny", 32, {"img_size": 32, "serial_depths": _ONCE}),
    (
        "mlp_mixer.MlpMixer",
        32,
        {"img_size": 32, "patch_size": 8, "num_blocks": 2, "embed_dim": 32},
    ),
    ("pit_ti_224", 64, {"img_size": 64}),
    ("pit_ti_distilled_224", 64, {"img_size": 64}),
    ("levit_128s", 64, {"img_size": 64, "depth": (1, 1, 1)}),
    ("efficientvit_m0", 64, {"img_size": 64}),
    ("efficientvit_b0", 64, {}),
    ("efficientformerv2_s0", 64, {"img_size": 64}),
    ("mobilevit_xxs", 64, {}),
    ("mobilevitv2_050", 64, {}),
    ("pvt_v2_b0", 64, {"depths": _ONCE}),
    ("visformer_tiny", 64, {"img_size": 64, "depth": (1, 1, 1)}),
    ("tnt_s_legacy_patch16_224", 32, {"img_size": 32, "depth": 1}),
    ("nf_regnet_b0", 64, {}),
    ("resnetv2_50d_evos", 64, {"layers": _ONCE}),
)
_TIMM_TESTS = (
    "byobnet", "coatnet", "convnext", "convnext2", "convnext3", "efficientnet",
    "efficientnet_evos", "efficientnet_gn", "efficientnet_ln", "mambaout", "maxvit", "nfnet",
    "resnet", "vit", "vit2", "vit3", "vit4", "vit_relpos",
)  # fmt: skip
# They are built for one size of pictures.
_SIZED = {"coatnet", "maxvit", "vit", "vit2", "vit3", "vit4", "vit_relpos"}
# No norm of the batch or the features that has a scale of its own.
_REFUSED = {
    "test_nfnet": "NoNormError",
    "nf_regnet_b0": "NoNormError",
    "test_efficientnet_evos": "UnsupportedNormError",
    "resnetv2_50d_evos": "UnsupportedNormError",
}
_KEPT = {"convnextv2_atto": ("GlobalResponseNorm",)}
_TIMM_CORE = {"test_resnet", "test_vit", "deit_tiny_distilled_patch16_224"}


def timm_model(name: str, **keywords: Any) -> nn.Module:
    import timm

    module, dot, cls = name.partition(".")
    if dot:
        make = getattr(import_module(f"timm.models.{module}"), cls)
        network: nn.Module = make(num_classes=CLASSES, **keywords)
        return network
    return timm.create_model(name, pretrained=False, num_classes=CLASSES, **keywords)


def _big_transfer() -> nn.Module:
    """BiT: GroupNorm before the activation, convolutions with standardised weights."""
    from timm.layers import GroupNormAct, StdConv2d

    return timm_model(
        "resnetv2.ResNetV2",
        layers=_ONCE,
        channels=(32, 32, 32, 64),
        conv_layer=StdConv2d,
        norm_layer=partial(GroupNormAct, num_groups=8),
    )


def timm_networks() -> list[Entry]:
    tests = [(f"test_{n}", 64, {"img_size": 64} if n in _SIZED else {}) for n in _TIMM_TESTS]
    bit = Entry("resnetv2.ResNetV2 (BiT)", "timm", _big_transfer, picture(64))
    rows = [
        Entry(
            name, "timm", partial(timm_model, name, **keywords), picture(size),
            refused=_REFUSED.get(name, ""), kept=_KEPT.get(name, ()), core=name in _TIMM_CORE,
        )
        for name, size, keywords in (*tests, *_TIMM)
    ]  # fmt: skip
    return [*rows, bit]


def _torchvision(name: str, **keywords: Any) -> nn.Module:
    from torchvision import models

    return models.get_model(name, weights=None, num_classes=CLASSES, **keywords)


def _torchvision_swin(second: bool) -> nn.Module:
    from torchvision.models import swin_transformer as swin

    two = {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2}
    return swin.SwinTransformer(
        [4, 4], embed_dim=24, depths=[1, 1], num_heads=[2, 2], window_size=[4, 4],
        num_classes=CLASSES, **(two if second else {}),
    )  # fmt: skip


def _torchvision_convnext() -> nn.Module:
    from torchvision.models.convnext import CNBlockConfig, ConvNeXt

    widths = [CNBlockConfig(8, 16, 1), CNBlockConfig(16, 32, 1), CNBlockConfig(32, None, 1)]
    return ConvNeXt(widths, num_classes=CLASSES)


def _torchvision_vit() -> nn.Module:
    from torchvision.models import VisionTransformer

    return VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=2, hidden_dim=32, mlp_dim=64,
        num_classes=CLASSES,
    )  # fmt: skip


def _frozen_batch_norm() -> nn.Module:
    from torchvision.models.resnet import BasicBlock, ResNet
    from torchvision.ops import FrozenBatchNorm2d

    return ResNet(BasicBlock, [1, 1, 1, 1], CLASSES, norm_layer=FrozenBatchNorm2d)


def torchvision_networks() -> list[Entry]:
    backbone = {"weights_backbone": None}
    googlenet = {"aux_logits": True, "init_weights": False}
    wide = "deeplabv3_mobilenet_v3_large"
    make = partial(Entry, library="torchvision", example=picture(32))
    return [
        make("resnet18", build=partial(_torchvision, "resnet18")),
        make("resnet10 (FrozenBatchNorm2d)", build=_frozen_batch_norm),
        make("mobilenet_v3_small", build=partial(_torchvision, "mobilenet_v3_small")),
        make("shufflenet_v2_x0_5", build=partial(_torchvision, "shufflenet_v2_x0_5")),
        make("efficientnet_b0", build=partial(_torchvision, "efficientnet_b0")),
        make("mnasnet0_5", build=partial(_torchvision, "mnasnet0_5")),
        make("convnext", build=_torchvision_convnext, core=True),
        make("swin", build=partial(_torchvision_swin, False)),
        make("swin_v2", build=partial(_torchvision_swin, True)),
        make("vit", build=_torchvision_vit),
        make(
            "googlenet",
            build=partial(_torchvision, "googlenet", **googlenet),
            example=picture(64),
        ),
        make(
            "lraspp_mobilenet_v3_large",
            build=partial(_torchvision, "lraspp_mobilenet_v3_large", **backbone),
            example=picture(64),
            options={"head_name": ["classifier.low_classifier", "classifier.high_classifier"]},
        ),
        make(
            wide,
            build=partial(_torchvision, wide, **backbone),
            example=picture(64),
            options={"head_name": "classifier.4"},
        ),
    ]
