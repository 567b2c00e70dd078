"""What a pool does when it ends: with the tasks that wait, and with its threads."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import thread as stock
from contextlib import AbstractContextManager
from functools import partial
from queue import Empty

from managed_exec.scheduling.outcomes import Outcomes
from managed_exec.scheduling.queue import TaskQueue
from managed_exec.scheduling.worker import end_without_run
from managed_exec.task import Task


def cancel_waiting(tasks: TaskQueue, outcomes: Outcomes) -> None:
    """Cancel the tasks that have not started. No more come, and no lock is held: callbacks run here.

    Raises:
        BaseException: the last that a done callback or, in the main thread, a hook has raised, once all are cancelled:
            a ``KeyboardInterrupt``, say. See ``Hooks.emit``.
    """
    tasks.close()
    interrupt: BaseException | None = None
    for task in _taken(tasks):
        try:
            try:
                task.future.cancel()
            finally:
                outcomes.note_cancelled(task, threading.current_thread().name)
        except BaseException as raised:  # noqa: BLE001 raised below
            interrupt = raised
    if interrupt is not None:
        raise interrupt


def fail_waiting(tasks: TaskQueue, outcomes: Outcomes, reason: str) -> None:
    """Fail the tasks that have not started, for the pool is broken. No more come, and no lock is held."""
    new_error = partial(stock.BrokenThreadPool, reason)
    tasks.close(new_error)
    for task in _taken(tasks):
        is_cancelled = not task.future.set_running_or_notify_cancel()
        end_without_run(task, new_error(), outcomes, threading.current_thread().name, is_cancelled=is_cancelled)


def join_all(threads: Collection[threading.Thread], lock: AbstractContextManager[object]) -> None:
    """Wait for all *threads*, which *lock* guards, also those that come meanwhile; not for those that have left."""
    joined: set[threading.Thread] = set()
    while True:
        with lock:
            left = set(threads) - joined
        if not left:
            return
        for thread in left:
            thread.join()
        joined |= left


def call_if_there(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Call *method* if the object that it is of is still there."""
    found = method()
    if found is not None:
        found()


def _taken(tasks: TaskQueue) -> Iterator[Task]:
    """Take and yield the tasks that have not started; with them goes what has been put for workers that wait."""
    try:
        while True:
            task = tasks.get_nowait()
            if task is not None:
                yield task
                del task  # or it would live until the next one is there
    except Empty:
        return
