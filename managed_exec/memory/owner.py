"""Whose memory it is: the task in which a storage was created."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

_ages = itertools.count()


class Owner:
    """A task, as the memory manager sees it. Older owners have smaller ages."""

    __slots__ = ("__weakref__", "age", "device", "finished", "migrated", "moved_bytes", "name", "on_migration")

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
