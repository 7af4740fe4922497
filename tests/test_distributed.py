"""Two processes over gloo give the losses, gradients and buffers of one."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from tests import ranks
from torch import Tensor
from torch.distributed import is_available, is_gloo_available
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException

from sigmanens.distributed import _buckets, own_members
from sigmanens.errors import InputError

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (is_available() and is_gloo_available()), reason="this PyTorch comes without gloo"
    ),
]


def close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        bound = tolerance * max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(ours[name], expected, rtol=0, atol=bound, msg=name)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What the two ranks got in every scenario."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.spawn(ranks.run_scenarios, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"rank{r}.pt", weights_only=True) for r in range(2)]


def one_process(layers: str | None = None, frozen: bool = False) -> dict[str, Any]:
    """All rows and members in this process, folded."""
    ens = ranks.ensemble(layers=layers)
    ens.freeze_statistics(frozen)
    x, y = ranks.batch()
    loss = ranks.loss_function()(ens(x), y, ens)
    loss.backward()
    return ranks.state(ens, loss)


@pytest.mark.case("T8")
@pytest.mark.parametrize(
    ("scenario", "layers"),
    [
        ("ddp, synchronised", None),
        ("member by member, synchronised", None),
        ("member by member, prefix", "bn2"),
        ("member by member in ddp", None),
        ("members over ranks, folded", None),
        ("members over ranks, sequential", None),
    ],
)
def test_two_processes_are_one(
    found: list[dict[str, Any]], scenario: str, layers: str | None
) -> None:
    expected = one_process(layers)
    for rank in found:
        got = rank[scenario]
        torch.testing.assert_close(got["loss"], expected["loss"])
        assert (
            got["gradients"].keys() == {n for n, _ in ranks.ensemble().named_parameters()} or layers
        )
        close(got["gradients"], expected["gradients"])
        close(got["buffers"], expected["buffers"])


@pytest.mark.case("T8")
def test_without_synchronisation_each_rank_has_its_own_statistics(
    found: list[dict[str, Any]],
) -> None:
    ens = ranks.ensemble()
    losses = []
    for half in (slice(0, 4), slice(4, 8)):
        x, y = (t[half] for t in ranks.batch())
        losses.append(ranks.loss_function()(ens(x), y, ens))
    torch.stack(losses).mean().backward()
    expected = ranks.state(ens, torch.stack(losses).mean())
    for rank in found:
        torch.testing.assert_close(rank["ddp"]["loss"], expected["loss"])
        close(rank["ddp"]["gradients"], expected["gradients"])
    means = [rank["ddp"]["buffers"]["network.bn1.running_mean"] for rank in found]
    assert not torch.allclose(*means)


def test_accumulated_batches_are_one_batch(found: list[dict[str, Any]]) -> None:
    expected = one_process(frozen=True)
    for rank in found:
        torch.testing.assert_close(rank["accumulated"]["loss"], expected["loss"])
        close(rank["accumulated"]["gradients"], expected["gradients"])


def test_a_killed_rank_ends_the_job_which_resumes_to_the_same_weights(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    killed.mkdir()
    mp.spawn(ranks.train, args=(str(whole), 0, None), nprocs=2)
    with pytest.raises((ProcessExitedException, ProcessRaisedException)):
        mp.spawn(ranks.train, args=(str(killed), 0, 2), nprocs=2)
    assert torch.load(killed / "state.pt", weights_only=True)["step"] == 2
    mp.spawn(ranks.train, args=(str(killed), 1, None), nprocs=2)
    ours, theirs = (torch.load(f / "state.pt", weights_only=True) for f in (killed, whole))
    assert ours["step"] == theirs["step"] == ranks.STEPS
    for name, value in theirs["ensemble"].items():
        assert torch.equal(ours["ensemble"][name], value), name


def test_lightning_ddp_trains_all_ranks_alike(tmp_path: Path) -> None:
    pytest.importorskip("lightning")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(ranks.lightning, args=(str(tmp_path), port), nprocs=2)
    first, second = (torch.load(tmp_path / f"fit{r}.pt", weights_only=True) for r in range(2))
    assert first["changed"] > 0
    for name, value in first["parameters"].items():
        assert torch.equal(value, second["parameters"][name]), name


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    """A process group of this process."""
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/alone", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_members_that_do_not_divide_are_refused(alone: None) -> None:
    ens = ranks.ensemble()
    with own_members(ens) as own:
        assert own == range(4)
    for member_ranks in (0, 3):
        with (
            pytest.raises(InputError, match=f"member_ranks is {member_ranks}"),
            own_members(ens, member_ranks),
        ):
            pass


def test_statistics_of_other_members_are_not_mixed_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sigmanens.distributed.dist.get_world_size", lambda group: 2)
    monkeypatch.setattr("sigmanens.distributed.dist.get_rank", lambda group: 1)
    with (
        pytest.raises(InputError, match="'bn1' was a SyncBatchNorm"),
        own_members(ranks.ensemble(synchronised=True)),
    ):
        pass
    with own_members(ranks.ensemble()) as own:
        assert own == range(2, 4)
    with own_members(ranks.ensemble(synchronised=True), member_ranks=1) as own:
        assert own == range(4)


def test_buckets_hold_every_parameter_once_and_one_dtype_each() -> None:
    tensors = [torch.zeros(n, dtype=d) for n, d in ((3, torch.float32), (5, torch.float32))]
    tensors += [torch.zeros(2, dtype=torch.float64), torch.zeros(9)]
    buckets = list(_buckets(tensors, 12))
    assert [[len(t) for t in b] for b in buckets] == [[3], [5], [2], [9]]
    assert [len(b) for b in _buckets(tensors[:2], 13)] == [2]
    assert list(_buckets([], 12)) == []
