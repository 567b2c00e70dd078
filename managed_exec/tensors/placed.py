"""``to`` and ``cuda`` of managed tensors: what ``"cuda"`` means, outside a task too, and ``disperse``."""

from __future__ import annotations

from typing import Any

import torch

from managed_exec.devices.current import resolve_cuda, resolve_to
from managed_exec.memory.room import rooms, tensor_bytes


class PlacedTensor(torch.Tensor):
    """The base of ``ManagedTensor`` that knows the machine's devices. It has no state."""

    def to(self, *args: Any, **kwargs: Any) -> Any:
        """Convert or move as torch does; a bare ``"cuda"`` is the current device (see ``cuda``)."""
        args, kwargs = resolve_to(args, kwargs)
        return super().to(*args, **kwargs)

    def cuda(
        self,
        device: int | str | torch.device | None = None,
        non_blocking: bool = False,
        memory_format: torch.memory_format = torch.preserve_format,
        *,
        disperse: bool = False,
    ) -> Any:
        """Return the tensor on the current device, or on *device*; itself if it is there.

        Args:
            device: None for the task's device; outside a task, for the thread's current one. Where there is no
                accelerator this is the CPU, and the result a copy, as it is everywhere else.
            non_blocking: as in torch, like the next.
            memory_format: of the result.
            disperse: whether to choose the device with the most bytes free.

        Raises:
            ValueError: both a device and *disperse* are given.
        """
        if not disperse:
            target = resolve_cuda(device)
            is_copy = target.type == "cpu" and self.device.type == "cpu"
            return super().to(target, non_blocking=non_blocking, copy=is_copy, memory_format=memory_format)
        if device is not None:
            raise ValueError(f"cuda: expected a device or disperse=True, not both, got {device!r}")
        with rooms().booked(tensor_bytes(self)) as target:
            return self.cuda(target, non_blocking, memory_format)
