"""One protocol for every kind of device.

Covers what the layers above need of a device: how much memory it has, what is current on the calling thread, streams,
synchronising and the allocator's cache. Does not cover which devices there are (see ``discovery``).

Every method that speaks of "current" means the calling thread alone. Nothing here holds a lock.
"""

from __future__ import annotations

import functools
import os
from typing import NamedTuple, Protocol

import torch
from torch._C import _accelerator_getDeviceStats, _accelerator_getStream, _accelerator_isAllocatorInitialized

from managed_exec.devices import nvml


class DeviceMemory(NamedTuple):
    """Memory of one device, in bytes.

    ``free_bytes`` is what an allocation can still get: what the driver has left, other processes counted, plus the
    blocks that this process's allocator holds unused. ``allocated_bytes`` is what this process's tensors hold.
    """

    free_bytes: int
    total_bytes: int
    allocated_bytes: int


class Device(Protocol):
    """What the package asks of a device, whatever its kind."""

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def is_accelerator(self) -> bool:
        """Whether work on the device runs asynchronously, in streams, beside the thread that asked for it."""

    @property
    def read_leaves_no_trace(self) -> bool:
        """Whether ``memory`` is cheap on a device the process has not used: no context is created for the answer."""

    def memory(self) -> DeviceMemory:
        """Read the memory now."""

    def utilization(self) -> float | None:
        """Return the share of the last sampling period in which the device was busy, 0 to 1; None when unknown."""

    def new_stream(self) -> torch.Stream | None:
        """Return a stream of the device other than its default one; None where the device has no streams."""

    def current_stream(self) -> torch.Stream | None:
        """Return the calling thread's current stream on this device; None where the device has no streams."""

    def synchronize(self) -> None:
        """Wait for all work on the device, in every stream."""

    def empty_cache(self) -> None:
        """Give the allocator's unused blocks back, on every device of this kind (torch offers no finer call)."""


def _allocator_bytes(index: int) -> tuple[int, int]:
    """Return what tensors hold of the device, and what the allocator does. torch's own calls flatten all statistics."""
    if not _accelerator_isAllocatorInitialized():
        return 0, 0
    statistics = _accelerator_getDeviceStats(index)
    return statistics["allocated_bytes"]["all"]["current"], statistics["reserved_bytes"]["all"]["current"]


def current_stream(device: torch.device) -> torch.Stream:
    """Return the calling thread's current stream on the accelerator *device*, which has an index."""
    return _accelerator_getStream(device.index)  # what torch.accelerator.current_stream calls, after a microsecond


class AcceleratorDevice:
    """A device of the current ``torch.accelerator``: CUDA, ROCm, XPU, the simulator."""

    is_accelerator = True

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self._index: int = torch_device.index

    @functools.cached_property
    def _nvml_uuid(self) -> str | None:
        # Asked for late: it initialises CUDA, after which a process can no longer fork workers that use it.
        return nvml.cuda_uuid(self._index) if self.torch_device.type == "cuda" else None

    @property
    def read_leaves_no_trace(self) -> bool:
        return self.torch_device.type == "sim" or self._nvml_uuid is not None

    def memory(self) -> DeviceMemory:
        allocated, reserved = _allocator_bytes(self._index)
        cached = reserved - allocated
        reading = None if self._nvml_uuid is None else nvml.memory(self._nvml_uuid)
        free, total = reading or torch.get_device_module(self.torch_device).mem_get_info(self._index)
        return DeviceMemory(free + cached, total, allocated)

    def utilization(self) -> float | None:
        return None if self._nvml_uuid is None else nvml.utilization(self._nvml_uuid)

    def new_stream(self) -> torch.Stream:
        return torch.Stream(self.torch_device)

    def current_stream(self) -> torch.Stream:
        return _accelerator_getStream(self._index)

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self._index)

    def empty_cache(self) -> None:
        torch.accelerator.memory.empty_cache()

    def __repr__(self) -> str:
        return f"AcceleratorDevice({str(self.torch_device)!r})"


class CpuDevice:
    """The machine's processors and main memory, used where there is no accelerator."""

    is_accelerator = False
    read_leaves_no_trace = True
    torch_device = torch.device("cpu")

    def memory(self) -> DeviceMemory:
        """Read main memory. ``allocated_bytes`` is the process's resident memory: torch does not count CPU tensors."""
        page_bytes = os.sysconf("SC_PAGE_SIZE")
        total = os.sysconf("SC_PHYS_PAGES") * page_bytes
        return DeviceMemory(_available_bytes(total), total, _resident_bytes(page_bytes))

    def utilization(self) -> float | None:
        return None

    def new_stream(self) -> None:
        return None

    def current_stream(self) -> None:
        return None

    def synchronize(self) -> None:
        """Return at once: work on the CPU is done when the call that asked for it returns."""

    def empty_cache(self) -> None:
        """Return at once: torch keeps no cache of CPU memory."""

    def __repr__(self) -> str:
        return "CpuDevice()"


def _available_bytes(total_bytes: int) -> int:
    """Return what can be had without swapping: Linux's estimate, elsewhere all memory (there is no portable one)."""
    try:
        with open("/proc/meminfo", encoding="ascii") as meminfo:
            for line in meminfo:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        return total_bytes
    return total_bytes


def _resident_bytes(page_bytes: int) -> int:
    """Return the process's resident memory; 0 where the system has no /proc."""
    try:
        with open("/proc/self/statm", encoding="ascii") as statm:
            return int(statm.read().split()[1]) * page_bytes
    except OSError:
        return 0
