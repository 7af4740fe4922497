"""``auto`` follows a stated model; ``measure_schedule`` measures and leaves a choice alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.networks import Pictures, Recurrent, apart, randomise

import sigmanens as sn
from sigmanens import timing
from sigmanens.errors import InputError
from sigmanens.schedule import PASS_BYTES, members_per_pass

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("members", "rows", "row_bytes", "device", "expected"),
    [
        (4, 128, PASS_BYTES // 512, CPU, 4),  # all four fill the bound exactly
        (4, 128, PASS_BYTES // 512 + 1, CPU, 3),
        (4, 128, PASS_BYTES // 256, CPU, 2),
        (4, 128, PASS_BYTES, CPU, 1),  # never fewer than one
        (4, 128, PASS_BYTES, torch.device("cuda"), 4),
        (4, 128, 0, CPU, 4),  # nothing known
    ],
)
def test_the_model_of_auto(
    members: int, rows: int, row_bytes: int, device: torch.device, expected: int
) -> None:
    assert members_per_pass(members, rows, row_bytes, device) == expected


def test_auto_folds_as_many_members_as_the_model_says_and_reports_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ens = apart(sn.convert(randomise(Pictures(3)), 5)).eval()
    largest = 8 * 8 * 8 * 4  # width × height × width, float32
    monkeypatch.setattr("sigmanens.schedule.PASS_BYTES", largest * 6 * 2)
    x = torch.randn(6, 1, 8, 8)
    expected = ens(x)
    rows: list[int] = []
    ens.network.conv2.register_forward_pre_hook(lambda m, a: rows.append(len(a[0])))
    torch.testing.assert_close(ens(x), expected)
    assert rows == [12, 12, 6]
    assert "schedule auto: 2 of 5 members in a pass at 6 samples (2,048 bytes" in str(ens.report)
    rows.clear()
    ens(x[:2])
    assert rows == [10]


def pretend(
    monkeypatch: pytest.MonkeyPatch, ens: sn.SigmaEnsemble, seconds: dict[Any, float]
) -> None:
    """Run every step, but let it have taken as long as said for its schedule."""
    monkeypatch.setattr(timing, "_timed", lambda step, _: (step(), seconds[ens.schedule])[1])


def test_the_fastest_is_chosen_and_nothing_else_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    ens = apart(sn.convert(randomise(Pictures(3, dropout=0.5)), 4)).train()
    ens.network.conv1.weight.grad = torch.ones_like(ens.network.conv1.weight)
    x, y = torch.randn(6, 1, 8, 8), torch.randint(3, (6,))
    state = {k: v.clone() for k, v in ens.state_dict().items()}
    random = torch.get_rng_state()
    pretend(monkeypatch, ens, {"folded": 2.0, "sequential": 3.0, 2: 1.0})
    assert sn.measure_schedule(ens, x, y) == {"folded": 2.0, "sequential": 3.0, 2: 1.0}
    assert ens.schedule == 2
    assert "schedule 2 measured fastest in training: folded 2000.0 ms" in str(ens.report)
    assert all(torch.equal(v, state[k]) for k, v in ens.state_dict().items())
    assert torch.equal(ens.network.conv1.weight.grad, torch.ones_like(ens.network.conv1.weight))
    assert ens.network.conv2.weight.grad is None
    assert torch.equal(torch.get_rng_state(), random)
    assert ens.training


def test_a_real_measurement_of_a_prediction() -> None:
    ens = apart(sn.convert(randomise(Pictures(3)), 4))
    seconds = sn.measure_schedule(ens, torch.randn(2, 1, 8, 8), repeats=1)
    assert seconds.keys() == {"folded", "sequential", 2}
    assert seconds[ens.schedule] == min(seconds.values()) > 0


def test_what_a_network_cannot_do_is_left_out_and_wrong_arguments_are_named() -> None:
    ens = apart(sn.convert(randomise(Recurrent(batch_first=False)), 4))
    x = torch.randn(6, 4, 4)
    assert sn.measure_schedule(ens, x, repeats=1).keys() == {"sequential"}
    with pytest.raises(InputError, match="no schedule could be measured"):
        sn.measure_schedule(ens, x, candidates=["folded"])
    with pytest.raises(InputError, match="repeats is 0"):
        sn.measure_schedule(ens, x, repeats=0)
    with pytest.raises(InputError, match="expected 'auto', 'folded'"):
        sn.measure_schedule(ens, x, candidates=["fast"])
