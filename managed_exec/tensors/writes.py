"""What the kernels of a thread have written to since a call began, so that the call can be made again or taken back."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch._C import DisableTorchFunctionSubclass


class Writes:
    """The tensors that kernels have written to, in order."""

    __slots__ = ("tensors",)

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []

    def touched(self, tensor: torch.Tensor) -> bool:
        """Return whether anything was written to the storage of *tensor*."""
        if not self.tensors or tensor.layout is not torch.strided:
            return any(tensor is written for written in self.tensors)
        with DisableTorchFunctionSubclass():
            address = tensor.untyped_storage()._cdata
            return any(
                written.layout is torch.strided and written.untyped_storage()._cdata == address
                for written in self.tensors
            )


class _Thread(threading.local):
    """The logs that are open in the calling thread, outermost first. Set and unset by ``logged_writes``."""

    logs: tuple[Writes, ...] = ()


_thread = _Thread()


def note_writes(tensors: Iterable[torch.Tensor]) -> None:
    """Note that a kernel has written to *tensors*."""
    for log in _thread.logs:
        log.tensors.extend(tensors)


@contextmanager
def logged_writes() -> Iterator[Writes]:
    """Yield a log of what the calling thread's kernels write to in the block."""
    log = Writes()
    before = _thread.logs
    _thread.logs = (*before, log)
    try:
        yield log
    finally:
        _thread.logs = before
