"""The tasks that wait: highest priority first, first come first served among equals.

    put -> waiting --take--> booked on a device, and run
                  \\--take, no device takes it now--> held --take--> booked

A worker looks at the held tasks first, then at the waiting ones. A held task may be passed by others, a bounded number
of times: then a device is kept free for it, until it has room (``DeviceLoads.keep_for``).

Who wakes whom: ``put`` leaves one token for each task, and a worker takes one before each look at the waiting tasks. A
task is only held while another runs, or has been given up and still has its bytes, for else a device without tasks
takes any; the worker of each task that ends looks at the held ones again, and leaves a token for a sleeping one to look
as well. The last worker to end fails those that only a task which was given up keeps from starting.

Locks: the queue's own, then ``DeviceLoads._lock``. Nothing of the user's runs under either.
"""

from __future__ import annotations

import heapq
import itertools
import queue
import threading
from bisect import insort
from collections import deque
from concurrent.futures._base import CANCELLED, CANCELLED_AND_NOTIFIED
from typing import Any, TypeAlias

from managed_exec.options import ANY, Need
from managed_exec.scheduling.appraisal import Appraiser
from managed_exec.scheduling.loads import DeviceLoads
from managed_exec.task import Task

# How many tasks may start before one that was held when they came, on a device that it could run on.
MAX_PASSED = 16

_LOOK = object()  # a token that stands for no task
_CANCELLED = (CANCELLED, CANCELLED_AND_NOTIFIED)  # states of a future


class _Held:
    """A task that no device took when it was its turn."""

    __slots__ = ("order", "passed", "task")

    def __init__(self, task: Task, age: int) -> None:
        self.task = task
        self.order = (-task.options.priority, age)
        self.passed = 0  # tasks started since on devices that it could have had

    def __lt__(self, other: _Held) -> bool:
        return self.order < other.order


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
        self._held: list[_Held] = []  # by priority, then by age
        self._ages = itertools.count()
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
            insort(self._held, _Held(task, -1))
            self._loads.keep_for(task.need)
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
            # Read without its lock: a future that is cancelled after this look will not let the task start.
            if task.future._state in _CANCELLED or task.future.stop is not None:
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
                    self._note_start(position)
                    if held is not None:
                        self._tokens.put(_LOOK)  # a device may have been kept for it, and takes others now
                return task, position, None
            # Held before the next look: a task that ends meanwhile finds it, or has made the room that look finds.
            with self._lock:
                insort(self._held, held or _Held(task, next(self._ages)))
            del task, held

    def look_again(self) -> None:
        """Have the held tasks looked at again: a task has ended, and the calling worker is about to take one itself."""
        if self._held:
            self._tokens.put(_LOOK)

    def get_nowait(self) -> Task | None:
        """Return a task that has not started, or the None that was put.

        Raises:
            queue.Empty: there is none. A task that is to run again has started, and stays.
        """
        with self._lock:
            for i, held in enumerate(self._held):
                if not held.task.attempts:
                    del self._held[i]
                    self._loads.keep_no_longer(held.task.need)
                    return held.task
        while True:
            token = self._tokens.get_nowait()
            if token is not _LOOK:
                return None if token is None else self._next_waiting()

    def take_stranded(self) -> list[Task]:
        """Remove and return the held tasks that only what given-up tasks have reserved keeps from starting.

        For a worker that is to end while none runs a task: nobody would look at them any more.
        """
        with self._lock:
            stranded = [held for held in self._held if not self._loads.fits_beside_reserved(held.task.need)]
            for held in stranded:
                self._held.remove(held)
                self._loads.keep_no_longer(held.task.need)
        return [held.task for held in stranded]

    @property
    def has_held(self) -> bool:
        """Whether there are tasks that no device took when it was their turn."""
        return bool(self._held)

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

    def _next_held(self) -> _Held | None:
        """Remove and return the first held task that a device would take, or that is not to run any more."""
        with self._lock:
            for i, held in enumerate(self._held):
                cancelled = held.task.future.cancelled() or held.task.future.stop is not None
                if cancelled or self._may_start(held.task.need):
                    del self._held[i]
                    if cancelled:
                        self._loads.keep_no_longer(held.task.need)
                    if self._held:
                        self._tokens.put(_LOOK)  # there may be room for more than one
                    return held
        return None

    def _may_start(self, need: Need) -> bool:
        """Return whether a device would take a held task with this *need*, or it is needed no longer as it was."""
        if need.unknown and self._appraiser is not None and self._appraiser.knows(need.unknown):
            return True
        return self._loads.has_room(need)

    def _note_start(self, position: int) -> None:
        """Count a task that has started on a device before those that are held."""
        with self._lock:
            for held in self._held:
                if held.task.need is not ANY and held.task.need.takes(position):
                    held.passed += 1
                    if held.passed >= MAX_PASSED:
                        self._loads.keep_for(held.task.need)
