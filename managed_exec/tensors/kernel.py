"""One call of an operator, as the memory manager runs it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch._C import _DisableTorchDispatch, _len_torch_dispatch_stack

from managed_exec.errors import DeviceMemoryError
from managed_exec.memory.record import Record
from managed_exec.memory.relief import NoRoom
from managed_exec.memory.table import RecordTable
from managed_exec.tensors.colocation import tensors_of
from managed_exec.tensors.plain import plain_alias
from managed_exec.tensors.schema import Facts, written_arguments
from managed_exec.tensors.writes import call_has_written

T = TypeVar("T")


class OperatorCall:
    """One call of an operator, as the memory manager runs it: as often as needed, until there is room.

    Args:
        records: of the operands.
        about: the operator.
        adopt: makes what the operator returns managed.
    """

    __slots__ = ("adopt", "args", "func", "kwargs", "may_run_python", "records", "writes")

    def __init__(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        records: Sequence[Record],
        about: Facts,
        adopt: Callable[[Any], Any],
    ) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.records = records
        self.writes, self.may_run_python, _ = about
        self.adopt = adopt

    def __call__(self) -> Any:
        if self.may_run_python or _len_torch_dispatch_stack():
            # It may use other managed tensors, or a mode that traces has declined managed ones: the dispatch level
            # stays on, and the operands are plain.
            plain: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
            is_traced = _traced()
            args = tuple(_plain(value, plain, is_traced) for value in self.args)
            kwargs = {name: _plain(value, plain, is_traced) for name, value in self.kwargs.items()}
            if plain:
                result = self.func(*args, **kwargs)
                result = _replaced(result, {id(alias): tensor for tensor, alias in plain.values()})
                del args, kwargs, plain
                return self.adopt(result)
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

    def may_leave(self) -> bool:
        """Return whether the call that this is part of can be made elsewhere: it writes to nothing, nor has it."""
        return not self.writes and not call_has_written()

    def device(self) -> torch.device:
        """Where the kernel allocates: the device it is told, else that of its first operand."""
        wanted = self.kwargs.get("device")
        if wanted is not None:
            device = torch.device(wanted)
            if device.index is None and device.type not in ("cpu", "meta"):
                return torch.device(device.type, torch.accelerator.current_device_index())
            return device
        return self.records[0].device if self.records else tensors_of(self.args)[0].device


def _traced() -> Callable[[torch.Tensor], bool]:
    """Return what says whether the tracer that is on (``make_fx``) knows a tensor as one of its values."""
    tracing = sys.modules.get("torch.fx.experimental.proxy_tensor")
    mode = None if tracing is None else tracing.get_proxy_mode()
    if tracing is None or mode is None:
        return lambda tensor: False
    return lambda tensor: bool(tracing.has_proxy_slot(tensor, mode.tracer))


def _plain(
    value: Any, plain: dict[int, tuple[torch.Tensor, torch.Tensor]], is_traced: Callable[[torch.Tensor], bool]
) -> Any:
    """Return *value* with plain aliases of its managed tensors, the same one for the same tensor."""
    if isinstance(value, (list, tuple)):
        return type(value)([_plain(element, plain, is_traced) for element in value])
    if not hasattr(value, "_record") or not isinstance(value, torch.Tensor) or is_traced(value):
        return value
    if id(value) not in plain:
        plain[id(value)] = value, plain_alias(value)
    return plain[id(value)][1]


def _replaced(result: Any, originals: dict[int, torch.Tensor]) -> Any:
    """Return *result* with the operands of the call in place of their aliases."""
    if isinstance(result, (list, tuple)):
        return type(result)([_replaced(element, originals) for element in result])
    return originals.get(id(result), result)


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
    has_run = True
    try:
        return call()
    except DeviceMemoryError:
        raise
    except torch.OutOfMemoryError as error:
        has_run = False
        return NoRoom.of(error, device)
    finally:
        table.land(has_run=has_run)
