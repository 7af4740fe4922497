"""The member axis and the containers that inputs and results come in."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sigmanens.errors import InputError
from sigmanens.passes.context import MemberAxis
from sigmanens.passes.trees import expand, join, map_tensors, narrow, unfold

Pair = namedtuple("Pair", ["first", "second"])


@dataclass(frozen=True)
class Frozen:
    value: Tensor
    name: str = "n"


@dataclass
class Derived:
    value: Tensor
    twice: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.twice = self.value * 2


class Attributed(dict):
    """A mapping that cannot be built from its items alone."""

    def __init__(self, marker: str) -> None:
        super().__init__()
        self.marker = marker


# -- the axis ----------------------------------------------------------------------------------


def test_a_narrowed_axis_is_restored_even_after_an_error() -> None:
    axis = MemberAxis(4)

    def narrow_and_fail() -> None:
        with axis.only(1, 3), axis.probe(), axis.only(2, 3):
            assert (axis.start, axis.stop, axis.active, axis.probing) == (2, 3, 1, True)
            raise KeyError

    with pytest.raises(KeyError):
        narrow_and_fail()
    assert (axis.start, axis.stop, axis.active, axis.probing) == (0, 4, 4, False)
    assert repr(axis) == "MemberAxis(4, active=0:4)"


# -- containers --------------------------------------------------------------------------------


def test_containers_are_rebuilt_with_their_classes_and_paths() -> None:
    t = torch.zeros(2)
    tree = {
        "a": [t, (t, Pair(t, "text"))],
        "b": Frozen(t),
        "c": OrderedDict(x=t),
        "d": None,
        "e": 3,
    }
    paths: list[str] = []

    def add_one(x: Tensor, path: str) -> Tensor:
        paths.append(path)
        return x + 1

    out = map_tensors(add_one, tree)
    assert paths == ["a.0", "a.1.0", "a.1.1.0", "b.value", "c.x"]
    assert isinstance(out["a"][1][1], Pair)
    assert out["a"][1][1].second == "text"
    assert isinstance(out["b"], Frozen)
    assert out["b"].name == "n"
    assert type(out["c"]) is OrderedDict
    assert (out["d"], out["e"]) == (None, 3)
    assert torch.equal(out["c"]["x"], t + 1)
    assert torch.equal(tree["a"][0], torch.zeros(2))


@pytest.mark.parametrize(
    "tree",
    [
        defaultdict(list, a=torch.zeros(1)),
        UserDict(a=torch.zeros(1)),
        MappingProxyType({"a": torch.zeros(1)}),
    ],
    ids=lambda t: type(t).__name__,
)
def test_mappings_of_other_kinds(tree: Mapping[str, Tensor]) -> None:
    out = map_tensors(lambda t, _: t + 1, tree)
    assert type(out) is type(tree)
    assert out["a"].item() == 1
    assert tree["a"].item() == 0


def test_a_mapping_keeps_what_it_has_besides_its_items() -> None:
    tree = Attributed("kept")
    tree["a"] = torch.zeros(1)
    out = map_tensors(lambda t, _: t + 1, tree)
    assert isinstance(out, Attributed)
    assert out.marker == "kept"
    assert out["a"].item() == 1


def test_derived_fields_of_a_dataclass_are_derived_again() -> None:
    out = map_tensors(lambda t, _: t + 1, Derived(torch.ones(1)))
    assert out.value.item() == 2
    assert out.twice.item() == 4


def test_results_of_torch_that_are_tuples_with_names() -> None:
    top = torch.rand(3, 4).max(1)
    out = map_tensors(lambda t, _: t.double(), top)
    assert type(out) is type(top)
    assert out.values.dtype == torch.float64


# -- folding -----------------------------------------------------------------------------------


@given(members=st.integers(1, 4), size=st.integers(1, 4), dim=st.integers(0, 2))
def test_expanding_is_member_major_along_the_batch_dimension(
    members: int, size: int, dim: int
) -> None:
    shape = [3, 2, 5]
    shape[dim] = size
    x = torch.randn(shape)
    out = expand({"x": x, "s": x}, {"x": dim}, members)
    assert torch.equal(out["s"], x)
    for m in range(members):
        assert torch.equal(out["x"].narrow(dim, m * size, size), x)


def test_expanding_keeps_the_memory_format_and_the_gradient() -> None:
    x = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last).requires_grad_()
    y = expand(x, {"": 0}, 3)
    assert y.is_contiguous(memory_format=torch.channels_last)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3))


def test_narrowing_cuts_batched_tensors_only() -> None:
    x, s = torch.arange(12).view(2, 6), torch.arange(6)
    out = narrow({"x": x, "s": s}, {"x": 1}, 2, 3)
    assert torch.equal(out["x"], x[:, 2:5])
    assert torch.equal(out["s"], s)


@given(members=st.integers(1, 4), size=st.integers(0, 4))
def test_unfolding_inverts_folding(members: int, size: int) -> None:
    y = torch.randn(members, size, 3)
    out = unfold((y.flatten(0, 1), torch.tensor(1.0), "text"), members, size)
    assert torch.equal(out[0], y)
    assert out[1:] == (torch.tensor(1.0), "text")


def test_a_result_without_the_rows_is_named() -> None:
    with pytest.raises(InputError, match=r"result 'states\.0' has shape \(2, 6\); expected 6 rows"):
        unfold({"states": [torch.zeros(2, 6)]}, 3, 2)
    with pytest.raises(InputError, match="the result has shape"):
        unfold(torch.zeros(5), 3, 2)


def test_joining_passes_concatenates_members_and_averages_scalars() -> None:
    blocks = [
        {"logits": torch.full((2, 3, 4), 1.0), "loss": torch.tensor(1.0), "cache": None},
        {"logits": torch.full((1, 3, 4), 5.0), "loss": torch.tensor(4.0), "cache": None},
    ]
    out = join(blocks, [2, 1])
    assert out["logits"].shape == (3, 3, 4)
    assert out["logits"][:, 0, 0].tolist() == [1, 1, 5]
    assert out["loss"].item() == pytest.approx(2.0)
    assert out["cache"] is None
