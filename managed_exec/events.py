"""What a pool and the memory manager tell to hooks: frozen records, made only where somebody listens.

A hook is any callable that takes one event. It is called in the thread in which the thing happened, without any lock,
and should be quick. One that raises is reported to the log and called no more.

Times are seconds of ``time.perf_counter()``; bytes are those of storages.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TaskSubmitted:
    """A task has come into the queue."""

    task_id: int
    name: str  # of its function
    at_s: float


@dataclass(frozen=True)
class TaskStarted:
    """A task is about to be called; once more for each time it runs."""

    task_id: int
    name: str
    device: torch.device
    worker: str  # the name of its thread
    attempt: int  # 0 for the first
    at_s: float


@dataclass(frozen=True)
class TaskRetried:
    """A run of a task is over, and it runs again: at once, or when there is a device for it alone."""

    task_id: int
    name: str
    worker: str
    at_s: float
    reason: Literal["out of memory", "process lost"]


@dataclass(frozen=True)
class TaskFinished:
    """A task's future is about to be done; or a task that was cancelled while it waited has left the queue.

    Each task that has come into the queue ends with one of these, and with no more.
    """

    task_id: int
    name: str
    device: torch.device | None  # where it ran last; None if it never has
    worker: str  # the name of the thread
    submitted_s: float
    started_s: float | None  # the last time it was called; None if it never was
    at_s: float
    error: BaseException | None  # CancelledError of one that was cancelled while it waited
    retries: int = 0  # how often it was run again


@dataclass(frozen=True)
class TensorMoved:
    """A storage has left its device, has come back, or has gone from one tier to another."""

    what: Literal["spilled", "unspilled"]
    device: torch.device  # the storage's own
    tier: str  # where it is now, or has been: "peer", "host", "disk"
    n_bytes: int
    task: str | None  # that created it, as "task 3"; None if none did
    started_s: float
    at_s: float


@dataclass(frozen=True)
class CallMigrated:
    """A call is made on another device, because its own had no room."""

    task: str | None  # that made it
    device: torch.device  # where it is made
    at_s: float


Event: TypeAlias = TaskSubmitted | TaskStarted | TaskRetried | TaskFinished | TensorMoved | CallMigrated
Hook: TypeAlias = Callable[[Event], object]


class Hooks:
    """Those who listen.

    Changed and read in single steps, without a lock: a hook may be taken away by a finalizer, which the collector runs
    in any thread, in the middle of anything.
    """

    def __init__(self, hooks: Iterable[Hook] = ()) -> None:
        try:
            given = tuple(hooks)
        except TypeError:
            raise TypeError(f"hooks: expected a list of callables that take one event, got {hooks!r}") from None
        # By a key of each. Not compared: what is the user's may be equal to anything. Empty while nobody listens: then
        # no event needs to be made.
        self.hooks: dict[object, Hook] = {}
        for hook in given:
            if not callable(hook):
                raise TypeError(f"hooks: expected callables that take one event, got {hook!r}")
            self.add(hook)

    def add(self, hook: Hook) -> object:
        """Have *hook* called with every event; return what it is taken away with."""
        key = object()
        self.hooks[key] = hook
        return key

    def remove(self, key: object) -> None:
        """Call the hook that was added with *key* no more; does nothing if it is not there."""
        self.hooks.pop(key, None)

    def emit(self, event: Event) -> None:
        """Call every hook with *event*. No lock is held.

        Raises:
            KeyboardInterrupt: in the main thread, once all were called: the user wants the program to end, and a hook
                was where it happened to be.
        """
        interrupt: KeyboardInterrupt | None = None
        for key, hook in self.hooks.copy().items():
            try:
                hook(event)
            except BaseException as error:  # noqa: BLE001 whatever it is, the work it was told of goes on
                if isinstance(error, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
                    interrupt = error
                    continue
                self.remove(key)
                _log.exception("hook %r failed on %r and is called no more", hook, event)
        if interrupt is not None:
            raise interrupt


def logging_hook(logger: logging.Logger | None = None, level: int = logging.INFO) -> Hook:
    """Return a hook that writes each event to *logger*, by default ``managed_exec.events``, at *level*."""
    target = logger or _log

    def log(event: Event) -> None:
        target.log(level, "%s", event)

    return log
