"""Whose memory it is: the task in which a storage was created."""

from __future__ import annotations

import itertools
import threading

_ages = itertools.count()


class Owner:
    """A task, as the memory manager sees it. Older owners have smaller ages."""

    __slots__ = ("age", "finished", "name")

    def __init__(self, name: str) -> None:
        self.age = next(_ages)
        self.name = name
        self.finished = False  # a finished owner's storages are the first to be spilled


class _Thread(threading.local):
    """The owner of what the calling thread creates. Set and unset by the device context."""

    owner: Owner | None = None


thread = _Thread()
