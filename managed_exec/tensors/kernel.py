"""One call of an operator, as the memory manager runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
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
    """One call of an operator, as the memory manager runs it: as often as needed, until there is room."""

    __slots__ = ("args", "func", "kwargs", "records")

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], records: list[Record]) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.records = records

    def __call__(self) -> Any:
        with _DisableTorchDispatch():
            return self.func(*self.args, **self.kwargs)

    def written(self) -> list[Record]:
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


def or_no_room(call: Callable[[], T], device: torch.device, table: RecordTable) -> T | NoRoom:
    """Return what *call* returns, still in flight, or that it has found no room on *device*."""
    table.take_off()
    landed = False
    try:
        result = call()
        landed = True  # by the caller, once the result is registered
    except DeviceMemoryError:
        raise
    except torch.OutOfMemoryError as error:
        return NoRoom.of(error, device)
    finally:
        if not landed:
            table.land()
    return result
