"""Norms that are no modules, or are applied past their forward: found on an example, reported."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.networks import apart, randomise, snapshot, unchanged
from torch import Tensor, nn

import sigmanens as sn
from sigmanens.conversion.functional import FunctionalNorms
from sigmanens.errors import UnsupportedNormError
from sigmanens.norms import SigmaLayerNorm

WIDTH = 6


class Inner(nn.Module):
    """What the network calls between its two norms."""

    def __init__(self, act: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act
        self.net: list[Net] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.net[0], x)


class Net(nn.Module):
    """(B, 4) → (B, 3); ``inner`` may use the second norm in any way."""

    def __init__(self, act: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        self.proj = nn.Linear(4, WIDTH)
        self.first = nn.LayerNorm(WIDTH)
        self.second = nn.LayerNorm(WIDTH)
        self.batch = nn.BatchNorm1d(WIDTH)
        self.inner = Inner(act)
        self.inner.net.append(self)
        self.fc = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.inner(self.batch(self.first(self.proj(x)))))


def network(act: Callable[[Net, Tensor], Tensor]) -> Net:
    torch.manual_seed(0)
    base = Net(act)
    randomise(base).eval()
    return base


def converted(base: nn.Module, **options: Any) -> tuple[sn.SigmaEnsemble, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ens = sn.convert(base, 3, init="preserve", schedule="folded", example=example(), **options)
    assert all(issubclass(w.category, sn.SigmaNensWarning) for w in caught)
    assert all(w.filename == __file__ for w in caught)
    return ens, [str(w.message) for w in caught]


def example() -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(2))


def own(net: Net, x: Tensor) -> Tensor:
    return net.second(x)


CALLS: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "layer_norm": lambda n, x: F.layer_norm(n.second(x), (WIDTH,)),
    "group_norm": lambda n, x: F.group_norm(n.second(x), 2),
    "rms_norm": lambda n, x: F.rms_norm(n.second(x), (WIDTH,)),
    "instance_norm": lambda n, x: F.instance_norm(n.second(x).unsqueeze(1)).squeeze(1),
    "batch_norm": lambda n, x: F.batch_norm(
        n.second(x), torch.zeros(WIDTH), torch.ones(WIDTH), training=False
    ),
    "layer_norm, by a module made in passing": lambda n, x: nn.LayerNorm(WIDTH)(n.second(x)),
}


@pytest.mark.case("C9")
@pytest.mark.parametrize("call", CALLS)
def test_functional_norms_are_reported_with_the_module_that_calls_them(call: str) -> None:
    base = network(CALLS[call])
    before = snapshot(base)
    ens, messages = converted(base)
    assert len(messages) == 1
    function = call.partition(",")[0]
    where = "is called in 'inner' (Inner), not by a norm module"
    assert messages[0].startswith(f"{function}() {where}")
    assert ("schedule='sequential'" in messages[0]) == (call == "batch_norm")
    assert [note for note in ens.report.notes if "() is called in" in note] == messages
    assert ens.report.converted == ["first", "second", "batch"]
    assert unchanged(base, before)


def test_calls_of_norm_modules_are_not_reported() -> None:
    for act in (own, lambda n, x: n.second.forward(x)):
        messages = converted(network(act))[1]
        assert messages == []


def test_calls_are_told_apart_and_reported_once() -> None:
    def act(net: Net, x: Tensor) -> Tensor:
        for _ in range(3):
            x = F.layer_norm(net.second(x), (WIDTH,))
        return F.layer_norm(x, (WIDTH,), net.first.weight, net.second.bias)

    ens, messages = converted(network(act))
    assert len(messages) == 3
    assert sum("not by a norm module" in m for m in messages) == 1
    assert ens.report.kept == ["first", "second"]


# -- a norm's weight, used past its forward ----------------------------------------------------


PAST: dict[str, tuple[str, Callable[[Net, Tensor], Tensor]]] = {
    "functional": (
        "layer_norm",
        lambda n, x: F.layer_norm(x, (WIDTH,), n.second.weight, n.second.bias, n.second.eps),
    ),
    "keyword": ("layer_norm", lambda n, x: F.layer_norm(x, (WIDTH,), weight=n.second.weight)),
    "arithmetic": ("mul", lambda n, x: x * n.second.weight),
    "copied": ("double", lambda n, x: x * n.second.weight.double().to(x.dtype)),
}


@pytest.mark.parametrize("how", PAST)
def test_a_norm_used_past_its_forward_is_kept_and_reported(how: str, tmp_path: Path) -> None:
    function, act = PAST[how]
    base = network(act)
    ens, messages = converted(base)
    expected = f"{function}() is called in 'inner' (Inner) with the weight of norm 'second'"
    assert messages == [expected]
    assert ens.report.converted == ["first", "batch"]
    assert f"{expected}: it stays shared by all members" in str(ens.report)
    x = example()
    torch.testing.assert_close(ens(x)[2], base(x), rtol=1e-5, atol=1e-5)
    apart(ens)
    torch.testing.assert_close(ens.member(1)(x), ens(x)[1], rtol=1e-5, atol=1e-5)
    ens.save_pretrained(tmp_path)
    assert torch.equal(sn.load(tmp_path, base=base)(x), ens(x))


def test_without_an_example_such_a_network_does_not_run() -> None:
    ens = sn.convert(network(PAST["functional"][1]), WIDTH, init="preserve", schedule="folded")
    with pytest.raises((sn.SigmaNensError, RuntimeError)):
        ens(example())


def test_asking_a_norm_for_its_device_and_dtype_is_no_use_of_it() -> None:
    def act(net: Net, x: Tensor) -> Tensor:
        weight = net.second.weight
        assert torch.is_floating_point(weight)
        added = torch.zeros(1, device=weight.device, dtype=weight.dtype)
        return net.second(x.to(weight.dtype)) + added

    ens, messages = converted(network(act))
    assert messages == []
    assert isinstance(ens.network.second, SigmaLayerNorm)


@pytest.mark.parametrize("layers", [None, "first"], ids=["selected", "left out"])
def test_a_batch_norm_used_past_its_forward_is_refused(layers: str | None) -> None:
    def act(net: Net, x: Tensor) -> Tensor:
        b = net.batch
        return F.batch_norm(net.second(x), b.running_mean, b.running_var, b.weight, b.bias)

    with pytest.raises(
        UnsupportedNormError,
        match=r"batch \(BatchNorm1d\): batch_norm\(\) is called in 'inner' \(Inner\) with the "
        "weight of norm 'batch', past each member's statistics: call the norm itself there$",
    ):
        converted(network(act), layers=layers)


def test_weight_standardisation_is_no_norm() -> None:
    class Standardised(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            rows = F.batch_norm(self.weight.reshape(1, 3, -1), None, None, training=True)
            return F.linear(x, rows.reshape_as(self.weight), self.bias)

    base = network(own)
    base.fc = Standardised(WIDTH, 3)
    assert converted(base)[1] == []


def test_the_example_runs_in_evaluation_mode_and_the_mode_is_restored() -> None:
    seen: list[bool] = []

    def act(net: Net, x: Tensor) -> Tensor:
        seen.append(net.training)
        return net.second(x)

    base = network(act).train()
    converted(base)
    assert not seen[0]  # later ones are trials of copies, in both modes
    assert all(m.training for m in base.modules())


def test_the_trace_leaves_with_the_block() -> None:
    base = network(CALLS["layer_norm"])
    trace = FunctionalNorms(base, {"second": base.second})
    with trace:
        base(example())
    found = dict(trace.found)
    base(example())
    assert trace.found == found
    # 'first' was not named as a norm, so that its own call counts.
    calls = [re.match(r"(\w+)\(\) is called in '(\w+)'", text) for text in found]
    assert [call.groups() for call in calls if call] == [
        ("layer_norm", "first"),
        ("batch_norm", "batch"),
        ("layer_norm", "inner"),
    ]
