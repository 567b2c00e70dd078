"""One call of an operator, as the memory manager runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch._C import _DisableTorchDispatch

from managed_exec.errors import DeviceMemoryError
from managed_exec.memory.record import Record
from managed_exec.memory.relief import NoRoom
from managed_exec.memory.table import RecordTable
from managed_exec.tensors.colocation import tensors_of
from managed_exec.tensors.schema import written_arguments

T = TypeVar("T")


class OperatorCall:
    """One call of an operator, as the memory manager runs it: as often as needed, until there is room.

    Args:
        records: of the operands.
        writes: whether the operator writes to any of them.
        adopt: makes what the operator returns managed.
    """

    __slots__ = ("adopt", "args", "func", "kwargs", "records", "writes")

    def __init__(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        records: Sequence[Record],
        writes: bool,
        adopt: Callable[[Any], Any],
    ) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.records = records
        self.writes = writes
        self.adopt = adopt

    def __call__(self) -> Any:
        with _DisableTorchDispatch():
            result = self.func(*self.args, **self.kwargs)
        return self.adopt(result)

    def written(self) -> list[Record]:
        if not self.writes:
            return []
        found = []
        for tensor in written_tensors(self.func, self.args, self.kwargs):
            record = getattr(tensor, "_record", None)
            if record is not None:
                found.append(record)
        return found

    def device(self) -> torch.device:
        """Where the kernel allocates: the device it is told, else that of its first operand."""
        wanted = self.kwargs.get("device")
        if wanted is not None:
            return torch.device(wanted)
        return self.records[0].device if self.records else tensors_of(self.args)[0].device


def written_tensors(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors that the operator writes to."""
    names = written_arguments(func)
    if not names:
        return []
    return tensors_of(
        [value for i, value in enumerate(args) if i in names] + [v for name, v in kwargs.items() if name in names]
    )


def same_view(tensor: torch.Tensor, copied: torch.Tensor) -> torch.Tensor:
    """Return *copied*, the bytes of the storage of *tensor*, as *tensor* sees them."""
    with _DisableTorchDispatch():
        view = torch.empty(0, dtype=tensor.dtype, device=copied.device)
        view.set_(copied.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        view = torch._neg_view(view) if tensor.is_neg() else view
        return torch._conj(view) if tensor.is_conj() else view


def or_no_room(call: Callable[[], T], device: torch.device, table: RecordTable) -> T | NoRoom:
    """Return what *call* returns, all of it with its records, or that it has found no room on *device*."""
    table.take_off(())
    try:
        return call()
    except DeviceMemoryError:
        raise
    except torch.OutOfMemoryError as error:
        return NoRoom.of(error, device)
    finally:
        table.land()
