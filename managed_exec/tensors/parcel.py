"""Values on their way from one process to another.

    pack -> Parcel: a short message, and file descriptors --the caller sends both--> unpack

The message is a few kilobytes at most, whatever the value: what is larger is in anonymous shared memory (``memfd``),
which has no name and so is gone when the last process that has it is. Bytes are copied once, by the sender; the
receiver maps large ones where they are.

- Callables go by cloudpickle, so lambdas, closures and what ``__main__`` defines can be sent.
- The bytes that tensors see are sent, each byte once, whoever shares it. Device tensors, spilled ones too, arrive as
  tensors of the CPU, managed ones as plain tensors. Neither gradients nor the graph travel, so a tensor that has a
  ``grad_fn`` is refused, as ``torch.multiprocessing`` does.
- CPU tensors in shared memory (``share_memory_()``) are not copied: both processes have the same memory.
- NumPy arrays, and whatever else pickles its buffers out of band, travel as tensors do.

Nothing here is shared between threads, so nothing is locked.
"""

from __future__ import annotations

import io
import mmap
import os
import pickle
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from managed_exec.tensors.pieces import PiecePickler, PieceUnpickler

_INLINE_BYTES = 8 * 1024  # so much goes in the message itself: writing that to a pipe is one step that cannot block
_LARGE_BYTES = 64 * 1024  # from here on a part has shared memory of its own, and is freed on its own
_MAX_LARGE = 64  # of such parts in a parcel: each takes a descriptor for a moment, and a mapping as long as it lives
_ALIGNMENT = 16  # of the parts in the common area
_CPU = torch.device("cpu")


class _Place(NamedTuple):
    """Where a part of a parcel is."""

    n_bytes: int
    offset: int | None  # in the common area; None: it is all of what the descriptor stands for
    descriptor: int = -1  # by its order among the parcel's


class _Storage(NamedTuple):
    """A storage that arrives: the bytes from *first_byte* on of the one that was sent."""

    place: _Place
    first_byte: int
    is_shared: bool


class _Table(NamedTuple):
    body: _Place
    buffers: list[_Place]
    storages: list[_Storage]


class _Message(NamedTuple):
    n_descriptors: int
    area_bytes: int
    table: _Place
    inline: bytes | None  # the common area; None: the first descriptor is for it


class _Part(Protocol):
    @property
    def n_bytes(self) -> int: ...

    shared_descriptor: int | None  # of the shared memory that the part is, if it is that

    def write(self, target: memoryview) -> None:
        """Write the bytes to *target*, which has as many."""


class _Buffer:
    """Bytes of the host."""

    def __init__(self, content: memoryview) -> None:
        self._content = content
        self.n_bytes = content.nbytes
        self.shared_descriptor: int | None = None

    def write(self, target: memoryview) -> None:
        target[:] = self._content


class Parcel:
    """A packed value. Its descriptors are to be sent in order, before ``close``."""

    def __init__(self, message: bytes, descriptors: Sequence[int], own: Sequence[int], kept: object) -> None:
        self.message = message
        self.descriptors = descriptors
        self._own = own  # those of the descriptors that were made for the parcel
        self._kept = kept  # what has the others

    def close(self) -> None:
        """Let go of the descriptors. What was sent stays with who receives it."""
        own, self._own, self.descriptors, self._kept = self._own, (), (), None
        for descriptor in own:
            os.close(descriptor)


def check_packs(value: object) -> None:
    """Raise what ``pack`` would raise of *value*."""
    PiecePickler(io.BytesIO(), lambda buffer: None).dump(value)


def pack(value: object, *, in_message: bool = False) -> Parcel:
    """Return *value* ready to be sent.

    Args:
        in_message: whether all of it goes in the message, however long that gets, and no descriptor is needed.

    Raises:
        Exception: a part of the value cannot be pickled; whatever pickling it has raised.
        OSError: no more descriptors, or no more shared memory.
    """
    buffers: list[_Buffer] = []
    body = io.BytesIO()
    pickler = PiecePickler(body, lambda buffer: buffers.append(_Buffer(buffer.raw())))
    pickler.dump(value)
    parts: list[_Part] = [_Buffer(body.getbuffer()), *buffers, *pickler.pieces]
    large_bytes = max(_LARGE_BYTES, sum(part.n_bytes for part in parts) // _MAX_LARGE)
    own: list[int] = []
    descriptors: list[int] = []
    in_area: list[tuple[int, _Part]] = []
    area_bytes = 0
    places = []
    try:
        for part in parts:
            shared = None if in_message else part.shared_descriptor
            if shared is None and (in_message or part.n_bytes < large_bytes):
                places.append(_Place(part.n_bytes, area_bytes))
                in_area.append((area_bytes, part))
                area_bytes += -(-part.n_bytes // _ALIGNMENT) * _ALIGNMENT
                continue
            if shared is None:
                shared = _new_memory(part.n_bytes, own)
                part.write(memoryview(mmap.mmap(shared, part.n_bytes)))
            places.append(_Place(part.n_bytes, None, len(descriptors)))
            descriptors.append(shared)
        first_piece = 1 + len(buffers)
        storages = [
            _Storage(place, piece.first_byte, place.offset is None and piece.shared_descriptor is not None)
            for place, piece in zip(places[first_piece:], pickler.pieces, strict=True)
        ]
        # The area's descriptor comes first, if there is one; the table says its readers' places without it.
        table = _Buffer(memoryview(pickle.dumps(_Table(places[0], places[1:first_piece], storages))))
        table_place = _Place(table.n_bytes, area_bytes)
        in_area.append((area_bytes, table))
        area_bytes += table.n_bytes
        inline = None
        if in_message or area_bytes <= _INLINE_BYTES:
            area = bytearray(area_bytes)
            _write(in_area, memoryview(area))
            inline = bytes(area)
        else:
            descriptor = _new_memory(area_bytes, own)
            _write(in_area, memoryview(mmap.mmap(descriptor, area_bytes)))
            descriptors.insert(0, descriptor)
        message = pickle.dumps(_Message(len(descriptors), area_bytes, table_place, inline))
    except BaseException:
        for descriptor in own:
            os.close(descriptor)
        raise
    return Parcel(message, descriptors, own, pickler.pieces)


def unpack(message: bytes, receive: Callable[[int], list[int]]) -> Any:
    """Return the value that was packed.

    Args:
        message: the parcel's.
        receive: returns that many descriptors, in the order in which they were sent. They are closed here.

    Raises:
        Exception: what unpickling the value raises, say because a module is not there.
    """
    told: _Message = pickle.loads(message)
    descriptors = receive(told.n_descriptors) if told.n_descriptors else []
    try:
        if told.inline is None:
            area = memoryview(mmap.mmap(descriptors[0], told.area_bytes))
            others = descriptors[1:]
        else:
            area, others = memoryview(told.inline), descriptors
        table: _Table = pickle.loads(_read(told.table, area, others))
        storages = [_received(storage, area, others) for storage in table.storages]
        buffers = [_read(place, area, others) for place in table.buffers]
        return PieceUnpickler(io.BytesIO(_read(table.body, area, others)), buffers, storages).load()
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _new_memory(n_bytes: int, own: list[int]) -> int:
    """Return a descriptor of new shared memory, noted in *own*."""
    descriptor = os.memfd_create("managed_exec")
    own.append(descriptor)
    os.ftruncate(descriptor, n_bytes)
    return descriptor


def _write(parts: Sequence[tuple[int, _Part]], area: memoryview) -> None:
    for offset, part in parts:
        if part.n_bytes:
            part.write(area[offset : offset + part.n_bytes])


def _read(place: _Place, area: memoryview, descriptors: Sequence[int]) -> bytearray:
    """Return a copy of the bytes at *place*."""
    if place.offset is not None:
        return bytearray(area[place.offset : place.offset + place.n_bytes])
    with mmap.mmap(descriptors[place.descriptor], place.n_bytes) as mapped:
        return bytearray(mapped)


def _received(storage: _Storage, area: memoryview, descriptors: Sequence[int]) -> tuple[torch.UntypedStorage, int]:
    """Return a storage, and the place of its first byte in the one that was sent."""
    place = storage.place
    kind: Any = torch.UntypedStorage  # torch's annotations lack what is used here
    if place.n_bytes == 0:
        found = torch.empty(0, dtype=torch.uint8, device=_CPU).untyped_storage()
    elif storage.is_shared:
        found = kind._new_shared_fd_cpu(descriptors[place.descriptor], place.n_bytes)
    elif place.offset is None:
        # Python's mmap would keep a descriptor for as long as the tensor lives.
        found = kind.from_file(f"/proc/self/fd/{descriptors[place.descriptor]}", True, place.n_bytes)
    else:
        found = torch.frombuffer(_read(place, area, descriptors), dtype=torch.uint8).untyped_storage()
    return found, storage.first_byte
