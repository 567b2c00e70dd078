"""The device context of pools that manage memory: what a task creates on its device is managed.

Function level of managed tensors inside a task, for the calls that have no managed operand yet. Such a call finds no
room like any kernel; it is made again once room was made. What it returns becomes managed if it is large enough.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from managed_exec.context import DeviceContext
from managed_exec.devices import Device
from managed_exec.inheritance import SubmitterStreams
from managed_exec.memory import owner as ownership
from managed_exec.memory.manager import MemoryManager
from managed_exec.memory.manager import manager as process_manager
from managed_exec.memory.owner import Owner, staying
from managed_exec.memory.relief import NoRoom
from managed_exec.tensors.backward import BACKWARD_CALLS
from managed_exec.tensors.colocation import tensors_of
from managed_exec.tensors.kernel import or_no_room
from managed_exec.tensors.managed import ManagedTensor, manage

_COMPATIBLE = torch._has_compatible_shallow_copy_type


class ManagedContext(DeviceContext):
    """Bind the calling thread to one of *devices*, and have *manager* manage what its tasks create there."""

    def __init__(self, devices: Sequence[Device], manager: MemoryManager) -> None:
        super().__init__(devices)
        self._manager = manager  # the process's; another pool may have had it made anew since the last task
        self._owner: Owner | None = None  # between enter and leave

    def enter(self, position: int, task_id: int, submitter: SubmitterStreams | None) -> None:
        self._manager = process_manager()
        self._owner = ownership.thread.owner = Owner(f"task {task_id}")
        super().enter(position, task_id, submitter)

    def leave(self) -> None:
        try:
            super().leave()
        finally:
            ownership.thread.owner = None
            if self._owner is not None:
                self._owner.finished = True  # what it leaves behind is spilled first
                self._owner = None

    def _needs_mode(self, device: torch.device) -> bool:
        return True

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is _COMPATIBLE and any(isinstance(arg, ManagedTensor) for arg in args):
            return False  # or a module takes over the memory of a managed parameter, and not the handle
        if func in BACKWARD_CALLS:
            with staying():
                return super().__torch_function__(func, types, args, kwargs)
        if types and any(issubclass(kind, ManagedTensor) for kind in types):
            # The managed operands' own function level sees to the rest.
            return super().__torch_function__(func, types, args, kwargs)
        call = functools.partial(self._call, func, types, args, kwargs)
        device = self._allocates_on(args, kwargs or {})
        table = self._manager.table
        result = or_no_room(call, device, table)
        if isinstance(result, NoRoom):
            result = self._manager.relief.rerun(lambda: or_no_room(call, device, table), result)
        return result

    def _call(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any] | None,
    ) -> Any:
        """Make the call and return its result, managed."""
        return self._adopt(super().__torch_function__(func, types, args, kwargs), func, args)

    def _allocates_on(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.device:
        """Return the device that a call allocates on: the one it is told, else its operands', else the task's."""
        wanted = self._resolve(kwargs.get("device"))
        if isinstance(wanted, torch.device) and wanted.type == self.device.type and wanted.index is not None:
            return wanted
        operands = (tensor.device for tensor in tensors_of(args))
        return next((device for device in operands if device.type == self.device.type), self.device)

    def _adopt(self, result: Any, func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Return *result* with the new device tensors in it managed."""
        if type(result) is torch.Tensor:
            is_new = (
                result.device.type == self.device.type
                and result.grad_fn is None
                and func.__name__ != "__get__"  # an attribute: whoever reads it again expects the same object
                and not any(result is arg for arg in args)
                and result.layout is torch.strided
                and result.untyped_storage().nbytes() >= self._manager.policy.min_bytes
            )
            return manage(result) if is_new else result
        if isinstance(result, (list, tuple)) and any(type(element) is torch.Tensor for element in result):
            adopted = [self._adopt(element, func, args) for element in result]
            # A named tuple takes its fields one by one; torch's own and plain ones take a sequence.
            return type(result)(*adopted) if hasattr(result, "_fields") else type(result)(adopted)
        return result
