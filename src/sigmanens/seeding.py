"""The random state of devices: put back after a block, and seeded without touching others.

``torch.manual_seed`` seeds every device, and ``torch.random.fork_rng`` over all of them makes a
context on each, which a job with one process per device cannot afford.

All threads draw from the same generators of torch. So only one at a time is in a block that seeds
them; the others wait. Threads that draw outside such a block are not held up.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

_TURN = threading.RLock()


def device_of(network: nn.Module) -> torch.device:
    """Where the first parameter of a network lies; the CPU without one."""
    return next((p.device for p in network.parameters()), torch.device("cpu"))


@contextmanager
def own_random_state(*devices: torch.device) -> Iterator[None]:
    """Put the random state of the CPU and of these devices, of one type, back after the block.

    The thread is alone in such blocks: another waits until this one has left.
    """
    cards = [device for device in devices if device.type not in ("cpu", "meta")]
    kind = cards[0].type if cards else "cuda"
    with _TURN, torch.random.fork_rng([card.index or 0 for card in cards], device_type=kind):
        yield


def seed_device(device: torch.device, seed: int) -> None:
    """Seed the CPU and one device as ``torch.manual_seed`` does, and no other device."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
    elif device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


def generator_states(device: torch.device) -> list[Tensor]:
    """The states of the generators of the CPU and of one device: equal if nothing was drawn."""
    states = [torch.get_rng_state()]
    if device.type not in ("cpu", "meta"):
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def seeded(generator: torch.Generator | None) -> int:
    """A seed drawn from the generator, or from torch's default one."""
    device = "cpu" if generator is None else generator.device
    return int(torch.randint(2**62, (), generator=generator, device=device))


@contextmanager
def own_seed(seed: int) -> Iterator[None]:
    """Draw on the CPU from a seed for a while; torch's generator is put back afterwards."""
    with own_random_state():
        torch.default_generator.manual_seed(seed)
        yield
