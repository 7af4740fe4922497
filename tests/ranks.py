"""What each of two processes does in the tests of torch.distributed; results go into files."""

from __future__ import annotations

import copy
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.networks import Pictures, apart, randomise
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import sigmanens as sn
from sigmanens.ensemble.distributed import average_gradients, average_statistics, own_members
from sigmanens.errors import SigmaNensError

MEMBERS, ROWS, STEPS = 4, 8, 3


def base() -> nn.Module:
    """The network that is converted."""
    torch.manual_seed(0)
    return randomise(Pictures(3))


def ensemble(synchronised: bool = False, layers: str | None = None) -> sn.SigmaEnsemble:
    """The same on every rank and in the test."""
    network = base()
    if synchronised:
        network = nn.SyncBatchNorm.convert_sync_batchnorm(network)
    generator = torch.Generator().manual_seed(1)
    return apart(sn.convert(network, MEMBERS, layers=layers, generator=generator)).train()


def batch(step: int = 0) -> tuple[Tensor, Tensor]:
    """All ranks' rows of a step."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(ROWS, 1, 8, 8, generator=generator)
    return x, torch.randint(3, (ROWS,), generator=generator)


def in_ddp(ens: sn.SigmaEnsemble) -> nn.Module:
    """Wrapped for these CPUs: DDP refuses SyncBatchNorm there, whose own kernels need a GPU."""
    with mock.patch.object(DistributedDataParallel, "_passing_sync_batchnorm_handle"):
        return DistributedDataParallel(ens)


def loss_function() -> sn.EnsembleLoss:
    return sn.EnsembleLoss(diversity=sn.Diversity(tau=0.5, weight=1e-2))


def state(ens: nn.Module, loss: Tensor) -> dict[str, Any]:
    """Loss, gradients and buffers."""
    ens = getattr(ens, "module", ens)
    return {
        "loss": loss.detach(),
        "gradients": {n: p.grad.clone() for n, p in ens.named_parameters() if p.grad is not None},
        "buffers": {n: b.clone() for n, b in ens.named_buffers()},
    }


def own_rows(step: int = 0) -> tuple[Tensor, Tensor]:
    """This rank's half of the rows."""
    half = slice(dist.get_rank() * ROWS // 2, (dist.get_rank() + 1) * ROWS // 2)
    x, y = batch(step)
    return x[half], y[half]


def mean(loss: Tensor) -> Tensor:
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


def folded_in_ddp(synchronised: bool) -> dict[str, Any]:
    ens = ensemble(synchronised)
    ddp = in_ddp(ens)
    x, y = own_rows()
    loss = loss_function()(ddp(x), y, ens)
    loss.backward()
    return state(ddp, mean(loss))


def member_by_member(layers: str | None, synchronised: bool) -> dict[str, Any]:
    ens = ensemble(synchronised, layers)
    x, y = own_rows()
    loss = ens.backward(x, y, loss_function())
    average_gradients(ens, bucket_bytes=1000)
    return state(ens, mean(loss))


def member_by_member_in_ddp() -> dict[str, Any]:
    ens = ensemble(True)
    ddp = in_ddp(ens)
    x, y = own_rows()
    with ddp.no_sync():
        loss = ens.backward(x, y, loss_function())
    average_gradients(ddp)
    return state(ddp, mean(loss))


def members_over_ranks(schedule: str) -> dict[str, Any]:
    ens = ensemble()
    ens.schedule = schedule
    x, y = batch()  # every rank sees all rows
    with own_members(ens) as own:
        assert list(own) == [2 * dist.get_rank(), 2 * dist.get_rank() + 1]
        if schedule == "sequential":
            loss = ens.backward(x, y, loss_function())
        else:
            loss = loss_function()(ens(x), y, ens)
            loss.backward()
    average_gradients(ens)
    average_statistics(ens, member_ranks=2)
    return state(ens, mean(loss))


def accumulated() -> dict[str, Any]:
    """Two batches of two rows a rank, one exchange."""
    ens = ensemble()
    ens.freeze_statistics()
    x, y = own_rows()
    losses = [ens.backward(x[s], y[s], loss_function(), scale=0.5) for s in (slice(2), slice(2, 4))]
    average_gradients(ens)
    return state(ens, mean(torch.stack(losses).mean()))


def sharded(schedule: str, blocks: bool, synchronised: bool) -> dict[str, Any]:
    """Parameters divided over the ranks (FSDP): losses of some steps, and what they end with."""
    mesh = init_device_mesh("cpu", (2,))
    ens = ensemble(synchronised)
    if blocks:
        for module in (ens.network.conv1, ens.network.conv2):
            fully_shard(module, mesh=mesh)
    fully_shard(ens.network, mesh=mesh)
    optimizer = torch.optim.SGD(sn.param_groups(ens, lr=0.01), momentum=0.9)
    loss_fn, losses = loss_function(), []
    for step in range(STEPS):
        x, y = own_rows(step)
        optimizer.zero_grad()
        if schedule == "sequential":
            loss = ens.backward(x, y, loss_fn)
        else:
            loss = loss_fn(ens(x), y, ens)
            loss.backward()
        optimizer.step()
        losses.append(mean(loss))
    refused = []
    for attempt in (lambda: own_members(ens).__enter__(), lambda: ens.save_pretrained("unused")):
        try:
            attempt()
        except SigmaNensError as e:
            refused.append(str(e))
    cosine = torch.tensor(sn.diversity.cosine(ens))
    average_statistics(ens)
    probs = ens.predict(batch()[0]).probs
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)  # whole on rank 0
    state = get_model_state_dict(ens, options=options)
    return {
        "losses": torch.stack(losses), "probs": probs, "cosine": cosine, "state": state,
        "refused": refused, "prefix": ens._runner._prefix is not None,
    }  # fmt: skip


SCENARIOS: dict[str, Any] = {
    "ddp, synchronised": lambda: folded_in_ddp(True),
    "ddp": lambda: folded_in_ddp(False),
    "member by member, synchronised": lambda: member_by_member(None, True),
    "member by member, prefix": lambda: member_by_member("bn2", True),
    "member by member in ddp": member_by_member_in_ddp,
    "members over ranks, folded": lambda: members_over_ranks("folded"),
    "members over ranks, sequential": lambda: members_over_ranks("sequential"),
    "accumulated": accumulated,
    "sharded, folded": lambda: sharded("folded", False, True),
    "sharded, sequential": lambda: sharded("sequential", False, True),
    "sharded by block, folded": lambda: sharded("folded", True, True),
    "sharded by block, sequential": lambda: sharded("sequential", True, True),
    "sharded, own statistics": lambda: sharded("sequential", True, False),
}


def run_scenarios(rank: int, folder: str) -> None:
    """All scenarios in one process group; each rank writes what it got."""
    _join(rank, folder, "scenarios")
    found = {name: scenario() for name, scenario in SCENARIOS.items()}
    torch.save(found, Path(folder) / f"rank{rank}.pt")
    dist.destroy_process_group()


def train(rank: int, folder: str, attempt: int, dies_at: int | None) -> None:
    """Train for ``STEPS``, keeping the state after each; resume where a state is found."""
    _join(rank, folder, f"attempt{attempt}")
    ens, kept = ensemble(), Path(folder) / "state.pt"
    optimizer = torch.optim.SGD(sn.param_groups(ens, lr=0.01), momentum=0.9)
    first = 0
    if kept.exists():
        saved = torch.load(kept, weights_only=True)
        ens.load_state_dict(saved["ensemble"])
        optimizer.load_state_dict(saved["optimizer"])
        first = saved["step"]
    for step in range(first, STEPS):
        if step == dies_at and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        x, y = own_rows(step)
        optimizer.zero_grad()
        ens.backward(x, y, loss_function())
        average_gradients(ens)
        optimizer.step()
        average_statistics(ens)
        if rank == 0:
            part = kept.with_suffix(".part")
            saved = {"ensemble": ens.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(saved | {"step": step + 1}, part)
            os.replace(part, kept)
    dist.destroy_process_group()


class Batches:
    """A loader; of a list of batches Lightning would make several loaders."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def lightning(rank: int, folder: str, port: int) -> None:
    """Two steps of Lightning's DDP strategy; each rank writes its parameters."""
    import lightning as L

    from sigmanens.integrations.lightning import EnsembleModule

    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "test", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    torch.set_num_threads(1)
    ens = ensemble()
    before = copy.deepcopy(ens.state_dict())
    module = EnsembleModule(ens, loss_function(), lr=0.01, lr_schedule="constant")
    rows = slice(rank * 4, rank * 4 + 4)
    data = Batches([tuple(t[rows] for t in batch(step)) for step in range(2)])
    trainer = L.Trainer(
        max_epochs=1, accelerator="cpu", strategy="ddp", devices=2, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(module, train_dataloaders=data)
    changed = sum(not torch.equal(v, before[k]) for k, v in ens.state_dict().items())
    parameters = {n: p.detach() for n, p in ens.named_parameters()}
    torch.save({"parameters": parameters, "changed": changed}, Path(folder) / f"fit{rank}.pt")


def _join(rank: int, folder: str, name: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/{name}", rank=rank, world_size=2)
