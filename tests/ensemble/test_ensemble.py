"""Inputs and results of any kind, and batches split among the members."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.networks import Outcome, Pictures, Recurrent, Words, Wrapped, apart, dense, randomise
from tests.oracles.norms import member_networks
from torch import Tensor

import sigmanens as sn
from sigmanens.errors import InputError, SigmaNensWarning

IDS = torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(3))


@dataclass
class Batch:
    logits: Tensor  # named so that the helper network finds it
    note: str = "kept"


def close(a: Any, b: Any, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


# -- what it tells of itself -------------------------------------------------------------------


def test_an_ensemble_says_what_it_is() -> None:
    base = dense()
    base.pretrained_cfg = {"tag": "small"}  # type: ignore[assignment]
    ens = sn.convert(base, 3)
    assert ens.num_members == 3
    assert ens.base_config == {"tag": "small"}
    assert sn.convert(dense(), 2).base_config is None
    assert ens.schedule == "auto"
    assert list(ens.sigma_norms()) == ["1", "4"]
    assert list(ens.member_heads()) == ["6"]
    assert float(ens.temperature) == 1.0


# -- inputs and results ------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["folded", "sequential", 2])
@pytest.mark.parametrize("container", ["tensor", "tuple", "dict", "dataclass"])
def test_results_of_any_kind_carry_the_members_first(container: str, schedule: Any) -> None:
    base = randomise(dense()).eval()
    ens = apart(sn.convert(Wrapped(base, container), 3, schedule=schedule))
    x = torch.randn(4, 4)
    expected = torch.stack(
        [net.network(x) for net in member_networks(Wrapped(base, container), ens)]
    )
    result = ens(x)
    if container == "tensor":
        close(result, expected)
    elif container == "tuple":
        assert isinstance(result, tuple)
        close(result[1], expected * 2)
    elif container == "dict":
        close(result["logits"], expected)
        close(result["more"]["twice"][0], expected * 2)
    else:
        assert isinstance(result, Outcome)
        close(result.features, expected * 2)
        assert result.note == "kept"
    assert ens.predict(x).member_probs.shape == (3, 4, 3)
    close(ens.predict(x).member_probs, expected.softmax(-1))


@pytest.mark.parametrize("schedule", ["folded", "sequential"])
def test_inputs_of_any_kind_are_given_to_each_member(schedule: str) -> None:
    base = randomise(dense()).eval()
    ens = apart(sn.convert(Wrapped(base, "tensor"), 3, schedule=schedule))
    x = torch.randn(4, 4)
    expected = ens(x)
    close(ens(x=x), expected)
    close(ens({"a": {"b": x}}), expected)
    close(ens(Batch(x)), expected)
    close(ens(x={"a": x}), expected)
    close(ens.predict((x,)).member_probs, expected.softmax(-1))
    close(ens.predict([x]).member_probs, expected.softmax(-1))
    close(ens.predict({"x": x}).member_probs, expected.softmax(-1))
    close(ens.predict({"x": Batch(x)}).member_probs, expected.softmax(-1))


def test_transformers_models_and_outputs() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=11, hidden_size=8, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=16, num_labels=3, max_position_embeddings=16,
    )  # fmt: skip
    base = randomise(transformers.BertForSequenceClassification(config)).eval()
    ens = sn.convert(base, 3, example={"input_ids": IDS})
    assert ens.base_config is ens.network.config
    apart(ens)
    mask = torch.ones(4, 5, dtype=torch.long)
    mask[1, 3:] = 0
    inputs = {"input_ids": IDS, "attention_mask": mask}
    labels = torch.tensor([0, 1, 2, 0])
    result = ens(**inputs, labels=labels, output_hidden_states=True)
    assert type(result).__name__ == "SequenceClassifierOutput"
    singles = [net(**inputs, labels=labels) for net in member_networks(base, ens)]
    close(result.logits, torch.stack([s.logits for s in singles]), 1e-4)
    close(result.loss, torch.stack([s.loss for s in singles]).mean(), 1e-4)
    assert result.hidden_states[0].shape == (3, 4, 5, 8)
    assert result.attentions is None
    assert ens(**inputs, return_dict=False)[0].shape == (3, 4, 3)
    encoding = transformers.BatchEncoding(inputs)
    close(ens.predict(encoding).member_probs, result.logits.softmax(-1), 1e-4)
    ens.schedule = "sequential"
    close(ens(**inputs, labels=labels).loss, result.loss, 1e-4)
    close(ens(**inputs).logits, result.logits, 1e-4)


@pytest.mark.parametrize("schedule", ["folded", "sequential", 2])
def test_inputs_without_a_batch_are_shared(schedule: Any) -> None:
    base = randomise(Words()).eval()
    ens = apart(sn.convert(base, 3, schedule=schedule))
    causal = torch.tril(torch.ones(1, 1, 5, 5))
    padding = torch.ones(4, 5)
    padding[2, 2:] = 0
    for mask in (causal, padding, None):
        expected = torch.stack([net(IDS, mask) for net in member_networks(base, ens)])
        close(ens(IDS, mask), expected)
        close(ens(ids=IDS, mask=mask), expected)
        close(ens.predict({"ids": IDS, "mask": mask}).member_probs, expected.softmax(-1))


def test_a_guessed_batch_dimension_warns_once_and_is_right_when_declared() -> None:
    base = randomise(Words()).eval()
    square = IDS[:, :4]
    causal = torch.tril(torch.ones(1, 1, 4, 4))
    ens = apart(sn.convert(base, 2, schedule="folded"))
    with pytest.warns(SigmaNensWarning, match=r"input '1' was guessed for a batch of 4.*None") as w:
        guessed = ens(square, causal)
    close(guessed, torch.stack([net(square, causal) for net in member_networks(base, ens)]))
    assert w[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ens(square, causal)
        for dims in ({"mask": None}, {1: None}):
            declared = apart(sn.convert(base, 2, schedule="folded", batch_dims=dims))
            nets = member_networks(base, declared)
            expected = torch.stack([net(square, causal) for net in nets])
            close(declared(square, causal), expected)
            close(declared(square, mask=causal), expected)


@pytest.mark.parametrize("schedule", ["auto", "folded", "sequential"])
def test_declared_batch_dimensions_of_recurrent_states(schedule: str) -> None:
    base = randomise(Recurrent(batch_first=True)).eval()
    ens = apart(sn.convert(base, 3, schedule=schedule, batch_dims={"state": 1}))
    x = torch.randn(4, 6, 4)
    state = (torch.randn(1, 4, 5), torch.randn(1, 4, 5))
    expected = torch.stack([net(x, state) for net in member_networks(base, ens)])
    close(ens(x, state), expected)
    close(ens(x, state=state), expected)
    assert ens.schedule == schedule
    for chunk in (1, 5, 8):
        close(ens.predict((x, state), chunk=chunk).member_probs, expected.softmax(-1))
    with pytest.raises(InputError, match=r"'1\.0' has shape \(1, 3, 5\).*dimension 1 is the batch"):
        ens(x, tuple(s[:, :3] for s in state))


def test_no_batched_input_is_an_error() -> None:
    with pytest.raises(InputError, match="no input tensor with a batch dimension"):
        sn.convert(dense(), 2)(3)


# -- split batches -----------------------------------------------------------------------------


@pytest.mark.case("T1")
@pytest.mark.parametrize("schedule", ["folded", "sequential", 2])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_split_batch_gives_each_member_its_own_share(schedule: Any, training: bool) -> None:
    base = randomise(Pictures(3)).eval()
    ens = apart(sn.convert(base, 3, schedule=schedule)).train(training)
    separate = [net.train(training) for net in member_networks(base, ens)]
    x = torch.randn(12, 1, 8, 8)
    y = torch.randint(3, (12,))
    logits = ens(x, split=True)
    assert logits.shape == (3, 4, 3)
    close(logits, torch.stack([net(s) for net, s in zip(separate, x.chunk(3), strict=True)]))
    F.cross_entropy(logits.flatten(0, 1), y).backward()
    before = ens.network.bn1.scale_logit.grad.clone()
    ens.zero_grad()
    x[4:8] += 1.0
    F.cross_entropy(ens(x, split=True).flatten(0, 1), y).backward()
    after = ens.network.bn1.scale_logit.grad
    close(after[[0, 2]], before[[0, 2]], 1e-6)
    assert (after[1] - before[1]).abs().max() > 1e-4


@pytest.mark.case("T2")
def test_a_batch_that_does_not_split_is_an_error() -> None:
    ens = sn.convert(dense(), 3)
    with pytest.raises(
        InputError, match=r"split=True got 7 rows, which 3 members do not divide.*6"
    ):
        ens(torch.randn(7, 4), split=True)
    with pytest.raises(
        InputError, match=r"cannot divide input '0', a torch\.Tensor, among members"
    ):
        ens(torch.eye(6, 4).to_sparse(), split=True)


def test_an_array_in_the_place_of_a_tensor_is_named() -> None:
    numpy = pytest.importorskip("numpy")
    ens = sn.convert(dense(), 2)
    with pytest.raises(InputError, match=r"'0' is a numpy\.ndarray: give torch\.as_tensor"):
        ens.predict(numpy.zeros((3, 4), dtype="float32"))


def test_the_temperature_lies_where_the_network_does() -> None:
    base = dense()
    with torch.device("meta"):
        ens = sn.convert(base, 2)
    assert ens.temperature.device == torch.device("cpu")
