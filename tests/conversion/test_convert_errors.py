"""What cannot be converted is named, and left as it was."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.networks import Words, dense, randomise, snapshot, unchanged
from torch import Tensor, nn

import sigmanens as sn
from sigmanens.conversion.heads import MemberHeads
from sigmanens.errors import (
    AlreadyConvertedError,
    ConversionError,
    HeadNotFoundError,
    InputError,
    NoNormError,
)
from sigmanens.norms import MemberNorm


def bad_example() -> dict[str, Any]:
    return {"example": torch.randn(2, 9)}


@pytest.mark.case("C6")
@pytest.mark.parametrize(
    ("make", "options", "error", "message"),
    [
        (lambda: nn.Linear(4, 2), {}, NoNormError, "no normalisation layer found in this Linear"),
        (dense, {"layers": "nothing"}, NoNormError, r"layers='nothing' selects none .*1, 4"),
        (
            dense,
            {"layers": [], "head": "shared"},
            NoNormError,
            r"layers=\(\) selects none of the 2 norms",
        ),
        (dense, {"layers": lambda n, m: False}, NoNormError, "selects none of the 2 .*: 1, 4"),
        (dense, {"layers": ["1", "9", "0"]}, NoNormError, "names '0', '9', which are no.*1, 4"),
        (dense, {"layers": "("}, InputError, r"layers='\(' is no valid regular expression"),
        (dense, {"layers": 3}, InputError, "layers is 3; expected 'all', a regular expr"),
        (dense, {"layers": [1]}, InputError, r"layers is \[1\]"),
        (dense, {"members": 0}, InputError, "members is 0; expected an integer ≥ 1"),
        (dense, {"members": -2}, InputError, "members is -2"),
        (dense, {"members": True}, InputError, "members is True"),
        (dense, {"members": 4.0}, InputError, r"members is 4\.0"),
        (dense, {"members": "4"}, InputError, "members is '4'"),
        (dense, {"head": "own"}, InputError, "head is 'own'; expected one of 'auto', 'fresh'"),
        (dense, {"init": "zeros"}, InputError, "init is 'zeros'; expected one of 'auto', 'normal'"),
        (dense, {"scale": "tanh"}, InputError, "scale is 'tanh'; expected one of 'sigmoid'"),
        (dense, {"train": "heads"}, InputError, "train is 'heads'; expected one of 'all'"),
        (dense, {"shift": "member"}, InputError, "shift is 'member'; expected one of True"),
        (dense, {"schedule": "vmap"}, InputError, "schedule is 'vmap'; expected 'auto', 'folded'"),
        (dense, {"schedule": 4}, InputError, "schedule is 4; .* from 1 to 3"),
        (dense, {"schedule": True}, InputError, "schedule is True"),
        (dense, {"batch_dims": {"y": 0}}, InputError, "batch_dims names 'y'"),
        (dense, {"head_name": "head"}, HeadNotFoundError, "head_name='head' is no module"),
        (dense, {"head_name": "2", "head": "fresh"}, HeadNotFoundError, "a ReLU without a Linear"),
        (
            lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2))),
            {"head": "copy", "head_name": "1"},
            NoNormError,
            "lie inside the head '1'.*Name a smaller head",
        ),
        (dense, bad_example(), RuntimeError, "shapes cannot be multiplied"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("in_place", [False, True], ids=["convert", "convert_"])
def test_errors_are_named_and_leave_the_network_as_it_was(
    make: Callable[[], nn.Module],
    options: dict[str, Any],
    error: type[Exception],
    message: str,
    in_place: bool,
) -> None:
    base = make()
    before = snapshot(base)
    options = {"members": 3} | options
    with pytest.raises(error, match=message) as caught:
        (sn.convert_ if in_place else sn.convert)(base, **options)
    assert unchanged(base, before)
    assert "example" in options or isinstance(caught.value, sn.SigmaNensError)


def test_something_that_is_no_network_is_named() -> None:
    with pytest.raises(InputError, match=r"convert got a list; expected an nn.Module"):
        sn.convert([nn.LayerNorm(4)], 2)  # type: ignore[arg-type]


@pytest.mark.case("C5")
def test_a_converted_network_is_refused_and_keeps_its_members() -> None:
    ens = sn.convert(dense(), 3)
    with pytest.raises(AlreadyConvertedError, match="a SigmaEnsemble of 3 members already"):
        sn.convert(ens, 2)
    for network in (ens.network, nn.Sequential(nn.LayerNorm(4), ens)):
        for convert in (sn.convert, sn.convert_):
            with pytest.raises(
                AlreadyConvertedError, match=r"2 σNorm layers already .*Convert the base"
            ):
                convert(network, 2)
    assert ens.num_members == 3
    assert ens(torch.randn(2, 4)).shape == (3, 2, 3)


class Doubling(nn.Module):
    """Applies a norm in a way that its class does not show: twice the scale."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.norm.extra = 2.0  # type: ignore[assignment]
        self.encoder = nn.TransformerEncoderLayer(4, 1, 4, batch_first=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        factor = 1.0 if type(self.norm) is nn.LayerNorm else 2.0
        return self.head(self.encoder(self.norm(x))[:, 0] * factor)


@pytest.mark.parametrize("in_place", [False, True], ids=["convert", "convert_"])
def test_an_example_that_shows_another_function_is_refused_and_undone(in_place: bool) -> None:
    base = randomise(Doubling()).eval()
    base.head.weight.requires_grad_(False)
    before, activation = snapshot(base), base.encoder.activation_relu_or_gelu
    x = torch.randn(2, 5, 4)
    with pytest.raises(ConversionError, match="converted Doubling does not reproduce the base"):
        (sn.convert_ if in_place else sn.convert)(base, 2, example=x, train="members")
    assert unchanged(base, before)
    assert base.encoder.activation_relu_or_gelu == activation
    assert not any(isinstance(m, (MemberNorm, MemberHeads)) for m in base.modules())


@pytest.mark.parametrize(
    "example",
    [torch.randint(11, (2, 5)), (torch.randint(11, (2, 5)), torch.ones(2, 5)),
     {"ids": torch.randint(11, (2, 5))}],
    ids=["tensor", "tuple", "mapping"],
)  # fmt: skip
def test_an_example_of_any_kind_passes_for_a_right_conversion(example: Any) -> None:
    base = randomise(Words()).train()
    ens = sn.convert(base, 2, example=example)
    assert ens.training
    assert base.training
