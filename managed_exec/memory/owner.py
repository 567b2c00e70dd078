"""Whose memory it is: the task in which a storage was created; and how much a task has had at once."""

from __future__ import annotations

import itertools
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_ages = itertools.count()


class Owner:
    """A task, as the memory manager sees it. Older owners have smaller ages."""

    __slots__ = (
        "__weakref__",
        "age",
        "device",
        "finished",
        "gone",
        "held_bytes",
        "migrated",
        "moved_bytes",
        "name",
        "on_migration",
        "peak_bytes",
    )

    def __init__(
        self, name: str, device: torch.device, on_migration: Callable[[torch.device], None] | None = None
    ) -> None:
        self.age = next(_ages)
        self.name = name
        self.device = device  # that the task is bound to now
        self.on_migration = on_migration  # told where a call of the task was made that its own device had no room for
        self.finished = False  # a finished owner's storages are the first to be spilled
        self.moved_bytes: Counter[str] = Counter()  # "spilled host" and so on; guarded by the table's lock
        self.migrated = 0  # calls
        # Bytes of the device storages that were made in the task's thread and live, wherever they are now, and the most
        # there were: what the task would have taken of a device with room. Changed by the task's own thread alone.
        self.held_bytes = self.peak_bytes = 0
        # Sizes of those that have died since the last was made. They die in any thread, at any time the collector
        # likes: an append is atomic and needs no lock. None until there is one to die.
        self.gone: deque[int] | None = None

    def note_made(self, n_bytes: int) -> deque[int]:
        """Count a new device storage of the task, in its own thread; return where its size goes when it dies."""
        gone = self.gone
        if gone is None:
            gone = self.gone = deque()
        while gone:
            self.held_bytes -= gone.popleft()
        self.held_bytes += n_bytes
        if self.held_bytes > self.peak_bytes:
            self.peak_bytes = self.held_bytes
        return gone


class _Thread(threading.local):
    """Of the calling thread. ``owner`` is set and unset by the device context."""

    owner: Owner | None = None  # of what it creates
    stays = False  # whether its kernels must run where they are, because nobody above could make the call elsewhere


thread = _Thread()


@contextmanager
def staying() -> Iterator[None]:
    """Have the kernels of the block wait for room on their own device, and never be sent to another."""
    before, thread.stays = thread.stays, True
    try:
        yield
    finally:
        thread.stays = before
