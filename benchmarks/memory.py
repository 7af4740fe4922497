"""Peak memory of two training steps, each in a process of its own.

Run as a module it is that process: `python -m benchmarks.memory SUBJECT CONTESTANT MEMBERS BATCH`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["peak_memory"]

STATUS = Path("/proc/self/status")


def peak_memory(subject: str, contestant: str, members: int, batch: int) -> dict[str, Any]:
    """Bytes of resident memory that network, optimizer and two steps add at their peak.

    Linux only, by the default allocator; elsewhere "bytes" is None.
    """
    row = {"subject": subject, "contestant": contestant, "members": members, "batch": batch}
    if not STATUS.exists():
        return row | {"bytes": None}
    # A heap that never shrinks, which is faster, would count what was freed long ago.
    environment = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"}
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", subject, contestant, str(members), str(batch)],
        capture_output=True,
        text=True,
        check=False,
        env=environment,
    )
    if done.returncode:
        raise RuntimeError(f"measuring the memory of {row} failed:\n{done.stderr}")
    return row | json.loads(done.stdout.splitlines()[-1])


def _field(name: str) -> int:
    """A line of the process's status, in bytes."""
    line = next(x for x in STATUS.read_text().splitlines() if x.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def _main(subject: str, contestant: str, members: str, batch: str) -> None:
    import torch

    from benchmarks.contestants import build
    from benchmarks.subjects import SUBJECTS

    torch.set_num_threads(1)
    found, size = SUBJECTS[subject], int(batch)
    # What libraries take on first use is not the network's.
    build("one network", found, 1).step(found.inputs(2), found.labels(2))
    before = _field("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # start the peak anew
    competitor = build(contestant, found, int(members))
    for _ in range(2):  # the first makes the optimizer's state
        competitor.step(found.inputs(size), found.labels(size))
    print(json.dumps({"bytes": _field("VmHWM") - before, "parameters": competitor.parameters}))


if __name__ == "__main__":
    _main(*sys.argv[1:])
