"""The tasks that wait: highest priority first, first come first served among equals.

    put -> waiting --take--> booked on a device, and run
                  \\--take, no device takes it now--> held --take--> booked

A worker looks at the held tasks first, then at the waiting ones. See ``HeldTasks`` for what is held, and how often a
task may be passed by others.

Who wakes whom: ``put`` leaves one token for each task, and a worker takes one before each look at the waiting tasks. A
task is only held while another runs, or has been given up and still has its bytes, for else a device without tasks
takes any; the worker of each task that ends looks at the held ones again, and leaves a token for a sleeping one to look
as well. The last worker to end fails those that only a task which was given up keeps from starting.

Locks: the queue's own, then ``DeviceLoads._lock``. Nothing of the user's runs under either.
"""

from __future__ import annotations

import heapq
import logging
import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, TypeAlias

from managed_exec.scheduling.appraisal import Appraiser
from managed_exec.scheduling.held import HeldTask, HeldTasks
from managed_exec.scheduling.loads import DeviceLoads
from managed_exec.task import Task

_log = logging.getLogger("concurrent.futures")  # where the standard pool reports what befalls a worker

_LOOK = object()  # a token that stands for no task

# A task that a worker has taken; the position of the device that it is booked on, None if it was cancelled (also
# between two runs) or the placement failed; what the placement raised.
Taken: TypeAlias = "tuple[Task, int | None, BaseException | None]"


class TaskQueue:
    """What a pool has still to run. Stands in for the standard pool's queue, which drains it by ``get_nowait``."""

    def __init__(self, loads: DeviceLoads, appraiser: Appraiser | None = None) -> None:
        self._loads = loads
        self._appraiser = appraiser  # None where nothing is to be found out of a task before it starts
        self._tokens: queue.SimpleQueue[Any] = queue.SimpleQueue()  # True for each waiting task, _LOOK, None to exit
        # The waiting tasks of priority 0, nearly all: changed without the lock, in single steps.
        self._plain: deque[Task] = deque()
        self._lock = threading.Lock()  # guards the fields below
        self._levels: dict[int, deque[Task]] = {}  # the other waiting tasks, by negated priority
        self._order: list[int] = []  # a heap of the levels that have tasks
        self._held = HeldTasks(loads, appraiser)
        # Once no task is to be held any more that has not run: what those get that would be; None: they are cancelled.
        self._is_closed = False
        self._new_error: Callable[[], BaseException] | None = None
        self.n_put = 0  # tasks ever put; changed by ``put`` alone, which the pool calls under its shutdown lock

    def put(self, task: Task | None) -> None:
        """Add *task*; None has a worker look whether it should end, once it finds nothing to do before."""
        if task is None:
            self._tokens.put(None)
            return
        self.n_put += 1
        if not task.options.priority:
            self._plain.append(task)
        else:
            with self._lock:
                level = self._levels.get(-task.options.priority)
                if level is None:
                    level = self._levels[-task.options.priority] = deque()
                    heapq.heappush(self._order, -task.options.priority)
                level.append(task)
        self._tokens.put(True)

    def put_back(self, task: Task) -> None:
        """Have *task*, which has run and is to run again, taken before all others of its priority."""
        with self._lock:
            self._held.add_first(task)
        self._tokens.put(_LOOK)

    def take(self, last_position: int | None) -> Taken | None:
        """Return the next task, booked on a device; wait for one. None: the worker should look whether to end."""
        while True:
            held = self._next_held() if self._held else None
            if held is None:
                token = self._tokens.get()
                if token is None:
                    return None
                if token is _LOOK:
                    continue
                task = self._next_waiting()
            else:
                task = held.task
            if task.future.is_unwanted:
                if held is not None:  # it may be so only now, and a device still be kept for it
                    self._loads.keep_no_longer(task.need)
                return task, None, None
            if self._appraiser is not None and (held is None or task.need.unknown):
                before = task.need
                self._appraiser.appraise(task)
                if before.unknown and task.need is not before:
                    self._loads.keep_no_longer(before)
            try:
                position = self._loads.book(last_position, task.need)
            except BaseException as error:  # noqa: BLE001 whatever the placement raises is the task's
                self._loads.keep_no_longer(task.need)
                try:
                    return task, None, error
                finally:
                    del error, task, held  # the traceback of the error refers to this frame
            if position is not None:
                if self._held:
                    with self._lock:
                        self._held.note_start(position, task.options.priority, held)
                    if held is not None:
                        self._tokens.put(_LOOK)  # a device may have been kept for it, and takes others now
                return task, position, None
            # Held before the next look: a task that ends meanwhile finds it, or has made the room that look finds.
            with self._lock:
                is_refused = self._is_closed and not task.attempts
                if is_refused:
                    self._loads.keep_no_longer(task.need)
                elif held is None:
                    self._held.add(task)
                else:
                    self._held.put(held)
            if is_refused:
                if self._new_error is not None:
                    return task, None, self._new_error()
                try:
                    task.future.cancel()
                except BaseException:  # noqa: BLE001 a done callback's; the task is cancelled, and its worker is needed
                    _log.exception("exception in a done callback of task %d", task.id)
                return task, None, None
            del task, held

    def look_again(self) -> None:
        """Have the held tasks looked at again: a task has ended, and the calling worker is about to take one itself."""
        if self._held:
            self._tokens.put(_LOOK)

    def close(self, new_error: Callable[[], BaseException] | None = None) -> None:
        """Hold no more tasks that have not run: one that a worker has in its hands now starts, or is given out again.

        Args:
            new_error: makes what such a task fails with; None: it is cancelled.
        """
        with self._lock:
            self._is_closed, self._new_error = True, new_error

    def get_nowait(self) -> Task | None:
        """Return a task that has not started, or the None that was put.

        Raises:
            queue.Empty: there is none. A task that is to run again has started, and stays.
        """
        with self._lock:
            task = self._held.take_unstarted()
        if task is not None:
            return task
        while True:
            token = self._tokens.get_nowait()
            if token is not _LOOK:
                return None if token is None else self._next_waiting()

    def take_stranded(self) -> list[Task]:
        """Remove and return the held tasks that only what given-up tasks have reserved keeps from starting.

        For a worker that is to end while none runs a task: nobody would look at them any more.
        """
        with self._lock:
            return self._held.take_stranded()

    @property
    def has_held(self) -> bool:
        """Whether there are tasks that no device took when it was their turn."""
        return len(self._held) > 0

    def qsize(self) -> int:
        return self._tokens.qsize() + len(self._held)

    def _next_waiting(self) -> Task:
        """Remove and return the first of the waiting tasks. A token for it was taken, so there is one to be found."""
        while True:
            if self._order:
                with self._lock:
                    if self._order and (self._order[0] < 0 or not self._plain):
                        level = self._levels[self._order[0]]
                        task = level.popleft()
                        if not level:
                            del self._levels[heapq.heappop(self._order)]
                        return task
            try:
                return self._plain.popleft()
            except IndexError:
                continue  # another worker took it, and left the task of its own token at another level

    def _next_held(self) -> HeldTask | None:
        """Remove and return the first held task that a device would take, or that is not to run any more."""
        with self._lock:
            held = self._held.take()
            if held is not None and self._held:
                self._tokens.put(_LOOK)  # there may be room for more than one
            return held
