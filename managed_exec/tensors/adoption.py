"""What a task creates on its device becomes managed, whoever the operands are.

Managed operands see to that by themselves; this is for the calls that have none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._C import (
    DisableTorchFunction,
    _len_torch_dispatch_stack,
    _pop_torch_dispatch_stack,
    _push_on_torch_dispatch_stack,
)
from torch.utils._python_dispatch import TorchDispatchMode

from managed_exec.errors import DeviceMemoryError
from managed_exec.memory.manager import MemoryManager
from managed_exec.tensors.handle import is_foreign
from managed_exec.tensors.managed import ManagedTensor
from managed_exec.tensors.schema import facts


class AdoptingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's __init_subclass__ is not annotated
    """Run every kernel as those of managed tensors are run: again once room was made, large results managed."""

    def __init__(self, manager: MemoryManager) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's is not annotated
        self._manager = manager

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Torch would wrap __torch_dispatch__ for its compiler, which the first kernel of a process would then import.
        return False

    def call(self, func: Callable[[], Any]) -> Any:
        """Call *func* with the mode on."""
        _push_on_torch_dispatch_stack(self)  # what entering the mode comes to, at a fifth of the price
        try:
            return func()
        finally:
            _pop_torch_dispatch_stack(None)

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with DisableTorchFunction():
            if _len_torch_dispatch_stack() or (types and any(map(is_foreign, types))):
                # Other modes, and classes with a dispatch of their own (fake tensors, wrappers), have their say first;
                # the managed operands among theirs see to themselves.
                return ManagedTensor.adopted(func, args, kwargs or {}, func(*args, **(kwargs or {})), self._adopts)
            if types or facts(func).writes:
                return ManagedTensor.dispatch(func, args, kwargs or {}, self._adopts)
            # The common case, small and plain, is worth a way of its own.
            table = self._manager.table
            table.take_off(())
            try:
                result = func(*args, **kwargs) if kwargs else func(*args)
                if type(result) is torch.Tensor and not self._adopts(result):
                    return result
                return ManagedTensor.adopted(func, args, kwargs or {}, result, self._adopts)
            except DeviceMemoryError:
                raise
            except torch.OutOfMemoryError:
                pass  # outside of this block, so that nothing of the failed attempt is held
            finally:
                table.land()
            return ManagedTensor.dispatch(func, args, kwargs or {}, self._adopts)

    def _adopts(self, tensor: torch.Tensor) -> bool:
        """Return whether *tensor*, new or a view, is on a device and worth a record, or of a storage that has one."""
        if tensor.layout is not torch.strided or tensor.is_nested:
            return False
        storage = tensor.untyped_storage()
        # Zeros that autograd has not written down have no memory, whatever their storage says.
        if storage.nbytes() >= self._manager.policy.smallest_bytes and not (tensor.is_cpu or tensor._is_zerotensor()):
            return True
        return self._manager.table.has_record(storage)  # which may be anywhere, for detaching needs no byte
