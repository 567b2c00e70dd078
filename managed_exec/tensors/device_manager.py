"""``device_manager``: which device has room for a tensor, and how to get tensors there.

The object has no state of its own; the bookings of what is on its way are made on first use (see ``memory.room``).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar, cast

import torch

from managed_exec.devices.current import current_device, resolve_cuda
from managed_exec.devices.discovery import available_devices
from managed_exec.memory.room import rooms, tensor_bytes
from managed_exec.tensors.managed import ManagedTensor, manage
from managed_exec.tensors.module import ManagedModule
from managed_exec.tensors.results import iter_tensors

T = TypeVar("T")


class DeviceManager:
    """The machine's devices, as a place for tensors. Safe from several threads."""

    __slots__ = ()

    @property
    def devices(self) -> tuple[torch.device, ...]:
        """Every accelerator device; the CPU alone where there is none, and in a task that runs on the CPU."""
        return available_devices() if current_device().type != "cpu" else (current_device(),)

    def find_device(self, nbytes: int, disperse: bool = False) -> torch.device:
        """Return a device with room for *nbytes*.

        Args:
            nbytes: how many bytes will be allocated there.
            disperse: False: the current device (in a task, the task's) while it has room, counting what could be
                spilled, else the one with the most; True: the device with the most bytes free, so that tensors spread
                over all devices.

        Raises:
            TypeError, ValueError: *nbytes* is not a number of bytes.
            DeviceMemoryError: no device is as large as that.
        """
        if isinstance(nbytes, bool) or not isinstance(nbytes, int):
            raise TypeError(f"nbytes: expected a number of bytes, got {nbytes!r}")
        if nbytes < 0:
            raise ValueError(f"nbytes: expected 0 or more bytes, got {nbytes}")
        return rooms().find(nbytes, disperse)

    def send(self, tensors: T, device: int | str | torch.device | None = None) -> T:
        """Return *tensors* on one device, managed, in the same structure.

        Args:
            tensors: a tensor, a module, or lists, tuples and mappings of these. Anything else in them stays what it is.
                Tensors are sent by ``to()``, so that gradients flow back; modules become managed and move in place.
            device: None for the one that ``find_device`` finds for all of them together.

        Raises:
            DeviceMemoryError: they fit no device.
        """
        if device is None:
            target = self.find_device(sum(tensor_bytes(tensor) for tensor in iter_tensors(tensors)))
        else:
            target = resolve_cuda(device)
        return cast("T", _send(tensors, target, {}))

    def __repr__(self) -> str:
        return "device_manager"


def _send(value: Any, device: torch.device, sent: dict[int, Any]) -> Any:
    """Return *value* on *device*; *sent* has, by its id, what was sent already."""
    if id(value) in sent:
        return sent[id(value)]
    if isinstance(value, torch.Tensor):
        sent[id(value)] = _handle(value).to(device)
    elif isinstance(value, torch.nn.Module):
        sent[id(value)] = ManagedModule.from_module(value).to(device)
    elif isinstance(value, tuple):
        elements = [_send(element, device, sent) for element in value]
        # A named tuple takes its fields one by one; torch's own and plain ones take a sequence.
        return type(value)(*elements) if hasattr(value, "_fields") else type(value)(elements)
    elif isinstance(value, (list, Mapping)):
        sent[id(value)] = filled = copy.copy(value)
        for key, element in value.items() if isinstance(value, Mapping) else enumerate(value):
            filled[key] = _send(element, device, sent)  # type: ignore[index]  # a mapping that cannot be written to
    else:
        return value
    return sent[id(value)]


def _handle(tensor: torch.Tensor) -> ManagedTensor:
    """Return a managed tensor of the same memory that is part of the graph of *tensor*."""
    if tensor.requires_grad and not isinstance(tensor, ManagedTensor):
        return tensor.as_subclass(ManagedTensor)
    return manage(tensor)


device_manager = DeviceManager()
