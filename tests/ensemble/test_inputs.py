"""Where the batch dimension of each input is."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sigmanens.ensemble.inputs import (
    batch_size,
    find_batched,
    input_tree,
    resolve_batch_dims,
    split_tree,
)
from sigmanens.errors import InputError

Pair = namedtuple("Pair", ["first", "second"])


def batched(**inputs: Any) -> tuple[dict[str, int], list[str]]:
    return find_batched(inputs, batch_size((), inputs, {}), {})


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
    assert batch_size((), inputs, {"mask": None}) == 6
    assert batch_size((), inputs, {"mask": 2}) == 4
    with pytest.raises(InputError, match=r"'x' has shape \(6, 3\).*the batch, which has 1 samples"):
        find_batched(inputs, batch_size((), inputs, {"x": 0}), {"x": 0})


def test_declared_dimensions_hold_for_what_is_nested_too() -> None:
    tree = {"x": torch.zeros(2, 3), "state": (torch.zeros(1, 2, 4), torch.zeros(1, 2, 4))}
    assert find_batched(tree, 2, {"state": 1})[0] == {"x": 0, "state.0": 1, "state.1": 1}
    assert find_batched(tree, 2, {"state.0": 1, "state.1": None})[0] == {"x": 0, "state.0": 1}
    with pytest.raises(
        InputError, match=r"'state\.0' has shape \(1, 2, 4\).*dimension 2.*2 samples"
    ):
        find_batched(tree, 2, {"state": 2})


def test_no_batch_is_an_error_that_says_what_to_do() -> None:
    for args in ((), (3, "text"), (torch.tensor(1.0),)):
        with pytest.raises(InputError, match=r"no input tensor .* batch_dims=\{'x': 1\}"):
            batch_size(args, {}, {})


def test_inputs_by_position_and_name_survive_the_round_trip() -> None:
    args, kwargs = split_tree(input_tree((1, 2), {"mask": 3}))
    assert (args, kwargs) == ([1, 2], {"mask": 3})


class Three(nn.Module):
    def forward(self, ids: Tensor, mask: Tensor, *, state: Tensor | None = None) -> Tensor:
        return ids


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
    size = batch_size(args, kwargs, dims)
    found, guessed = find_batched(input_tree(args, kwargs), size, dims)
    assert all(dim == 0 for dim in found.values())
    return [list(found), guessed]


def test_the_usual_inputs_of_a_transformer_have_the_batch_first() -> None:
    ids, long = torch.zeros(5, 5), torch.zeros(1, 1, 5, 5)
    known, unknown = (resolve_batch_dims(Texts(c), None) for c in (Config(), {"hidden": 5}))
    assert unknown == {}
    for args, kwargs in (((ids, ids), {}), ((), {"input_ids": ids, "attention_mask": ids})):
        names = list(input_tree(args, kwargs))
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
