"""Pickling of values whose tensors travel beside the pickle, as pieces of storages; see ``parcel``."""

from __future__ import annotations

import io
import pickle
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

import cloudpickle
import torch
from torch._C import DisableTorchFunctionSubclass, _DisableTorchDispatch

from managed_exec.memory.manager import manager
from managed_exec.tensors.managed import ManagedTensor
from managed_exec.tensors.wrapped_names import reduce_wrapped

_ALIGNMENT = 16  # bytes, of the widest element
_NO_FILE = "<dynamic-code>"
_CPU = torch.device("cpu")


class Piece:
    """What is sent of a storage: all bytes between the first and the last that any of the tensors sees."""

    def __init__(self, index: int, holder: torch.Tensor | torch.UntypedStorage) -> None:
        self.index = index
        self._holder = holder  # keeps the storage alive
        self._first = self._end = -1  # bytes; -1 until a tensor is noted
        self.shared_descriptor = _shared_descriptor(_storage_of(holder))

    def note(self, first: int, end: int) -> None:
        """Have the bytes from *first* up to *end* sent as well."""
        self._first = first if self._first < 0 else min(self._first, first)
        self._end = max(self._end, end)

    @property
    def first_byte(self) -> int:
        return 0 if self.shared_descriptor is not None else self._first - self._first % _ALIGNMENT

    @property
    def n_bytes(self) -> int:
        return _storage_of(self._holder).nbytes() if self.shared_descriptor is not None else self._end - self.first_byte

    def write(self, target: memoryview) -> None:
        with _bytes_of(self._holder) as source:
            torch.frombuffer(target, dtype=torch.uint8).copy_(source[self.first_byte : self.first_byte + self.n_bytes])


def _shared_descriptor(storage: torch.UntypedStorage) -> int | None:
    """Return the descriptor of the shared memory that *storage* is, if it is that; it stays the storage's."""
    if storage.device.type != "cpu" or not storage.is_shared():
        return None
    strategy: str = torch.multiprocessing.get_sharing_strategy()  # type: ignore[no-untyped-call]
    if strategy != "file_descriptor":
        return None
    descriptor: int = storage._share_fd_cpu_()[0]
    return None if descriptor < 0 else descriptor  # a mapped file has none


def _storage_of(holder: torch.Tensor | torch.UntypedStorage) -> torch.UntypedStorage:
    """Return the storage without saying so to the memory manager: nobody gets the memory."""
    if isinstance(holder, torch.UntypedStorage):
        return holder
    with DisableTorchFunctionSubclass(), _DisableTorchDispatch():
        return holder.untyped_storage()


@contextmanager
def _bytes_of(holder: torch.Tensor | torch.UntypedStorage) -> Iterator[torch.Tensor]:
    """Yield the bytes of a storage, read where they are: on its device, or in the tier that it was spilled to."""
    if isinstance(holder, ManagedTensor) and holder.record is not None:
        spilled = manager().copy_elsewhere(holder.record, _CPU)
        if spilled is not None:
            yield spilled
            return
        with holder.hold() as plain:
            yield _settled_bytes(plain.untyped_storage())
        return
    yield _settled_bytes(_storage_of(holder))


def _settled_bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return the bytes of *storage* once no kernel writes them any more, whatever stream it is in."""
    if storage.device.type != "cpu":
        torch.accelerator.synchronize(storage.device)
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _rebuild_tensor(*_: Any) -> Any:
    """Stand in a pickle for the unpickler's own method, which knows the storages."""
    raise pickle.UnpicklingError("a packed tensor can only be unpacked by managed_exec.tensors.parcel.unpack")


def _rebuild_storage(*_: Any) -> Any:
    """As ``_rebuild_tensor``."""
    return _rebuild_tensor()


class PiecePickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no annotations
    """Pickle tensors and storages as references to pieces, which are sent beside the pickle."""

    def __init__(self, file: IO[bytes], on_buffer: Callable[[pickle.PickleBuffer], None]) -> None:
        super().__init__(file, protocol=5, buffer_callback=on_buffer)
        self.pieces: list[Piece] = []
        self._by_storage: dict[int, Piece] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, torch.Tensor):
            if obj.requires_grad and not obj.is_leaf:
                raise TypeError(
                    f"a tensor of shape {tuple(obj.shape)} is part of an autograd graph ({obj.grad_fn}), and graphs do "
                    "not go to another process; detach() it"
                )
            is_plain = type(obj) is torch.Tensor and not obj.__dict__
            if (is_plain or isinstance(obj, ManagedTensor)) and _is_ordinary(obj):
                return self._reduce_ordinary(obj)
            if obj.layout is not torch.strided and obj.device.type not in ("cpu", "meta"):
                on_cpu: Any = obj.detach().cpu().requires_grad_(obj.requires_grad)
                return on_cpu.__reduce_ex__(5)
        elif isinstance(obj, torch.UntypedStorage) and obj.device.type != "meta":
            return _rebuild_storage, (self._piece(obj, 0, obj.nbytes()).index, None)
        elif isinstance(obj, torch.storage.TypedStorage) and obj._untyped_storage.device.type != "meta":
            storage = obj._untyped_storage
            return _rebuild_storage, (self._piece(storage, 0, storage.nbytes()).index, obj.dtype)
        elif isinstance(obj, io.TextIOWrapper) and obj not in (sys.stdout, sys.stderr):
            raise TypeError(f"an open file ({obj!r}) goes to no other process")  # cloudpickle would send its text
        elif isinstance(obj, types.CodeType):
            # cloudpickle drops the name of the file, without which a traceback does not say where it is.
            rebuild, args = self.dispatch_table[types.CodeType](obj)
            return rebuild, tuple(obj.co_filename if arg == _NO_FILE else arg for arg in args)
        return reduce_wrapped(obj) or super().reducer_override(obj)

    def _reduce_ordinary(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """Reduce a tensor that is a view of its storage and nothing else."""
        first = int(tensor.storage_offset()) * tensor.itemsize
        end = first
        if tensor.numel():
            last: int = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            end += (last + 1) * tensor.itemsize
        piece = self._piece(tensor, first, end)
        return _rebuild_tensor, (
            piece.index,
            tensor.dtype,
            first,
            tuple(tensor.shape),
            tensor.stride(),
            (tensor.is_conj(), tensor.is_neg()),
            tensor.requires_grad,
            isinstance(tensor, torch.nn.Parameter),
        )

    def _piece(self, holder: torch.Tensor | torch.UntypedStorage, first: int, end: int) -> Piece:
        """Return the piece of the holder's storage, those bytes included."""
        address = _storage_of(holder)._cdata
        piece = self._by_storage.get(address)
        if piece is None:
            piece = self._by_storage[address] = Piece(len(self.pieces), holder)
            self.pieces.append(piece)
        piece.note(first, end)
        return piece


def _is_ordinary(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_meta or tensor.is_nested)


class PieceUnpickler(pickle.Unpickler):
    """Undo ``PiecePickler``."""

    def __init__(
        self, file: IO[bytes], buffers: Sequence[Any], storages: Sequence[tuple[torch.UntypedStorage, int]]
    ) -> None:
        super().__init__(file, buffers=buffers)
        self._storages = storages
        self._own = {"_rebuild_tensor": self._tensor, "_rebuild_storage": self._storage}

    def find_class(self, module: str, name: str, /) -> Any:
        if module == __name__ and name in self._own:
            return self._own[name]
        return super().find_class(module, name)

    def _tensor(
        self,
        index: int,
        dtype: torch.dtype,
        first: int,
        shape: tuple[int, ...],
        stride: tuple[int, ...],
        bits: tuple[bool, bool],
        requires_grad: bool,
        is_parameter: bool,
    ) -> torch.Tensor:
        storage, first_byte = self._storages[index]
        tensor = torch.empty(0, dtype=dtype, device=_CPU)
        tensor.set_(storage, (first - first_byte) // dtype.itemsize, shape, stride)
        is_conj, is_neg = bits
        tensor = torch._neg_view(tensor) if is_neg else tensor
        tensor = torch._conj(tensor) if is_conj else tensor
        return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)

    def _storage(self, index: int, dtype: torch.dtype | None) -> Any:
        storage, _ = self._storages[index]
        if dtype is None:
            return storage
        return torch.storage.TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)  # type: ignore[no-untyped-call]
