"""Copies between a storage on a device and a copy of its bytes in a tier.

The two functions that resize a storage are here, and nothing else does. Copies run in a stream of their own, ordered
by events after the kernels that wrote the bytes, so that other streams go on; the caller waits without the GIL.
No lock is held here.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from managed_exec.devices import current_stream
from managed_exec.memory.record import Record
from managed_exec.memory.tiers import Copy


class CopyStreams:
    """One stream a device and direction, made on first use."""

    def __init__(self) -> None:
        # Changed in single steps, without a lock: the collector may begin another move while one is begun.
        self._streams: dict[tuple[torch.device, str], torch.Stream] = {}

    def get(self, device: torch.device, direction: str) -> torch.Stream:
        stream = self._streams.get((device, direction))
        if stream is None:
            stream = self._streams.setdefault((device, direction), torch.Stream(device))
        return stream


def whole(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return all of *storage* as a plain byte tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def copy_out(source: torch.Tensor, after: Iterable[torch.Stream | None], copy: Copy, streams: CopyStreams) -> None:
    """Fill *copy* with the bytes of *source*, which were written and read in the streams *after*."""
    if source.device.type == "cpu":
        copy.bytes.copy_(source)
        return
    stream = streams.get(source.device, "out")
    for earlier in after:
        if earlier is not None:
            earlier.record_event().synchronize()  # here and not in the stream, where other copies would wait too
    if copy.bytes.device.type == "cpu" and not copy.bytes.is_pinned():
        # Not a page the device can copy to by itself; the copy is synchronous then, whatever it is asked.
        with stream:
            copy.bytes.copy_(source)
        return
    with stream:
        copy.bytes.copy_(source, non_blocking=True)
        done = stream.record_event()
    done.synchronize()


def copy_in(record: Record, copy: Copy) -> None:
    """Fill the record's storage, which has its memory again, from *copy*. The bytes are there when this returns."""
    # A tensor of its own, so no handle's version counter moves: to autograd nothing has changed.
    target = whole(record.storage)
    if not record.in_streams:
        target.copy_(copy.bytes)
        return
    # In the current stream, for the memory was just allocated there: an earlier user of it may still be at work.
    target.copy_(copy.bytes, non_blocking=copy.bytes.device.type == "cpu" and copy.bytes.is_pinned())
    current_stream(record.device).synchronize()


def free_storage(record: Record) -> None:
    """Give the storage's memory back; its identity and that of all its views stay."""
    record.storage.resize_(0)


def allocate_storage(record: Record) -> None:
    """Give the storage its memory again.

    Raises:
        torch.OutOfMemoryError: the device has no room; the storage stays empty.
    """
    record.storage.resize_(record.n_bytes)
