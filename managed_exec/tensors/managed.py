"""``ManagedTensor``: a real tensor whose storage can leave its device and come back.

Dispatch level, below autograd: before a kernel runs, the storages of its operands are made resident and marked in use;
a kernel that finds no room is run again once room was made; what it returns is managed. As the Python dispatch key sits
on the tensor itself, this holds in the backward pass and for callers in C++ too.

Function level, above autograd: a call whose kernel refused operands of several devices is made again with the operands
moved by ``to()``; a call that hands out the memory makes the tensor immovable first.
"""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, SupportsIndex, TypeVar, cast

import torch
from torch._C import DisableTorchFunction, DisableTorchFunctionSubclass, _DisableTorchDispatch, _EnableTorchFunction

from managed_exec.errors import DeviceMemoryError, NotMovableError
from managed_exec.memory.manager import manager
from managed_exec.memory.owner import staying
from managed_exec.memory.record import Record
from managed_exec.memory.relief import ElsewhereError, NoRoom
from managed_exec.tensors.backward import BACKWARD_CALLS, run_backward
from managed_exec.tensors.colocation import Colocated, DeviceMismatchError, meeting_device, tensors_of
from managed_exec.tensors.handle import Handle
from managed_exec.tensors.kernel import or_no_room
from managed_exec.tensors.placed import PlacedTensor
from managed_exec.tensors.plain import plain_alias, plain_copy
from managed_exec.tensors.writes import begin_call, was_written

T = TypeVar("T")
_make_subclass = torch.Tensor._make_subclass

# Calls that hand out a pointer to the memory, or the storage itself. No schema tells, for they are not operators.
_EXPORTS: frozenset[Any] = frozenset(
    {
        torch.Tensor.data_ptr,
        torch.Tensor.__dlpack__,
        torch.Tensor.untyped_storage,
        torch.Tensor.storage,
        torch.Tensor._typed_storage,
        torch.Tensor.share_memory_,
        # Reads data_ptr() where this level is off already. (The getter of a property.)
        torch.Tensor.__cuda_array_interface__.__get__,
    }
)
SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_SPECIAL = _EXPORTS | BACKWARD_CALLS | {SET_DATA}  # looked up on the way of every call


class ManagedTensor(PlacedTensor, Handle):
    """A tensor whose memory is managed. ``manage(x)`` makes one; so does ``x.as_subclass(ManagedTensor)``."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        is_special = func in _SPECIAL
        if is_special:
            if func in BACKWARD_CALLS:
                with DisableTorchFunctionSubclass(), staying():
                    return run_backward(func, args, kwargs or {}, _EnableTorchFunction)
            if func in _EXPORTS:
                _export(args[0], func)
        before = begin_call()
        try:
            with DisableTorchFunctionSubclass():
                result = func(*args, **kwargs) if kwargs else func(*args)
        except RuntimeError as error:
            # The call is made again, if it has not changed its operands yet.
            tensors = tensors_of((*args, *kwargs.values()) if kwargs else args)
            remedy = _remedy(error, args, kwargs or {}, tensors)
            if remedy is None or any(was_written(tensor, before) for tensor in tensors):
                if isinstance(error, ElsewhereError):
                    raise DeviceMemoryError(str(error)) from None  # nobody further up could make the call elsewhere
                raise
        else:
            if is_special and func == SET_DATA and isinstance(args[0], ManagedTensor):
                args[0].take_over()
            return result
        try:
            return remedy(func)
        except ElsewhereError as error:
            text = str(error)
        raise DeviceMemoryError(text)  # once is enough

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]  # torch's is not readable
        plain = plain_copy(self, torch.device("cpu"))
        text = repr(plain).removeprefix("tensor(")[:-1]
        device = "" if self.device.type == "cpu" else f", device='{self.device}'"
        return f"ManagedTensor({text}{device})"

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec) if self.dim() == 0 else object.__format__(self, spec)

    def as_subclass(self, cls: Any) -> Any:
        """Return the tensor as one of class *cls*. One that knows nothing of records keeps the memory where it is."""
        if issubclass(cls, ManagedTensor):
            return super().as_subclass(cls)
        with self.hold(), DisableTorchFunctionSubclass(), _DisableTorchDispatch():
            return super().as_subclass(cls)

    def tolist(self) -> Any:
        return plain_copy(self, torch.device("cpu")).tolist()

    def numpy(self, *, force: bool = False) -> Any:
        """Return an array as torch does. Where it shares the memory, torch does not let that be freed any more."""
        if force and self.device.type != "cpu":
            return plain_copy(self, torch.device("cpu")).numpy()
        with self.hold() as plain:
            return plain.requires_grad_(self.requires_grad).numpy(force=force)

    def __reduce_ex__(self, protocol: SupportsIndex) -> Any:
        """Pickle as a plain tensor, so that a file can be read where this package is not installed.

        One whose device broke while it was spilled becomes a tensor of the CPU.
        """
        try:
            with self.hold() as plain:
                return self._reduced(plain, protocol)
        except torch.AcceleratorError:
            if self.residency == "device":
                raise
        return self._reduced(plain_copy(self, torch.device("cpu")), protocol)

    def _reduced(self, plain: torch.Tensor, protocol: SupportsIndex) -> Any:
        if isinstance(self, torch.nn.Parameter):
            return torch._utils._rebuild_parameter, (plain, self.requires_grad, OrderedDict())
        return plain.requires_grad_(self.requires_grad).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __deepcopy__(self, memo: dict[int, Any]) -> ManagedTensor:
        if id(self) in memo:
            return cast("ManagedTensor", memo[id(self)])
        if not self.is_leaf:
            raise RuntimeError(
                "only tensors created explicitly by the user (graph leaves) support the deepcopy protocol, "
                "as in torch; use detach() first"
            )
        with self.hold() as plain:
            copied: torch.Tensor = _with_room(lambda: _plain_deepcopy(plain, memo), self.device)
            copied.requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copied = torch.nn.Parameter(copied, self.requires_grad)
        if self.grad is not None:
            copied.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = copied
        return cast("ManagedTensor", copied)

    @property
    def is_registered(self) -> bool:
        """Whether the memory manager has a record of the storage: it may move."""
        return self._record is not None

    # -- residency --------------------------------------------------------------------------------------------------

    def spill(self, tier: str | None = None) -> ManagedTensor:
        """Move the storage, with all its views, to *tier* (None: the first with room).

        Args:
            tier: ``"peer"``, ``"host"`` or ``"disk"``.

        Raises:
            NotMovableError: the storage is pinned, in use, shared with what is not managed, or too small.
            TierFullError: the tier has no room.
            ValueError: no such tier.
        """
        record = self.record
        if record is None:
            raise NotMovableError(f"storages below {manager().policy.smallest_bytes} bytes are never moved")
        manager().spill(record, tier)
        return self

    def unspill(self) -> ManagedTensor:
        """Bring the storage back to its device."""
        record = self.record
        if record is not None:
            manager().unspill(record)
        return self

    @property
    def residency(self) -> str:
        """Where the bytes are: ``"device"``, or the tier ``"peer"``, ``"host"`` or ``"disk"``.

        On the way there ``"leaving"``, from one tier to another ``"sinking"``, and on the way back ``"returning"``.
        """
        record = self.record
        return "device" if record is None else record.residency.value

    def pin(self) -> ManagedTensor:
        """Keep the storage on its device until ``unpin``; pins count."""
        record = self.record
        if record is not None:
            manager().pin(record)
        return self

    def unpin(self) -> ManagedTensor:
        """Undo one ``pin``.

        Raises:
            ValueError: it is not pinned.
        """
        record = self.record
        if record is not None:
            manager().unpin(record)
        return self

    @property
    def pinned(self) -> bool:
        """Whether it is pinned, by whatever view of the storage."""
        record = self.record
        return record is not None and record.pins > 0

    @contextmanager
    def hold(self) -> Iterator[torch.Tensor]:
        """Yield a plain tensor of the same memory, which stays where it is until the block ends.

        For kernels that bypass torch's dispatcher. Do not keep the plain tensor: as long as it lives the memory cannot
        move.
        """
        self.pin()
        try:
            yield plain_alias(self)
        finally:
            self.unpin()


def manage(x: torch.Tensor) -> ManagedTensor:
    """Return *x* as a managed tensor: the same memory, and the same place in the autograd graph.

    The storage can move once nothing but managed tensors refers to it, so drop *x*.

    Raises:
        TypeError: *x* is not a tensor.
    """
    if isinstance(x, ManagedTensor):
        return x
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"manage: expected a tensor, got {type(x).__name__}")
    if x.grad_fn is not None:
        return x.as_subclass(ManagedTensor)  # refers to x itself, as its base, so this one cannot move
    managed = _make_subclass(ManagedTensor, x, x.requires_grad)
    managed._look_up(manager())  # so that it can move from now on
    return managed


def _remedy(
    error: RuntimeError, args: tuple[Any, ...], kwargs: Mapping[str, Any], tensors: list[torch.Tensor]
) -> Callable[[Callable[..., Any]], Any] | None:
    """Return how to make a call that raised *error* again, so that it succeeds; None if there is no way."""
    if isinstance(error, ElsewhereError):
        place = error.target
        manager().relief.note_migration(place)
        return lambda func: Colocated(args, kwargs, place, _moved).call(functools.partial(_call_below, func))
    if isinstance(error, (DeviceMemoryError, torch.AcceleratorError)):
        return None
    if isinstance(error, torch.OutOfMemoryError):
        # A plain tensor that the call made on its way: those of managed ones have found room below.
        device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), None)
        if device is None:
            return None
        no_room = NoRoom.of(error, device)
        return lambda func: _rerun(functools.partial(_call_below, func, *args, **kwargs), no_room)
    if isinstance(error, DeviceMismatchError):
        target: torch.device | None = error.target
    elif "device" not in str(error).lower():
        return None  # every text of torch about operands of several devices has the word
    else:
        target = meeting_device(tensors, [r for t in tensors if (r := _record_of_any(t)) is not None], ())
    if target is None:
        return None
    place = target
    return lambda func: Colocated(args, kwargs, place, _moved).call(functools.partial(_call_below, func))


def _rerun(call: Callable[[], T], no_room: NoRoom) -> T:
    keeper = manager()
    return keeper.relief.rerun(lambda: or_no_room(call, no_room.device, keeper.table), no_room)


def _with_room(call: Callable[[], T], device: torch.device) -> T:
    """Return what *call* returns, which allocates plain tensors on *device*; call it again once there is room."""
    outcome = or_no_room(call, device, manager().table)
    return _rerun(call, outcome) if isinstance(outcome, NoRoom) else outcome


def _plain_deepcopy(plain: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    """Return a managed copy of *plain*, made as outside a task: torch insists on plain parts."""
    with DisableTorchFunction():
        copied = copy.deepcopy(plain, memo)
    return manage(copied)


def _moved(tensor: Any, target: torch.device) -> Any:
    """Return *tensor* on *target*, managed there unless that would take it out of its graph."""
    if isinstance(tensor, ManagedTensor):
        return tensor.to(target)
    if tensor.layout is torch.strided and not (tensor.requires_grad and torch.is_grad_enabled()):
        return manage(tensor.detach()).to(target)
    return _with_room(lambda: tensor.to(target), target)


def _call_below(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _record_of_any(tensor: torch.Tensor) -> Record | None:
    return tensor.record if isinstance(tensor, ManagedTensor) else None


def _export(tensor: Any, func: Callable[..., Any]) -> None:
    if isinstance(tensor, ManagedTensor):
        record = tensor.record
        if record is not None:
            manager().export(record, f"its memory was handed out by {func.__name__}()")
