"""Which device has room: by what is free there, what could be spilled, and what is on its way.

A choice and the allocation it is made for are two steps. What was chosen for a tensor that is still on its way is
booked meanwhile, so that of several threads each sees the others' choices.
"""

from __future__ import annotations

import functools
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from managed_exec.devices.current import current_device
from managed_exec.devices.discovery import available_devices
from managed_exec.errors import DeviceMemoryError
from managed_exec.memory.manager import manager
from managed_exec.sizes import format_bytes


class Rooms:
    """Finds devices with room, one choice at a time."""

    def __init__(self) -> None:
        # Guards the fields below, and is held for a choice: two threads never choose by the same state. The table's
        # lock is taken under it. Reentrant: the collector may run a destructor that moves a tensor.
        self._lock = threading.RLock()
        self._booked: Counter[torch.device] = Counter()  # bytes on their way there
        self._choices = 0  # made so far; among equals each is the first in its turn

    def find(self, n_bytes: int, disperse: bool) -> torch.device:
        """Return a device for *n_bytes*.

        Args:
            n_bytes: what will be allocated there.
            disperse: False: the thread's current device while it has room, counting what could be spilled; True: the
                device with the most bytes free, so that a program's tensors spread over all of them.

        Raises:
            DeviceMemoryError: no device is as large as that.
        """
        with self._lock:
            return self._choose(n_bytes, disperse)

    @contextmanager
    def booked(self, n_bytes: int) -> Iterator[torch.device]:
        """Yield the device with the most bytes free; *n_bytes* of them are taken by others' choices until the end."""
        with self._lock:
            device = self._choose(n_bytes, disperse=True)
            self._booked[device] += n_bytes
        try:
            yield device
        finally:
            with self._lock:
                self._booked[device] -= n_bytes

    def _choose(self, n_bytes: int, disperse: bool) -> torch.device:
        """Choose. The lock is held."""
        current = current_device()
        movable = _movable_bytes()
        # The current one alone, if that will do: on CUDA to ask a device makes a context there.
        if not disperse and self._free(current) + movable[current] >= n_bytes:
            return current
        devices = available_devices() if current.type != "cpu" else (current,)
        first = self._choices % len(devices)
        self._choices += 1
        devices = devices[first:] + devices[:first]
        sizes = {device: manager().limits.memory(device).total_bytes for device in devices}
        if n_bytes > max(sizes.values()):
            there_is = ", ".join(f"{device} has {format_bytes(sizes[device])}" for device in sorted(devices, key=str))
            raise DeviceMemoryError(f"no device for {format_bytes(n_bytes)} ({n_bytes} bytes): {there_is}")
        free = {device: self._free(device) for device in devices if sizes[device] >= n_bytes}
        if disperse and max(free.values()) >= n_bytes:
            return max(free, key=lambda device: free[device])
        # Where even that is too little the allocation waits for other tasks, or says who holds what.
        return max(free, key=lambda device: free[device] + movable[device])

    def _free(self, device: torch.device) -> int:
        return manager().limits.memory(device).free_bytes - self._booked[device]


def _movable_bytes() -> Counter[torch.device]:
    """Return how many bytes could be spilled, by device."""
    movable: Counter[torch.device] = Counter()
    keeper = manager()
    if keeper.policy.spill:
        for record in keeper.table.movable():
            movable[record.device] += record.n_bytes
    return movable


def tensor_bytes(tensor: torch.Tensor) -> int:
    """Return the bytes of the elements of *tensor*, whatever its layout; 0 for one that is not initialised yet."""
    if torch.nn.parameter.is_lazy(tensor):
        return 0
    if tensor.layout is torch.strided:
        return tensor.numel() * tensor.element_size()
    if tensor.layout is torch.sparse_coo:
        parts = [tensor._indices(), tensor._values()]
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    else:
        return 0
    return sum(tensor_bytes(part) for part in parts)


@functools.cache
def rooms() -> Rooms:
    """Return the process's one, made on first use; ``rooms.cache_clear()`` forgets it."""
    return Rooms()
