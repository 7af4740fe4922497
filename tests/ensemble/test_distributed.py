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

import sigmanens as sn
from sigmanens.ensemble.distributed import _buckets, own_members
from sigmanens.errors import InputError

pytestmark = pytest.mark.skipif(
    not (is_available() and is_gloo_available()), reason="this PyTorch comes without gloo"
)


def close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        if name.endswith(("mean", "var", "tracked")):  # one set of statistics may stand for all
            expected = expected.expand_as(ours[name])
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


@pytest.fixture(scope="module")
def trained() -> tuple[Tensor, sn.SigmaEnsemble]:
    """Losses of some steps on all rows in this process, and the ensemble they end with."""
    ens = ranks.ensemble()
    optimizer = torch.optim.SGD(sn.param_groups(ens, lr=0.01), momentum=0.9)
    losses = []
    for step in range(ranks.STEPS):
        x, y = ranks.batch(step)
        optimizer.zero_grad()
        losses.append(ranks.loss_function()(ens(x), y, ens))
        losses[-1].backward()
        optimizer.step()
    return torch.stack(losses).detach(), ens


@pytest.mark.parametrize("schedule", ["folded", "sequential"])
@pytest.mark.parametrize("kind", ["sharded", "sharded by block"])
def test_sharded_parameters_train_as_in_one_process(
    found: list[dict[str, Any]],
    trained: tuple[Tensor, sn.SigmaEnsemble],
    kind: str,
    schedule: str,
    tmp_path: Path,
) -> None:
    losses, expected = trained
    x, _ = ranks.batch()
    for rank in found:
        got = rank[f"{kind}, {schedule}"]
        torch.testing.assert_close(got["losses"], losses)
        torch.testing.assert_close(got["probs"], expected.predict(x).probs)
        torch.testing.assert_close(
            got["cosine"], torch.tensor(sn.diversity.cosine(expected)), rtol=0, atol=1e-5
        )
        assert not got["prefix"]
        assert "must run the same members" in got["refused"][0]
        assert "get_model_state_dict" in got["refused"][1]
    state = found[0][f"{kind}, {schedule}"]["state"]
    close(state, expected.state_dict())
    # The gathered state is that of an ensemble in one process, which is saved and loaded as usual.
    ens = ranks.ensemble()
    ens.load_state_dict(state)
    ens.save_pretrained(tmp_path)
    again = sn.load(tmp_path, base=ranks.base())
    torch.testing.assert_close(again.predict(x).probs, expected.predict(x).probs)


def test_sharded_ranks_have_statistics_of_their_own_until_they_are_averaged(
    found: list[dict[str, Any]],
) -> None:
    ensembles = [ranks.ensemble() for _ in range(2)]  # one a rank, with the same parameters
    optimizers = [torch.optim.SGD(sn.param_groups(ens, lr=0.01), momentum=0.9) for ens in ensembles]
    for step in range(ranks.STEPS):
        x, y = ranks.batch(step)
        for ens, half in zip(ensembles, (slice(0, 4), slice(4, 8)), strict=True):
            ens.zero_grad()
            ranks.loss_function()(ens(x[half]), y[half], ens).backward()
        for p, q in zip(*(ens.parameters() for ens in ensembles), strict=True):
            p.grad = (p.grad + q.grad) / 2
            q.grad = p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    first, second = (dict(ens.named_buffers()) for ens in ensembles)
    assert not torch.allclose(*(b["network.bn1.running_mean"] for b in (first, second)))
    means = {n: (b + second[n]).div(2).to(b.dtype) for n, b in first.items()}
    expected = dict(ensembles[0].named_parameters()) | means
    state = found[0]["sharded, own statistics"]["state"]
    close(state, {n: expected[n].detach() for n in state})
    assert state.keys() == expected.keys()


def test_accumulated_batches_are_one_batch(found: list[dict[str, Any]]) -> None:
    expected = one_process(frozen=True)
    for rank in found:
        torch.testing.assert_close(rank["accumulated"]["loss"], expected["loss"])
        close(rank["accumulated"]["gradients"], expected["gradients"])


@pytest.mark.slow
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


@pytest.mark.slow
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
    monkeypatch.setattr("sigmanens.ensemble.distributed.dist.get_world_size", lambda group: 2)
    monkeypatch.setattr("sigmanens.ensemble.distributed.dist.get_rank", lambda group: 1)
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
