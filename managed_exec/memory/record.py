"""One record for each managed storage: where its bytes are and who uses them.

A record refers to the storage's Python object, and managed tensors (its *handles*) refer to the record; nothing else
keeps a record alive, so the storage lives exactly as long as its last handle.

Movable means: every reference to the storage is a handle that no kernel is using. That is counted, never assumed:
torch's count of references to the storage must be the number of handles plus the one of the Python object held here.
A plain alias, or a storage that C++ code holds, makes the count larger, and the storage stays where it is.
"""

from __future__ import annotations

import enum
import functools
import sys
from typing import Any

import torch
from torch._C import _storage_Use_Count

from managed_exec.devices import current_stream
from managed_exec.memory.owner import Owner
from managed_exec.memory.unseen import unseen

_CPU = torch.device("cpu")  # a storage there has no index; comparing is a fifth of asking for the type


class _Holder:
    """Holds a storage as a record does."""

    storage: torch.UntypedStorage


@functools.cache
def _storage_references() -> int:
    """Return what ``sys.getrefcount`` says of a storage that a record holds and nobody else.

    Measured once, for whether torch itself has a reference to the object depends on its version.
    """
    with unseen():
        tensor = torch.empty(1, device="cpu")
        holder = _Holder()
        holder.storage = tensor.untyped_storage()
    return sys.getrefcount(holder.storage)


class Residency(enum.Enum):
    """Where the bytes of a storage are.

    The storage has its memory in RESIDENT, LEAVING and RETURNING; its bytes are valid there in the first two. A copy
    elsewhere exists in PEER, HOST, DISK, SINKING and RETURNING. Kernels run in RESIDENT alone.
    """

    RESIDENT = "device"
    LEAVING = "leaving"  # being copied to a tier, by one thread; back to RESIDENT if that fails
    PEER = "peer"
    HOST = "host"
    DISK = "disk"
    SINKING = "sinking"  # being copied from PEER to a lower tier, by one thread; back to PEER if that fails
    RETURNING = "returning"  # being copied back, by one thread; back to where it was if that fails


RESIDENT = Residency.RESIDENT  # for what looks at each operand: Python 3.11 is slow to find it in the class
MOVING = frozenset({Residency.LEAVING, Residency.SINKING, Residency.RETURNING})
IN_A_TIER = frozenset({Residency.PEER, Residency.HOST, Residency.DISK})  # and nowhere else, nor on its way
ON_DEVICE = frozenset({Residency.RESIDENT, Residency.LEAVING, Residency.RETURNING})  # the storage has its memory


class Record:
    """The state of one managed storage. The table's lock guards what is not said to need none."""

    # One is made for each new storage, so what nearly all have in common is said here and not set.
    residency = Residency.RESIDENT  # read without the lock too, see ``RecordTable.in_use``
    moved_by = 0  # the identifier of the thread that moves it, or did so last
    pins = 0
    immovable: str | None = None  # why the storage must not move any more, once it was exported
    last_use = 0  # needs no lock: a hint
    copy: Any = None  # the bytes in a tier; None while RESIDENT or LEAVING
    release_copy: Any = None  # the finalizer that drops the copy if the record dies first
    # Streams of the device: that of the last kernel that wrote, and those of kernels that have read since.
    writer: torch.Stream | None = None
    readers: frozenset[torch.Stream] = frozenset()
    in_streams = False  # whether its kernels run asynchronously, in streams

    def __init__(self, storage: torch.UntypedStorage, n_bytes: int, owner: Owner | None) -> None:
        self.storage = storage
        self.n_bytes = n_bytes
        self.device = storage.device
        # Every handle refers to this object and nobody else does, so that its reference count counts them.
        self.alive = object()
        self.owner = owner
        if self.device != _CPU:
            self.in_streams = True
            # A new storage was most likely written, or is being written, by a kernel of the current stream.
            self.writer = current_stream(self.device)

    def note_size(self) -> None:
        """Note the size of the storage, which a kernel that still uses it may have changed."""
        self.n_bytes = self.storage.nbytes()

    def handles(self) -> int:
        """Return the number of live managed tensors on the storage."""
        return sys.getrefcount(self.alive) - 2  # this object's own reference and the call's argument

    def obstacle(self) -> str | None:
        """Return why the storage cannot be moved, whether or not a kernel uses it; None if it can. Holds the lock."""
        if self.immovable is not None:
            return self.immovable
        if self.pins:
            return "pinned"
        if not self.storage.resizable():
            return "torch cannot free its memory, which comes from elsewhere"
        if sys.getrefcount(self.storage) != _storage_references():
            return "somebody holds its storage"
        references = _storage_Use_Count(self.storage._cdata)
        if references != self.handles() + 1:
            return "a plain tensor, or other code, shares its memory"
        return None
