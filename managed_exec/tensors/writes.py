"""What the kernels of a thread have written to of late, so that a call can be made again or taken back.

On the way of every call, so it is one number to read; who wrote what is looked at only when a call has failed. Storages
are known by their address: one that was freed and given to another only makes an answer more careful.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable

import torch
from torch._C import DisableTorchFunctionSubclass

_REMEMBERED = 1024


class _Thread(threading.local):
    """Of the calling thread: how many tensors its kernels have written to, and the storages of the last ones."""

    def __init__(self) -> None:
        self.count = 0
        self.count_at_call = 0  # when the last call at the function level began
        self.addresses: deque[int] = deque(maxlen=_REMEMBERED)


_thread = _Thread()


def write_count() -> int:
    """Return how many tensors the calling thread's kernels have written to."""
    return _thread.count


def begin_call() -> int:
    """Note that a call at the function level begins; return ``write_count()``."""
    count = _thread.count_at_call = _thread.count
    return count


def call_has_written() -> bool:
    """Return whether kernels have written to anything since the last call at the function level began."""
    return _thread.count != _thread.count_at_call


def note_writes(tensors: Iterable[torch.Tensor]) -> None:
    """Note that a kernel has written to *tensors*."""
    for tensor in tensors:
        _thread.count += 1
        _thread.addresses.append(_address(tensor))


def was_written(tensor: torch.Tensor, since: int) -> bool:
    """Return whether the thread's kernels may have written to the storage of *tensor* since that ``write_count``."""
    n_writes = _thread.count - since
    if n_writes == 0:
        return False
    if n_writes > _REMEMBERED:
        return True
    address = _address(tensor)
    return any(_thread.addresses[-i] == address for i in range(1, n_writes + 1))


def _address(tensor: torch.Tensor) -> int:
    if tensor.layout is not torch.strided:
        return id(tensor)  # made of several storages; written to as a whole
    with DisableTorchFunctionSubclass():
        address: int = tensor.untyped_storage()._cdata
    return address
