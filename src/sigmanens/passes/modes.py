"""Training and evaluation mode of a module that several threads call.

The mode is state of the module. :func:`evaluating` switches to evaluation and back, and
:func:`training` marks a call in training mode. While one thread evaluates a module that was in
training mode, others that evaluate join it, and one that trains waits, and the other way round.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from weakref import WeakKeyDictionary

import torch
from torch import nn


class _Modes:
    """Who uses a module in which mode."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.evaluating = 0
        self.training = 0
        self.waiting = 0  # calls in training mode that wait for their turn
        self.restored: list[nn.Module] = []  # modules to be put back into training mode


_lock = threading.Lock()
_modes: WeakKeyDictionary[nn.Module, _Modes] = WeakKeyDictionary()
# The modules that this call evaluates or trains already.
_mine: ContextVar[tuple[_Modes, ...]] = ContextVar("sigmanens_modes", default=())


def _of(module: nn.Module) -> _Modes:
    with _lock:
        return _modes.setdefault(module, _Modes())


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients; every submodule gets back the mode it had."""
    modes = _of(module)
    mine = _mine.get()
    nested = modes in mine
    with modes.changed:
        # Where nobody evaluates yet, a call in training mode that waits goes first.
        while not nested and (modes.training or (modes.waiting and not modes.evaluating)):
            modes.changed.wait()
        found = [m for m in module.modules() if m.training]
        if found:
            modes.restored += found
            module.eval()
        modes.evaluating += 1
    token = _mine.set((*mine, modes))
    try:
        with torch.no_grad():
            yield
    finally:
        _mine.reset(token)
        with modes.changed:
            modes.evaluating -= 1
            outermost = modes.evaluating == 0
            # Within a call in training mode the mode found is restored at once.
            back = modes.restored if outermost else found if nested else []
            for m in back:
                m.training = True
            if outermost:
                modes.restored = []
                modes.changed.notify_all()


@contextmanager
def training(module: nn.Module) -> Iterator[None]:
    """A call in training mode: the mode does not change before it has ended."""
    modes = _of(module)
    mine = _mine.get()
    if modes in mine:
        yield
        return
    with modes.changed:
        modes.waiting += 1
        try:
            while modes.restored:
                modes.changed.wait()
        finally:
            modes.waiting -= 1
        held = module.training
        modes.training += held
        if not held and not modes.waiting:
            modes.changed.notify_all()
    token = _mine.set((*mine, modes)) if held else None
    try:
        yield
    finally:
        if token is not None:
            _mine.reset(token)
            with modes.changed:
                modes.training -= 1
                modes.changed.notify_all()
