"""The containers that inputs and results come in."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import DynamicCache

from sigmanens.errors import InputError
from sigmanens.passes.trees import join, map_tensors, unfold

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


class Opaque:
    def __init__(self, logits: Tensor) -> None:
        self.logits = logits


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize(
    "make",
    [Opaque, lambda z: SimpleNamespace(logits=z), lambda z: torch.distributions.Categorical(z)],
    ids=["class", "namespace", "distribution"],
)
def test_a_result_in_an_unknown_object_is_refused_by_name(
    make: Callable[[Tensor], Any], nested: bool
) -> None:
    made = make(torch.rand(6, 2))
    result = {"logits": torch.rand(6, 2), "more": made} if nested else made
    for members, size in ((3, 2), (1, 6)):
        with pytest.raises(InputError, match=f"{type(made).__name__}, an object that holds"):
            unfold(result, members, size)


def test_plain_values_in_a_result_are_passed_on() -> None:
    for value in ("text", 3, None, torch.float32, torch.device("cpu"), SimpleNamespace(n=3)):
        assert unfold((torch.zeros(2, 1), value), 1, 2)[1] is value


def test_the_cache_of_a_decoder_is_left_out() -> None:
    cache = DynamicCache()
    cache.update(torch.zeros(4, 1, 2, 3), torch.zeros(4, 1, 2, 3), 0)
    out = unfold({"logits": torch.zeros(4, 2), "past": cache}, 2, 2)
    assert out["past"] is None
    assert out["logits"].shape == (2, 2, 2)
