"""What a person reads when a network cannot be converted, whole and as it is printed."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import sigmanens as sn
from sigmanens.errors import NoNormError, UnsupportedNormError


class StrangeNorm(nn.Module):
    """Stands for a norm of no known class, with a scale but no weight."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


def refusal(model: nn.Module, **options: object) -> str:
    with pytest.raises(UnsupportedNormError) as caught:
        sn.convert(model, 2, **options)
    return str(caught.value)


@pytest.mark.parametrize("name", ["test_nfnet", "nf_regnet_b0"])
def test_a_network_that_standardises_weights_is_told_so(name: str) -> None:
    model = pytest.importorskip("timm").create_model(name, num_classes=3)
    with pytest.raises(NoNormError) as caught:
        sn.convert(model, 2)
    count = sum("StdConv" in type(m).__name__ for m in model.modules())
    assert count > 5
    kinds = {type(m).__name__ for m in model.modules() if "StdConv" in type(m).__name__}
    assert str(caught.value) == (
        "this NormFreeNet has no normalisation layers: it standardises the weights of its "
        f"convolutions instead ({count} × {', '.join(sorted(kinds))}). σNorm scales normalised "
        "activations per member. Take a network with BatchNorm, LayerNorm, RMSNorm, GroupNorm or "
        "InstanceNorm layers"
    )


def test_a_reason_is_given_once_with_the_norms_it_holds_for() -> None:
    model = pytest.importorskip("timm").create_model("test_efficientnet_evos", num_classes=3)
    assert refusal(model) == (
        "13 of 13 norms of this EfficientNet cannot be converted:\n"
        "  bn1, blocks.0.0.bn1, blocks.1.0.bn1, blocks.1.0.bn2 and 9 more (13 × EvoNorm2dS0): an "
        "EvoNorm is normalisation and activation in one formula, so that its weight scales no "
        "normalised value and σNorm has no counterpart. Build the network with another norm "
        "layer\n"
        "This EfficientNet has no other norm to convert"
    )


def test_each_class_and_reason_has_its_own_line() -> None:
    tied = nn.LayerNorm(4)
    parametrize.register_parametrization(tied, "weight", nn.Identity())
    model = nn.Sequential(
        nn.Linear(4, 4), StrangeNorm(), tied, StrangeNorm(), nn.LayerNorm(4), nn.Linear(4, 2)
    )
    kind = f"{StrangeNorm.__module__}.StrangeNorm"
    assert refusal(model).splitlines() == [
        "3 of 4 norms of this Sequential cannot be converted:",
        f"  1, 3 (2 × StrangeNorm): no rule covers {kind}, and it does not compute weight ⊙ "
        "norm(x) + bias: it has no 'weight' of one value per channel. Register a builder for it "
        "with sigmanens.conversion.rules.register_norm",
        "  2 (ParametrizedLayerNorm): its parameters are parametrised: make them plain first, "
        "with torch.nn.utils.parametrize.remove_parametrizations",
        "To keep them as they are, the same for all members, choose other norms with layers=…",
    ]


def test_the_way_out_is_offered_where_another_norm_is_there_and_works() -> None:
    model = nn.Sequential(nn.Linear(4, 4), StrangeNorm(), nn.LayerNorm(4), nn.Linear(4, 2))
    assert refusal(model, layers="1").endswith(
        "\nTo keep it as it is, the same for all members, choose other norms with layers=…"
    )
    assert sn.convert(model, 2, layers="2").report.converted == ["2"]


def test_a_forward_that_accelerate_replaced_is_named_with_the_cure() -> None:
    hooks = pytest.importorskip("accelerate.hooks")
    norm = nn.LayerNorm(4)
    hooks.add_hook_to_module(norm, hooks.ModelHook())
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.Linear(4, 2))
    assert "accelerate.hooks.remove_hook_from_submodules" in refusal(model)
    hooks.remove_hook_from_submodules(model)
    assert sn.convert(model, 2).report.converted == ["1"]
