"""How much of each device's memory may be used, and how much of that is free.

The allocator itself keeps the limit, for only then does out-of-memory arise at the limit.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from managed_exec import sim
from managed_exec.devices import AcceleratorDevice, CpuDevice, Device, DeviceMemory
from managed_exec.memory.policy import MemoryPolicy

_NO_LIMIT = (0, 0)  # of a device that is new, until a pool comes with it


class Limits:
    """The devices that may be used, and the limit of each."""

    def __init__(self) -> None:
        self.policy = MemoryPolicy()
        self._lock = threading.RLock()  # guards the three below; a leaf, and reentrant, as the collector may spill
        # Bytes that may be used and bytes there are; in the order in which pools came with the devices.
        self._limits: dict[torch.device, tuple[int, int]] = {}
        self._withdrawn: set[torch.device] = set()  # those found broken, until a pool comes with them again
        self._simulator = sim.configuration()  # what the entries of simulated devices are about

    def add(self, devices: list[torch.device]) -> None:
        """Allow the use of *devices*, and have their allocators keep the limit.

        Raises:
            ValueError: the allocator of such a device keeps no limit.
        """
        with self._lock:
            self._forget_former_simulator()
            self._withdrawn.difference_update(devices)
            for device in devices:
                total = AcceleratorDevice(device).memory().total_bytes
                if device not in self._limits or total != self._limits[device][0]:  # or its capacity was set
                    limit = min(self.policy.limit_bytes(total), total)
                    if limit < total:
                        _set_limit(device, limit, total)
                    self._limits[device] = limit, total

    def lift(self) -> None:
        """Have the allocators keep no limit any more."""
        with self._lock:
            self._forget_former_simulator()
            for device, (limit, total) in self._limits.items():
                if limit < total:
                    _lift_limit(device, limit, total)
            self._limits.clear()

    def withdraw(self, device: torch.device) -> None:
        """Send nothing to *device* any more, which broke."""
        with self._lock:
            self._forget_former_simulator()
            self._withdrawn.add(device)

    def peers(self, device: torch.device) -> list[torch.device]:
        """Return the other devices of the same kind that there are and that work."""
        with self._lock:
            self._forget_former_simulator()
            there = [peer for peer in self._limits if peer.type == device.type and peer.index != device.index]
            return [peer for peer in there if peer not in self._withdrawn]

    def total_bytes(self, device: torch.device) -> int:
        """Return what may be used of *device*, free or not."""
        if device.type == "cpu":
            return CpuDevice().memory().total_bytes
        total: int = torch.get_device_module(device).mem_get_info(device.index)[1]
        return self._limit_bytes(device, total)

    def memory(self, device: torch.device) -> DeviceMemory:
        """Read the memory of *device*; its total and what is free are counted up to the limit."""
        if device.type == "cpu":
            return CpuDevice().memory()
        memory = AcceleratorDevice(device).memory()
        limit = self._limit_bytes(device, memory.total_bytes)
        if limit >= memory.total_bytes:
            return memory
        return DeviceMemory(
            max(0, min(memory.free_bytes, limit - memory.allocated_bytes)), limit, memory.allocated_bytes
        )

    def _limit_bytes(self, device: torch.device, total_bytes: int) -> int:
        """Return how much of *total_bytes*, which *device* has now, may be used."""
        with self._lock:
            self._forget_former_simulator()
            limit, limited_bytes = self._limits.get(device, (total_bytes, total_bytes))
        return min(limit, total_bytes) if limit < limited_bytes else total_bytes

    def _forget_former_simulator(self) -> None:
        """Lift what was said of simulated devices before the simulator was enabled anew, or disabled; forget those that
        there are no more. The lock is held.
        """
        now = sim.configuration()
        if now is not self._simulator:  # each call of sim.enable makes another, also of equal values
            self._simulator = now
            n_devices = 0 if now is None else now.devices
            self._limits = {
                device: limit if device.type != "sim" else _NO_LIMIT
                for device, limit in self._limits.items()
                if device.type != "sim" or device.index < n_devices
            }
            self._withdrawn = {device for device in self._withdrawn if device.type != "sim"}


def capacity_bytes(devices: Sequence[Device], limits: Limits | None, position: int) -> int:
    """Return what tasks may reserve of the device at *position*; *limits* is None where nothing is managed."""
    device = devices[position]
    return device.memory().total_bytes if limits is None else limits.total_bytes(device.torch_device)


def _set_limit(device: torch.device, limit_bytes: int, total_bytes: int) -> None:
    if device.type == "sim":
        sim.set_capacity(device.index, limit_bytes)
    else:
        _set_fraction(device, limit_bytes / total_bytes)


def _lift_limit(device: torch.device, limit_bytes: int, total_bytes: int) -> None:
    if device.type != "sim":
        _set_fraction(device, 1.0)
    elif AcceleratorDevice(device).memory().total_bytes == limit_bytes:  # else its capacity was set since
        sim.set_capacity(device.index, total_bytes)


def _set_fraction(device: torch.device, fraction: float) -> None:
    set_fraction = getattr(torch.get_device_module(device), "set_per_process_memory_fraction", None)
    if set_fraction is None:
        raise ValueError(f"limit: the allocator of {device} keeps no limit; leave it out")
    set_fraction(fraction, device)
