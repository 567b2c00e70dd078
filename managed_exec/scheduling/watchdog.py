"""Sees to it that tasks stop: those whose time is over, and those that were cancelled while they ran.

    running --timeout is over, or cancel()--> to stop --the task looks, and raises--> done
                                                \\--GRACE_S later it still runs--> given up

A task that is to stop does so where it looks: at a checkpoint, or at its next managed operation. One that does not look
for ``GRACE_S`` is given up: it is reported with its stack, its future is done with the error, its place on the device
is free, and another thread works in the place of its own. What it had reserved of the device stays reserved until it
has really ended, for it may still hold that memory. It then gives back nothing twice, and its thread ends.

Who finishes a task: whoever takes its entry out of ``running``, its worker when the call has returned, or the watchdog.

Who wakes whom: the watchdog sleeps until the first of ``clocks`` is due. Whoever sets an earlier one wakes it, and so
does a worker that ends: it ends with the last of them. Nobody waits for it but ``shutdown``; if it died, tasks would
still run and end, and only timeouts not be kept.
"""

from __future__ import annotations

import logging
import math
import sys
import threading
import time
import traceback
from concurrent.futures import thread as stock
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Protocol, TypeAlias

from managed_exec.errors import TaskTimeoutError
from managed_exec.future import Stop, TaskFuture
from managed_exec.scheduling.threads import Wakeable, WorkerThread, forget_thread, start_thread
from managed_exec.task import Task

_log = logging.getLogger("concurrent.futures")  # where the standard pool reports what befalls a worker

# Seconds that a task which is to stop has for it, before it is given up.
GRACE_S = 5.0
# When to look again for a task that was not to be found.
_LOOK_AGAIN_S = 0.1
# When to try again to start a thread that the system would not start.
_TRY_AGAIN_S = 1.0
_LONGEST_SLEEP_S = 3600.0  # a queue takes no timeout of years


class Watched(Protocol):
    """What the watchdog needs of a worker."""

    thread: WorkerThread

    @property
    def is_of_lanes(self) -> bool:
        """Whether its tasks run in processes."""

    def run(self) -> None: ...

    def successor(self, task: Task, position: int | None, error: BaseException) -> Watched:
        """Return a worker to go on in the place of this one, whose first act is to fail *task* with *error*."""

    def finish_first(self) -> None:
        """Do that first act."""

    def tell_to_stop(self, task: Task) -> None:
        """Pass on, to where *task* runs, that it is to stop, which its future says already."""

    def release(self, task: Task, position: int | None) -> None:
        """Free the place of *task* on the device at *position*, where it has one; not what it had reserved."""


# A task that runs now: its worker, and the position of the device that it is booked on; None if it goes on on the CPU,
# without a booking. A plain tuple, for each task makes one.
Run: TypeAlias = "tuple[Watched, Task, int | None]"


class Watchdog:
    """One for each pool. Its thread starts with the first task that has a timeout, or is cancelled while it runs.

    It refers to nothing of the executor's but the set of threads and its lock, so the executor can be collected.
    """

    def __init__(
        self, threads: set[threading.Thread], threads_lock: threading.Lock, tasks: Wakeable, thread_name: str
    ) -> None:
        self._threads = threads  # the pool's, guarded by the next
        self._threads_lock = threads_lock  # the executor's shutdown lock
        self._tasks = tasks
        self._thread_name = thread_name
        # The fields below are changed in single steps, without a lock: workers come by here for every task, and
        # ``cancel`` may be called anywhere. A copy of a dictionary is one step, a loop over it is not.
        self.running: dict[TaskFuture[Any], Run] = {}
        self.clocks: dict[TaskFuture[Any], float] = {}  # when, by the monotonic clock, to see to a running task
        self._workers: set[Watched] = set()  # that live and are not given up
        # Workers whose threads the system would not start, and the names of these; guarded by the lock of the threads.
        self._unstarted: list[tuple[Watched, str]] = []
        # Until when the watchdog sleeps. Set before it looks a last time at the clocks, and read after a clock was set:
        # so a clock that is set while it falls asleep is seen by one of the two.
        self._sleeps_until = 0.0
        self._wake: SimpleQueue[None] = SimpleQueue()
        self._is_started = threading.Lock()  # held while there is a thread; waited for by nobody
        self._thread: threading.Thread | None = None  # the last one started

    # -- workers ----------------------------------------------------------------------------------------------------

    def start_worker(self, worker: Watched, name: str, *, successor: bool = False) -> None:
        """Start the thread of *worker*. The locks of the threads, and of the interpreter's exit, are held.

        Args:
            successor: whether it takes the place of one that was given up; else that of any that was not there.
        """
        thread = worker.thread = WorkerThread(worker.run, name)
        self._workers.add(worker)
        self._threads.add(thread)
        try:
            start_thread(thread, self._tasks)
        except BaseException:
            self._workers.discard(worker)
            self._threads.discard(thread)
            raise
        if self._unstarted and not successor:
            self._unstarted.pop()  # it is in the place of one of these

    def note_worker_end(self, worker: Watched) -> None:
        """Be told by *worker* that it ends; also by one that was given up."""
        self._workers.discard(worker)
        self._wake.put(None)

    def join(self) -> None:
        """Wait for the watchdog's own thread, if there is one; the workers have ended."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    # -- clocks -----------------------------------------------------------------------------------------------------

    def start_clock(self, future: TaskFuture[Any], timeout_s: float) -> None:
        """Let the task of *future*, which starts now, be told to stop when its time is over.

        Whoever ends the run takes the clock out of ``clocks``.
        """
        self._set_clock(future, time.monotonic() + timeout_s)
        self._keep_grace(future)

    def stop_clock(self, future: TaskFuture[Any]) -> None:
        """Let the time of *future*'s task stand still: its run is over, and the next one has not begun."""
        self.clocks.pop(future, None)
        self._keep_grace(future)

    def _keep_grace(self, future: TaskFuture[Any]) -> None:
        """Set the clock of a task that was told to stop, if it was: that may just have been overwritten, or dropped."""
        if future.stop is not None:
            self._set_clock(future, time.monotonic() + GRACE_S)

    def watch(self, future: TaskFuture[Any]) -> None:
        """Give up the task of *future*, which has just been told to stop, if it still runs in ``GRACE_S``."""
        self._set_clock(future, time.monotonic() + GRACE_S)
        run = self.running.get(future)
        if run is not None:
            run[0].tell_to_stop(run[1])
        else:
            self._tasks.put(None)  # it may be waiting to run again: have a worker look

    def _set_clock(self, future: TaskFuture[Any], due: float) -> None:
        self.clocks[future] = due
        if self._is_started.acquire(blocking=False):
            self._start()
        if due < self._sleeps_until:
            self._wake.put(None)

    def _start(self) -> None:
        """Start the thread, which ``_is_started`` says is there."""
        # The interpreter's exit ends the workers, and the last of them this one.
        thread = threading.Thread(target=self._run, name=self._thread_name, daemon=False)
        try:
            thread.start()
        except RuntimeError as error:
            self._is_started.release()  # the next one tries again
            _log.error("cannot start the thread that watches timeouts and cancelled tasks: %s", error)
        else:
            self._thread = thread

    # -- the watchdog's thread --------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            while self._workers or self._must_start_more():
                self._sleeps_until = 0.0
                self._start_unstarted()
                self._see_to_due()
                self._sleeps_until = self._first_due()
                sleep_s = self._first_due() - time.monotonic()
                if sleep_s <= 0:  # what is still due is between two runs, or is being booked elsewhere at this moment
                    sleep_s = _LOOK_AGAIN_S
                if self._unstarted:
                    sleep_s = min(sleep_s, _TRY_AGAIN_S)
                with suppress(Empty):
                    self._wake.get(timeout=min(sleep_s, _LONGEST_SLEEP_S))
            self._is_started.release()
            # A worker may have come, and set a clock, while this thread still seemed to be there for it.
            if not self._workers or not self._is_started.acquire(blocking=False):
                return

    def _must_start_more(self) -> bool:
        """Return whether tasks may wait for a worker that has still to be started; not when the interpreter exits."""
        return bool(self._unstarted) and not stock._shutdown

    def _start_unstarted(self) -> None:
        """Try again to start the threads that the system would not start."""
        with self._threads_lock, stock._global_shutdown_lock, suppress(RuntimeError):
            while self._unstarted and not stock._shutdown:
                self.start_worker(*self._unstarted[-1])

    def _first_due(self) -> float:
        return min(self.clocks.copy().values(), default=math.inf)

    def _see_to_due(self) -> None:
        now = time.monotonic()
        for future, due in self.clocks.copy().items():
            if due > now or self.clocks.get(future) != due:  # the latter: another run of it has begun meanwhile
                continue
            try:
                self._see_to(future)
            except BaseException:  # noqa: BLE001 of all that a task's fate can bring, nothing may stop the others' clocks
                self.clocks.pop(future, None)
                _log.exception("cannot see to a task that is to stop")

    def _see_to(self, future: TaskFuture[Any]) -> None:
        """Do with a task, whose clock is due, what is next: tell it to stop, or give it up."""
        if future.done():
            self.clocks.pop(future, None)
        elif future.stop is not None:
            run = self.running.pop(future, None)
            if run is not None:
                self.clocks.pop(future, None)
                self._give_up(run, future.stop)
        else:
            run = self.running.get(future)
            if run is not None:
                task = run[1]
                text = f"{task} has not ended within its timeout of {task.options.timeout:g} s"
                future.request_stop(Stop(TaskTimeoutError, text))
                self.clocks[future] = time.monotonic() + GRACE_S
                run[0].tell_to_stop(task)

    def _give_up(self, run: Run, stop: Stop) -> None:
        """Go on without the worker of a task that does not return. The task's entry was taken out of ``running``."""
        worker, task, position = run
        with suppress(Exception):  # a handler of the user's may raise, and the task has to be finished all the same
            text = f"{task} has not stopped within {GRACE_S:g} s of being told to ({stop.text}): "
            if worker.is_of_lanes:
                text += "its process is ended"
            else:
                text += f"its thread {worker.thread.name!r} is given up, and another takes its place. It is at\n"
                text += _stack(worker.thread)
            _log.warning(text)
        worker.release(task, position)
        self._workers.discard(worker)
        successor = worker.successor(task, position, stop.new_error())
        try:
            with self._threads_lock, stock._global_shutdown_lock:
                self._threads.discard(worker.thread)
                forget_thread(worker.thread)
                self.start_worker(successor, f"{worker.thread.name}+", successor=True)
        except RuntimeError as error:
            text = "cannot start a thread in the place of %r: %s; the pool has one less until one can be started"
            _log.error(text, worker.thread.name, error)
            successor.finish_first()
            with self._threads_lock:
                self._unstarted.append((successor, f"{worker.thread.name}+"))
        finally:
            worker.thread.give_up()  # those who joined it now look for its successor


def _stack(thread: threading.Thread) -> str:
    """Return where *thread* is, as text: a frame would keep what it refers to alive."""
    frame = None if thread.ident is None else sys._current_frames().get(thread.ident)
    return "an unknown place: it has just ended" if frame is None else "".join(traceback.format_stack(frame))
