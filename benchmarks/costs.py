"""What members cost besides passes: norms, penalty, conversion, checkpoint."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import sigmanens as sn
from benchmarks.measure import interleaved
from benchmarks.subjects import Subject
from sigmanens.ensemble.inputs import call_arguments
from sigmanens.ensemble.prediction import logits_of

__all__ = ["overheads", "storage"]


def overheads(
    subject: Subject, members: int, batch: int, runs: int, seconds: float
) -> dict[str, Any]:
    """Shares of a forward and backward pass that σNorms and the penalty take.

    "norms": a pass of one member over a pass of the base, less 1, heads shared. "penalty": forward
    and backward of the penalty over a pass of M members.
    """
    torch.manual_seed(0)
    base = subject.make().train()
    single = sn.convert(base, 1, head="shared").train()
    ensemble = sn.convert(base, members, schedule="folded").train()
    diversity = sn.Diversity(tau=0.1, weight=1e-4)
    x, y = subject.inputs(batch), subject.labels(batch)
    args, kwargs = call_arguments(x)

    def pass_of(network: Any, target: Tensor) -> None:
        network.zero_grad()
        logits = logits_of(network(*args, **kwargs))
        F.cross_entropy(logits.flatten(0, logits.dim() - 2), target).backward()

    functions = {
        "base": lambda: pass_of(base, y),
        "one member": lambda: pass_of(single, y),
        "members": lambda: pass_of(ensemble, y.repeat(members)),
        "penalty": lambda: diversity(ensemble).backward(),
    }
    timings = interleaved(functions, "base", runs=runs, seconds=seconds)
    norms, penalty, whole = (timings[n].ratio for n in ("one member", "penalty", "members"))
    assert norms is not None
    assert penalty is not None
    assert whole is not None
    return {"batch": batch, "norms": norms - 1, "penalty": penalty / whole}


def storage(subject: Subject, members: int) -> dict[str, Any]:
    """Seconds of a conversion, and bytes of the base's weights and of the members' checkpoint."""
    base = subject.make()
    start = time.process_time()
    ensemble = sn.convert(base, members)
    seconds = time.process_time() - start
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "checkpoint"
        ensemble.save_pretrained(target)
        size = sum(f.stat().st_size for f in target.iterdir())
    weights = sum(t.numel() * t.element_size() for t in base.state_dict().values())
    return {
        "conversion_seconds": seconds,
        "checkpoint_bytes": size,
        "base_bytes": weights,
        "base_parameters": sum(p.numel() for p in base.parameters()),
        "parameters": sum(p.numel() for p in ensemble.parameters()),
    }
