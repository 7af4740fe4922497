"""How many members share a pass under ``schedule="auto"``: a stated model, the same on every run.

Folded members save calls, but a pass that falls out of a CPU's cache waits for memory. So a pass
takes as many members as keep its largest normalised activation within 8 MiB, at least one; on
other devices, where calls are what costs, all of them. The number depends on shapes and device
only, so that a seed fixes a training's numbers to the last bit, dropout included.
"""

from __future__ import annotations

import torch

from sigmanens.norms.kernels import is_eager

PASS_BYTES = 8 * 2**20
"""Bytes of the largest normalised activation up to which members are folded on a CPU."""


def members_per_pass(members: int, rows: int, row_bytes: int, device: torch.device) -> int:
    """Number of members in a pass: 1 to ``members``, each of which sees ``rows`` samples.

    ``row_bytes`` are those of the largest input of a norm, for one sample of one member.
    """
    if device.type != "cpu" or row_bytes * rows == 0:
        return members
    return max(1, min(members, PASS_BYTES // (row_bytes * rows)))


def runs_as_called() -> bool:
    """Whether a call may look at its numbers: no compiler, tracer, transform or CUDA graph.

    There all members are folded, and nothing is shared between passes.
    """
    capturing = torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()
    return is_eager() and not capturing


def in_process_group() -> bool:
    """Whether this is one process of several, which must run the same passes."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()
