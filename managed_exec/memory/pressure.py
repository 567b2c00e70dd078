"""Who may make room on a device, when several kernels want the same.

A kernel that found no room takes the device's turn before it makes any, and keeps it until it has run. Turns go to the
oldest task first. So while one makes room nobody else spills what it has gathered, and the oldest always gets done:
what is resident then is its own operands, what is movable (it moves it) and what kernels in flight use (it waits for
them: they end, or fail for want of room and give up their operands before they queue here).

Who waits for the turn is woken when it ends. A task that is to stop is not: it looks for itself now and then.

A thread that holds the turn waits only for kernels in flight and, for a bounded time, for other tasks' memory.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# How often a thread that waits for the turn looks whether its task is to stop.
_LOOK_S = 0.1
# How long to move away again and again what others bring back.
_MOST_MOVING_S = 10.0


class _Stopwatch:
    """Counts from when it was first read, and anew when that much more of the device is free than at the last start."""

    def __init__(self, part_bytes: int) -> None:
        self._part_bytes = part_bytes
        self._start_s: float | None = None  # by the monotonic clock; None: not read since it was reset
        self._most_free_bytes = 0  # at the start

    def reset(self) -> None:
        self._start_s = None

    def start_s(self, free_bytes: int) -> float:
        """Return since when it counts; *free_bytes* are free now."""
        if self._start_s is None or free_bytes >= self._most_free_bytes + self._part_bytes:
            self._start_s, self._most_free_bytes = time.monotonic(), free_bytes
        return self._start_s


class Patience:
    """Until when a request waits for what others may let go of.

    Counted anew when something was spilled for it, and when others have let go of some of what it needs: in so few
    parts that it cannot go on for ever. After each kernel in flight it waits a moment, however long it has waited.
    """

    _MOST_PARTS = 8

    def __init__(self, wait_s: float, moment_s: float, needed_bytes: int) -> None:
        self._wait_s = wait_s
        self._moment_s = min(moment_s, wait_s)
        part_bytes = max(1, needed_bytes // self._MOST_PARTS)
        self._waiting = _Stopwatch(part_bytes)
        self._moving = _Stopwatch(part_bytes)
        self._in_flight_s = 0.0  # when a kernel was last in flight, by the monotonic clock

    def may_go_on(self, free_bytes: int) -> bool:
        """Return whether to try on after something was moved away: not if that has not helped for long.

        Then others bring back at once what is moved: those whose operands it is, and who cannot succeed either.

        Args:
            free_bytes: of the device, now.
        """
        start_s = self._moving.start_s(free_bytes)
        return time.monotonic() < start_s + max(self._wait_s, _MOST_MOVING_S)

    def renew(self) -> None:
        self._waiting.reset()

    def note_flight(self) -> None:
        """Note that a kernel is in flight whose operands, or what it makes, could be moved if it were not."""
        self._in_flight_s = time.monotonic()

    def deadline(self, free_bytes: int, *, for_tasks: bool) -> float:
        """Return until when to wait, by the monotonic clock; for a moment only, if not for tasks.

        Args:
            free_bytes: of the device, now.
        """
        start_s = self._waiting.start_s(free_bytes)
        wait_s = self._wait_s if for_tasks else self._moment_s
        last = start_s + self._wait_s + _MOST_MOVING_S
        return max(start_s + wait_s, min(self._in_flight_s + self._moment_s, last))


class Turns:
    """The turns of one device."""

    def __init__(self, condition: threading.Condition, check_stop: Callable[[], None]) -> None:
        self._condition = condition  # its lock guards the fields below
        self._check_stop = check_stop  # raises if the calling thread's task is to stop
        self._waiting: list[tuple[int, int]] = []  # a heap of age and arrival
        self._holder: int | None = None  # the thread that has the turn
        self._arrivals = itertools.count()

    @property
    def is_mine(self) -> bool:
        """Whether the calling thread has the turn."""
        return self._holder == threading.get_ident()

    @contextmanager
    def turn(self, age: int) -> Iterator[None]:
        """Hold the device's turn; wait for it behind all that are older. A thread that has it keeps it."""
        me = threading.get_ident()
        if self._holder == me:
            yield
            return
        ticket = (age, next(self._arrivals))
        with self._condition:
            heapq.heappush(self._waiting, ticket)
            try:
                while self._holder is not None or self._waiting[0] != ticket:
                    self._check_stop()
                    self._condition.wait(_LOOK_S)
            except BaseException:
                self._waiting.remove(ticket)
                heapq.heapify(self._waiting)
                self._condition.notify_all()
                raise
            heapq.heappop(self._waiting)
            self._holder = me
        try:
            yield
        finally:
            with self._condition:
                self._holder = None
                self._condition.notify_all()
