"""What the kernels of a thread have written to: how often, and, while somebody asks, which tensors."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


class _Thread(threading.local):
    """Of the calling thread. ``recorders`` are set and unset by ``recorded_writes``."""

    count = 0
    recorders: tuple[list[torch.Tensor], ...] = ()


_thread = _Thread()


def write_count() -> int:
    """Return how many kernels that write to an operand the calling thread has run."""
    return _thread.count


def note_writes(tensors: Iterable[torch.Tensor]) -> None:
    """Note that a kernel has written to *tensors*."""
    _thread.count += 1
    for recorder in _thread.recorders:
        recorder.extend(tensors)


@contextmanager
def recorded_writes() -> Iterator[list[torch.Tensor]]:
    """Yield a list that receives what the calling thread's kernels write to in the block."""
    recorder: list[torch.Tensor] = []
    before = _thread.recorders
    _thread.recorders = (*before, recorder)
    try:
        yield recorder
    finally:
        _thread.recorders = before
