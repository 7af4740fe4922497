"""Where the batch dimension of each input is."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from sigmanens.ensemble.inputs import Inputs, call_arguments, resolve_batch_dims
from sigmanens.errors import InputError

Pair = namedtuple("Pair", ["first", "second"])


def batched(**inputs: Any) -> tuple[dict[str, int], list[str]]:
    found = Inputs.of((), inputs, {})
    return found.batched, found.guessed


def test_inputs_with_the_batch_first_are_batched_and_others_shared() -> None:
    found, guessed = batched(x=torch.zeros(3, 7), mask=torch.zeros(1, 1, 5, 5), t=torch.tensor(2))
    assert found == {"x": 0}
    assert not guessed
    found, guessed = batched(x={"ids": torch.zeros(3, 7), "more": [torch.zeros(3)]}, n=3)
    assert found == {"x.ids": 0, "x.more.0": 0}
    assert not guessed


def test_ambiguous_inputs_are_reported_as_guesses() -> None:
    found, guessed = batched(x=torch.zeros(5, 5), mask=torch.zeros(1, 1, 5, 5))
    assert found == {"x": 0}
    assert guessed == ["mask"]
    found, guessed = batched(x=torch.zeros(5, 2), mask=torch.zeros(5, 5))
    assert found == {"x": 0, "mask": 0}
    assert guessed == ["mask"]
    found, guessed = batched(x=torch.zeros(5, 2), state=torch.zeros(1, 5, 4))
    assert found == {"x": 0}
    assert guessed == ["state"]


def test_the_first_tensor_that_may_be_batched_sets_the_batch_size() -> None:
    inputs = {"mask": torch.zeros(1, 1, 4, 4), "x": torch.zeros(6, 3)}
    assert Inputs.of((), inputs, {"mask": None}).size == 6
    with pytest.raises(InputError, match=r"'x' has shape \(6, 3\).*4 samples"):
        Inputs.of((), inputs, {"mask": 2, "x": 0})
    with pytest.raises(InputError, match=r"'x' has shape \(6, 3\).*the batch, which has 1 samples"):
        Inputs.of((), inputs, {"x": 0})


def test_declared_dimensions_hold_for_what_is_nested_too() -> None:
    tree = {"x": torch.zeros(2, 3), "state": (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))}
    assert Inputs.of((), tree, {"state": 1}).batched == {"x": 0, "state.0": 1, "state.1": 1}
    assert Inputs.of((), tree, {"state.0": 1, "state.1": None}).batched == {"x": 0, "state.0": 1}
    with pytest.raises(
        InputError, match=r"'state\.0' has shape \(1, 2, 4\).*dimension 2.*2 samples"
    ):
        Inputs.of((), tree, {"state": 2})


def test_no_batch_is_an_error_that_says_what_to_do() -> None:
    for args in ((), (3, "text"), (torch.tensor(1.0),)):
        with pytest.raises(InputError, match=r"no input tensor .* batch_dims=\{'x': 1\}"):
            Inputs.of(args, {}, {})


def test_inputs_by_position_and_name_survive_the_round_trip() -> None:
    x = torch.zeros(2, 3)
    args, kwargs = Inputs.of((x, 2), {"mask": 3}, {}).arguments()
    assert args[0] is x
    assert (args[1:], kwargs) == ([2], {"mask": 3})


def test_a_mapping_is_keyword_inputs_where_the_network_takes_its_keys() -> None:
    x = torch.zeros(2, 3)
    both = {"ids": x, "mask": x}
    assert call_arguments(both, Three()) == ((), both)
    assert call_arguments(both, Whole()) == ((both,), {})


class Three(nn.Module):
    def forward(self, ids: Tensor, mask: Tensor, *, state: Tensor | None = None) -> Tensor:
        return ids


class Whole(nn.Module):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return batch["ids"]


class Anything(nn.Module):
    def forward(self, *args: Tensor, **kwargs: Tensor) -> Tensor:
        return args[0]


def test_declared_by_name_or_by_position_is_the_same() -> None:
    assert resolve_batch_dims(Three(), {"mask": 1, 0: None}) == {
        "mask": 1, "1": 1, "0": None, "ids": None,
    }  # fmt: skip
    assert resolve_batch_dims(Three(), {"state.0": 1})["2.0"] == 1
    assert resolve_batch_dims(Anything(), {"whatever": 1, 7: 0}) == {"whatever": 1, "7": 0}
    assert resolve_batch_dims(Three(), None) == {}


@pytest.mark.parametrize(
    ("dims", "message"),
    [
        ({"msk": 1}, "names 'msk', which is no input of Three.forward; its inputs are ids, mask"),
        ({3: 1}, "names '3'"),
        ({"mask": -1}, r"batch_dims\['mask'\] is -1; expected the batch dimension counted from 0"),
        ({"mask": True}, "is True"),
        ({"mask": "0"}, "is '0'"),
    ],
)
def test_wrong_declarations_are_named(dims: dict[Any, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        resolve_batch_dims(Three(), dims)


# -- Hugging Face ------------------------------------------------------------------------------


class Config:
    """What tells a network of transformers."""

    model_type = "bert"

    def to_dict(self) -> dict[str, Any]:
        return {}


class Texts(nn.Module):
    def __init__(self, config: object) -> None:
        super().__init__()
        self.config = config

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Any = None
    ) -> Tensor:
        return input_ids


def guesses(dims: dict[str, int | None], *args: Tensor, **kwargs: Tensor) -> list[list[str]]:
    found = Inputs.of(args, kwargs, dims)
    assert all(dim == 0 for dim in found.batched.values())
    return [list(found.batched), found.guessed]


def test_the_usual_inputs_of_a_transformer_have_the_batch_first() -> None:
    ids, long = torch.zeros(5, 5), torch.zeros(1, 1, 5, 5)
    known, unknown = (resolve_batch_dims(Texts(c), None) for c in (Config(), {"hidden": 5}))
    assert unknown == {}
    for args, kwargs in (((ids, ids), {}), ((), {"input_ids": ids, "attention_mask": ids})):
        names = [*map(str, range(len(args))), *kwargs]
        assert guesses(known, *args, **kwargs) == [names, []]
        assert guesses(unknown, *args, **kwargs) == [names, names[1:]]
    # A size of 1 is broadcast by the network, and so shared; one of another size is a guess.
    assert guesses(known, ids, long) == [["0"], []]
    assert guesses(known, ids, long.expand(2, 1, 5, 5)) == [["0"], ["1"]]
    # Three kinds of positions before the batch, in some networks for text and pictures.
    assert guesses(known, ids, position_ids=ids) == [["0", "position_ids"], []]
    assert guesses(known, ids, position_ids=ids.expand(3, 5, 5)) == [["0"], ["position_ids"]]


def test_what_is_declared_goes_before_the_usual() -> None:
    dims = resolve_batch_dims(Texts(Config()), {"attention_mask": None})
    assert guesses(dims, torch.zeros(5, 5), torch.zeros(5, 5)) == [["0"], []]


# -- what is done with a batch -----------------------------------------------------------------


@given(members=st.integers(1, 4), size=st.integers(1, 4), dim=st.integers(0, 2))
def test_expanding_is_member_major_along_the_batch_dimension(
    members: int, size: int, dim: int
) -> None:
    shape = [3, 2, 5]
    shape[dim] = size
    x, s = torch.randn(shape), torch.randn(7)
    out = Inputs.of((), {"x": x, "s": s}, {"x": dim, "s": None}).expand(members)
    assert out.tree["s"] is s
    assert out.size == members * size
    for m in range(members):
        assert torch.equal(out.tree["x"].narrow(dim, m * size, size), x)


def test_expanding_keeps_the_memory_format_and_the_gradient() -> None:
    x = torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last).requires_grad_()
    y = Inputs.of((x,), {}, {}).expand(3).tree["0"]
    assert y.is_contiguous(memory_format=torch.channels_last)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3))


def test_samples_are_cut_picked_and_repeated_along_their_dimension() -> None:
    x, s = torch.arange(12).view(2, 6), torch.arange(5)
    inputs = Inputs.of((), {"x": x, "s": s}, {"x": 1})
    rows = torch.tensor([4, 0])
    for made, expected in (
        (inputs.narrow(2, 3), x[:, 2:5]),
        (inputs.select(rows), x[:, rows]),
        (inputs.resized(8), x[:, [0, 1, 2, 3, 4, 5, 0, 1]]),
    ):
        assert torch.equal(made.tree["x"], expected)
        assert made.tree["s"] is s
        assert made.size == expected.shape[1]


def test_copies_share_no_memory() -> None:
    inputs = Inputs.of(([torch.zeros(3, 2)], torch.zeros(3)), {}, {})
    inputs.copied().tree["0"][0][1, 1] = 5.0
    assert torch.equal(inputs.tree["0"][0], torch.zeros(3, 2))


class Graph:
    def __init__(self) -> None:
        self.nodes = torch.zeros(4, 2)


@pytest.mark.parametrize(
    "make",
    [
        Graph,
        lambda: torch.eye(3).to_sparse(),
        lambda: pack_sequence([torch.zeros(2, 3), torch.zeros(1, 3)]),
    ],
    ids=["object", "sparse", "packed"],
)
def test_objects_with_tensors_go_to_every_member_whole(make: Callable[[], Any]) -> None:
    x = torch.zeros(3, 2)
    for args in ((make(), x), ([make()], x)):
        found = Inputs.of(args, {}, {})
        assert found.whole
        assert not found.batched
        assert found.copied().tree["0"] is not args[0]
