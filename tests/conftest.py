"""What every test runs under: no network, one thread, a fixed seed, third-party hubs offline."""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Read once, when the libraries are imported: so before anything that may import them.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"

import pytest
import torch
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]

settings.register_profile("local", deadline=None)
settings.register_profile("continuous", deadline=None, derandomize=True)
settings.load_profile("continuous" if os.environ.get("CI") else "local")


class NetworkBlocked(RuntimeError):
    """A test tried to reach something other than this machine."""


def _is_local(host: object) -> bool:
    if host in (None, "", "localhost", socket.gethostname()):
        return True
    try:
        return ipaddress.ip_address(str(host).partition("%")[0]).is_loopback
    except ValueError:
        return False


@pytest.fixture(autouse=True)
def network_attempts(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Make connections and name look-ups beyond loopback raise, and fail the test even if the
    code under test swallowed that. A test that means to try empties this list afterwards.
    """
    attempts: list[str] = []

    def refuse(what: str) -> None:
        attempts.append(what)
        raise NetworkBlocked(f"tests may not use the network: {what}")

    def guarded(name: str) -> Any:
        original = getattr(socket.socket, name)

        def method(self: socket.socket, *args: Any) -> Any:
            # sendto(data, [flags,] address); connect(address) and connect_ex(address)
            internet = self.family in (socket.AF_INET, socket.AF_INET6)
            if internet and not _is_local(args[-1][0]):
                refuse(f"socket.{name} to {args[-1]}")
            return original(self, *args)

        return method

    resolve = socket.getaddrinfo

    def getaddrinfo(host: Any, *args: Any, **kwargs: Any) -> Any:
        name = host.decode() if isinstance(host, bytes) else host
        if not _is_local(name):
            refuse(f"look-up of {name}")
        return resolve(host, *args, **kwargs)

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, guarded(name))
    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    yield attempts
    assert not attempts, f"the test tried to use the network: {attempts}"


def pytest_sessionstart() -> None:
    torch.set_num_threads(1)  # before fixtures of a module, too: sums depend on it in the last bit
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as a shell starts what is in the back
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _same_start() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of real data and weights that lies beside the project; not part of it."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip(f"no folder of real data at {folder}")
    return folder
