"""The threads of a pool, as the interpreter sees them when it exits.

The standard library's exit handler wakes every thread in its table of threads, and waits for it: so queued tasks are
run even by a program that ends. Ours are in that table until they are given up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, MutableMapping
from concurrent.futures import thread as stock
from typing import Protocol, cast


class Wakeable(Protocol):
    def put(self, item: None, /) -> None: ...


def start_thread(thread: threading.Thread, wake: Wakeable) -> None:
    """Start *thread* and have the interpreter wake it through *wake*, and wait for it, when it exits.

    The standard pool's global lock is held.
    """
    thread.start()
    _exit_table()[thread] = wake


def forget_thread(thread: threading.Thread) -> None:
    """Have the interpreter wait for *thread* no more. The standard pool's global lock is held."""
    _exit_table().pop(thread, None)


def _exit_table() -> MutableMapping[threading.Thread, Wakeable]:
    return cast("MutableMapping[threading.Thread, Wakeable]", stock._threads_queues)


class _AtExit:
    """Whether the interpreter was told; changed under the lock."""

    lock = threading.Lock()
    told = False


def have_threads_end_first() -> None:
    """Have the interpreter's exit wait for the threads of pools before it closes process pools.

    It calls in reverse order what was registered, and ``concurrent.futures`` registers for process pools last: a pool's
    threads, which run all that is queued before they end, would find their lanes closed.
    """
    with _AtExit.lock:
        if not _AtExit.told:
            threading._register_atexit(stock._python_exit)  # type: ignore[attr-defined]
            _AtExit.told = True


class WorkerThread(threading.Thread):
    """A thread that can be given up: then nobody waits for it, neither ``join`` nor the interpreter when it exits.

    A thread cannot become a daemon once it has started, so it starts as one, and the interpreter waits for it by the
    table alone. From then on it says that it is none, as the standard pool's: threads that tasks start ask it.
    """

    def __init__(self, run: Callable[[], None], name: str) -> None:
        self._has_begun = False
        super().__init__(name=name, daemon=True)
        self._target_run = run
        self._over = threading.Event()  # set by its own end, or by whoever gives it up
        self._is_given_up = False

    @property
    def daemon(self) -> bool:  # type: ignore[override]  # an attribute in typeshed
        return not self._has_begun

    def run(self) -> None:
        self._has_begun = True
        try:
            self._target_run()
        finally:
            del self._target_run
            self._over.set()

    def give_up(self) -> None:
        """Have nobody wait for the thread any more."""
        self._is_given_up = True
        self._over.set()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the thread has ended or is given up."""
        # In a forked child it is not alive, and nobody would say that it is over.
        if self is not threading.current_thread() and self.is_alive() and not self._over.wait(timeout):
            return
        if not self._is_given_up:
            super().join(timeout)
