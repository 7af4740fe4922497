"""Plan a training of M members on many accelerators: memory, traffic, efficiency. A cost model.

`python -m benchmarks.plan --page docs/scale.md` writes the table for ViT-L/16 into the page.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Job", "Layout", "layouts", "table"]

GIB = 2**30
START, STOP = "<!-- plan -->\n", "<!-- /plan -->"


@dataclass(frozen=True)
class Job:
    """A transformer, its ensemble and the machine; defaults: ViT-L/16 at 224 pixels.

    Attributes:
        parameters: of the shared network.
        tokens: per sample.
        width, depth: of the transformer.
        members: M.
        ranks: accelerators.
        batch: samples per step, all ranks together; every member sees each.
        peak: floating-point operations per second of one accelerator.
        utilisation: share of them that a step reaches (an assumption).
        bandwidth: bytes per second that one accelerator sends to others while all do.
        memory: bytes of one accelerator.
        optimizer_bytes: per parameter: weight, gradient and two moments in float32.
    """

    parameters: float = 304e6
    tokens: int = 197
    width: int = 1024
    depth: int = 24
    members: int = 16
    ranks: int = 64
    batch: int = 1024
    peak: float = 989e12
    utilisation: float = 0.4
    bandwidth: float = 50e9
    memory: float = 80 * GIB
    optimizer_bytes: int = 16

    def member_parameters(self) -> int:
        """Scale logits of all members: two norms a block, and the last."""
        return self.members * (2 * self.depth + 1) * self.width


@dataclass(frozen=True)
class Layout:
    """D data ranks × J member ranks, members one at a time on each rank.

    Attributes:
        data_ranks: D.
        member_ranks: J.
        rows: samples of a rank's pass.
        passes: members of a rank.
        state_bytes: weights, gradients and moments on a rank.
        activation_bytes: of one member's pass.
        traffic_bytes: that a rank sends in a step.
        compute_seconds: of a step.
        exchange_seconds: of a step, none of it hidden behind computation.
    """

    data_ranks: int
    member_ranks: int
    rows: float
    passes: float
    state_bytes: float
    activation_bytes: float
    traffic_bytes: float
    compute_seconds: float
    exchange_seconds: float

    @property
    def efficiency(self) -> float:
        """Share of a step spent computing."""
        return self.compute_seconds / (self.compute_seconds + self.exchange_seconds)


def layouts(job: Job, sharded: bool = False) -> list[Layout]:
    """All ways of dividing the ranks that divide the members too.

    Args:
        job: what is trained on what.
        sharded: weights, gradients and moments divided over the ranks (FSDP), gathered for every
            member's forward and backward pass, instead of held by each (DDP).

    Activations are the 34 bytes per token, channel and layer of arXiv 2205.05198 (half precision,
    attention maps not kept); operations are 6 per parameter and token; a ring exchange sends twice
    the gradient's bytes (float32) less 1/ranks of it, a gather or a scatter once.
    """
    found = []
    j = 1
    while j <= job.ranks:
        if job.ranks % j == 0 and job.members % j == 0:
            found.append(_layout(job, job.ranks // j, j, sharded))
        j *= 2
    return found


def _layout(job: Job, data_ranks: int, member_ranks: int, sharded: bool) -> Layout:
    rows, passes = job.batch / data_ranks, job.members / member_ranks
    trained = job.parameters + job.member_parameters()
    state = trained * job.optimizer_bytes / (job.ranks if sharded else 1)
    share = (job.ranks - 1) / job.ranks
    # Gathered in half precision for each pass forward and backward; scattered in float32 once.
    traffic = share * trained * ((2 * 2 * passes + 4) if sharded else 2 * 4)
    return Layout(
        data_ranks=data_ranks,
        member_ranks=member_ranks,
        rows=rows,
        passes=passes,
        state_bytes=state,
        activation_bytes=34 * job.tokens * job.width * job.depth * rows,
        traffic_bytes=traffic,
        compute_seconds=rows
        * passes
        * 6
        * job.parameters
        * job.tokens
        / (job.peak * job.utilisation),
        exchange_seconds=traffic / job.bandwidth,
    )


def table(job: Job) -> str:
    """All layouts, as Markdown."""
    heads = (
        "D × J", "rows a pass", "passes a step", "state GiB", "activations GiB", "fits",
        "sent a step GiB", "step s", "efficiency",
    )  # fmt: skip
    lines = ["| state | " + " | ".join(heads) + " |", "|" + " --- |" * (len(heads) + 1)]
    for sharded in (False, True):
        for x in layouts(job, sharded):
            needed = x.state_bytes + x.activation_bytes
            cells = (
                "sharded" if sharded else "on every rank",
                f"{x.data_ranks} × {x.member_ranks}",
                f"{x.rows:g}",
                f"{x.passes:g}",
                f"{x.state_bytes / GIB:.1f}",
                f"{x.activation_bytes / GIB:.1f}",
                "yes" if needed <= 0.9 * job.memory else "no",
                f"{x.traffic_bytes / GIB:.1f}",
                f"{x.compute_seconds + x.exchange_seconds:.2f}",
                f"{x.efficiency:.0%}",
            )
            lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, or write it into a page between its marks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plan", description=__doc__)
    for name, kind in (("members", int), ("ranks", int), ("batch", int), ("utilisation", float)):
        parser.add_argument(f"--{name}", type=kind, default=getattr(Job, name))
    parser.add_argument("--page", type=Path)
    options = parser.parse_args(argv)
    job = Job(
        members=options.members, ranks=options.ranks, batch=options.batch,
        utilisation=options.utilisation,
    )  # fmt: skip
    if options.page is None:
        print(table(job))
        return 0
    text = options.page.read_text()
    before, rest = text.split(START)
    after = rest.split(STOP)[1]
    options.page.write_text(before + START + table(job) + STOP + after)
    return 0


if __name__ == "__main__":
    sys.exit(main())
