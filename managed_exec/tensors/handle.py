"""``Handle``: a tensor that the memory manager knows, and the dispatch level of managed tensors, below autograd.

Before a kernel runs, the storages of its operands are made resident and marked in use; a kernel that finds no room is
run again once room was made; what it returns is managed. As the Python dispatch key sits on the tensor itself, this
holds in the backward pass and for callers in C++ too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._C import (
    DisableTorchFunction,
    DisableTorchFunctionSubclass,
    _DisableTorchDispatch,
    _is_torch_function_enabled,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)

from managed_exec.memory.manager import MemoryManager, manager
from managed_exec.memory.owner import Owner
from managed_exec.memory.record import Record
from managed_exec.tensors.colocation import DeviceMismatchError, meeting_device, tensors_of
from managed_exec.tensors.kernel import OperatorCall, same_view, written_tensors
from managed_exec.tensors.schema import Facts, facts
from managed_exec.tensors.writes import note_writes

_make_subclass = torch.Tensor._make_subclass
_STRIDED = torch.strided

# The two operators that read one tensor wherever it is, and by which values travel between devices.
_TO_COPY: Any = torch.ops.aten._to_copy.default
_COPY: Any = torch.ops.aten.copy_.default
_DETACH: Any = torch.ops.aten.detach.default


def is_foreign(kind: type) -> bool:
    """Return whether tensors of class *kind* have a dispatch of their own, which is not that of managed tensors."""
    return not issubclass(kind, Handle) and kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]


class Handle(torch.Tensor):
    """A tensor whose storage may have a record; see ``ManagedTensor``, its only subclass."""

    _record: Record | None = None
    _alive: object | None = None
    # Whether it was found to have no record. One that has none and was not looked at yet is to be looked at:
    # as_subclass makes handles without asking anyone.
    _has_none = False

    @property
    def record(self) -> Record | None:
        """The record of the storage; None if it is too small to be managed, or has no memory of its own."""
        return self._record if self._record is not None or self._has_none else self._look_up(manager())

    def take_over(self) -> None:
        """Be a handle of the storage that the tensor has been given, and no longer of the one it had."""
        old = self._record  # kept meanwhile: it may be the same one, with its bytes in a tier
        self._record = self._alive = None
        self._look_up(manager())
        del old

    def _look_up(self, keeper: MemoryManager) -> Record | None:
        with DisableTorchFunctionSubclass(), _DisableTorchDispatch():
            self._register(self, keeper, None)
        return self._record

    def _register(self, tensor: torch.Tensor, keeper: MemoryManager, owner: Owner | None) -> None:
        """Become one of the handles of the storage of *tensor*."""
        # Sparse tensors are made of tensors of their own; those of a fake or meta device have no memory.
        if tensor.layout is _STRIDED and not tensor.is_meta:
            record = keeper.table.record_of(tensor.untyped_storage(), owner)
            if record is not None:
                self._record = record
                self._alive = record.alive
                return
        self._has_none = True

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own annotation lacks func
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if len(types) > 1 and any(map(is_foreign, types)):
            return NotImplemented  # theirs knows what to do with what is inside
        # Below autograd there is no function level, whoever has switched it on above (see tensors.backward).
        if _len_torch_function_stack() or _is_torch_function_enabled():
            with DisableTorchFunction():
                return cls.dispatch(func, args, kwargs or {})
        return cls.dispatch(func, args, kwargs or {})

    @classmethod
    def dispatch(
        cls,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        adopts: Callable[[torch.Tensor], bool] | None = None,
    ) -> Any:
        """Run the kernel of *func* with its operands resident.

        Args:
            adopts: which of the tensors that it returns become managed; None for all.
        """
        keeper = manager()
        if func is _TO_COPY or func is _COPY:
            args = _read_elsewhere(func, args, kwargs, keeper)
        records: list[Record] = []
        _add_records(args, records)
        if kwargs:
            _add_records(kwargs.values(), records)
        about = facts(func)
        try:
            if about.is_functional and not _len_torch_dispatch_stack():
                # The common case, in short; what cannot be done so changes nothing, and is left to the manager.
                keeper.table.take_off(records)
                try:
                    if keeper.are_ready(records):
                        with _DisableTorchDispatch():
                            result = func(*args, **kwargs)
                        return cls._wrap(result, keeper, records[0].owner if records else None, adopts, ())
                except torch.OutOfMemoryError:
                    pass
                finally:
                    keeper.table.land()
            return keeper.run(cls._call(func, args, kwargs, records, about, keeper, adopts))
        except (torch.OutOfMemoryError, torch.AcceleratorError):
            raise
        except RuntimeError as error:
            if "device" not in str(error).lower():
                raise  # every text of torch about operands of several devices has the word
            target = meeting_device(tensors_of((*args, *kwargs.values())), records, written_tensors(func, args, kwargs))
            if target is None:
                raise
            raise DeviceMismatchError(target, str(error)) from error

    @classmethod
    def _call(
        cls,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        records: list[Record],
        about: Facts,
        keeper: MemoryManager,
        adopts: Callable[[torch.Tensor], bool] | None,
    ) -> OperatorCall:
        """Return what the manager runs: the kernel, what it wrote to noted, what it returns managed."""
        owner = records[0].owner if records else None

        def adopt(result: Any) -> Any:
            written: Sequence[torch.Tensor] = ()
            if about.writes:
                written = written_tensors(func, args, kwargs)
                note_writes(written)
                _note_written(func, written)
            # A mode that has declined managed operands and is on while the kernel gets plain ones knows its results.
            return result if _len_torch_dispatch_stack() else cls._wrap(result, keeper, owner, adopts, written)

        if func is _DETACH and not _len_torch_dispatch_stack():
            records = []  # it looks at no byte, so nothing has to be there; but what is not adopted must stay
        return OperatorCall(func, args, kwargs, records, about, adopt)

    @classmethod
    def adopted(
        cls,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        result: Any,
        adopts: Callable[[torch.Tensor], bool],
    ) -> Any:
        """Return what the kernel of *func* has returned with those tensors managed that *adopts* says so of."""
        return cls._wrap(result, manager(), None, adopts, written_tensors(func, args, kwargs))

    @classmethod
    def _wrap(
        cls,
        result: Any,
        keeper: MemoryManager,
        owner: Owner | None,
        adopts: Callable[[torch.Tensor], bool] | None,
        written: Sequence[torch.Tensor],
    ) -> Any:
        """Return *result* with the tensors in it managed, but for *written*, which the kernel was given."""
        if type(result) is torch.Tensor:
            if result.is_nested or (adopts is not None and not adopts(result)):
                return result  # torch ends the process over nested tensors of a class with a dispatch of its own
            if written and any(result is tensor for tensor in written):
                return result
            managed = _make_subclass(cls, result)
            managed._register(result, keeper, owner)
            return managed
        if isinstance(result, (list, tuple)):
            return type(result)([cls._wrap(element, keeper, owner, adopts, written) for element in result])
        return result


def _add_records(values: Iterable[Any], records: list[Record]) -> None:
    """Add to *records* those of the handles among a call's arguments that are not in it yet."""
    for value in values:
        if isinstance(value, Handle):
            record = value._record or value.record
            if record is not None and record not in records:
                records.append(record)
        elif isinstance(value, (list, tuple)):
            _add_records(value, records)


def _read_elsewhere(
    func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], keeper: MemoryManager
) -> tuple[Any, ...]:
    """Return the arguments of a copy, a spilled source that goes elsewhere replaced by its copy in a tier."""
    if func is _COPY:
        index, device = 1, args[0].device
    else:
        index, device = 0, kwargs.get("device")
    source = args[index]
    if device is None or not isinstance(source, Handle):
        return args
    record = source.record
    copied = None if record is None else keeper.copy_elsewhere(record, device)
    if copied is None:
        return args
    return (*args[:index], same_view(source, copied), *args[index + 1 :])


def _note_written(func: Any, written: Sequence[torch.Tensor]) -> None:
    """Note what a kernel, which still uses *written*, may have changed besides the bytes: the storage, or its size.

    Torch counts, above this level, a new version of what an operator writes to if the operator returns it. Those that
    return nothing (the lists of ``_foreach_`` and ``_fused_``) count in their kernels, which this level keeps from it.
    """
    if not func._schema.returns:
        torch.autograd.graph.increment_version(written)
    for tensor in written:
        if isinstance(tensor, Handle):
            if func.overloadpacket is torch.ops.aten.set_:
                tensor.take_over()
            elif tensor._record is not None:
                tensor._record.note_size()
            else:
                tensor._look_up(manager())  # it may have grown
