"""The device context of pools that manage memory: what a task creates on its device is managed.

Function level of managed tensors inside a task, for the calls that have no managed operand yet: their kernels are seen
to at the dispatch level while the call lasts. Calls that stay on the CPU are let through.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch._C import _len_torch_function_stack

from managed_exec.context import DeviceContext
from managed_exec.devices import Device
from managed_exec.devices import current as current_devices
from managed_exec.errors import DeviceMemoryError
from managed_exec.inheritance import SubmitterStreams
from managed_exec.memory import owner as ownership
from managed_exec.memory.manager import MemoryManager
from managed_exec.memory.owner import Owner, staying
from managed_exec.memory.relief import ElsewhereError, NoRoom
from managed_exec.tensors.adoption import AdoptingMode
from managed_exec.tensors.backward import BACKWARD_CALLS
from managed_exec.tensors.colocation import tensors_of
from managed_exec.tensors.kernel import or_no_room
from managed_exec.tensors.managed import SET_DATA, ManagedTensor
from managed_exec.tensors.writes import was_written, write_count

_COMPATIBLE = torch._has_compatible_shallow_copy_type
_TRANSFERS: frozenset[Any] = frozenset({torch.Tensor.to, torch.Tensor.cuda})


class ManagedContext(DeviceContext):
    """Bind the calling thread to one of *devices*, and have *manager* manage what its tasks create there."""

    def __init__(self, devices: Sequence[Device], manager: MemoryManager) -> None:
        super().__init__(devices)
        self._manager = manager
        self._adopting = AdoptingMode(manager)
        self._owner: Owner | None = None  # between enter and leave
        self._flights = manager.table.flights  # this thread's

    def enter(self, position: int, task_id: int, submitter: SubmitterStreams | None) -> None:
        owner = self._owner = ownership.thread.owner = Owner(
            f"task {task_id}", self._bindings[position][0], self._rebind
        )
        self._manager.table.running.add(owner)
        self._flights.future = self.future
        super().enter(position, task_id, submitter)

    def leave(self) -> None:
        self._flights.future = None  # what is left to do is not the task's, and must be done
        try:
            super().leave()
        finally:
            ownership.thread.owner = None
            if self._owner is not None:
                self._owner.finished = True  # what it leaves behind is spilled first
                self._owner.on_migration = None
                self._manager.table.running.discard(self._owner)
                self.last_owner = self._owner
                self._owner = None

    def _needs_mode(self, device: torch.device) -> bool:
        return True

    def _rebind(self, target: torch.device) -> None:
        """Let the task follow a call of its own to *target*, if that takes one more task."""
        position = next((i for i, (device, _) in enumerate(self._bindings) if device == target), self.position)
        if position == self.position or self.future is None or not self.move_booking(self.future, position):
            return
        before = self.stream
        self.position, self.device = position, target
        current_devices.thread.device = target
        if self._owner is not None:
            self._owner.device = target
        self._enter_stream(position, None)
        if before is not None and self.stream is not None:
            self.stream.wait_stream(before)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is _COMPATIBLE and not isinstance(args[0], ManagedTensor) and isinstance(args[1], ManagedTensor):
            return False  # or a module takes over the memory of a managed parameter, and not the handle
        if func == SET_DATA and isinstance(args[1], ManagedTensor) and not isinstance(args[0], ManagedTensor):
            # The plain tensor is given the memory, which has to be there, and stays there from now on.
            with args[1].hold() as plain:
                return func(args[0], plain)
        if func in BACKWARD_CALLS:
            call = partial(super().__torch_function__, func, types, args, kwargs)
            with staying():  # its kernels run below autograd, where nobody can make a call elsewhere
                # Kernels whose operands are all too small to be managed have to find room like all others.
                return self._adopting.call(call)
        if types and any(issubclass(kind, ManagedTensor) for kind in types):
            # The managed operands' own function level sees to the rest.
            return super().__torch_function__(func, types, args, kwargs)
        operands = tensors_of(args)
        on_device = any(not tensor.is_cpu for tensor in operands)
        wanted = kwargs.get("device") if kwargs else None
        if not (on_device or wanted is not None or func in _TRANSFERS or _len_torch_function_stack()):
            return func(*args, **kwargs) if kwargs else func(*args)
        call = partial(super().__torch_function__, func, types, args, kwargs)
        if on_device or self._is_numbered(wanted):  # it is made where it is, or where the program has said
            if ownership.thread.stays:
                return self._call(call, operands, wanted)
            with staying():
                return self._call(call, operands, wanted)
        try:
            return self._call(call, operands, wanted)
        except ElsewhereError as error:
            target = error.target
        self._manager.relief.note_migration(target)  # the task follows, if it can
        home = self.device
        self.device = current_devices.thread.device = target
        try:
            with staying():
                return self._call(call, operands, wanted)
        finally:
            self.device = current_devices.thread.device = home

    def _call(self, call: Callable[[], Any], operands: Sequence[torch.Tensor], wanted: Any) -> Any:
        """Make a call with what it creates adopted; again if it finds no room in a place no dispatch level sees."""
        before = write_count()
        try:
            return self._adopting.call(call)
        except DeviceMemoryError:
            raise
        except torch.OutOfMemoryError as error:
            if any(was_written(tensor, before) for tensor in operands):
                raise
            resolved = self._resolve(wanted)
            device = next((tensor.device for tensor in operands if not tensor.is_cpu), self.device)
            no_room = NoRoom.of(error, resolved if self._is_numbered(resolved) else device)
        again = partial(or_no_room, partial(self._adopting.call, call), no_room.device, self._manager.table)
        return self._manager.relief.rerun(again, no_room)

    def _is_numbered(self, wanted: Any) -> bool:
        """Return whether a call that says *wanted* says by number where it allocates."""
        resolved = self._resolve(wanted)
        return isinstance(resolved, torch.device) and resolved.index is not None and resolved is not self.device
