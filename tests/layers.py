"""One plain norm of each kind, and σNorms over them whose members differ in everything."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from sigmanens.conversion.rules import register_norm, rule_for
from sigmanens.norms import Affine, RunningStatistics, SigmaNorm
from sigmanens.passes.context import MemberAxis


class Centred(nn.Module):
    """A norm of a user's own: centres the last dimension."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(-1, keepdim=True)) * self.weight + self.bias


class CentredFirst(Centred):
    """The same over dimension 1."""

    def forward(self, x: Tensor) -> Tensor:
        y = (x - x.mean(1, keepdim=True)).movedim(1, -1)
        return (y * self.weight + self.bias).movedim(-1, 1)


register_norm(Centred)
register_norm(CentredFirst, channels="first")


def torchvision_layer_norm(width: int) -> nn.Module:
    return pytest.importorskip("torchvision.models.convnext").LayerNorm2d(width)


def timm_layer_norm(width: int) -> nn.Module:
    return pytest.importorskip("timm.layers").LayerNorm2d(width)


def timm_norm(kind: str, **kwargs: object) -> nn.Module:
    return getattr(pytest.importorskip("timm.layers"), kind)(4, act_layer=nn.SiLU, **kwargs)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "bn1d": (lambda: nn.BatchNorm1d(4), (4,)),
    "bn1d_length": (lambda: nn.BatchNorm1d(4), (4, 3)),
    "bn2d": (lambda: nn.BatchNorm2d(4), (4, 3, 2)),
    "bn3d": (lambda: nn.BatchNorm3d(4), (4, 2, 3, 2)),
    "bn_cumulative": (lambda: nn.BatchNorm2d(4, momentum=None), (4, 3, 2)),
    "bn_momentum": (lambda: nn.BatchNorm1d(4, momentum=0.7, eps=0.1), (4,)),
    "bn_untracked": (lambda: nn.BatchNorm1d(4, track_running_stats=False), (4, 3)),
    "bn_plain": (lambda: nn.BatchNorm2d(4, affine=False), (4, 3, 2)),
    "bn_bare": (lambda: nn.BatchNorm2d(4, affine=False, track_running_stats=False), (4, 3, 2)),
    "ln": (lambda: nn.LayerNorm(4), (4,)),
    "ln_tokens": (lambda: nn.LayerNorm(4), (5, 4)),
    "ln_shape": (lambda: nn.LayerNorm((3, 4), eps=0.1), (2, 3, 4)),
    "ln_all": (lambda: nn.LayerNorm((2, 3, 4)), (2, 3, 4)),
    "ln_no_bias": (lambda: nn.LayerNorm(4, bias=False), (5, 4)),
    "ln_plain": (lambda: nn.LayerNorm(4, elementwise_affine=False), (5, 4)),
    "rms": (lambda: nn.RMSNorm(4), (5, 4)),
    "rms_shape": (lambda: nn.RMSNorm((3, 4), eps=0.1), (2, 3, 4)),
    "rms_plain": (lambda: nn.RMSNorm(4, elementwise_affine=False), (4,)),
    "gn": (lambda: nn.GroupNorm(2, 4), (4, 3, 2)),
    "gn_flat": (lambda: nn.GroupNorm(2, 4, eps=0.1), (4,)),
    "gn_plain": (lambda: nn.GroupNorm(2, 4, affine=False), (4, 3)),
    "in1d": (lambda: nn.InstanceNorm1d(4, affine=True), (4, 5)),
    "in2d": (lambda: nn.InstanceNorm2d(4), (4, 3, 2)),
    "in2d_tracked": (
        lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
        (4, 3, 2),
    ),
    "in2d_cumulative": (
        lambda: nn.InstanceNorm2d(4, momentum=None, track_running_stats=True),
        (4, 3, 2),
    ),
    "in3d": (lambda: nn.InstanceNorm3d(4, track_running_stats=True), (4, 2, 3, 2)),
    "channels_first_torchvision": (lambda: torchvision_layer_norm(4), (4, 3, 2)),
    "channels_first_timm": (lambda: timm_layer_norm(4), (4, 3, 2)),
    "bn_act": (lambda: timm_norm("BatchNormAct2d"), (4, 3, 2)),
    "gn_act": (lambda: timm_norm("GroupNormAct", num_groups=2), (4, 3, 2)),
    "wrapped": (lambda: Centred(4), (5, 4)),
    "wrapped_first": (lambda: CentredFirst(4), (4, 3)),
}


def folded_layer(
    plain: nn.Module,
    members: int,
    scale: str = "sigmoid",
    shift: str = "none",
    carried: bool = True,
) -> SigmaNorm:
    """A σNorm in float64 with scales, shifts and statistics that differ between members."""
    rule = rule_for(plain)
    assert not isinstance(rule, str), rule
    full = (members, *rule.shape(plain))

    def draw(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, dtype=torch.float64)

    affine = Affine(
        draw(full),
        draw(full) if carried else None,
        draw(full) if carried else None,
        {"none": None, "shared": draw(full[1:]), "member": draw(full)}[shift],
        scale,
    )
    layer = rule.build(plain, MemberAxis(members), affine)
    if isinstance(layer, RunningStatistics) and layer.running_mean is not None:
        layer.running_mean.normal_()
        layer.running_var.normal_().exp_()
        layer.num_batches_tracked.copy_(torch.arange(members))
    return layer.double()
